"""The emulator itself: it catches planted faults, compiles MLX's text, and rounds and reduces as documented."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator import EmulatorError, has_clang, launcher
from emulator.generated import generate

from metal_kernels.launching import launch
from metal_kernels.launching.launch import Kernel, launching

needs_clang = pytest.mark.skipif(not has_clang, reason="needs clang++ from 17 on")
Shaped = tuple[tuple[int, ...], mx.Dtype]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[mx.array]]:
    """Return what runs a body over named inputs, to named outputs."""
    monkeypatch.setattr(launch, "FOLDER", tmp_path)

    def run(
        body: str,
        inputs: dict[str, mx.array],
        outputs: dict[str, Shaped],
        *,
        helpers: str = "",
        template: list[tuple[str, Any]] | None = None,
        groups: tuple[int, int, int] = (1, 1, 1),
        threads: tuple[int, int, int] = (32, 1, 1),
        check: bool = True,
    ) -> list[mx.array]:
        (tmp_path / "tried.metal").write_text(f"{helpers}// body\n{body}")
        kernel = Kernel("tried", inputs=tuple(inputs), outputs=tuple(outputs))
        with launching(partial(launcher, check=check)):
            return kernel(
                list(inputs.values()),
                template=template or [],
                groups=groups,
                threads=threads,
                shapes=[shape for shape, _ in outputs.values()],
                dtypes=[dtype for _, dtype in outputs.values()],
            )

    return run


def numbers(*shape: int, scale: float = 1.0) -> mx.array:
    return mx.array((np.random.default_rng(0).standard_normal(shape) * scale).astype(np.float32))


def bits(x: mx.array) -> np.ndarray:
    return np.array(x.view({2: mx.uint16, 4: mx.uint32}[x.dtype.size]))


# ---- planted faults: 64 threads in two simdgroups, x and y of 64 floats

LANE = "uint i = thread_index_in_threadgroup;\n"
BARRIER = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"
FAULTS = {
    "race": ("y[i] = x[i]; if (i % 2 == 0) y[0] = x[i];", "output 'y' depends on the order"),
    "race between threadgroups": (
        "y[i] = float(threadgroup_position_in_grid.x);",
        "output 'y' depends on the order",
    ),
    "missing barrier": (
        "threadgroup float a[64];\na[i] = x[i]; y[i] = a[63 - i];",
        "output 'y' depends on the order.*64 elements",
    ),
    "unwritten output": ("if (i != 5) y[i] = x[i];", "1 elements, the first at flat index 5"),
    "unwritten threadgroup memory": (
        f"threadgroup float a[64];\nif (i != 5) a[i] = x[i];\n{BARRIER}y[i] = a[i];",
        "1 elements, the first at flat index 5",
    ),
    "read after an input": (
        "y[i] = x[i + 1];",
        r"tried: out-of-bounds access to 'x': byte offset 256 of 256, thread \(63, 0, 0\) of threadgroup \(0, 0",
    ),
    "read before an input": ("y[i] = x[int(i) - 1];", r"'x': byte offset -4 of 256, thread \(0, 0, 0\)"),
    "read far after an input": ("y[i] = x[i + 1000000];", "out-of-bounds access to 'x': byte offset"),
    "write after an output": (
        "y[i] = x[i]; y[i + 1] = x[i];",
        r"'y': byte offset 256 of 256, thread \(63, 0, 0\)",
    ),
    "write before an output": ("y[i] = x[i]; y[int(i) - 1] = x[i];", r"'y': byte offset -4 of 256"),
    "write to an input": (
        "y[i] = x[i]; ((device float*)(x))[i] = 0;",
        r"write to input 'x': byte offset 0 of 256, thread \(0, 0, 0\)",
    ),
    "read after a threadgroup array": (
        f"threadgroup float a[64];\na[i] = x[i];\n{BARRIER}auto p = a + 16; y[i] = p[i];",
        r"'a': byte offset 256 of 256, thread \(48, 0, 0\)",
    ),
    "wild pointer": ("y[i] = ((const device float*)(4096))[i];", "access to memory that is in no buffer"),
    "divergent simdgroup operation": (
        "float s = 0;\nif (i < 16) {\n s = metal::simd_sum(x[i]); }\n y[i] = s;",
        "divergent simdgroup operation: thread 0 waits at simd_sum, tried.metal:5, thread 16 has returned",
    ),
    "two simdgroup operations": (
        "float s = 0;\nif (i % 2) s = metal::simd_sum(x[i]);\nelse s = metal::simd_max(x[i]);\ny[i] = s;",
        "divergent simdgroup operation: .* simd_max, tried.metal:5, .* simd_sum, tried.metal:4",
    ),
    "simdgroup operation in some passes of a loop": (
        "float s = 0;\nfor (uint k = 0; k < i % 3; k++) s += metal::simd_sum(x[i]);\ny[i] = s;",
        "divergent simdgroup operation",
    ),
    "divergent barrier": (
        f"if (i < 32) {{\n{BARRIER} }} else {{\n{BARRIER} }} y[i] = x[i];",
        "divergent threadgroup_barrier: .* tried.metal:4, .* tried.metal:6",
    ),
    "barrier after a return": (
        f"y[i] = x[i]; if (i == 7) return;\n{BARRIER}",
        "divergent threadgroup_barrier: .* tried.metal:4, thread 7 has returned",
    ),
    "too much threadgroup memory": (
        f"threadgroup float a[8000], b[193];\na[i] = b[i] = x[i];\n{BARRIER}y[i] = a[i] + b[i];",
        "32772 bytes of threadgroup memory, Metal has 32768",
    ),
    "no such lane": (
        "y[i] = metal::simd_shuffle(x[i], 32);",
        "simd_shuffle at tried.metal:3: there is no such lane",
    ),
    "matrices of half a simdgroup": (
        "metal::simdgroup_float8x8 m; m.thread_elements()[0] = m.thread_elements()[1] = x[i];\n"
        "if (i % 32 < 16) metal::simdgroup_multiply_accumulate(m, m, m, m);\ny[i] = m.thread_elements()[0];",
        "divergent simdgroup operation: thread 0 waits at simdgroup_multiply_accumulate, tried.metal:4",
    ),
    "too much local memory": (
        "float a[100000]; for (int k = 0; k < 100000; k++) a[k] = x[i] + k;\n"
        "float s = 0; for (int k = 0; k < 100000; k++) s += a[(k * 7919 + int(i)) % 100000]; y[i] = s;",
        "local variables take too much memory",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(run: Callable[..., list[mx.array]], fault: str) -> None:
    body, message = FAULTS[fault]
    groups = (2, 1, 1) if "between threadgroups" in fault else (1, 1, 1)
    with pytest.raises(EmulatorError, match=message):
        run(LANE + body, {"x": numbers(64)}, {"y": ((64,), mx.float32)}, threads=(64, 1, 1), groups=groups)


UNDEFINED = {
    "misaligned": ("y[i] = (*(const device float4*)(x + i)).x;", "tried.metal:3: a misaligned address"),
    "local index": ("float a[4] = {0, 0, 0, 0}; a[i % 5] = x[i]; y[i] = a[0];", "tried.metal:3: an index beyond"),
    "shift": ("y[i] = float(1 << (i + 1));", "tried.metal:3: a shift by more bits"),
    "division": ("y[i] = float(5 / (i % 7));", "tried.metal:3: a division by zero"),
}


@needs_clang
@pytest.mark.parametrize("fault", UNDEFINED)
def test_undefined_behaviour_is_caught(run: Callable[..., list[mx.array]], fault: str) -> None:
    body, message = UNDEFINED[fault]
    with pytest.raises(EmulatorError, match=message):
        run(LANE + body, {"x": numbers(36)}, {"y": ((32,), mx.float32)})


def test_an_output_of_odd_size_is_watched(run: Callable[..., list[mx.array]]) -> None:
    with pytest.raises(EmulatorError, match="out-of-bounds write to 'y': byte offset 12 of 12"):
        run(
            "y[thread_index_in_threadgroup] = 1;", {"x": mx.zeros(8)}, {"y": ((3,), mx.float32)}, threads=(4, 1, 1)
        )


def test_a_simdgroup_operation_needs_a_whole_simdgroup(run: Callable[..., list[mx.array]]) -> None:
    body = f"{LANE}y[i] = metal::simd_sum(x[i]);"
    with pytest.raises(EmulatorError, match="simd_sum at tried.metal:3: a simdgroup of 16 threads"):
        run(body, {"x": numbers(48)}, {"y": ((48,), mx.float32)}, threads=(48, 1, 1))


def test_without_check_one_run_decides(run: Callable[..., list[mx.array]]) -> None:
    body = f"{LANE}y[i] = x[i]; if (i == 0) y[1] = 0;"
    (y,) = run(body, {"x": numbers(32)}, {"y": ((32,), mx.float32)}, check=False)
    assert mx.array_equal(y, numbers(32))


def test_scratch_outputs_may_stay_unwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    kernel = Kernel("tried", inputs=("x",), outputs=("y", "z"), scratch=("z",))
    outputs: dict[str, Any] = {"shapes": [(32,), (32,)], "dtypes": [mx.float32] * 2}

    def launched(body: str) -> list[mx.array]:
        (tmp_path / "tried.metal").write_text(f"// body\n{LANE}{body}")
        with launching(launcher):
            return kernel([numbers(32)], template=[], groups=(1, 1, 1), threads=(32, 1, 1), **outputs)

    y, z = launched("y[i] = x[i]; if (i < 8) z[i] = 2;")
    assert mx.array_equal(y, numbers(32)) and z[:8].tolist() == [2] * 8
    with pytest.raises(EmulatorError, match="output 'z' depends on the order"):
        launched("y[i] = x[i]; z[0] = x[i];")
    with pytest.raises(EmulatorError, match="output 'y' depends on the order"):
        launched("z[i] = x[i]; if (i < 8) y[i] = 2;")


REFUSED = {
    "pointer without address space": ("", "const float* p = 0; y[0] = x[0];", "`const float. p =`: pointers"),
    "helper without address space": (
        "inline float f(const float& v) { return v; }\n",
        "y[0] = f(x[0]);",
        "pointers",
    ),
    "template reference": ("template <typename V> float f(V& v) { return v; }\n", "y[0] = f(x[0]);", "pointers"),
    "lambda": ("", "auto f = [&](float v) { return v; }; y[0] = f(x[0]);", "no lambdas"),
    "qualified as_type": ("", "y[0] = metal::as_type<float>(1u);", "without `metal::`"),
    "threadgroup scalar": ("", "threadgroup float a;\na = x[0]; y[0] = a;", "the form is `threadgroup type name"),
    "threadgroup array in a helper": (
        "inline float f(float v) {\n  threadgroup float a[2];\n  a[0] = v; return a[0];\n}\n",
        "y[0] = f(x[0]);",
        "a threadgroup array in a helper",
    ),
    "float becomes bfloat by itself": ("", "bfloat b = x[0]; y[0] = b;", "does not compile|would refuse"),
    "bfloat and half": ("", "y[0] = float(bfloat(x[0]) + half(x[0]));", "does not compile|would refuse"),
    "an operation over 64 bits": ("", "y[0] = float(metal::simd_sum(ulong(x[0])));", "does not compile"),
    "two types in max": ("", "y[0] = metal::max(x[0], 1);", "does not compile|would refuse"),
    "shape of an input": ("", "y[0] = x_shape[0];", "does not pass x_shape"),
    "unknown attribute": ("", "y[0] = float(grid_origin.x);", "does not know the attribute grid_origin"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_metal_or_cuda_refuse_is_refused(run: Callable[..., list[mx.array]], fault: str) -> None:
    helpers, body, message = REFUSED[fault]
    with pytest.raises(EmulatorError, match=message):
        run(body, {"x": numbers(8)}, {"y": ((1,), mx.float32)}, helpers=helpers, threads=(1, 1, 1))


TAKES_DEVICE = "inline float first(const device float* p) { return p[0]; }\n"
WRONG_SPACES = {
    "constant as device": (TAKES_DEVICE, "y[0] = first(x);", 7),
    "threadgroup as device": (TAKES_DEVICE, "threadgroup float a[1];\na[0] = x[0]; y[0] = first(a);", 8),
    "local as device": (TAKES_DEVICE, "float a[1] = {x[0]}; y[0] = first(a);", 8),
    "device as threadgroup": ("", "const threadgroup float* p = x; y[0] = p[0];", 8),
    "double": ("", "double d = x[0]; y[0] = float(d);", 8),
    "a name of MLX's preamble": (
        "inline float hypot(float a, float b) { return a; }\n",
        "y[0] = hypot(x[0], 0);",
        8,
    ),
}


@needs_clang
@pytest.mark.parametrize("fault", WRONG_SPACES)
def test_wrong_address_spaces_are_refused(run: Callable[..., list[mx.array]], fault: str) -> None:
    helpers, body, size = WRONG_SPACES[fault]
    with pytest.raises(EmulatorError, match="Metal would refuse this kernel:\n.*tried.metal"):
        run(body, {"x": numbers(size)}, {"y": ((1,), mx.float32)}, helpers=helpers, threads=(1, 1, 1))


def test_right_address_spaces_compile(run: Callable[..., list[mx.array]]) -> None:
    helpers = (
        "template <typename P> inline float first(P p) { return float(p[0]); }\n"
        "inline void add(thread float& to, const device float* p) { to += p[0]; }\n"
    )
    body = "threadgroup float a[1];\na[0] = first(n);\nfloat s = first(a); add(s, x); y[0] = s + first(x + 1);"
    inputs = {"x": mx.array([1.0] * 8), "n": mx.array([2], mx.int32)}
    (y,) = run(body, inputs, {"y": ((1,), mx.float32)}, helpers=helpers, threads=(1, 1, 1))
    assert y.item() == 4


def test_wrong_calls_are_refused() -> None:
    sizes = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    one = {"output_shapes": [(1,)], "output_dtypes": [mx.float32], "template": []}
    kernel = launcher(Kernel("absent", inputs=("x",), outputs=("y",)))
    with pytest.raises(EmulatorError, match="takes \\('x',\\) and gives \\('y',\\)"):
        kernel(inputs=[], **sizes, **one)
    with pytest.raises(EmulatorError, match="threadgroups of \\(32, 33, 1\\)"):
        kernel(inputs=[mx.zeros(1)], grid=(64, 64, 1), threadgroup=(32, 33, 1), **one)


# ---- the text


def test_the_text_is_what_mlx_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    (tmp_path / "shared.metal").write_text("// shared\n")
    (tmp_path / "shown.metal").write_text(
        "// helpers\n// body\nuint i = thread_index_in_simdgroup;\ny[i] = T(n[0] * K);\n"
    )
    kernel = Kernel("shown", inputs=("x", "n", "s"), outputs=("y",), includes=("shared.metal",))
    inputs = [mx.zeros((2, 4), mx.bfloat16), mx.array([1]), mx.array(1.0)]
    name = "custom_kernel_shown__float16_t__3_1_bfloat16_t_int32_tc_floats_float16_t"
    values = "<float16_t, -3, 1>"
    assert generate(kernel, inputs, [("T", mx.float16), ("K", -3), ("B", True)], [mx.float16]) == (
        "// shared\n// helpers\ntemplate <typename T, int K, bool B>\n"
        f"[[kernel]] void {name}(\n"
        "  const device bfloat16_t* x [[buffer(0)]],\n"
        "  const constant int32_t* n [[buffer(1)]],\n"
        "  const constant float& s [[buffer(2)]],\n"
        "  device float16_t* y [[buffer(3)]],\n"
        "  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {\n"
        "uint i = thread_index_in_simdgroup;\ny[i] = T(n[0] * K);\n\n}\n\n"
        f'template [[host_name("{name}")]] [[kernel]] decltype({name}{values}) {name}{values};\n'
    )


def test_lines_are_counted_as_in_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    (tmp_path / "shared.metal").write_text(
        "\ninline float f(float v) {\n  return metal::simd_shuffle(v, 40);\n}\n"
    )
    (tmp_path / "tried.metal").write_text("// one\n// two\n// body\n\ny[0] = f(x[0]);\n")
    kernel = Kernel("tried", inputs=("x",), outputs=("y",), includes=("shared.metal",))
    with launching(launcher), pytest.raises(EmulatorError, match="simd_shuffle at shared.metal:3"):
        kernel(
            [mx.zeros(8)], template=[], groups=(1, 1, 1), threads=(32, 1, 1), shapes=[(1,)], dtypes=[mx.float32]
        )


# ---- arguments


def test_template_values(run: Callable[..., list[mx.array]]) -> None:
    body = "y[0] = T(K * 2); y[1] = B ? T(1) : T(0); y[2] = T(x[0] / 2);"
    for i, (dtype, half) in enumerate(((mx.int32, 3), (mx.float32, 3.5), (mx.bfloat16, 3.5), (mx.float16, 3.5))):
        template = [("T", dtype), ("K", -3), ("B", i % 2 == 0)]
        (y,) = run(body, {"x": mx.array([7.0])}, {"y": ((3,), dtype)}, template=template, threads=(1, 1, 1))
        assert y.tolist() == [-6, int(i % 2 == 0), half]


def test_scalars_are_references(run: Callable[..., list[mx.array]]) -> None:
    (y,) = run("y[0] = s + 1;", {"s": mx.array(2.0)}, {"y": ((1,), mx.float32)}, threads=(1, 1, 1))
    assert y.item() == 3


@pytest.mark.parametrize(
    "dtype", [mx.bool_, mx.uint8, mx.int8, mx.uint16, mx.int16, mx.uint32, mx.int32, mx.int64]
)
def test_integers_pass_through(run: Callable[..., list[mx.array]], dtype: mx.Dtype) -> None:
    x = mx.array([0, 1, 100, 1, 0, 2, 3, 4]).astype(dtype)
    (y,) = run(f"{LANE}y[i] = x[i];", {"x": x}, {"y": ((2, 4), dtype)}, threads=(8, 1, 1))
    assert y.dtype == dtype and mx.array_equal(y, x.reshape(2, 4))


def test_inputs_are_read_in_row_order(run: Callable[..., list[mx.array]]) -> None:
    x = numbers(6, 4).T[::2]
    (y,) = run(f"{LANE}y[i] = x[i];", {"x": x}, {"y": ((2, 6), mx.float32)}, threads=(12, 1, 1))
    assert mx.array_equal(y, x)


def test_attributes_in_a_grid_with_partial_threadgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    (tmp_path / "tried.metal").write_text(
        "// body\nuint3 at = thread_position_in_grid, size = threads_per_grid;\n"
        "uint i = (at.z * size.y + at.y) * size.x + at.x;\n"
        "uint values[11] = {thread_position_in_threadgroup.x, thread_position_in_threadgroup.y,\n"
        "  threadgroup_position_in_grid.x, threadgroup_position_in_grid.y, threadgroup_position_in_grid.z,\n"
        "  threads_per_threadgroup.x, threads_per_threadgroup.y, threadgroups_per_grid.x,\n"
        "  thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup};\n"
        "for (int k = 0; k < 11; k++) y[i * 11 + k] = values[k];\n"
    )
    kernel = launcher(Kernel("tried", inputs=("x",), outputs=("y",)))
    (y,) = kernel(
        inputs=[mx.zeros(1)],
        template=[],
        grid=(45, 3, 2),
        threadgroup=(20, 2, 1),
        output_shapes=[(2, 3, 45, 11)],
        output_dtypes=[mx.uint32],
    )
    found = np.array(y)
    for z, row, x in np.ndindex(2, 3, 45):
        width, height = (20 if x < 40 else 5), (2 if row < 2 else 1)
        index = row % 2 * width + x % 20
        expected = [x % 20, row % 2, x // 20, row // 2, z, width, height, 3, index, index % 32, index // 32]
        assert found[z, row, x].tolist() == expected


# ---- arithmetic


def awkward_floats() -> np.ndarray:
    """Ties, their neighbours, subnormal numbers, overflow, infinities and NaN."""
    rng = np.random.default_rng(1)
    words = rng.integers(0, 2**32, 20000, dtype=np.uint64).astype(np.uint32)
    ties = (words & 0xFFFF0000) | 0x8000
    for_half = (rng.standard_normal(20000) * 10.0 ** rng.integers(-9, 6, 20000)).astype(np.float32).view(np.uint32)
    half_ties = (for_half & 0xFFFFE000) | 0x1000
    special = np.array([0, 0x80000000, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000], np.uint32)
    return np.concatenate([words, ties, ties - 1, ties + 1, for_half, half_ties, half_ties + 1, special]).view(
        np.float32
    )


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_conversions_round_to_nearest_even(run: Callable[..., list[mx.array]], dtype: mx.Dtype) -> None:
    floats = awkward_floats()
    x = mx.array(floats)
    body = f"uint i = thread_position_in_grid.x;\nif (i < {x.size}) y[i] = T(x[i]);"
    size = -(-x.size // 1024)
    (y,) = run(
        body, {"x": x}, {"y": (x.shape, dtype)}, template=[("T", dtype)], groups=(size, 1, 1), threads=(1024, 1, 1)
    )
    if dtype == mx.float16:
        with np.errstate(over="ignore"):
            expected = floats.astype(np.float16).astype(np.float32)
    else:
        # The nearer neighbour among the words that end in 16 zeros, by exact arithmetic on the words.
        words = floats.view(np.uint32).astype(np.int64)
        down = words & ~0xFFFF
        rest = words - down
        up = (rest > 0x8000) | ((rest == 0x8000) & (down >> 16 & 1 == 1))
        expected = np.where(np.isnan(floats), np.nan, (down + up * 0x10000).astype(np.uint32).view(np.float32))
    assert np.array_equal(np.array(y.astype(mx.float32)), expected, equal_nan=True)


@pytest.mark.parametrize(
    "dtype", [mx.bfloat16, pytest.param(mx.float16, marks=needs_clang)], ids=["bfloat16", "float16"]
)
def test_every_operation_rounds(run: Callable[..., list[mx.array]], dtype: mx.Dtype) -> None:
    a, b = numbers(1024, scale=13).astype(dtype), numbers(1024)[::-1].astype(dtype)
    body = f"{LANE}T p = a[i] * b[i]; y[i] = p + b[i]; z[i] = a[i] / b[i]; T s = a[i] - b[i]; s += a[i]; w[i] = s;"
    outputs = {name: ((1024,), dtype) for name in "yzw"}
    y, z, w = run(body, {"a": a, "b": b}, outputs, template=[("T", dtype)], threads=(1024, 1, 1))
    wide_a, wide_b = (np.array(v.astype(mx.float32)).astype(np.float64) for v in (a, b))

    def rounded(v: np.ndarray) -> np.ndarray:
        # Exact sums and products of these inputs, and quotients far from ties, fit float64.
        return np.array(mx.array(v.astype(np.float32)).astype(dtype).astype(mx.float32)).astype(np.float64)

    for found, expected in (
        (y, rounded(rounded(wide_a * wide_b) + wide_b)),
        (z, rounded(wide_a / wide_b)),
        (w, rounded(rounded(wide_a - wide_b) + wide_a)),
    ):
        assert np.array_equal(np.array(found.astype(mx.float32)), expected)


@needs_clang
def test_products_fuse_into_sums_inside_an_expression(run: Callable[..., list[mx.array]]) -> None:
    body = (
        "y[0] = x[0] * x[1] + x[2]; float p = x[0] * x[1]; y[1] = p + x[2]; y[2] = metal::fma(x[0], x[1], x[2]);"
    )
    tiny = 2.0**-13
    (y,) = run(body, {"x": mx.array([1 + tiny, 1 - tiny, -1.0])}, {"y": ((3,), mx.float32)}, threads=(1, 1, 1))
    assert y.tolist() == [-(tiny**2), 0.0, -(tiny**2)]


def test_literals_are_floats(run: Callable[..., list[mx.array]]) -> None:
    (y,) = run(
        "y[0] = x[0] + 0.1; y[1] = x[0] * 1e-8 + .5;",
        {"x": mx.array([1.0])},
        {"y": ((2,), mx.float32)},
        threads=(1, 1, 1),
    )
    one = np.float32(1)
    assert y.tolist() == [one + np.float32(0.1), one * np.float32(1e-8) + np.float32(0.5)]


FUNCTIONS = ["exp", "exp2", "log", "sqrt", "sin", "cos", "tanh", "floor", "ceil", "rint", "trunc", "fabs"]


def test_functions(run: Callable[..., list[mx.array]]) -> None:
    x = np.abs(np.array(numbers(64))) * 4
    lines = "".join(f"y[{k} * 64 + i] = metal::{name}(x[i]);\n" for k, name in enumerate(FUNCTIONS))
    lines += f"y[{len(FUNCTIONS)} * 64 + i] = metal::rsqrt(x[i]);\nz[i] = metal::precise::exp(bfloat(x[i]));\n"
    shapes = {"y": ((len(FUNCTIONS) + 1, 64), mx.float32), "z": ((64,), mx.bfloat16)}
    y, z = run(LANE + lines, {"x": mx.array(x)}, shapes, threads=(64, 1, 1))
    wide = x.astype(np.float64)
    for name, found in zip(FUNCTIONS, np.array(y), strict=False):
        np.testing.assert_allclose(found, getattr(np, name)(wide), rtol=2e-7, err_msg=name)
    np.testing.assert_allclose(np.array(y)[-1], wide**-0.5, rtol=1e-7)
    rounded = np.array(mx.array(x).astype(mx.bfloat16).astype(mx.float32))
    np.testing.assert_allclose(np.array(z.astype(mx.float32)), np.exp(rounded.astype(np.float64)), rtol=2**-8)


def test_integers_and_selection(run: Callable[..., list[mx.array]]) -> None:
    body = (
        "y[0] = metal::popcount(x[0]); y[1] = metal::clz(x[0]); y[2] = metal::ctz(x[0]);\n"
        "y[3] = metal::max(x[0], 7u); y[4] = metal::min(x[0], 7u); y[5] = metal::clamp(x[0], 8u, 9u);\n"
        "y[6] = metal::select(1u, 2u, x[0] > 5u); y[7] = as_type<uint>(1.0f);\n"
        "y[8] = uint(as_type<ushort>(half(1))); y[9] = uint(as_type<ushort>(bfloat(1)));\n"
        "y[10] = uint(metal::isnan(NAN)) + 2 * uint(metal::isinf(INFINITY)) + 4 * uint(metal::isfinite(1.0f));\n"
        "y[11] = uint(float(metal::numeric_limits<half>::max())); y[12] = uint(metal::abs(-3));\n"
        "y[13] = metal::is_same_v<bfloat, bfloat16_t> ? 1 : 0;\n"
    )
    (y,) = run(body, {"x": mx.array([40] * 8, mx.uint32)}, {"y": ((14,), mx.uint32)}, threads=(1, 1, 1))
    assert y.tolist() == [2, 26, 3, 40, 7, 9, 2, 0x3F800000, 0x3C00, 0x3F80, 7, 65504, 3, 1]


def test_vectors(run: Callable[..., list[mx.array]]) -> None:
    body = (
        f"{LANE}auto p = x + 4 * i;\nhalf4 v = *(const device half4*)(p);\nuint2 w = as_type<uint2>(v);\n"
        "half2 low = as_type<half2>(w.x);\nfloat4 f = float4(float(v.x), float(v.y), float(v.z), float(v.w));\n"
        "*(device float4*)(y + 4 * i) = float4(f.w, f.z, float(low.y), f[0]);"
    )
    x = numbers(32, 4).astype(mx.float16)
    (y,) = run(body, {"x": x}, {"y": ((32, 4), mx.float32)})
    assert mx.array_equal(y, x[:, ::-1].astype(mx.float32))


# ---- simdgroups and threadgroup memory


def test_simd_sum_adds_in_a_butterfly(run: Callable[..., list[mx.array]]) -> None:
    """Partners are lanes i ^ 1, 2, 4, 8, 16, in this order; every lane gets the same bits."""
    x = numbers(64, scale=13)
    expected = np.array(x).reshape(2, 32)
    for mask in (1, 2, 4, 8, 16):
        expected = expected + expected[:, np.arange(32) ^ mask]
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        body = f"{LANE}y[i] = metal::simd_sum(x[i]);"
        (y,) = run(body, {"x": x.astype(dtype)}, {"y": ((64,), dtype)}, threads=(64, 1, 1))
        if dtype == mx.float32:
            assert np.array_equal(bits(y), expected.reshape(-1).view(np.uint32))
        assert len(set(bits(y)[:32].tolist())) == len(set(bits(y)[32:].tolist())) == 1


def test_simdgroup_operations(run: Callable[..., list[mx.array]]) -> None:
    operations: dict[str, Callable[[np.ndarray], Any]] = {
        "metal::simd_max(v)": lambda v: [max(v)] * 32,
        "metal::simd_min(v)": lambda v: [min(v)] * 32,
        "metal::simd_product(v % 3 + 1)": lambda v: [np.prod(v % 3 + 1)] * 32,
        "metal::simd_and(v)": lambda v: [np.bitwise_and.reduce(v)] * 32,
        "metal::simd_or(v)": lambda v: [np.bitwise_or.reduce(v)] * 32,
        "metal::simd_xor(v)": lambda v: [np.bitwise_xor.reduce(v)] * 32,
        "metal::simd_prefix_inclusive_sum(v)": np.cumsum,
        "metal::simd_prefix_exclusive_sum(v)": lambda v: np.cumsum(v) - v,
        "metal::simd_shuffle(v, (lane * 7) % 32)": lambda v: v[np.arange(32) * 7 % 32],
        "metal::simd_shuffle_xor(v, 5)": lambda v: v[np.arange(32) ^ 5],
        "metal::simd_shuffle_down(v, 3)": lambda v: [*v[3:], *v[29:]],
        "metal::simd_shuffle_up(v, 3)": lambda v: [*v[:3], *v[:29]],
        "metal::simd_broadcast(v, 9)": lambda v: [v[9]] * 32,
        "metal::simd_broadcast_first(v)": lambda v: [v[0]] * 32,
        "int(metal::simd_any(v == 20))": lambda v: [int(20 in v)] * 32,
        "int(metal::simd_all(v < 60))": lambda v: [int(max(v) < 60)] * 32,
        "metal::simd_shuffle_xor(int2(v, lane), 1).y": lambda v: np.arange(32) ^ 1,
    }
    body = f"{LANE}ushort lane = thread_index_in_simdgroup; int v = x[i];\n"
    body += "".join(f"y[{k} * 64 + i] = {text};\n" for k, text in enumerate(operations))
    x = np.random.default_rng(2).permutation(64).astype(np.int32)
    (y,) = run(body, {"x": mx.array(x)}, {"y": ((len(operations), 64), mx.int32)}, threads=(64, 1, 1))
    for (text, expected), found in zip(operations.items(), np.array(y), strict=True):
        assert found[:32].tolist() == list(expected(x[:32])), text
        assert found[32:].tolist() == list(expected(x[32:])), text


def test_threadgroup_memory_and_barriers(run: Callable[..., list[mx.array]]) -> None:
    body = (
        "threadgroup float a[2][SIDE], total[1];\n"
        "uint i = thread_index_in_threadgroup, g = threadgroup_position_in_grid.x;\n"
        f"for (int k = 0; k < 3; k++) {{\n  a[0][i] = x[g * SIDE + i] * (k + 1);\n{BARRIER}"
        f"  a[1][SIDE - 1 - i] = a[0][i];\n{BARRIER}"
        f"  if (i == 0) total[0] = a[1][0] + (k == 0 ? 0.0 : total[0]);\n{BARRIER}}}\n"
        "y[g * SIDE + i] = a[1][i] + total[0];"
    )
    x = mx.arange(3 * 96).astype(mx.float32)
    (y,) = run(
        body, {"x": x}, {"y": ((3, 96), mx.float32)}, template=[("SIDE", 96)], groups=(3, 1, 1), threads=(96, 1, 1)
    )
    rows = np.array(x).reshape(3, 96)
    assert np.array_equal(np.array(y), rows[:, ::-1] * 3 + rows[:, -1:] * 6)


def test_all_threadgroup_memory_may_be_used(run: Callable[..., list[mx.array]]) -> None:
    body = (
        f"threadgroup uchar a[32768];\n{LANE}for (int k = 0; k < 512; k++) a[i * 512 + k] = uchar(i);\n{BARRIER}"
    )
    (y,) = run(
        f"{body}y[i] = a[32767 - i * 512];", {"x": mx.zeros(1)}, {"y": ((64,), mx.uint8)}, threads=(64, 1, 1)
    )
    assert y.tolist() == list(range(63, -1, -1))


# ---- 8 x 8 matrices

MATRICES = """
const int lane = int(thread_index_in_simdgroup), row = (lane / 4 & 4) + lane / 2 % 4;
const int column = (lane / 4 & 2) * 2 + lane % 2 * 2;
metal::simdgroup_matrix<T, 8, 8> left, right;
metal::simdgroup_float8x8 sum;
sum.thread_elements()[0] = sum.thread_elements()[1] = 0.0f;
for (int k = 0; k < 64; k += 8) {
  for (int i = 0; i < 2; i++) {
    left.thread_elements()[i] = a[row * 64 + k + column + i];
    right.thread_elements()[i] = b[(k + row) * 8 + column + i];
  }
  metal::simdgroup_multiply_accumulate(sum, left, right, sum);
}
for (int i = 0; i < 2; i++) out[row * 8 + column + i] = sum.thread_elements()[i];
"""


def chain(a: mx.array, b: mx.array) -> np.ndarray:
    """Sum up products of 16-bit numbers in float32, k ascending; float64 holds a step exactly before it rounds."""
    wide_a, wide_b = (np.array(x.astype(mx.float32)).astype(np.float64) for x in (a, b))
    total = np.zeros((8, 8), dtype=np.float32)
    for k in range(a.shape[1]):
        total = (wide_a[:, k, None] * wide_b[None, k] + total).astype(np.float32)
    return total


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_matrix_products_are_chains_of_fused_multiply_adds(
    run: Callable[..., list[mx.array]], dtype: mx.Dtype
) -> None:
    a, b = numbers(8, 64).astype(dtype), numbers(64, 8, scale=3.0).astype(dtype)
    shapes = {"out": ((8, 8), mx.float32)}
    (out,) = run(
        MATRICES, {"a": a, "b": b}, shapes, template=[("T", dtype)], helpers="#include <metal_simdgroup_matrix>\n"
    )
    np.testing.assert_array_equal(np.array(out), chain(a, b))
    # Rows and columns are sums of their own: what is not finite stays in its row and column.
    spoiled = a.at[3].add(mx.inf)
    (got,) = run(MATRICES, {"a": spoiled, "b": b}, shapes, template=[("T", dtype)])
    others = [row for row in range(8) if row != 3]
    np.testing.assert_array_equal(np.array(got)[others], np.array(out)[others])
    assert not np.isfinite(np.array(got)[3]).any()
