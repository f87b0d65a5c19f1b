"""A decoder layer as the rows forward reads it: weights and settings out of the module that mlx-lm loaded."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metal_kernels import Linear, Rope, linear_rows, qkv_norm_rope, rope_frequencies
from mlx_spec.errors import UnsupportedModel
from mlx_spec.target.families import Family, FeedForward


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: weight [H]."""

    weight: mx.array
    eps: float

    @staticmethod
    def of(module: Any) -> "Norm":
        """Take what an ``nn.RMSNorm`` holds."""
        return Norm(module.weight, module.eps)

    def __call__(self, x: mx.array) -> mx.array:
        """Norm rows [..., H]. MLX's kernel gives a row a threadgroup of its own, so rows are independent."""
        return mx.fast.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True)
class Layer:
    """One pre-norm layer: attention with ``heads`` query and ``kv_heads`` key heads, then the feed-forward.

    qkv: the three projections, side by side. qk_norm: weights [D] of the query and key norms, or None.
    window: how many of the newest positions a row sees, itself included, or None for all.
    """

    input_norm: Norm
    qkv: tuple[Linear, ...]
    qk_norm: tuple[mx.array, mx.array] | None
    rope: Rope
    output: Linear
    post_norm: Norm
    feed_forward: FeedForward
    heads: int
    kv_heads: int
    scale: float
    window: int | None

    @staticmethod
    def of(module: Any, family: Family, window: int | None, name: str) -> "Layer":
        """Read a decoder layer of mlx-lm; its modules become views of joined weights, nothing is held twice.

        Raises UnsupportedModel for weights or a position encoding that the rows forward does not know.
        """
        attention = module.self_attn
        try:
            return Layer(
                Norm.of(module.input_layernorm),
                Linear.joined([attention.q_proj, attention.k_proj, attention.v_proj]),
                (attention.q_norm.weight, attention.k_norm.weight) if family.qk_norm else None,
                rope_frequencies(attention.rope),
                Linear.of(attention.o_proj),
                Norm.of(module.post_attention_layernorm),
                family.feed_forward(module.mlp),
                attention.n_heads,
                attention.n_kv_heads,
                attention.scale,
                window,
            )
        except (TypeError, ValueError) as error:
            raise UnsupportedModel(f"{name} has a layer that mlx_spec does not run: {error}") from error

    def project(self, x: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Return queries [R, H, D] and keys and values [2, R, KV, D] of rows [R, hidden], positions encoded."""
        return qkv_norm_rope(
            linear_rows(self.input_norm(x), self.qkv),
            self.qk_norm,
            positions,
            self.rope,
            heads=self.heads,
            kv_heads=self.kv_heads,
            eps=self.input_norm.eps,
        )

    def finish(self, x: mx.array, attended: mx.array) -> mx.array:
        """Add attention's output [R, H, D], projected, to rows [R, hidden], then the feed-forward's."""
        x = linear_rows(attended.reshape(x.shape[0], -1), self.output, residual=x)
        return self.feed_forward(self.post_norm(x), x)
