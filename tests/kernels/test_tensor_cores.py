"""Products on NVIDIA's tensor cores: when they are chosen, how they are cut, and that their text compiles.

The texts run on NVIDIA GPUs alone; ``python -m mlx_spec.check`` compares them there with the references.
"""

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cuda_text import compile_cuda, cuda_text

from metal_kernels import Cached, gemm_rows, qmm_rows
from metal_kernels.attention_rows import KERNEL, TWIN, attention_rows
from metal_kernels.launching import launch, tensor_cores
from metal_kernels.launching.launch import Kernel, launching


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Kernel, dict[str, Any]]]:
    """Pretend to be an NVIDIA GPU and note what is launched."""
    found: list[tuple[Kernel, dict[str, Any]]] = []
    monkeypatch.setattr(tensor_cores, "runs_on_cuda", lambda: True)

    def launcher(kernel: Kernel) -> launch.Launcher:
        def call(**settings: Any) -> list[mx.array]:
            found.append((kernel, settings))
            shapes = zip(settings["output_shapes"], settings["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype=dtype) for shape, dtype in shapes]

        return call

    with launching(launcher):
        yield found


def packed(outputs: int, depth: int, bits: int, group_size: int, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    weight, scales, biases = mx.quantize(mx.random.normal((outputs, depth)), group_size=group_size, bits=bits)
    return weight, scales.astype(dtype), biases.astype(dtype)


def product(
    rows: int, dtype: mx.Dtype, outputs: int = 96, depth: int = 256, bits: int | None = 4, **more: Any
) -> mx.array:
    x = mx.random.normal((rows, depth)).astype(dtype)
    if bits is None:
        return gemm_rows.gemm_rows(x, mx.random.normal((outputs, depth)).astype(dtype), **more)
    group_size = more.pop("group_size", 64)
    triple = packed(outputs, depth, bits, group_size, more.pop("scales", dtype))
    return qmm_rows.qmm_rows(x, *triple, group_size=group_size, bits=bits, **more)


@pytest.mark.parametrize("bits", [4, 8, None])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_sixteen_bit_rows_take_the_tensor_cores(dtype: mx.Dtype, bits: int | None, calls: list) -> None:
    assert product(5, dtype, bits=bits).shape == (5, 96)
    assert calls[0][0] is (gemm_rows.TWIN if bits is None else qmm_rows.TWIN)


@pytest.mark.parametrize(
    "settings",
    [
        dict(dtype=mx.float32),
        dict(dtype=mx.float32, bits=None),
        dict(dtype=mx.float32, scales=mx.bfloat16),
        dict(dtype=mx.float32, bias=mx.zeros((96,), dtype=mx.bfloat16)),
        dict(dtype=mx.bfloat16, bits=6),
        dict(dtype=mx.bfloat16, bits=3),
    ],
)
def test_other_products_take_the_common_text(settings: dict[str, Any], calls: list) -> None:
    product(5, **settings)
    assert calls[0][0] in (gemm_rows.KERNEL, qmm_rows.KERNEL)


def test_a_machine_without_them_takes_the_common_text() -> None:
    x = mx.zeros((1, 256), dtype=mx.bfloat16)
    assert tensor_cores.tensor_cut(x, 96, 128, 64, False) is None


@pytest.mark.parametrize("bits", [4, None])
def test_the_cut_depends_on_the_weights_alone(bits: int | None, calls: list) -> None:
    """Only the number of row tiles may follow the rows: it repeats the same sums for more of them."""
    cuts = set()
    for rows in range(1, 17):
        product(rows, mx.bfloat16, bits=bits)
        _, settings = calls.pop()
        template = dict(settings["template"])
        assert template.pop("ROW_TILES") == (1 if rows <= 8 else 2)
        assert "R" not in template
        cuts.add((tuple(template.items()), settings["grid"], settings["threadgroup"]))
    assert len(cuts) == 1


@pytest.mark.parametrize("outputs", [96, 100, 16384])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 64), (4, 128), (8, 32), (8, 128), (None, 0)])
def test_a_cut_covers_the_outputs_in_the_memory_there_is(
    bits: int | None, group_size: int, gated: bool, outputs: int, calls: list
) -> None:
    product(1, mx.bfloat16, outputs, bits=bits, gated=gated, **({"group_size": group_size} if bits else {}))
    _, settings = calls[0]
    template = dict(settings["template"])
    columns = 16 * template["TILES"] // (2 if gated else 1)
    blocks = settings["grid"][0] // settings["threadgroup"][0]
    width = outputs // 2 if gated else outputs
    assert (blocks - 1) * columns < width <= blocks * columns
    assert settings["threadgroup"] == (32 * template["WARPS"], 1, 1)
    assert template["WARPS"] == 4 or outputs < tensor_cores.WIDE
    chunk = 128 if bits is None else max(64, group_size * bits // 8)
    ring = template["WARPS"] * template["STAGES"] * 16 * template["TILES"] * chunk
    sums = template["WARPS"] * 16 * template["TILES"] * 16 * 4
    assert sums <= ring <= 48 * 1024


def attention(rows: int, dtype: mx.Dtype, heads: int = 24, kv_heads: int = 4, dim: int = 256, **more: Any) -> None:
    pool = mx.zeros((2, 1, 2, 32, kv_heads, dim), dtype=dtype)
    cached = Cached(mx.array([[0, 1]]), mx.array([40]), (rows,))
    queries, new = mx.zeros((rows, heads, dim), dtype=dtype), mx.zeros((rows, kv_heads, dim), dtype=dtype)
    attention_rows(queries, new, new, pool, 0, cached, scale=0.1, **more)


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_attention_of_sixteen_bits_takes_the_tensor_cores(rows: int, calls: list) -> None:
    """With a warp for 16 queries of a KV head; all else is the same for any number of rows."""
    attention(rows, mx.bfloat16)
    kernel, settings = calls[0]
    assert kernel is TWIN
    assert settings["threadgroup"] == (32 * -(-rows * 6 // 16), 1, 1)
    calls.clear()
    attention(2, mx.bfloat16)
    assert calls[0][1]["template"] == settings["template"]
    calls.clear()
    attention(rows, mx.float32)
    assert calls[0][0] is KERNEL


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("paths", [None, mx.array([[0, -1], [0, 1]])], ids=["chain", "tree"])
@pytest.mark.parametrize("dim", [64, 80, 256])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_nvcc_compiles_attention(
    dtype: mx.Dtype, dim: int, paths: mx.array | None, calls: list, tmp_path: Path
) -> None:
    attention(2, dtype, dim=dim, paths=paths)
    kernel, settings = calls[0]
    inputs = [x.dtype for x in settings["inputs"]]
    text = cuda_text(
        kernel, kernel.text(kernel.cuda_twin), settings["template"], inputs, settings["output_dtypes"]
    )
    compile_cuda(text, tmp_path)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize(
    ("dtype", "bits", "group_size", "rows"),
    [
        (mx.bfloat16, 4, 32, 16),
        (mx.bfloat16, 4, 64, 8),
        (mx.float16, 4, 64, 16),
        (mx.bfloat16, 8, 64, 16),
        (mx.float16, 8, 128, 8),
        (mx.bfloat16, None, 0, 16),
        (mx.float16, None, 0, 8),
    ],
)
def test_nvcc_compiles(
    dtype: mx.Dtype, bits: int | None, group_size: int, rows: int, calls: list, tmp_path: Path
) -> None:
    """Rows that are no whole number of chunks, an odd number of outputs, and everything fused."""
    more = {"group_size": group_size} if bits else {}
    depth = 640 if group_size == 128 else 576
    bias, residual = mx.zeros((100,), dtype=dtype), mx.zeros((rows, 50), dtype=dtype)
    product(rows, dtype, 100, depth, bits, bias=bias, residual=residual, gated=True, **more)
    kernel, settings = calls[0]
    inputs = [x.dtype for x in settings["inputs"]]
    text = cuda_text(
        kernel, kernel.text(kernel.cuda_twin), settings["template"], inputs, settings["output_dtypes"]
    )
    compile_cuda(text, tmp_path)
