"""mask_rows against numpy."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher

from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import launching
from metal_kernels.mask_rows import EACH, THREADS, mask_rows

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
SLICE = THREADS * EACH


@pytest.fixture(params=["native", "stock", "reference", "cpu"], autouse=True)
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    with launching(launcher), using(request.param):
        yield request.param


def words(rows: int, count: int) -> np.ndarray:
    """Return random words; one of all entries, and one of none, are among them where there is room."""
    found = np.random.default_rng(rows + count).integers(0, 2**32, (rows, -(-count // 32)), dtype=np.uint32)
    found[0, :1], found[-1, -1:] = 2**32 - 1, 0
    return found


def bits_of(x: mx.array) -> np.ndarray:
    return np.array(x.view(mx.uint32 if x.dtype == mx.float32 else mx.uint16))


def check(logits: mx.array, bits: np.ndarray) -> None:
    rows, count = logits.shape
    masked = mask_rows(logits, mx.array(bits))
    assert (masked.shape, masked.dtype) == (logits.shape, logits.dtype)
    allowed = np.array([[bits[r, i // 32] >> (i % 32) & 1 for i in range(count)] for r in range(rows)]) == 1
    low = bits_of(mx.array([-mx.inf], dtype=logits.dtype))[0]
    np.testing.assert_array_equal(bits_of(masked), np.where(allowed, bits_of(logits), low))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 31, 32, 33, 300, SLICE + 1])
def test_equals_numpy(count: int, dtype: mx.Dtype) -> None:
    for rows in (1, 3):
        logits = (13 * mx.random.normal((rows, count), key=mx.random.key(rows))).astype(dtype)
        check(logits, words(rows, count))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_allowed_keeps_its_bits_and_nothing_shines_through(dtype: mx.Dtype) -> None:
    logits = mx.array([[np.nan, np.inf, -np.inf, -0.0] * 16], dtype=dtype)
    check(logits, words(1, 64))
    assert mx.all(mask_rows(logits, mx.zeros((1, 2), dtype=mx.uint32)) == -mx.inf)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits, bits = mx.random.normal((16, 300), key=mx.random.key(1)), mx.array(words(16, 300))
    masked = mask_rows(logits, bits)
    for rows in range(1, 17):
        assert mx.array_equal(mask_rows(logits[:rows], bits[:rows]), masked[:rows]), rows


@pytest.mark.parametrize(
    ("logits", "bits"),
    [
        (mx.zeros((2, 64)), mx.zeros((2, 3), dtype=mx.uint32)),
        (mx.zeros((2, 64)), mx.zeros((1, 2), dtype=mx.uint32)),
        (mx.zeros((2, 64)), mx.zeros((2, 2), dtype=mx.int32)),
        (mx.zeros((64,)), mx.zeros((2,), dtype=mx.uint32)),
        (mx.zeros((0, 64)), mx.zeros((0, 2), dtype=mx.uint32)),
    ],
)
def test_what_does_not_fit_is_refused(logits: mx.array, bits: mx.array) -> None:
    with pytest.raises(ValueError, match=r"logits \[R, V\] and bits \[R, ceil\(V / 32\)\] uint32"):
        mask_rows(logits, bits)
