"""qkv_norm_rope and context_kv against float64 numpy, and part by part against each other."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher

from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import launching
from metal_kernels.norm_rope import context_kv, qkv_norm_rope
from metal_kernels.rope import Rope

# The result is rounded once, which is half a unit in the last place; MLX rounds the normed heads as well.
TOLERANCE = {mx.float32: 2e-6, mx.float16: 2**-11, mx.bfloat16: 2**-8}
Weights = tuple[mx.array, mx.array] | None


@pytest.fixture(params=["native", "stock", "reference", "cpu"], autouse=True)
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    with launching(launcher), using(request.param):
        yield request.param


def rope_of(dims: int, traditional: bool = False, scale: float = 1.0) -> Rope:
    frequencies = mx.array([10_000.0 ** (-i / dims) for i in range(0, dims, 2)])
    return Rope(dims, traditional, scale, frequencies, {"base": 10_000.0, "scale": 1.0, "freqs": None})


def random(seed: int, *shape: int, scale: float = 1.0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return (scale * mx.random.normal(shape, key=mx.random.key(seed))).astype(dtype)


def positions_of(rows: int) -> mx.array:
    return mx.array([0, 1, 17, 900, 4000, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 4095][:rows], dtype=mx.int32)


def joined(parts: mx.array, heads: int, gated: bool = False) -> mx.array:
    """Lay heads [R, H + 2 KV, D] out as a projection; gates are twice their queries."""
    queries, rest = parts[:, :heads], parts[:, heads:]
    first = mx.concatenate([queries, 2 * queries], axis=-1) if gated else queries
    return mx.concatenate([part.reshape(parts.shape[0], -1) for part in (first, rest)], axis=-1)


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def formula(
    x: np.ndarray, weight: np.ndarray | None, positions: list[int], dims: int, traditional: bool, eps: float
) -> np.ndarray:
    """Norm heads [R, heads, D], then turn pair i of ``dims`` entries by position / 10000 ** (2 i / dims)."""
    out = x.copy()
    if weight is not None:
        out = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight
    turned = out.copy()
    for i in range(dims // 2):
        first, second = (2 * i, 2 * i + 1) if traditional else (i, i + dims // 2)
        for row, position in enumerate(positions):
            # Positions times frequencies are rounded to float32 on every side.
            angle = float(np.float32(position) * np.float32(10_000.0 ** (-2 * i / dims)))
            a, b = out[row, :, first], out[row, :, second]
            turned[row, :, first] = a * np.cos(angle) - b * np.sin(angle)
            turned[row, :, second] = a * np.sin(angle) + b * np.cos(angle)
    return turned


@pytest.mark.parametrize(
    ("dim", "dims", "traditional", "normed", "gated", "dtype"),
    [
        (64, 64, False, True, False, mx.float32),
        (80, 80, True, True, True, mx.float16),
        (128, 96, False, False, False, mx.bfloat16),
        (256, 64, False, True, True, mx.bfloat16),
        (96, 32, True, True, False, mx.float32),
    ],
)
def test_equals_the_formula(
    dim: int, dims: int, traditional: bool, normed: bool, gated: bool, dtype: mx.Dtype, chosen: str
) -> None:
    """Heads are no multiple of what a threadgroup takes."""
    heads, kv_heads, positions = 5, 2, positions_of(5)
    tolerance = TOLERANCE[dtype]
    weights = (random(2, dim, dtype=dtype), random(3, dim, dtype=dtype)) if normed else None
    for scale in (0.1, 13.0):
        parts = random(1, 5, heads + 2 * kv_heads, dim, scale=scale, dtype=dtype)
        queries, kv = qkv_norm_rope(
            joined(parts, heads, gated),
            weights,
            positions,
            rope_of(dims, traditional),
            heads=heads,
            kv_heads=kv_heads,
            eps=1e-5,
            gated=gated,
        )
        assert (queries.shape, queries.dtype) == ((5, heads, dim), dtype)
        assert (kv.shape, kv.dtype) == ((2, 5, kv_heads, dim), dtype)
        assert mx.array_equal(kv[1], parts[:, heads + kv_heads :])
        given = (parts[:, :heads], parts[:, heads : heads + kv_heads])
        for got, x, weight in zip((queries, kv[0]), given, weights or (None, None), strict=True):
            wide = None if weight is None else float64(weight)
            expected = formula(float64(x), wide, positions.tolist(), dims, traditional, 1e-5)
            size = np.abs(expected).max()
            if chosen == "stock":
                # Its angles differ in the last bits: at position 4000, by up to a thousandth.
                np.testing.assert_allclose(float64(got), expected, atol=(1e-3 + 2 * tolerance) * size)
            else:
                np.testing.assert_allclose(float64(got), expected, rtol=tolerance, atol=2e-6 * size)


def test_eps_counts_where_a_head_is_small(chosen: str) -> None:
    parts, weights = random(1, 2, 3, 64, scale=1e-3), (mx.ones((64,)), mx.ones((64,)))
    for eps in (1e-5, 1e-6):
        queries, _ = qkv_norm_rope(
            joined(parts, 1), weights, mx.array([0, 0]), rope_of(64), heads=1, kv_heads=1, eps=eps
        )
        x = float64(parts[:, :1])
        np.testing.assert_allclose(
            float64(queries), x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps), rtol=3e-6
        )


def test_a_scale_counts_for_rotated_entries_only() -> None:
    """LongRoPE of a model whose heads are rotated in part."""
    parts, rope = random(1, 3, 4, 96), rope_of(64, scale=1.125)
    queries, kv = qkv_norm_rope(joined(parts, 2), None, mx.zeros((3,), mx.int32), rope, heads=2, kv_heads=1)
    for got, given in ((queries, parts[:, :2]), (kv[0], parts[:, 2:3])):
        np.testing.assert_allclose(np.array(got[..., :64]), 1.125 * np.array(given[..., :64]), rtol=1e-6)
        assert mx.array_equal(got[..., 64:], given[..., 64:])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("normed", [True, False])
def test_every_head_is_made_as_alone(normed: bool, dtype: mx.Dtype) -> None:
    heads, kv_heads, dim = 5, 2, 80
    rope, positions = rope_of(64), positions_of(5)
    parts = random(1, 5, heads + 2 * kv_heads, dim, scale=13, dtype=dtype)
    weights = (random(2, dim, dtype=dtype), random(3, dim, dtype=dtype)) if normed else None

    def run(heads_of: mx.array, heads: int, kv_heads: int, gated: bool) -> tuple[mx.array, mx.array]:
        x = joined(heads_of, heads, gated)
        return qkv_norm_rope(x, weights, positions, rope, heads=heads, kv_heads=kv_heads, eps=1e-5, gated=gated)

    queries, kv = run(parts, heads, kv_heads, False)
    gated_queries, gated_kv = run(parts, heads, kv_heads, True)
    assert mx.array_equal(gated_queries, queries) and mx.array_equal(gated_kv, kv)
    for head in range(heads):
        key = heads + head % kv_heads
        one = mx.stack([parts[:, head], parts[:, key], parts[:, key + kv_heads]], axis=1)
        query, pair = run(one, 1, 1, False)
        assert mx.array_equal(query[:, 0], queries[:, head])
        assert mx.array_equal(pair[:, :, 0], kv[:, :, head % kv_heads])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_context_keys_of_all_layers_are_made_as_those_of_a_projection(dtype: mx.Dtype) -> None:
    layers, kv_heads, dim = 3, 2, 64
    rope, positions = rope_of(dim), positions_of(5)
    projected = random(1, 5, layers, 2, kv_heads * dim, scale=13, dtype=dtype)
    weights = random(2, layers, dim, dtype=dtype)
    got = context_kv(projected, weights, positions, rope, eps=1e-6)
    assert (got.dtype, got.shape) == (dtype, (5, layers, 2, kv_heads, dim))
    for layer in range(layers):
        # The keys come first, as the one query head that a projection needs.
        x = mx.concatenate([projected[:, layer, 0, :dim], projected[:, layer].reshape(5, -1)], axis=-1)
        _, kv = qkv_norm_rope(
            x, (weights[0], weights[layer]), positions, rope, heads=1, kv_heads=kv_heads, eps=1e-6
        )
        assert mx.array_equal(got[:, layer], kv.swapaxes(0, 1))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(dtype: mx.Dtype) -> None:
    x, positions = random(1, 16, 4 * 64, scale=13, dtype=dtype), positions_of(16)
    weights = (random(2, 64, dtype=dtype), random(3, 64, dtype=dtype))

    def run(rows: int) -> tuple[mx.array, mx.array]:
        return qkv_norm_rope(x[:rows], weights, positions[:rows], rope_of(64), heads=2, kv_heads=1, eps=1e-6)

    queries, kv = run(16)
    for rows in range(1, 17):
        part, part_kv = run(rows)
        assert mx.array_equal(part, queries[:rows]), rows
        assert mx.array_equal(part_kv, kv[:, :rows]), rows


def test_what_does_not_fit_is_refused() -> None:
    rope, two, x = rope_of(64), mx.array([0, 1], dtype=mx.int32), mx.zeros((2, 4 * 64))

    def run(
        x: mx.array = x, weights: Weights = None, positions: mx.array = two, heads: int = 2
    ) -> tuple[mx.array, mx.array]:
        return qkv_norm_rope(x, weights, positions, rope, heads=heads, kv_heads=1)

    with pytest.raises(ValueError, match="weights"):
        run(weights=(mx.ones((64,)), mx.ones((32,))))
    with pytest.raises(ValueError, match="Positions"):
        run(positions=mx.array([0], dtype=mx.int32))
    with pytest.raises(ValueError, match="Positions"):
        run(positions=two.astype(mx.uint32))
    with pytest.raises(ValueError, match="rotates 64 entries of a head, which has only 32"):
        run(x[:, :128])
    with pytest.raises(ValueError, match="whole heads"):
        run(mx.zeros((2, 4 * 64 + 1)))
    with pytest.raises(ValueError, match="whole heads"):
        run(mx.zeros((0, 4 * 64)))
    with pytest.raises(ValueError, match="whole heads"):
        context_kv(mx.zeros((2, 3, 2, 128)), mx.ones((2, 64)), two, rope, eps=1e-6)
