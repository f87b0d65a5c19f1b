"""The MTP head: one decoder layer over the target's hidden state and the embedding of the token behind it.

For row i, at position i of the target, with token i + 1 known:

    z = fc([norm_e(embedding of token i + 1); norm_h(hidden state i)])
    y = decoder layer(z), at position i, over the head's own keys and values
    o = norm(y), which gives the logits of token i + 2 and is the hidden state of row i + 1 in a chain

Source: Qwen3.5's published checkpoints; module names are their tensor names.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.utils import _get_classes

from metal_kernels import Linear, linear_rows
from mlx_spec.drafters.mtp.contract import Contract
from mlx_spec.target.families import family_of
from mlx_spec.target.layers import Layer, Norm


class MTPHead(nn.Module):
    """The head's weights. Embedding and output head are the target's, unless the checkpoint brings its own."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Build the head for the configuration of a model whose decoder layer it has."""
        super().__init__()
        width, eps = int(config["hidden_size"]), float(config["rms_norm_eps"])
        self.pre_fc_norm_embedding = nn.RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = [decoder_layer(config)]
        self.norm = nn.RMSNorm(width, eps=eps)


def decoder_layer(config: dict[str, Any]) -> nn.Module:
    """Return one full-attention layer as mlx-lm builds it for a model, with experts where the model has them."""
    one = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "full_attention_interval": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    model_class, args_class = _get_classes(config)
    return model_class(args_class.from_dict({**config, **one})).layers[0]


@dataclass(frozen=True)
class HeadRows:
    """The forward of a head over rows, as one contract wires it."""

    contract: Contract
    norm_embedding: Norm
    norm_hidden: Norm
    fc: Linear
    layer: Layer
    norm: Norm

    @staticmethod
    def of(head: MTPHead, contract: Contract, config: dict[str, Any], name: str) -> "HeadRows":
        """Read a loaded head. Raises UnsupportedModel for a layer that the rows forward does not know."""
        return HeadRows(
            contract,
            Norm.of(head.pre_fc_norm_embedding),
            Norm.of(head.pre_fc_norm_hidden),
            Linear.of(head.fc),
            Layer.of(head.layers[0], family_of(config, name), None, name),
            Norm.of(head.norm),
        )

    def enter(self, embedded: mx.array, hidden: mx.array, positions: mx.array) -> "Entered":
        """Fuse embeddings [R, H] and hidden states [R, H] and project them at ``positions`` [R] int32."""
        parts = [self.norm_embedding(embedded), self.norm_hidden(hidden)]
        if self.contract.hidden_first:
            parts.reverse()
        fused = linear_rows(mx.concatenate(parts, axis=-1), self.fc)
        queries, keys_values = self.layer.project(fused, positions)
        return Entered(fused, queries, keys_values)

    def leave(self, fused: mx.array, attended: mx.array) -> tuple[mx.array, mx.array]:
        """Finish rows: fused [R, H] and attention's output [R, H, D] to (what the output head reads, what a chain
        goes on with), both [R, H]."""
        y = self.layer.finish(fused, attended)
        normed = self.norm(y)
        return normed, normed if self.contract.recycles_normed else y


@dataclass(frozen=True)
class Entered:
    """Rows before attention: fused [R, H], queries [R, H, D], keys and values [2, R, KV, D], positions encoded."""

    fused: mx.array
    queries: mx.array
    keys_values: mx.array

    def rows(self, start: int, stop: int) -> "Entered":
        """Return the rows from ``start`` to before ``stop``."""
        part = slice(start, stop)
        return Entered(self.fused[part], self.queries[part], self.keys_values[:, part])

    def followed_by(self, other: "Entered") -> "Entered":
        """Return these rows with those of ``other`` behind them."""
        return Entered(
            mx.concatenate([self.fused, other.fused]),
            mx.concatenate([self.queries, other.queries]),
            mx.concatenate([self.keys_values, other.keys_values], axis=1),
        )
