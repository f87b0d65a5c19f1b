"""topk_rows against a stable sort in numpy."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher

from metal_kernels import topk_rows
from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import Kernel, Launcher, launching

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
SLICE = 4096


@pytest.fixture(params=["native", "stock", "reference", "cpu"], autouse=True)
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    with launching(launcher), using(request.param):
        yield request.param


def expected(logits: mx.array, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Sort whole rows, the lower index first among equals, and cut."""
    values = np.array(logits.astype(mx.float32)).astype(np.float64)
    order = np.argsort(-values, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(values, order, axis=-1), order


def check(logits: mx.array, k: int) -> None:
    values, indices, finite = topk_rows(logits, k)
    wanted_values, wanted_indices = expected(logits, k)
    assert (values.dtype, indices.dtype, finite.shape) == (logits.dtype, mx.int32, ())
    np.testing.assert_array_equal(np.array(indices), wanted_indices)
    np.testing.assert_array_equal(np.array(values.astype(mx.float32)), wanted_values)
    assert finite.item() is True


@pytest.mark.parametrize(
    ("k", "dtype"), [(1, mx.bfloat16), (2, mx.float16), (16, mx.float32), (17, mx.float32), (300, mx.bfloat16)]
)
def test_equals_a_sort(k: int, dtype: mx.Dtype) -> None:
    for rows in (1, 7, 16):
        check(mx.random.normal((rows, 300), key=mx.random.key(rows)).astype(dtype), k)


@pytest.mark.parametrize("count", [16, SLICE, SLICE + 1, 5 * SLICE - 3])
def test_rows_of_one_and_of_many_slices(count: int) -> None:
    check(mx.random.normal((2, count), key=mx.random.key(count)), 16)


def test_more_slices_than_a_simdgroup_has_lanes() -> None:
    for scale in (0.1, 13.0):
        check((scale * mx.random.normal((3, 40 * SLICE), key=mx.random.key(0))).astype(mx.bfloat16), 16)


@pytest.mark.parametrize(("slices", "launches"), [(256, 2), (257, 0)])
def test_only_as_many_slices_as_the_second_launch_can_join_run_through_the_kernel(
    slices: int, launches: int
) -> None:
    """The best 16 of 256 slices are 4096 entries, one slice of the second launch."""
    launched = []

    def recording(kernel: Kernel) -> Launcher:
        launched.append(kernel.name)
        return lambda **given: [
            mx.zeros(shape, dtype=dtype)
            for shape, dtype in zip(given["output_shapes"], given["output_dtypes"], strict=True)
        ]

    with launching(recording), using("native"):
        topk_rows(mx.zeros((1, slices * SLICE)), 16)
    assert launched == ["topk_rows"] * launches


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_values_come_in_the_order_of_their_indices(dtype: mx.Dtype) -> None:
    """Few different values: the k-th and the next are equal, so the cut itself is decided by the index."""
    for seed, different in enumerate((1, 2, 5, 40, 40)):
        check(mx.random.randint(0, different, (9, 200), key=mx.random.key(seed)).astype(dtype), 16)


@pytest.mark.parametrize("order", ["rising", "falling", "in half of the lanes", "in one lane", "equal"])
def test_wherever_the_largest_are(order: str) -> None:
    """Where every entry of some lanes is larger than all of the others, the most candidates are ranked."""
    at = np.arange(2 * SLICE + 100)
    rows = {
        "rising": at,
        "falling": -at,
        "in half of the lanes": np.where(at % 32 < 16, 10_000 + at, at),
        "in one lane": np.where(at % 128 == 77, 10_000 - at, at),
        "equal": 0 * at,
    }
    check(mx.array(rows[order][None].astype(np.float32)), 16)


def test_minus_zero_equals_zero() -> None:
    row = np.zeros((1, 300), np.float32)
    row[0, ::3] = -0.0
    check(mx.array(row), 16)


def test_leading_axes_are_kept() -> None:
    check(mx.random.normal((2, 3, 50), key=mx.random.key(0)), 5)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """bfloat16, full of equal values."""
    logits = mx.random.randint(0, 9, (16, 200), key=mx.random.key(1)).astype(mx.bfloat16)
    values, indices, _ = topk_rows(logits, 16)
    for row in range(16):
        alone_values, alone_indices, _ = topk_rows(logits[row : row + 1], 16)
        assert mx.array_equal(alone_values[0], values[row])
        assert mx.array_equal(alone_indices[0], indices[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_an_entry_that_is_not_finite_is_reported(bad: float, dtype: mx.Dtype) -> None:
    logits = mx.random.normal((6, 200), key=mx.random.key(0)).astype(dtype)
    assert topk_rows(logits, 16)[2].item() is True
    for row, column in ((0, 0), (3, 77), (5, 199)):
        spoiled = logits + 0
        spoiled[row, column] = bad
        assert topk_rows(spoiled, 16)[2].item() is False


def test_indices_stay_inside_rows_without_any_number() -> None:
    _, indices, finite = topk_rows(mx.full((2, SLICE + 1), mx.nan), 16)
    assert finite.item() is False
    assert mx.min(indices).item() >= 0 and mx.max(indices).item() <= SLICE


@pytest.mark.parametrize("k", [0, 51])
def test_other_k_are_refused(k: int) -> None:
    with pytest.raises(ValueError, match="V = 50"):
        topk_rows(mx.zeros((2, 50)), k)
