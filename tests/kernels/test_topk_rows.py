"""topk_rows against a stable sort in numpy."""

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import topk_rows

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def expected(logits: mx.array, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Sort whole rows, the lower index first among equals, and cut."""
    values = np.array(logits.astype(mx.float32)).astype(np.float64)
    order = np.argsort(-values, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(values, order, axis=-1), order


def check(logits: mx.array, k: int) -> None:
    values, indices, finite = topk_rows(logits, k)
    wanted_values, wanted_indices = expected(logits, k)
    assert (values.dtype, indices.dtype) == (logits.dtype, mx.int32)
    np.testing.assert_array_equal(np.array(indices), wanted_indices)
    np.testing.assert_array_equal(np.array(values.astype(mx.float32)), wanted_values)
    assert finite.item() is True


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 16, 300])
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_equals_a_sort(rows: int, k: int, dtype: mx.Dtype) -> None:
    check(mx.random.normal((rows, 300), key=mx.random.key(rows)).astype(dtype), k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("different", [1, 2, 5, 40])
def test_equal_values_come_in_the_order_of_their_indices(different: int, dtype: mx.Dtype) -> None:
    """Few different values: the k-th and the next are equal, so the cut itself is decided by the index."""
    for seed in range(8):
        check(mx.random.randint(0, different, (9, 200), key=mx.random.key(seed)).astype(dtype), 16)


def test_leading_axes_are_kept() -> None:
    check(mx.random.normal((2, 3, 50), key=mx.random.key(0)), 5)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """bfloat16, full of equal values."""
    logits = mx.random.randint(0, 9, (16, 128), key=mx.random.key(1)).astype(mx.bfloat16)
    values, indices, _ = topk_rows(logits, 16)
    for row in range(16):
        alone_values, alone_indices, _ = topk_rows(logits[row : row + 1], 16)
        assert mx.array_equal(alone_values[0], values[row])
        assert mx.array_equal(alone_indices[0], indices[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0), (3, 77), (5, 99)])
def test_an_entry_that_is_not_finite_is_reported(place: tuple[int, int], bad: float, dtype: mx.Dtype) -> None:
    logits = np.random.default_rng(0).standard_normal((6, 100)).astype(np.float32)
    assert topk_rows(mx.array(logits).astype(dtype), 4)[2].item() is True
    logits[place] = bad
    assert topk_rows(mx.array(logits).astype(dtype), 4)[2].item() is False
