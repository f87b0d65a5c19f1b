"""rms_norm_rows against its formula in float64."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher

from metal_kernels.implementations import using
from metal_kernels.launch import launching
from metal_kernels.rms_norm_rows import rms_norm_rows

# One rounding of the result is half a unit in the last place; MLX also rounds before it multiplies by the weights.
TOLERANCE = {mx.float32: 2e-6, mx.float16: 2**-10, mx.bfloat16: 2**-7}


@pytest.fixture(params=["native", "stock", "reference"], autouse=True)
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    with launching(launcher), using(request.param):
        yield request.param


def random(seed: int, *shape: int, scale: float = 1.0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return (scale * mx.random.normal(shape, key=mx.random.key(seed))).astype(dtype)


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def formula(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scale", [0.1, 13.0])
@pytest.mark.parametrize("width", [1, 33, 576, 5120])
@pytest.mark.parametrize("rows", [1, 16])
def test_equals_the_formula(rows: int, width: int, scale: float, dtype: mx.Dtype) -> None:
    x, weight = random(1, rows, width, scale=scale, dtype=dtype), random(2, width, dtype=dtype)
    y, normed = rms_norm_rows(x, weight, 1e-5)
    assert (y.dtype, normed.dtype) == (dtype, dtype)
    assert mx.array_equal(y, x)
    expected = formula(float64(x), float64(weight), 1e-5)
    np.testing.assert_allclose(float64(normed), expected, rtol=TOLERANCE[dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scale", [0.1, 13.0])
def test_a_residual_is_added_and_rounded_first(scale: float, dtype: mx.Dtype) -> None:
    x, residual = random(1, 3, 576, scale=scale, dtype=dtype), random(3, 3, 576, scale=scale, dtype=dtype)
    weight = random(2, 576, dtype=dtype)
    y, normed = rms_norm_rows(x, weight, 1e-6, residual)
    np.testing.assert_array_equal(float64(y), float64(x + residual))
    assert (y.dtype, normed.dtype) == (dtype, dtype)
    assert mx.array_equal(normed, rms_norm_rows(y, weight, 1e-6)[1])
    expected = formula(float64(y), float64(weight), 1e-6)
    np.testing.assert_allclose(float64(normed), expected, rtol=TOLERANCE[dtype], atol=1e-7)


def test_eps_counts_where_the_row_is_small() -> None:
    x, weight = random(1, 2, 576, scale=1e-3), mx.ones((576,))
    for eps in (1e-5, 1e-6):
        np.testing.assert_allclose(
            np.array(rms_norm_rows(x, weight, eps)[1]), formula(float64(x), np.ones(576), eps), rtol=2e-6
        )
    assert mx.array_equal(rms_norm_rows(mx.zeros((2, 576)), weight, 1e-5)[1], mx.zeros((2, 576)))


def test_weights_of_another_dtype() -> None:
    x, weight = random(1, 2, 576, dtype=mx.bfloat16), random(2, 576)
    _, normed = rms_norm_rows(x, weight, 1e-5)
    assert normed.dtype == mx.bfloat16
    np.testing.assert_allclose(float64(normed), formula(float64(x), float64(weight), 1e-5), rtol=2**-7)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_does_not_depend_on_its_neighbours(dtype: mx.Dtype) -> None:
    x, residual = random(1, 16, 576, scale=13, dtype=dtype), random(3, 16, 576, dtype=dtype)
    weight = random(2, 576, dtype=dtype)
    whole = rms_norm_rows(x, weight, 1e-6, residual)
    for rows in range(1, 17):
        for part, all_rows in zip(rms_norm_rows(x[:rows], weight, 1e-6, residual[:rows]), whole, strict=True):
            assert mx.array_equal(part, all_rows[:rows]), rows


@pytest.mark.parametrize(
    ("x", "weight", "residual"),
    [
        (mx.zeros((2, 8)), mx.zeros((9,)), None),
        (mx.zeros((2, 2, 8)), mx.zeros((8,)), None),
        (mx.zeros((0, 8)), mx.zeros((8,)), None),
        (mx.zeros((2, 8)), mx.zeros((8,)), mx.zeros((1, 8))),
        (mx.zeros((2, 8)), mx.zeros((8,)), mx.zeros((2, 8), dtype=mx.bfloat16)),
    ],
)
def test_what_does_not_fit_is_refused(x: mx.array, weight: mx.array, residual: mx.array | None) -> None:
    with pytest.raises(ValueError, match=r"x \[R, K\], weight \[K\] and a residual like x"):
        rms_norm_rows(x, weight, 1e-6, residual)
