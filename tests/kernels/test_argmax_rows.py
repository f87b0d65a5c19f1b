"""argmax_rows against numpy."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher

from metal_kernels.argmax_rows import argmax_rows
from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import launching

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
SLICE = 8192


@pytest.fixture(params=["native", "stock", "reference", "cpu"], autouse=True)
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    with launching(launcher), using(request.param):
        yield request.param


def check(logits: mx.array) -> None:
    choices, finite = argmax_rows(logits)
    assert (choices.dtype, finite.dtype) == (mx.int32, mx.bool_)
    np.testing.assert_array_equal(
        np.array(choices), np.argmax(np.array(logits.astype(mx.float32)).astype(np.float64), axis=-1)
    )
    np.testing.assert_array_equal(np.array(finite), np.full(logits.shape[0], True))


@pytest.mark.parametrize(
    ("count", "dtype"),
    [
        (1, mx.float32),
        *((300, dtype) for dtype in DTYPES),
        (SLICE, mx.bfloat16),
        (SLICE + 1, mx.float16),
        (34 * SLICE - 5, mx.bfloat16),
    ],
)
def test_equals_numpy(count: int, dtype: mx.Dtype) -> None:
    for rows, scale in ((1, 13.0), (16 if count < 9 * SLICE else 2, 0.1)):
        check((scale * mx.random.normal((rows, count), key=mx.random.key(rows))).astype(dtype))


def test_the_largest_is_found_wherever_it_is() -> None:
    for place in (0, 1, 31, 32, 255, 256, SLICE - 1, SLICE, SLICE + 255, 2 * SLICE + 2):
        logits = np.zeros((3, 2 * SLICE + 3), np.float32)
        logits[1, place] = 1.0
        check(mx.array(logits))


@pytest.mark.parametrize("value", [0.0, -3.0, float("-inf")])
def test_the_lowest_index_among_equals(value: float) -> None:
    logits = np.full((2, 2 * SLICE + 3), value, np.float32)
    assert argmax_rows(mx.array(logits))[0].tolist() == [0, 0]
    logits[0, [SLICE + 9, 700, 701, 2 * SLICE - 1]] = 1.0
    assert argmax_rows(mx.array(logits))[0].tolist() == [700, 0]


def test_minus_zero_equals_zero() -> None:
    assert argmax_rows(mx.array([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]]))[0].tolist() == [1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 299])
def test_rows_with_nan_have_no_choice_and_infinities_are_reported(place: int, bad: float, dtype: mx.Dtype) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32)
    best = np.argmax(np.array(mx.array(rows).astype(dtype).astype(mx.float32)), axis=-1).tolist()
    rows[2, place] = bad
    if bad != -np.inf:
        best[2] = place if bad == np.inf else -1
    choices, finite = argmax_rows(mx.array(rows).astype(dtype))
    assert choices.tolist() == best
    assert finite.tolist() == [True, True, False, True]


def test_nan_in_any_slice_counts() -> None:
    rows = np.random.default_rng(0).standard_normal((3, 2 * SLICE + 3)).astype(np.float32)
    rows[0, 5] = rows[1, 2 * SLICE + 2] = np.nan
    choices, finite = argmax_rows(mx.array(rows))
    assert choices.tolist() == [-1, -1, int(np.argmax(rows[2]))]
    assert finite.tolist() == [False, False, True]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = mx.random.randint(0, 9, (16, 300), key=mx.random.key(1)).astype(mx.bfloat16)
    choices, _ = argmax_rows(logits)
    for rows in range(1, 17):
        assert mx.array_equal(argmax_rows(logits[:rows])[0], choices[:rows]), rows


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (5,), (2, 3, 4)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\[R, V\]"):
        argmax_rows(mx.zeros(shape))
