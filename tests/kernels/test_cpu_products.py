"""Products of the CPU library against float64, and row by row against themselves, bit for bit."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from oracles.products_numpy import as_numpy, assert_rounded_once, dequantised, fused, product

from metal_kernels.launching.cores import wanted_threads
from metal_kernels.launching.cpu_library import copied, set_threads
from metal_kernels.launching.implementations import using
from metal_kernels.linear import Linear, Quantization
from metal_kernels.linear_rows import linear_rows
from metal_kernels.row_products import BITS, FLOATS, suits_cpu

DTYPES = dict(zip(("bfloat16", "float16", "float32"), FLOATS, strict=True))
MOST_ROWS = 40
CASES_EACH = 3000


@pytest.fixture(autouse=True)
def on_the_cpu_library() -> Iterator[None]:
    with using("cpu"):
        yield
    set_threads(wanted_threads())


def random(rng: np.random.Generator, *shape: int, dtype: mx.Dtype) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def linear_of(
    rng: np.random.Generator, outputs: int, depth: int, bits: int, dtype: mx.Dtype, **other: Any
) -> Linear:
    """Weights of ``dtype``, or of 0 to 8 bits with scales of the type ``scales`` in groups of ``group``."""
    weight = random(rng, outputs, depth, dtype=mx.float32) * depth**-0.5
    bias = random(rng, outputs, dtype=dtype) if other.get("bias", True) else None
    if not bits:
        linear = Linear(weight.astype(dtype), bias=bias)
    else:
        group = other.get("group", 32)
        packed, *parts = mx.quantize(weight, group, bits)
        linear = Linear.affine(
            packed, *(part.astype(other.get("scales", dtype)) for part in parts), group, bits, bias
        )
    mx.eval(*linear.tensors.values())
    return linear


def float64(x: mx.array, linear: Linear, residual: mx.array | None, gated: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the result, and how far float32 sums may be from it."""
    if linear.quantization is None:
        weights, sizes = as_numpy(linear.weight), None
    else:
        assert linear.scales is not None and linear.biases is not None
        packed = linear.weight, linear.scales, linear.biases
        weights, sizes = dequantised(*packed, linear.quantization.group_size, linear.quantization.bits)
    return fused(*product(as_numpy(x), weights, sizes), linear.bias, residual, gated)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 16, 37])
@pytest.mark.parametrize("bits", [0, *BITS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_rounded_once(dtype: str, bits: int, rows: int) -> None:
    """Outputs fill no tile; plain depths fill no vector; scales have a type of their own."""
    rng, kind = np.random.default_rng([bits, rows]), DTYPES[dtype]
    gated, depth = rows % 2 == 0, 320 if bits else 333
    scales = FLOATS[(bits + rows) % 3]
    linear = linear_of(rng, 118, depth, bits, kind, scales=scales, group=32 if rows < 7 else 64)
    x = random(rng, rows, depth, dtype=kind)
    residual = random(rng, rows, 59 if gated else 118, dtype=kind)
    assert suits_cpu(x, linear)
    got = linear_rows(x, linear, residual=residual, gated=gated)
    assert_rounded_once(got, *float64(x, linear, residual, gated), kind)


@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_further_from_float64_than_stock(dtype: str, bits: int) -> None:
    rng, kind = np.random.default_rng(bits), DTYPES[dtype]
    linear = linear_of(rng, 96, 1024, bits, kind, bias=False)
    x = random(rng, 16, 1024, dtype=kind)
    expected, _ = float64(x, linear, None, False)
    ours = np.abs(as_numpy(linear_rows(x, linear)) - expected)
    with using("stock"):
        stock = np.abs(as_numpy(linear_rows(x, linear)) - expected)
    assert ours.mean() <= 1.001 * stock.mean()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_its_bits_whatever_the_pass(dtype: str) -> None:
    """Thousands of random cases: rows of passes of 1 to 40, in 1 to 3 threads, gated or not, of any weights."""
    rng, kind = np.random.default_rng(1), DTYPES[dtype]
    depths = {0: (40, 72, 576), **dict.fromkeys(BITS, (64, 160, 576))}
    linears = [linear_of(rng, 50, depth, bits, kind) for bits, each in depths.items() for depth in each]
    x = {depth: random(rng, MOST_ROWS, depth, dtype=kind) for depth in (40, 64, 72, 160, 576)}
    residual = random(rng, MOST_ROWS, 25, dtype=kind)
    alone = {}
    for case in range(CASES_EACH):
        set_threads(case % 3 + 1)
        which, count = int(rng.integers(len(linears))), int(rng.integers(1, 17 if case % 4 else MOST_ROWS + 1))
        first, linear, gated = int(rng.integers(MOST_ROWS - count + 1)), linears[which], bool(case % 2)

        def run(start: int, rows: int, linear: Linear = linear, gated: bool = gated) -> np.ndarray:
            depth = linear_depth(linear)
            part = copied(x[depth], (rows, depth), start * depth * kind.size)
            added = copied(residual, (rows, 25), start * 25 * kind.size) if gated else None
            out = linear_rows(part, linear, residual=added, gated=gated)
            return np.frombuffer(out, np.uint16 if kind.size == 2 else np.uint32).reshape(rows, -1)

        got, row = run(first, count), int(rng.integers(count))
        key = which, gated, first + row
        if key not in alone:
            alone[key] = run(first + row, 1)[0]
        assert np.array_equal(got[row], alone[key]), (case, which, first, count, row)


def linear_depth(linear: Linear) -> int:
    """Return K."""
    quantization = linear.quantization
    return linear.weight.shape[1] if quantization is None else linear.weight.shape[1] * 32 // quantization.bits


def test_two_threads_may_call_at_once() -> None:
    rng = np.random.default_rng(0)
    linear = linear_of(rng, 512, 256, 4, mx.bfloat16)
    x = random(rng, 16, 256, dtype=mx.bfloat16)
    mx.eval(x)
    set_threads(3)
    expected = bytes(memoryview(linear_rows(x, linear)))

    def calls(_: int) -> bool:
        with using("cpu"):
            return all(bytes(memoryview(linear_rows(x, linear))) == expected for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(calls, range(4)))


def test_what_the_library_does_not_take_is_left_to_mlx() -> None:
    x = mx.ones((2, 64), dtype=mx.bfloat16)
    weight, scales = mx.quantize(mx.ones((8, 64)), group_size=32, bits=4, mode="mxfp4")
    other = Linear(weight, scales, quantization=Quantization(32, 4, "mxfp4"))
    assert not suits_cpu(x, other)
    assert linear_rows(x, other).shape == (2, 8)
    assert not suits_cpu(x, Linear(mx.ones((8, 64))))
