"""dynamic_conv against its formula in float64."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher

from metal_kernels import dynamic_conv
from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import launching

# Half a unit in the last place where the sum is rounded once; MLX's operations round after each step.
ONE_ROUNDING = {mx.float32: 2e-6, mx.float16: 2**-11, mx.bfloat16: 2**-8}
MANY_ROUNDINGS = {mx.float32: 2e-6, mx.float16: 1e-2, mx.bfloat16: 8e-2}


@pytest.fixture(params=["native", "stock", "reference", "cpu"], autouse=True)
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    with launching(launcher), using(request.param):
        yield request.param


def random(seed: int, *shape: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def formula(x: np.ndarray, base: np.ndarray, dynamic: np.ndarray) -> np.ndarray:
    """Return out[i, c], the sum over t <= i of (base[t, c] + dynamic[i, t, c // group size]) * x[i - t, c]."""
    rows, width = x.shape
    taps, groups = dynamic.shape[1:]
    out = np.zeros((rows, width))
    for i in range(rows):
        for c in range(width):
            for t in range(taps):
                if t <= i:
                    out[i, c] += (base[t, c] + dynamic[i, t, c // (width // groups)]) * x[i - t, c]
    return out


def check(got: mx.array, expected: np.ndarray, chosen: str, dtype: mx.Dtype, scale: float = 1.0) -> None:
    assert got.dtype == dtype
    tolerance = (MANY_ROUNDINGS if chosen == "stock" else ONE_ROUNDING)[dtype]
    absolute = MANY_ROUNDINGS[dtype] if chosen == "stock" else 4e-6
    np.testing.assert_allclose(float64(got), expected, atol=scale * absolute, rtol=tolerance)


@pytest.mark.parametrize(
    ("taps", "groups", "dtype"),
    [(1, 12, mx.float32), (2, 1, mx.float16), (2, 12, mx.bfloat16), (3, 3, mx.float32)],
)
def test_equals_the_formula(taps: int, groups: int, dtype: mx.Dtype, chosen: str) -> None:
    for rows in (1, 2, 16):
        x, base = random(1, rows, 12, dtype=dtype), random(2, taps, 12, dtype=dtype)
        dynamic = random(3, rows, taps, groups, dtype=dtype)
        expected = formula(float64(x), float64(base), float64(dynamic))
        check(dynamic_conv(x, base, dynamic), expected, chosen, dtype)


@pytest.mark.parametrize(
    ("side", "scale", "dtype"), [(0, 0.1, mx.float32), (1, 13.0, mx.float16), (1, 0.1, mx.bfloat16)]
)
def test_a_side_and_a_residual(side: int, scale: float, dtype: mx.Dtype, chosen: str) -> None:
    """More channels than a threadgroup has threads."""
    x, residual = (scale * random(seed, 5, 320, dtype=mx.float32) for seed in (1, 4))
    x, residual = x.astype(dtype), residual.astype(dtype)
    base, dynamic = random(2, 2, 2, 320, dtype=dtype), random(3, 5, 2, 2, 20, dtype=dtype)
    expected = float64(residual) + formula(float64(x), float64(base)[side], float64(dynamic)[:, side])
    check(dynamic_conv(x, base, dynamic, residual, side), expected, chosen, dtype, max(scale, 1))


@pytest.mark.parametrize("chosen", ["cpu"], indirect=True)
@pytest.mark.parametrize("dtype", ONE_ROUNDING)
def test_the_cpu_library_is_no_further_from_float64_than_stock(chosen: str, dtype: mx.Dtype) -> None:
    x, base = random(1, 16, 320, dtype=dtype), random(2, 3, 320, dtype=dtype)
    dynamic = random(3, 16, 3, 20, dtype=dtype)
    ours = dynamic_conv(x, base, dynamic, x)
    with using("stock"):
        stock = dynamic_conv(x, base, dynamic, x)
    wanted = float64(x) + formula(float64(x), float64(base), float64(dynamic))
    assert np.abs(float64(ours) - wanted).mean() <= 1.001 * np.abs(float64(stock) - wanted).mean()


def test_blocks_side_by_side_do_not_mix() -> None:
    x, base = random(1, 3, 8, 12, dtype=mx.float32), random(2, 2, 12, dtype=mx.float32)
    dynamic = random(3, 3, 8, 2, 3, dtype=mx.float32)
    got = dynamic_conv(x, base, dynamic)
    for block in range(3):
        expected = formula(float64(x[block]), float64(base), float64(dynamic[block]))
        np.testing.assert_allclose(float64(got[block]), expected, atol=2e-6)


def test_a_row_does_not_depend_on_the_rows_after_it() -> None:
    """bfloat16: a shorter block is the beginning of a longer one, bit for bit."""
    x, base = random(1, 16, 12, dtype=mx.bfloat16), random(2, 2, 12, dtype=mx.bfloat16)
    dynamic = random(3, 16, 2, 3, dtype=mx.bfloat16)
    whole = dynamic_conv(x, base, dynamic, x)
    for rows in range(1, 16):
        assert mx.array_equal(dynamic_conv(x[:rows], base, dynamic[:rows], x[:rows]), whole[:rows]), rows
    # Two taps: row 9 reads rows 8 and 9 only.
    changed = mx.concatenate([random(4, 8, 12, dtype=mx.bfloat16), x[8:]])
    again = dynamic_conv(changed, base, dynamic, changed)
    assert mx.array_equal(again[9:], whole[9:])
    assert not mx.array_equal(again[7], whole[7])


def test_the_initial_kernels_change_nothing() -> None:
    x = random(1, 8, 12, dtype=mx.bfloat16)
    base = mx.zeros((2, 12))
    base[0] = 1.0
    got = dynamic_conv(x, base, mx.zeros((8, 2, 3), dtype=mx.bfloat16))
    assert got.dtype == mx.bfloat16
    assert mx.array_equal(got, x)


def test_more_rows_than_the_kernel_takes_have_gradients() -> None:
    x, base = random(1, 40, 8, 12, dtype=mx.float32), random(2, 2, 12, dtype=mx.float32)
    dynamic = random(3, 40, 8, 2, 3, dtype=mx.float32)
    both = mx.grad(lambda x, dynamic: dynamic_conv(x, base, dynamic).sum(), argnums=(0, 1))
    gradient, of_dynamic = both(x, dynamic)
    # The last row of a block is read by itself alone.
    kernel = base[0] + mx.repeat(dynamic[:, -1, 0], 4, axis=-1)
    np.testing.assert_allclose(np.array(gradient[:, -1]), np.array(kernel), atol=2e-6)
    # A group's share of a tap multiplies the row there, in each of the group's channels.
    sums = np.array(x).reshape(40, 8, 3, 4).sum(axis=-1)
    np.testing.assert_allclose(np.array(of_dynamic[:, :, 0]), sums, atol=2e-6)
    np.testing.assert_allclose(np.array(of_dynamic[:, 1:, 1]), sums[:, :-1], atol=2e-6)


@pytest.mark.parametrize(
    ("x", "base", "dynamic", "residual", "side"),
    [
        ((8, 12), (2, 11), (8, 2, 3), None, None),
        ((8, 12), (2, 12), (7, 2, 3), None, None),
        ((8, 12), (2, 12), (8, 2, 5), None, None),
        ((8, 12), (2, 12), (8, 3, 3), None, None),
        ((8, 12), (2, 12), (8, 2, 3), (8, 11), None),
        ((8, 12), (2, 2, 12), (8, 2, 2, 3), None, None),
        ((8, 12), (2, 2, 12), (8, 2, 2, 3), None, 2),
        ((8, 12), (2, 2, 12), (8, 3, 2, 3), None, 0),
    ],
)
def test_what_does_not_fit_is_refused(
    x: tuple[int, ...],
    base: tuple[int, ...],
    dynamic: tuple[int, ...],
    residual: tuple[int, ...] | None,
    side: int | None,
) -> None:
    with pytest.raises(ValueError, match=r"dynamic \[..., B, T, G\]"):
        dynamic_conv(
            mx.zeros(x), mx.zeros(base), mx.zeros(dynamic), None if residual is None else mx.zeros(residual), side
        )
