"""attention_rows against the softmax formula in float64, position by position."""

import math

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import attention_rows

SLOTS, HEADS, DIM, LAYERS, LAYER = 8, 4, 16, 3, 1
SCALE = DIM**-0.5
TOLERANCE = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}


def random(rng: np.random.Generator, *shape: int, dtype: mx.Dtype) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def paged(rng: np.random.Generator, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """Put rows into shuffled pages of a pool that is NaN wherever no row of the sequence stands."""
    count = -(-keys.shape[0] // SLOTS)
    pages = rng.permutation(count + 3)[:count]
    pool = np.full((count + 3, LAYERS, 2, SLOTS, *keys.shape[1:]), np.nan, dtype=np.float32)
    for position in range(keys.shape[0]):
        pool[pages[position // SLOTS], LAYER, :, position % SLOTS] = [
            np.array(keys[position].astype(mx.float32)),
            np.array(values[position].astype(mx.float32)),
        ]
    return mx.array(pool).astype(keys.dtype), mx.array(pages, dtype=mx.int32)


def formula(queries: mx.array, keys: mx.array, values: mx.array, length: int, window: int | None) -> np.ndarray:
    """Return softmax(q k / sqrt(d)) v over the visible positions of every row and head."""
    q, k, v = float64(queries), float64(keys), float64(values)
    out = np.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for row in range(q.shape[0]):
        at = length + row
        seen = [p for p in range(at + 1) if window is None or at - p < window]
        for head in range(q.shape[1]):
            scores = [math.fsum(q[row, head] * k[p, head // group]) * SCALE for p in seen]
            weights = np.exp(np.array(scores) - max(scores))
            out[row, head] = weights @ v[seen, head // group] / weights.sum()
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 7, 8, 20])
@pytest.mark.parametrize(("length", "rows"), [(0, 1), (0, 16), (1, 1), (7, 2), (8, 1), (9, 16), (23, 5), (40, 8)])
def test_equals_the_formula(length: int, rows: int, window: int | None, kv_heads: int, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(length * 100 + rows)
    queries = random(rng, rows, HEADS, DIM, dtype=dtype)
    keys, values = (random(rng, length + rows, kv_heads, DIM, dtype=dtype) for _ in range(2))
    pool, pages = paged(rng, keys[:length], values[:length])
    got = attention_rows(
        queries, keys[length:], values[length:], pool, LAYER, pages, length, scale=SCALE, window=window
    )
    assert (got.shape, got.dtype) == (queries.shape, dtype)
    expected = formula(queries, keys, values, length, window)
    np.testing.assert_allclose(float64(got), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("length", [0, 5, 30])
@pytest.mark.parametrize("window", [None, 12])
def test_a_row_equals_the_same_row_alone(window: int | None, length: int) -> None:
    """bfloat16: 1 row over what is cached, and rows of a block of 2 to 16, agree bit for bit."""
    rng = np.random.default_rng(length)
    queries = random(rng, 16, HEADS, DIM, dtype=mx.bfloat16)
    keys, values = (random(rng, length + 16, 2, DIM, dtype=mx.bfloat16) for _ in range(2))
    alone = []
    for row in range(16):
        at, one = length + row, slice(length + row, length + row + 1)
        pool, pages = paged(rng, keys[:at], values[:at])
        alone.append(
            attention_rows(
                queries[row : row + 1], keys[one], values[one], pool, LAYER, pages, at, scale=SCALE, window=window
            )[0]
        )
    pool, pages = paged(rng, keys[:length], values[:length])
    for rows in range(2, 17):
        new = slice(length, length + rows)
        block = attention_rows(
            queries[:rows], keys[new], values[new], pool, LAYER, pages, length, scale=SCALE, window=window
        )
        for row in range(rows):
            assert mx.array_equal(block[row], alone[row]), (rows, row)
