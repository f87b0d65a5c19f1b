"""norm_rope, qkv_norm_rope and context_kv against float64 numpy and against mlx-lm's own rope modules."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher
from mlx import nn
from mlx_lm.models.rope_utils import initialize_rope

from metal_kernels.implementations import using
from metal_kernels.launch import launching
from metal_kernels.norm_rope import context_kv, norm_rope, qkv_norm_rope
from metal_kernels.rope import Rope, rope_frequencies

# The result is rounded once, which is half a unit in the last place; MLX rounds the normed heads as well.
TOLERANCE = {mx.float32: 2e-6, mx.float16: 2**-11, mx.bfloat16: 2**-8}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 512,
    "short_factor": [1.0] * 32,
    "long_factor": np.linspace(1, 8, 32).tolist(),
}
KINDS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"type": "linear", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "longrope": LONGROPE,
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "mrope": {"rope_type": "mrope", "mrope_section": [16, 8, 8]},
}


@pytest.fixture(params=["native", "stock", "reference"], autouse=True)
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    with launching(launcher), using(request.param):
        yield request.param


def rope_module(kind: str = "default", dims: int = 64, traditional: bool = False) -> nn.Module:
    return initialize_rope(dims, 10_000.0, traditional, KINDS[kind], max_position_embeddings=4096)


def rope_of(dims: int, traditional: bool = False) -> Rope:
    return rope_frequencies(rope_module(dims=dims, traditional=traditional))


def random(seed: int, *shape: int, scale: float = 1.0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return (scale * mx.random.normal(shape, key=mx.random.key(seed))).astype(dtype)


def positions_of(rows: int) -> mx.array:
    return mx.array([0, 1, 17, 900, 4000, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 4095][:rows], dtype=mx.int32)


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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scale", [0.1, 13.0])
@pytest.mark.parametrize(
    ("dim", "dims", "traditional", "normed"),
    [(64, 64, False, True), (80, 80, True, True), (128, 96, False, False), (256, 64, False, True)],
)
def test_equals_the_formula(
    dim: int, dims: int, traditional: bool, normed: bool, scale: float, dtype: mx.Dtype, chosen: str
) -> None:
    """Heads are no multiple of what a threadgroup takes."""
    rope = rope_of(dims, traditional)
    x, positions = random(1, 5, 6, dim, scale=scale, dtype=dtype), positions_of(5)
    weight = random(2, dim, dtype=dtype) if normed else None
    got = norm_rope(x, weight, positions, rope, eps=1e-5)
    assert (got.dtype, got.shape) == (dtype, x.shape)
    wide = None if weight is None else float64(weight)
    expected = formula(float64(x), wide, positions.tolist(), dims, traditional, 1e-5)
    tolerance, size = TOLERANCE[dtype], np.abs(expected).max()
    if chosen == "stock":
        # Its angles differ in the last bits: at position 4000, by up to a thousandth.
        np.testing.assert_allclose(float64(got), expected, atol=(1e-3 + 2 * tolerance) * size)
    else:
        np.testing.assert_allclose(float64(got), expected, rtol=tolerance, atol=2e-6 * size)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_module_of_mlx_lm(kind: str, chosen: str) -> None:
    module = rope_module(kind)
    x, positions = random(1, 8, 3, 64), positions_of(8)
    expected = module(x[:, :, None], offset=positions)[:, :, 0]
    got = norm_rope(x, None, positions, rope_frequencies(module))
    if chosen == "stock":
        assert mx.array_equal(got, expected)
    else:
        np.testing.assert_allclose(np.array(got), np.array(expected), atol=2e-3)
        np.testing.assert_allclose(np.array(got[:3]), np.array(expected[:3]), atol=3e-5)


def test_a_scale_counts_for_rotated_entries_only() -> None:
    """LongRoPE of a model whose heads are rotated in part."""
    rope = rope_frequencies(rope_module("longrope"))
    assert rope.scale > 1.05
    x = random(1, 3, 2, 96)
    got = norm_rope(x, None, mx.zeros((3,), dtype=mx.int32), rope)
    np.testing.assert_allclose(np.array(got[..., :64]), rope.scale * np.array(x[..., :64]), rtol=1e-6)
    assert mx.array_equal(got[..., 64:], x[..., 64:])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "normed", "gated"),
    [(4, 2, 64, True, False), (5, 1, 80, False, False), (3, 2, 64, True, True)],
)
def test_a_joined_projection_is_cut_and_each_part_is_made_as_alone(
    heads: int, kv_heads: int, dim: int, normed: bool, gated: bool, dtype: mx.Dtype
) -> None:
    rope, positions = rope_of(64), positions_of(5)
    parts = random(1, 5, heads + 2 * kv_heads, dim, scale=13, dtype=dtype)
    q, k, v = parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]
    first = mx.concatenate([q, 2 * q], axis=-1) if gated else q
    joined = mx.concatenate([part.reshape(5, -1) for part in (first, k, v)], axis=-1)
    weights = (random(2, dim, dtype=dtype), random(3, dim, dtype=dtype))
    queries, kv = qkv_norm_rope(
        joined,
        weights if normed else None,
        positions,
        rope,
        heads=heads,
        kv_heads=kv_heads,
        eps=1e-5,
        gated=gated,
    )
    assert (queries.shape, kv.shape) == ((5, heads, dim), (2, 5, kv_heads, dim))
    q_weight, k_weight = weights if normed else (None, None)
    assert mx.array_equal(queries, norm_rope(q, q_weight, positions, rope, eps=1e-5))
    assert mx.array_equal(kv[0], norm_rope(k, k_weight, positions, rope, eps=1e-5))
    assert mx.array_equal(kv[1], v)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_context_keys_of_all_layers_are_made_as_alone(dtype: mx.Dtype) -> None:
    layers, kv_heads, dim = 3, 2, 64
    rope, positions = rope_of(dim), positions_of(5)
    projected = random(1, 5, layers, 2, kv_heads * dim, scale=13, dtype=dtype)
    weights = random(2, layers, dim, dtype=dtype)
    got = context_kv(projected, weights, positions, rope, eps=1e-6)
    assert (got.dtype, got.shape) == (dtype, (5, layers, 2, kv_heads, dim))
    heads = projected.reshape(got.shape)
    for layer in range(layers):
        alone = norm_rope(heads[:, layer, 0], weights[layer], positions, rope, eps=1e-6)
        assert mx.array_equal(got[:, layer, 0], alone)
        assert mx.array_equal(got[:, layer, 1], heads[:, layer, 1])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(dtype: mx.Dtype) -> None:
    joined, positions = random(1, 16, 4 * 64, scale=13, dtype=dtype), positions_of(16)
    weights = (random(2, 64, dtype=dtype), random(3, 64, dtype=dtype))

    def run(rows: int) -> tuple[mx.array, mx.array]:
        return qkv_norm_rope(joined[:rows], weights, positions[:rows], rope_of(64), heads=2, kv_heads=1, eps=1e-6)

    queries, kv = run(16)
    for rows in range(1, 17):
        part, part_kv = run(rows)
        assert mx.array_equal(part, queries[:rows]), rows
        assert mx.array_equal(part_kv, kv[:, :rows]), rows


@pytest.mark.parametrize(
    "module",
    [
        initialize_rope(64, 10_000.0, False, {"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=512),
        nn.ALiBi(),
    ],
)
def test_a_kind_without_a_fixed_table_is_refused_by_name(module: nn.Module) -> None:
    with pytest.raises(ValueError, match=type(module).__name__):
        rope_frequencies(module)


def test_what_does_not_fit_is_refused() -> None:
    rope, x, two = rope_of(64), mx.zeros((2, 3, 64)), mx.array([0, 1], dtype=mx.int32)
    with pytest.raises(ValueError, match="weights"):
        norm_rope(x, mx.ones((32,)), two, rope)
    with pytest.raises(ValueError, match="Positions"):
        norm_rope(x, None, mx.array([0], dtype=mx.int32), rope)
    with pytest.raises(ValueError, match="Positions"):
        norm_rope(x, None, two.astype(mx.uint32), rope)
    with pytest.raises(ValueError, match="rotates 64 entries of a head, which has only 32"):
        norm_rope(mx.zeros((2, 3, 32)), None, two, rope)
    with pytest.raises(ValueError, match="whole heads"):
        norm_rope(mx.zeros((2, 64)), None, two, rope)
    with pytest.raises(ValueError, match="whole heads"):
        qkv_norm_rope(mx.zeros((2, 4 * 64 + 1)), None, two, rope, heads=2, kv_heads=1)
    with pytest.raises(ValueError, match="whole heads"):
        context_kv(mx.zeros((2, 3, 2, 128)), mx.ones((2, 64)), two, rope, eps=1e-6)
