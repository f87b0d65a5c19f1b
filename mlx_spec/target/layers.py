"""A decoder layer over rows of several sequences, with the weights and settings of a module of mlx-lm."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metal_kernels import (
    Linear,
    Rope,
    attention_rows,
    joined_heads,
    kv_sides,
    linear_rows,
    qkv_norm_rope,
    rms_norm_rows,
)
from mlx_spec.errors import UnsupportedModel
from mlx_spec.target.batch_layout import PassContext
from mlx_spec.target.delta_net import DeltaNet, separated
from mlx_spec.target.families import Family, FeedForward
from mlx_spec.target.linears import joined_linears, linear_of
from mlx_spec.target.recurrent import LayerState


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
        """Norm rows [..., H], see ``rms_norm_rows``."""
        return rms_norm_rows(x, self.weight, self.eps)


@dataclass(frozen=True)
class Attention:
    """Attention over the pages and the rows of the pass.

    index: the layer's number in the pages.
    qkv: the three projections, side by side.
    qk_norm: weights [D] of the query and key norms, or None.
    eps: of these norms.
    rope: the position encoding.
    output: the output projection.
    heads, kv_heads: how many query heads, and key heads, there are.
    gated: each query head is followed by an output gate in ``qkv``.
    scale: of the scores.
    window: how many of the newest positions a row sees, itself included; None for all.
    """

    index: int
    qkv: tuple[Linear, ...]
    qk_norm: tuple[mx.array, mx.array] | None
    eps: float
    rope: Rope
    output: Linear
    heads: int
    kv_heads: int
    gated: bool
    scale: float
    window: int | None

    @staticmethod
    def of(module: Any, family: Family, args: Any, index: int, window: int | None, rope: Rope) -> "Attention":
        """Read an attention module of mlx-lm, all but its position encoding.

        Raises TypeError for weights that the kernels do not take.
        """
        return Attention(
            index,
            joined_linears([module.q_proj, module.k_proj, module.v_proj]),
            (module.q_norm.weight, module.k_norm.weight) if family.qk_norm else None,
            module.q_norm.eps if family.qk_norm else 0.0,
            rope,
            linear_of(module.o_proj),
            args.num_attention_heads,
            args.num_key_value_heads,
            family.gated_attention,
            module.scale,
            window,
        )

    @property
    def head_dim(self) -> int:
        """D, the size of a head."""
        return sum(part.size for part in self.qkv) // (self.heads * (1 + self.gated) + 2 * self.kv_heads)

    def __call__(self, x: mx.array, residual: mx.array, context: PassContext) -> tuple[mx.array, mx.array]:
        """Run normed rows [R, hidden]; return their sum with ``residual``, and keys and values [2, R, KV, D]."""
        projected, queries, keys_values = self.project(x, context.positions)
        keys, values = kv_sides(keys_values)
        attended = attention_rows(
            queries,
            keys,
            values,
            context.pool,
            self.index,
            context.cached,
            scale=self.scale,
            window=self.window,
            paths=context.paths,
        )
        return self.finish(projected, attended, residual), keys_values

    def project(self, x: mx.array, positions: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Project normed rows [R, hidden] at ``positions`` [R] int32.

        Returns the joined projection [R, N], and with norms and positions applied the queries [R, H, D] and the
        keys and values [2, R, KV, D].
        """
        projected = linear_rows(x, self.qkv)
        queries, keys_values = qkv_norm_rope(
            projected,
            self.qk_norm,
            positions,
            self.rope,
            heads=self.heads,
            kv_heads=self.kv_heads,
            eps=self.eps,
            gated=self.gated,
        )
        return projected, queries, keys_values

    def finish(self, projected: mx.array, attended: mx.array, residual: mx.array | None) -> mx.array:
        """Gate and project the attention output [R, H, D], and add it to ``residual``, if there is one.

        projected: [R, N], the joined projection, which holds the gates.
        """
        if self.gated:
            pairs = projected[:, : 2 * self.heads * self.head_dim].reshape(*attended.shape[:2], 2, -1)
            attended = attended * mx.sigmoid(pairs[:, :, 1])
        return linear_rows(joined_heads(attended), self.output, residual=residual)


@dataclass(frozen=True)
class Layer:
    """One pre-norm layer: a mixer, which reads other rows, then the feed-forward, which does not.

    A mixer takes normed rows, the residual and the PassContext; it returns the sum with the residual, and what
    later passes need of the rows.
    """

    input_norm: Norm
    mixer: Attention | DeltaNet
    post_norm: Norm
    feed_forward: FeedForward

    @staticmethod
    def of(
        module: Any, family: Family, args: Any, index: int, window: int | None, rope: Rope, name: str
    ) -> "Layer":
        """Read a decoder layer of mlx-lm. Its modules become views of joined weights, so nothing is held twice.

        family: of the model.
        args: the model's arguments in mlx-lm.
        index: the layer's number among those with the same kind of mixer.
        window: of attention, None for all positions.
        rope: the position encoding of attention.
        name: of the model, for the message.
        Raises UnsupportedModel for weights that the kernels do not take.
        """
        mixer: Attention | DeltaNet
        try:
            if is_recurrent(module):
                module.linear_attn = separated(module.linear_attn)
                mixer = DeltaNet.of(module.linear_attn, index)
            else:
                mixer = Attention.of(module.self_attn, family, args, index, window, rope)
            norms = Norm.of(module.input_layernorm), Norm.of(module.post_attention_layernorm)
            return Layer(norms[0], mixer, norms[1], family.feed_forward(module.mlp))
        except (TypeError, ValueError) as error:
            raise UnsupportedModel(f"{name} has a layer that mlx_spec does not run: {error}") from error

    def __call__(self, x: mx.array, context: PassContext) -> tuple[mx.array, mx.array | LayerState]:
        """Run rows [R, hidden]; return them and what later passes need of them."""
        x, kept = self.mixer(self.input_norm(x), x, context)
        return self.feed_forward(self.post_norm(x), x), kept


def is_recurrent(module: Any) -> bool:
    """Return whether a decoder layer of mlx-lm has linear attention in place of attention."""
    return hasattr(module, "linear_attn")
