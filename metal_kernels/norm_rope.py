"""RMSNorm and rotary position encoding of heads: of a joined projection, and of context keys."""

from dataclasses import dataclass

import mlx.core as mx

from metal_kernels.launching import cpu_library
from metal_kernels.launching.constants import floats
from metal_kernels.launching.implementations import implementation
from metal_kernels.launching.launch import Kernel
from metal_kernels.rope import Rope

KERNEL = Kernel(
    "norm_rope",
    inputs=("x", "weight", "key_weights", "positions", "frequencies", "settings"),
    outputs=("out",),
)
SIMDGROUPS = 4


def qkv_norm_rope(
    joined: mx.array,
    weights: tuple[mx.array, mx.array] | None,
    positions: mx.array,
    rope: Rope,
    *,
    heads: int,
    kv_heads: int,
    eps: float = 0.0,
    gated: bool = False,
) -> tuple[mx.array, mx.array]:
    """Cut a joined projection into queries, keys and values; norm and rotate queries and keys.

    joined: [R, (H + 2 KV) * D] in bfloat16, float16 or float32: H query heads, KV key heads, KV value heads.
    weights: those of the query and of the key norm, [D] each, or None for no norm.
    positions: [R] int32.
    rope: what rotates the first ``rope.dims`` entries of a head.
    heads, kv_heads: H and KV.
    eps: what the norms add to the mean square.
    gated: each query head is followed by D entries of its gate, [R, (2 H + 2 KV) * D] in all; they are skipped.

    Returns queries [R, H, D], and keys and values [2, R, KV, D] in one array, which ``kv_sides`` takes apart, in
    the dtype of joined.
    Raises ValueError for shapes and dtypes that do not fit.
    """
    rows, slots = joined.shape[0], heads * (1 + gated) + 2 * kv_heads
    dim = joined.shape[-1] // slots
    _check(joined, (rows, slots * dim), [(w, (dim,)) for w in weights or ()], positions, rope, dim)
    query_weight, key_weight = weights or (None, None)
    layout = Layout(heads=heads, kv_heads=kv_heads, layers=1, dim=dim, split=True, gated=gated)
    if implementation() == "cpu":
        queries = cpu_library.empty((rows, heads, dim), joined.dtype)
        kv = cpu_library.empty((2, rows, kv_heads, dim), joined.dtype)
        _cpu(joined, weights, positions, rope, eps, layout, queries, kv)
        return queries, kv
    if implementation() == "native":
        out = _native(joined, weights, positions, rope, eps, layout)
        queries, kv = out[: rows * heads * dim], out[rows * heads * dim :]
        return queries.reshape(rows, heads, dim), kv.reshape(2, rows, kv_heads, dim)
    x = joined.reshape(rows, slots, dim)
    queries, keys, values = mx.split(x, [slots - 2 * kv_heads, slots - kv_heads], axis=1)
    queries = queries[:, :: 1 + gated]
    queries = _composed(queries, query_weight, positions, rope, eps)
    return queries, mx.stack([_composed(keys, key_weight, positions, rope, eps), values])


def kv_sides(kv: mx.array) -> tuple[mx.array, mx.array]:
    """Return the keys and the values, [R, KV, D] each, that ``qkv_norm_rope`` returned in one array."""
    if implementation() == "cpu":
        return cpu_library.copied(kv, kv.shape[1:]), cpu_library.copied(kv, kv.shape[1:], kv.nbytes // 2)
    keys, values = mx.split(kv, 2)  # views; an index, with MLX, is a copy
    return keys.squeeze(0), values.squeeze(0)


def context_kv(projected: mx.array, weights: mx.array, positions: mx.array, rope: Rope, *, eps: float) -> mx.array:
    """Norm and rotate the context keys of all layers of a drafter; values pass as they are.

    projected: [R, layers, 2, KV * D] in bfloat16, float16 or float32, keys before values.
    weights: [layers, D] of the key norms.
    positions: [R] int32.
    rope, eps: as for ``qkv_norm_rope``.

    Returns [R, layers, 2, KV, D] in the dtype of projected.
    Raises ValueError for shapes and dtypes that do not fit.
    """
    layers, dim = weights.shape
    rows, kv_heads = projected.shape[0], projected.shape[-1] // dim
    _check(projected, (rows, layers, 2, kv_heads * dim), [(weights, (layers, dim))], positions, rope, dim)
    shape = (rows, layers, 2, kv_heads, dim)
    layout = Layout(heads=0, kv_heads=kv_heads, layers=layers, dim=dim, split=False)
    if implementation() == "cpu":
        kv = cpu_library.empty(shape, projected.dtype)
        _cpu(projected, (weights, weights), positions, rope, eps, layout, None, kv)
        return kv
    if implementation() == "native":
        return _native(projected, (weights, weights), positions, rope, eps, layout).reshape(shape)
    x = projected.reshape(shape)
    keys = [_composed(x[:, i, 0], weights[i], positions, rope, eps) for i in range(layers)]
    return mx.stack([mx.stack(keys, axis=1), x[:, :, 1]], axis=2)


def reference_norm_rope(
    x: mx.array, weight: mx.array | None, positions: mx.array, rope: Rope, eps: float
) -> mx.array:
    """Norm and rotate heads [R, heads, D] in float32, with one rounding at the end."""
    wide = x.astype(mx.float32)
    if weight is not None:
        wide = wide * mx.rsqrt(mx.mean(wide * wide, axis=-1, keepdims=True) + eps) * weight.astype(mx.float32)
    angles = positions.astype(mx.float32)[:, None, None] * rope.frequencies
    cos, sin = mx.cos(angles), mx.sin(angles)
    turned, rest = wide[..., : rope.dims], wide[..., rope.dims :]
    pairs = turned.reshape(*turned.shape[:-1], *((-1, 2) if rope.traditional else (2, -1)))
    axis = -1 if rope.traditional else -2
    a, b = (part.squeeze(axis) for part in mx.split(pairs, 2, axis=axis))
    turned = mx.stack([a * cos - b * sin, b * cos + a * sin], axis=axis).reshape(turned.shape) * rope.scale
    return mx.concatenate([turned, rest], axis=-1).astype(x.dtype)


@dataclass(frozen=True)
class Layout:
    """What a row holds, and how queries, keys and values come out; see norm_rope.metal."""

    heads: int
    kv_heads: int
    layers: int
    dim: int
    split: bool
    gated: bool = False

    @property
    def slots(self) -> int:
        """Heads of a row, keys and values included."""
        return self.heads + self.layers * 2 * self.kv_heads


def _check(
    x: mx.array,
    shape: tuple[int, ...],
    weights: list[tuple[mx.array, tuple[int, ...]]],
    positions: mx.array,
    rope: Rope,
    dim: int,
) -> None:
    if x.shape != shape or not x.size:
        raise ValueError(
            f"What is to be rotated has shape {x.shape}; whole heads of {dim} entries are needed: {shape}."
        )
    for weight, needed in weights:
        if weight.shape != needed:
            raise ValueError(f"The norm's weights must be {needed}, not {weight.shape}.")
    if positions.shape != shape[:1] or positions.dtype != mx.int32:
        raise ValueError(f"Positions must be {shape[:1]} int32, not {positions.shape} {positions.dtype}.")
    if rope.dims > dim:
        raise ValueError(f"The position encoding rotates {rope.dims} entries of a head, which has only {dim}.")


def _composed(x: mx.array, weight: mx.array | None, positions: mx.array, rope: Rope, eps: float) -> mx.array:
    """Norm and rotate heads [R, heads, D] by MLX's operations."""
    if implementation() == "reference":
        return reference_norm_rope(x, weight, positions, rope, eps)
    if weight is not None:
        x = mx.fast.rms_norm(x, weight, eps).astype(x.dtype)
    if rope.scale != 1.0:
        x = x.at[..., : rope.dims].multiply(rope.scale)
    # One offset per batch entry: every row is a batch entry of length 1.
    x = mx.fast.rope(x[:, :, None], rope.dims, traditional=rope.traditional, offset=positions, **rope.arguments)
    return x[:, :, 0]


def _native(
    x: mx.array,
    weights: tuple[mx.array, mx.array] | None,
    positions: mx.array,
    rope: Rope,
    eps: float,
    layout: Layout,
) -> mx.array:
    weight, key_weights = weights or (rope.frequencies, rope.frequencies)
    (out,) = KERNEL(
        [
            x,
            weight,
            key_weights,
            positions,
            rope.frequencies,
            floats(eps, rope.scale),
        ],
        template=[
            ("T", x.dtype),
            ("H", layout.heads),
            ("KV", layout.kv_heads),
            ("LAYERS", layout.layers),
            ("D", layout.dim),
            ("ROTATED", rope.dims),
            ("TRADITIONAL", rope.traditional),
            ("NORM", weights is not None),
            ("SPLIT", layout.split),
            ("GATED", layout.gated),
            ("SIMDGROUPS", SIMDGROUPS),
        ],
        groups=(-(-layout.slots // SIMDGROUPS), x.shape[0], 1),
        threads=(32 * SIMDGROUPS, 1, 1),
        shapes=[(x.shape[0] * layout.slots * layout.dim,)],
        dtypes=[x.dtype],
    )
    return out


def _cpu(
    x: mx.array,
    weights: tuple[mx.array, mx.array] | None,
    positions: mx.array,
    rope: Rope,
    eps: float,
    layout: Layout,
    queries: mx.array | None,
    kv: mx.array,
) -> None:
    """Write queries and kv, see norms.c."""
    types, (query_weight, key_weights) = cpu_library.TYPES, weights or (None, None)
    weight_type = types[x.dtype] if query_weight is None else types[query_weight.dtype]
    cpu_library.call(
        "cpu_norm_rope",
        *(x, types[x.dtype], query_weight, key_weights, weight_type, positions, rope.frequencies, queries, kv),
        *(x.shape[0], layout.heads, layout.kv_heads, layout.layers, layout.dim, rope.dims),
        *(rope.traditional, layout.gated, eps, rope.scale),
    )
