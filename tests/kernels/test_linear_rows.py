"""linear_rows against the formula in float64, over one map and several, and which kernels it runs."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher
from oracles.products_numpy import as_numpy

from metal_kernels import MAX_VERIFY_ROWS, Linear, Quantization, linear_rows
from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import Kernel, launching, noting_launches

DEPTH = 64
TOLERANCE = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}


@pytest.fixture(params=["native", "stock", "reference", "cpu"])
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    with launching(lambda kernel: launcher(kernel, check=False)), using(request.param):
        yield request.param


def random(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def linear(
    outputs: int, bits: int | None, dtype: mx.Dtype = mx.float32, bias: bool = False, mode: str = "affine"
) -> Linear:
    weight = 0.1 * random(outputs, outputs, DEPTH).astype(dtype)
    own = random(outputs + 1, outputs, dtype=dtype) if bias else None
    if bits is None:
        return Linear(weight.astype(dtype), bias=own)
    weight, scales, *biases = mx.quantize(weight.astype(dtype), 32, bits, mode)
    return Linear(weight, scales, biases[0] if biases else None, own, Quantization(32, bits, mode))


def formula(x: mx.array, linears: tuple[Linear, ...], residual: mx.array | None, gated: bool) -> np.ndarray:
    parts = []
    for each in linears:
        weight = each.weight
        if each.quantization:
            settings = (each.quantization.group_size, each.quantization.bits, each.quantization.mode)
            weight = mx.dequantize(weight, each.scales, each.biases, *settings)
        parts.append(as_numpy(x) @ as_numpy(weight).T + (0.0 if each.bias is None else as_numpy(each.bias)))
    out = np.concatenate(parts, axis=-1)
    if gated:
        gate, up = np.split(out, 2, axis=-1)
        out = gate / (1 + np.exp(-gate)) * up
    return out if residual is None else out + as_numpy(residual)


LINEARS: dict[str, tuple[Linear, ...]] = {
    "one": (linear(12, None, bias=True),),
    "quantised": (linear(12, 4, mx.bfloat16, bias=True),),
    "several": (linear(8, None), linear(4, 8)),
    "half": (linear(12, None, mx.float16),),
    "without biases": (linear(12, 4, mx.bfloat16, mode="mxfp4"),),
}


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape", [(3,), (17,), (2, 3)], ids=str)
def test_equals_the_formula(shape: tuple[int, ...], fused: bool, name: str, chosen: str) -> None:
    linears = LINEARS[name]
    dtype = {"quantised": mx.bfloat16, "without biases": mx.bfloat16, "half": mx.float16}.get(name, mx.float32)
    x = random(3, *shape, DEPTH, dtype=dtype)
    residual = random(4, *shape, 6, dtype=dtype) if fused else None
    got = linear_rows(x, linears if len(linears) > 1 else linears[0], residual=residual, gated=fused)
    expected = formula(x, linears, residual, fused)
    assert (got.shape, got.dtype) == (expected.shape, dtype)
    np.testing.assert_allclose(as_numpy(got), expected, atol=TOLERANCE[dtype] * np.abs(expected).max(), rtol=0)
    assert mx.array_equal(linear_rows(x, linears, residual=residual, gated=fused), got)


@pytest.mark.parametrize("rows", [1, MAX_VERIFY_ROWS, MAX_VERIFY_ROWS + 1])
def test_kernels_take_the_rows_of_a_verify_pass(rows: int) -> None:
    def launch(kernel: Kernel) -> Any:
        return lambda **given: [mx.zeros(given["output_shapes"][0], dtype=given["output_dtypes"][0])]

    x = random(3, rows, DEPTH)
    few = rows <= MAX_VERIFY_ROWS
    with launching(launch):
        for linears, names in ((LINEARS["several"], ["gemm_rows", "qmm_rows"]), (LINEARS["without biases"], [])):
            with noting_launches() as launched:
                linear_rows(x, linears)
            assert [kernel.name for kernel in launched] == (names if few else [])


@pytest.mark.parametrize("name", ["one", "quantised"])
def test_selected_outputs_are_those_of_the_whole_map(name: str, chosen: str) -> None:
    (whole,), index = LINEARS[name], mx.array([7, 0, 11])
    some = whole.select_outputs(index)
    assert some.size == 3 and some.quantization == whole.quantization
    x = random(3, 5, DEPTH, dtype=whole.bias.dtype)
    np.testing.assert_allclose(
        as_numpy(linear_rows(x, some)), as_numpy(linear_rows(x, whole))[:, [7, 0, 11]], atol=0.02
    )


def test_dequantised_weights_are_those_of_the_chosen_experts() -> None:
    weight = random(1, 4, 6, DEPTH)
    linear = Linear.affine(*mx.quantize(weight, 32, 8), group_size=32, bits=8)
    chosen = mx.array([[3, 0], [1, 1]])
    for each, whole in ((Linear(weight), weight), (linear, mx.dequantize(*linear.tensors.values(), 32, 8))):
        assert mx.array_equal(each.dequantized(), whole)
        assert mx.array_equal(each.dequantized(chosen), whole[chosen])


def test_scales_of_another_type_leave_rows_in_theirs() -> None:
    """With MLX's operations too: a model whose scales are kept may be run by another implementation."""
    weight, scales, biases = mx.quantize(mx.random.normal((96, 128)), 32, 4)
    quantization = Quantization(32, 4, "affine")
    linear = Linear(weight, scales.astype(mx.float16), biases.astype(mx.float16), quantization=quantization)
    x = mx.random.normal((3, 128)).astype(mx.bfloat16)
    expected = x.astype(mx.float32) @ mx.dequantize(weight, scales, biases, 32, 4).T
    for chosen in ("stock", None):
        with using(chosen):
            out = linear_rows(x, linear)
        assert out.dtype == mx.bfloat16
        assert mx.max(mx.abs(out.astype(mx.float32) - expected)) < 0.02 * mx.max(mx.abs(expected))
