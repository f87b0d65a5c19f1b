"""The block forward over joined weights, as drafting runs it; ``block.py`` says what it computes."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from metal_kernels import Linear, dynamic_conv, kv_sides, linear_rows
from mlx_spec.drafters.dflash2.block import DraftLayer, DraftModel, GroupedDynamicCausalConv
from mlx_spec.drafters.dflash2.config import DFlash2Config
from mlx_spec.drafters.stages import Record, record_feed_forward, record_stages, within
from mlx_spec.target.families import dense
from mlx_spec.target.layers import Attention, Norm
from mlx_spec.target.linears import joined_linears, linear_of

Attend = Callable[["BlockLayer", mx.array, mx.array], mx.array]
"""Attention of a layer: (layer, queries [N * B, H, D], keys and values [2, N * B, KV, D]) to [N * B, H, D]."""
Sublayer = Callable[[mx.array, mx.array | None], mx.array]
"""(rows [N, B, H], residual or None) to their sum [N, B, H]."""


@dataclass(frozen=True)
class Convolution:
    """The convolution around a sublayer: base kernels [2, T, H], and what makes a row's own kernels."""

    base: mx.array
    kernels: Linear

    @staticmethod
    def of(module: GroupedDynamicCausalConv) -> "Convolution":
        """Take what a module holds."""
        return Convolution(module.base_kernel, linear_of(module.kernel_projection))

    def prepare(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Convolve a sublayer's input [N, B, H]; also returns the kernels [N, B, 2, T, G] for ``finish``."""
        kernels = linear_rows(x, self.kernels).reshape(*x.shape[:2], *self.base.shape[:2], -1)
        return dynamic_conv(x, self.base, kernels, side=0), kernels

    def finish(self, x: mx.array, kernels: mx.array, residual: mx.array) -> mx.array:
        """Convolve a sublayer's output [N, B, H], and add the residual."""
        return dynamic_conv(x, self.base, kernels, residual, side=1)


@dataclass(frozen=True)
class BlockLayer:
    """One decoder layer over block rows; in DFlash 1 without convolutions."""

    input_norm: Norm
    attention_conv: Convolution | None
    attention: Attention
    sees_block: bool
    post_norm: Norm
    mlp_conv: Convolution | None
    feed_forward: Sublayer

    @staticmethod
    def of(layer: DraftLayer, index: int, model: DraftModel, config: DFlash2Config) -> "BlockLayer":
        """Read layer number ``index``; its modules become views of joined weights."""
        module = layer.self_attn
        attention = Attention(
            index=index,
            qkv=joined_linears([module.q_proj, module.k_proj, module.v_proj]),
            qk_norm=(module.q_norm.weight, module.k_norm.weight),
            eps=module.q_norm.eps,
            rope=model.rope,
            output=linear_of(module.o_proj),
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            gated=False,
            scale=config.head_dim**-0.5,
            window=config.windows[index],
        )
        attention_conv, mlp_conv = (
            Convolution.of(layer[name]) if name in layer else None for name in ("attention_conv", "mlp_conv")
        )
        norms = Norm.of(layer.input_layernorm), Norm.of(layer.post_attention_layernorm)
        return BlockLayer(
            norms[0], attention_conv, attention, not config.causal[index], norms[1], mlp_conv, dense(layer.mlp)
        )

    def __call__(self, x: mx.array, positions: mx.array, attend: Attend, record: Record | None = None) -> mx.array:
        """Run blocks [N, B, hidden] at ``positions`` [N * B] int32."""
        of_attention, of_mlp = within("attention", record), within("mlp", record)

        def attention(y: mx.array, residual: mx.array | None) -> mx.array:
            projected, queries, keys_values = self.attention.project(y.flatten(0, 1), positions)
            attended = attend(self, queries, keys_values)
            if of_attention is not None:
                keys, values = kv_sides(keys_values)
                record_stages(of_attention, q=queries, k=keys, v=values, attended=attended)
            flat = None if residual is None else residual.flatten(0, 1)
            return self.attention.finish(projected, attended, flat).reshape(x.shape)

        def feed_forward(y: mx.array, residual: mx.array | None) -> mx.array:
            record_feed_forward(of_mlp, self.feed_forward, y)
            return self.feed_forward(y, residual)

        x = around(self.attention_conv, attention, self.input_norm(x), x, of_attention)
        return around(self.mlp_conv, feed_forward, self.post_norm(x), x, of_mlp)


def around(
    conv: Convolution | None, sublayer: Sublayer, x: mx.array, residual: mx.array, record: Record | None = None
) -> mx.array:
    """Run a sublayer between the two sides of its convolution, if it has one, and add the residual."""
    record_stages(record, x=residual, normed=x)
    if conv is None:
        y = sublayer(x, residual)
        record_stages(record, y=y)
        return y
    prepared, kernels = conv.prepare(x)
    record_stages(record, coefficients=kernels, conv_before=prepared)
    out = sublayer(prepared, None)
    finished = conv.finish(out, kernels, residual)
    record_stages(record, out=out, conv_after=finished)
    return finished


@dataclass(frozen=True)
class BlockForward:
    """The forward of a drafter over blocks of rows."""

    layers: tuple[BlockLayer, ...]
    norm: Norm

    @staticmethod
    def of(model: DraftModel, config: DFlash2Config) -> "BlockForward":
        """Read a loaded model; its modules become views of joined weights."""
        layers = tuple(BlockLayer.of(layer, i, model, config) for i, layer in enumerate(model.layers))
        return BlockForward(layers, Norm.of(model.norm))

    def __call__(self, x: mx.array, positions: mx.array, attend: Attend, record: Record | None = None) -> mx.array:
        """Run blocks of rows and return the final-normed hidden states [N, B, H].

        x: [N, B, H], the scaled embeddings, the anchors' first.
        positions: [N * B] int32, of the rows.
        attend: brings context and visibility.
        """
        for index, layer in enumerate(self.layers):
            x = layer(x, positions, attend, within(f"layers.{index}", record))
        return self.norm(x)
