"""The block forward of DFlash and DFlash 2 as formulas in float64 numpy, on the tensors of the checkpoint.

Source: the published description of DFlash and DFlash 2; nothing of the block forward is used.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_kernels import Rope
from mlx_spec.checkpoints.tensors import read_tensors
from mlx_spec.drafters.dflash2.config import DFlash2Config
from mlx_spec.drafters.dflash2.drafter import DFlash2Drafter
from mlx_spec.drafters.dflash2.tensors import native_names
from mlx_spec.drafters.kind import DrafterSource
from mlx_spec.drafters.reference import (
    Array,
    Float64Tensors,
    Formula,
    attend,
    convolve,
    rms_norm,
    rope_formula,
    rotated,
    silu,
)
from mlx_spec.target import Target

# The residual stream of a float16 pass is kept at an eighth of its size, see ``DraftModel.shrink``.
SHRINK = 8


def formulas(
    source: DrafterSource, drafter: DFlash2Drafter, target: Target, steps: int, rows: int
) -> list[Formula]:
    """Return the formulas of all stages, in the order of computing.

    The stages are those of one sequence, without their first axis; ``positions`` [B] and ``ctx_positions`` [n] are
    those of the rows of block and context, and ``embedded`` [B, H] the target's embeddings of the block.
    """
    tensors = native_names(read_tensors(source.place, source.name), "speculators_model_type" in source.config)
    shrink = SHRINK if target.dtype == mx.float16 else 1
    weights = Float64Tensors(tensors, source.config)
    return list(BlockReference(drafter.config, weights, drafter.model.rope, shrink).formulas())


@dataclass(frozen=True)
class BlockReference:
    """A checkpoint in float64.

    rope: the angles of the position encoding, as data.
    shrink: by how much the residual stream is divided.
    """

    config: DFlash2Config
    weights: Mapping[str, Array]
    rope: Rope
    shrink: int

    def formulas(self) -> Iterator[Formula]:
        """Yield all stages."""
        config = self.config
        yield from rope_formula(config.head_dim, config.rope_theta, config.rope_scaling)
        yield Formula("ctx_combined", ("capture",), lambda x: x @ self.weights["fc.weight"].T / self.shrink)
        yield Formula("ctx_normed", ("ctx_combined",), lambda x: self.norm(x, "hidden_norm"))
        yield Formula("ctx_keys_values", ("ctx_normed", "ctx_positions"), self.context)
        scale = config.input_embedding_scale / self.shrink
        yield Formula("layers.0.attention.x", ("embedded",), lambda x: x * scale)
        for layer in range(config.num_hidden_layers):
            yield from self.attention(layer)
            yield from self.feed_forward(layer)
        last = f"layers.{config.num_hidden_layers - 1}.mlp.{self.end}"
        yield Formula("hidden", (last,), lambda x: self.norm(x, "norm")[1:])
        if config.selector_rank:
            projection = self.weights["candidate_selector.hidden_projection.weight"]
            yield Formula("hidden_projection", ("hidden",), lambda x: x @ projection.T)

    @property
    def end(self) -> str:
        """What the last stage of a sublayer is called."""
        return "conv_after" if self.config.conv_kernel_size else "y"

    def norm(self, x: Array, name: str) -> Array:
        """Norm the residual stream."""
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps / self.shrink**2)

    def linear(self, x: Array, name: str) -> Array:
        """Apply a linear map."""
        return x @ self.weights[f"{name}.weight"].T

    def heads(self, x: Array, layer: int, name: str, positions: Array | None = None) -> Array:
        """Project rows to heads [R, heads, D], normed and with positions encoded where these are given."""
        place = f"layers.{layer}.self_attn.{name}"
        rows = self.linear(x, f"{place}_proj").reshape(len(x), -1, self.config.head_dim)
        if positions is None:
            return rows
        normed = rms_norm(rows, self.weights[f"{place}_norm.weight"], self.config.rms_norm_eps)
        return rotated(normed, positions, self.rope)

    def context(self, x: Array, positions: Array) -> Array:
        """Return keys and values of context rows: [n, layers, 2, KV, D]."""
        layers = range(self.config.num_hidden_layers)
        sides = [[self.heads(x, layer, "k", positions), self.heads(x, layer, "v")] for layer in layers]
        return np.array(sides).transpose(2, 0, 1, 3, 4)

    def attention(self, layer: int) -> Iterator[Formula]:
        """Yield the attention sublayer."""
        place = f"layers.{layer}.attention"
        source = yield from self.start(place, f"layers.{layer}.input_layernorm", f"layers.{layer}.attention_conv")
        yield Formula(f"{place}.q", (source, "positions"), lambda x, at: self.heads(x, layer, "q", at))
        yield Formula(f"{place}.k", (source, "positions"), lambda x, at: self.heads(x, layer, "k", at))
        yield Formula(f"{place}.v", (source,), lambda x: self.heads(x, layer, "v"))

        def attended(q: Array, k: Array, v: Array, ctx: Array, at: Array, ctx_at: Array) -> Array:
            keys, values = np.concatenate([ctx[:, layer, 0], k]), np.concatenate([ctx[:, layer, 1], v])
            visible = self.visible(layer, np.round(at), np.round(ctx_at))
            return attend(q, keys, values, visible, self.config.head_dim**-0.5)

        parts = *(f"{place}.{side}" for side in "qkv"), "ctx_keys_values", "positions", "ctx_positions"
        yield Formula(f"{place}.attended", parts, attended)
        output = f"layers.{layer}.self_attn.o_proj"

        def out(x: Array) -> Array:
            return self.linear(x.reshape(len(x), -1), output) / self.shrink

        yield from self.finish(place, f"{place}.attended", out, f"layers.{layer}.attention_conv")
        yield Formula(f"layers.{layer}.mlp.x", (f"{place}.{self.end}",), lambda x: x)

    def visible(self, layer: int, positions: Array, context: Array) -> Array:
        """Return what block rows see of the context and of the block: bool [B, n + B]."""
        window = self.config.windows[layer]
        distance = positions[:, None] - context[None]
        of_context = np.ones(distance.shape, dtype=bool) if window is None else distance < window
        behind = positions[:, None] >= positions[None]
        of_block = behind if self.config.causal[layer] else np.ones_like(behind)
        return np.concatenate([of_context, of_block], axis=1)

    def feed_forward(self, layer: int) -> Iterator[Formula]:
        """Yield the feed-forward sublayer."""
        place, mlp = f"layers.{layer}.mlp", f"layers.{layer}.mlp"
        norm = f"layers.{layer}.post_attention_layernorm"
        source = yield from self.start(place, norm, f"layers.{layer}.mlp_conv")
        yield Formula(f"{place}.gate", (source,), lambda x: self.linear(x, f"{mlp}.gate_proj"))
        up = f"{mlp}.up_proj"
        yield Formula(f"{place}.up", (source,), lambda x: self.linear(x, up) / self.shrink)
        both = f"{place}.gate", f"{place}.up"
        yield Formula(f"{place}.activation", both, lambda gate, up: silu(gate) * up)
        down = f"{mlp}.down_proj"
        conv = f"layers.{layer}.mlp_conv"
        yield from self.finish(place, f"{place}.activation", lambda x: self.linear(x, down), conv)
        if layer + 1 < self.config.num_hidden_layers:
            yield Formula(f"layers.{layer + 1}.attention.x", (f"{place}.{self.end}",), lambda x: x)

    def start(self, place: str, norm: str, conv: str) -> Generator[Formula, None, str]:
        """Yield what comes before a sublayer; return the stage that it reads."""
        yield Formula(f"{place}.normed", (f"{place}.x",), lambda x: self.norm(x, norm))
        if not self.config.conv_kernel_size:
            return f"{place}.normed"
        base, taps = self.weights[f"{conv}.base_kernel"], self.config.conv_kernel_size
        yield Formula(
            f"{place}.coefficients",
            (f"{place}.normed",),
            lambda x: self.linear(x, f"{conv}.kernel_projection").reshape(len(x), 2, taps, -1),
        )
        both = f"{place}.normed", f"{place}.coefficients"
        yield Formula(f"{place}.conv_before", both, lambda x, own: convolve(x, base[0], own[:, 0]))
        return f"{place}.conv_before"

    def finish(self, place: str, inner: str, out: Callable[[Array], Array], conv: str) -> Iterator[Formula]:
        """Yield what comes after a sublayer, whose output is ``out`` of the stage ``inner``."""
        if not self.config.conv_kernel_size:
            yield Formula(f"{place}.y", (f"{place}.x", inner), lambda x, y: x + out(y))
            return
        yield Formula(f"{place}.out", (inner,), out)
        parts, base = (f"{place}.x", f"{place}.out", f"{place}.coefficients"), self.weights[f"{conv}.base_kernel"]
        yield Formula(f"{place}.conv_after", parts, lambda x, y, own: x + convolve(y, base[1], own[:, 1]))
