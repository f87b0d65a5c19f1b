"""dynamic_conv against its formula in float64."""

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import dynamic_conv

TOLERANCE = {mx.float32: 2e-6, mx.float16: 1e-2, mx.bfloat16: 8e-2}


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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("groups", [1, 3, 12])
@pytest.mark.parametrize("taps", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
def test_equals_the_formula(rows: int, taps: int, groups: int, dtype: mx.Dtype) -> None:
    x, base = random(1, rows, 12, dtype=dtype), random(2, taps, 12, dtype=dtype)
    dynamic = random(3, rows, taps, groups, dtype=dtype)
    got = dynamic_conv(x, base, dynamic)
    assert got.dtype == dtype
    expected = formula(float64(x), float64(base), float64(dynamic))
    np.testing.assert_allclose(float64(got), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_blocks_side_by_side_do_not_mix() -> None:
    x, base = random(1, 3, 8, 12, dtype=mx.float32), random(2, 2, 12, dtype=mx.float32)
    dynamic = random(3, 3, 8, 2, 3, dtype=mx.float32)
    got = dynamic_conv(x, base, dynamic)
    for block in range(3):
        expected = formula(float64(x[block]), float64(base), float64(dynamic[block]))
        np.testing.assert_allclose(float64(got[block]), expected, atol=2e-6)


def test_a_row_does_not_depend_on_the_rows_behind_it() -> None:
    """bfloat16: a shorter block is the beginning of a longer one, bit for bit."""
    x, base = random(1, 16, 12, dtype=mx.bfloat16), random(2, 2, 12, dtype=mx.bfloat16)
    dynamic = random(3, 16, 2, 3, dtype=mx.bfloat16)
    whole = dynamic_conv(x, base, dynamic)
    for rows in range(1, 16):
        assert mx.array_equal(dynamic_conv(x[:rows], base, dynamic[:rows]), whole[:rows]), rows
    # Two taps: row 9 reads rows 8 and 9 only.
    changed = mx.concatenate([random(4, 8, 12, dtype=mx.bfloat16), x[8:]])
    again = dynamic_conv(changed, base, dynamic)
    assert mx.array_equal(again[9:], whole[9:])
    assert not mx.array_equal(again[7], whole[7])


def test_the_initial_kernels_change_nothing() -> None:
    x = random(1, 8, 12, dtype=mx.bfloat16)
    base = mx.zeros((2, 12))
    base[0] = 1.0
    got = dynamic_conv(x, base, mx.zeros((8, 2, 3), dtype=mx.bfloat16))
    assert got.dtype == mx.bfloat16
    assert mx.array_equal(got, x)
