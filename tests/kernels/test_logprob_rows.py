"""logprob_rows against its formula in float64."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher

from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import launching
from metal_kernels.logprob_rows import logprob_rows

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
SLICE = 8192


@pytest.fixture(params=["native", "stock", "reference", "cpu"], autouse=True)
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    with launching(launcher), using(request.param):
        yield request.param


def formula(logits: mx.array, tokens: mx.array) -> tuple[np.ndarray, np.ndarray]:
    """Return log(sum of exp(logits)) of each row, and the token's logit less that."""
    x = np.array(logits.astype(mx.float32)).astype(np.float64)
    peak = x.max(axis=-1)
    total = peak + np.log(np.exp(x - peak[:, None]).sum(axis=-1))
    return total, x[np.arange(x.shape[0]), np.array(tokens)] - total


def check(logits: mx.array, tolerance: float = 1e-6) -> None:
    tokens = mx.random.randint(0, logits.shape[1], (logits.shape[0],), key=mx.random.key(9)).astype(mx.int32)
    for got, wanted in zip(logprob_rows(logits, tokens), formula(logits, tokens), strict=True):
        assert got.dtype == mx.float32
        np.testing.assert_allclose(np.array(got), wanted, rtol=tolerance, atol=4e-6)


@pytest.mark.parametrize(
    ("count", "dtype"), [(1, mx.float32), *((300, dtype) for dtype in DTYPES), (SLICE + 1, mx.bfloat16)]
)
def test_equals_the_formula(count: int, dtype: mx.Dtype) -> None:
    for rows in (1, 16):
        for scale in (0.1, 13.0):
            check((scale * mx.random.normal((rows, count), key=mx.random.key(rows))).astype(dtype))


@pytest.mark.parametrize("count", [SLICE, 34 * SLICE - 5])
def test_many_slices(count: int, chosen: str) -> None:
    """MLX's own sum of this many entries is less exact."""
    logits = mx.random.normal((2, count), key=mx.random.key(0)).astype(mx.bfloat16)
    check(logits, tolerance=1e-6 if chosen == "native" else 5e-6)


@pytest.mark.parametrize("chosen", ["cpu"], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cpu_library_is_no_further_from_float64_than_stock(chosen: str, dtype: mx.Dtype) -> None:
    logits = (2 * mx.random.normal((16, 49_152), key=mx.random.key(4))).astype(dtype)
    tokens = mx.arange(16, dtype=mx.int32) * 3000
    ours = logprob_rows(logits, tokens)
    with using("stock"):
        stock = logprob_rows(logits, tokens)
    for got, other, wanted in zip(ours, stock, formula(logits, tokens), strict=True):
        assert np.abs(np.array(got) - wanted).mean() <= 1.001 * np.abs(np.array(other) - wanted).mean()


@pytest.mark.parametrize("offset", [-3e4, 3e4])
def test_far_from_zero(offset: float) -> None:
    """The exponential of such logits is 0 or infinite in float32."""
    check(mx.random.normal((2, 300), key=mx.random.key(0)) + offset)


def test_masked_entries_count_as_probability_zero() -> None:
    """The second slice holds nothing else."""
    logits = np.random.default_rng(0).standard_normal((2, 2 * SLICE)).astype(np.float32)
    logits[:, SLICE - 5 :] = -np.inf
    check(mx.array(logits[:, : SLICE - 5]))
    kept = logprob_rows(mx.array(logits), mx.array([7, 9], dtype=mx.int32))
    for got, wanted in zip(kept, formula(mx.array(logits), mx.array([7, 9])), strict=True):
        np.testing.assert_allclose(np.array(got), wanted, rtol=1e-6)
    total, masked = logprob_rows(mx.array(logits), mx.array([SLICE - 5, 2 * SLICE - 1], dtype=mx.int32))
    assert mx.all(mx.isfinite(total)).item() and masked.tolist() == [-np.inf, -np.inf]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [3, SLICE])
def test_rows_that_are_not_finite_give_no_number(place: int, bad: float) -> None:
    logits = np.random.default_rng(0).standard_normal((4, SLICE + 1)).astype(np.float32)
    logits[1, place] = bad
    logits[3] = -np.inf
    for got in logprob_rows(mx.array(logits), mx.array([1, 2, 3, 4], dtype=mx.int32)):
        assert mx.isfinite(got).tolist() == [True, False, True, False]


def test_tokens_outside_the_vocabulary_give_nan() -> None:
    total, picked = logprob_rows(mx.zeros((3, 300)), mx.array([-1, 299, 300], dtype=mx.int32))
    assert mx.isnan(picked).tolist() == [True, False, True]
    assert mx.all(mx.isfinite(total)).item()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = (13 * mx.random.normal((16, SLICE + 1), key=mx.random.key(1))).astype(mx.bfloat16)
    tokens = mx.arange(16, dtype=mx.int32) * 100
    whole = logprob_rows(logits, tokens)
    for rows in range(1, 17):
        for part, all_rows in zip(logprob_rows(logits[:rows], tokens[:rows]), whole, strict=True):
            assert mx.array_equal(part, all_rows[:rows]), rows


@pytest.mark.parametrize(
    ("logits", "tokens"),
    [
        (mx.zeros((2, 5)), mx.zeros((3,), dtype=mx.int32)),
        (mx.zeros((2, 5)), mx.zeros((2,), dtype=mx.uint32)),
        (mx.zeros((5,)), mx.zeros((5,), dtype=mx.int32)),
        (mx.zeros((2, 0)), mx.zeros((2,), dtype=mx.int32)),
    ],
)
def test_what_does_not_fit_is_refused(logits: mx.array, tokens: mx.array) -> None:
    with pytest.raises(ValueError, match=r"logits \[R, V\] and tokens \[R\] int32"):
        logprob_rows(logits, tokens)
