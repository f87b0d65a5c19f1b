"""The MTP head: one decoder layer over the target's hidden state and the embedding of the token after it.

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
from mlx_spec.drafters.chain import AttentionInputs
from mlx_spec.drafters.mtp.spec import MTPSpec
from mlx_spec.drafters.stages import Record, record_feed_forward, record_stages
from mlx_spec.target.families import Family, FeedForward
from mlx_spec.target.layers import Attention, Layer, Norm
from mlx_spec.target.linears import linear_of
from mlx_spec.target.rope import rope_frequencies


class MTPHead(nn.Module):
    """The head's weights. Embedding and output head are the target's, unless the checkpoint brings its own."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Build the head for the configuration of a model whose decoder layer it has."""
        super().__init__()
        width, eps = int(config["hidden_size"]), float(config["rms_norm_eps"])
        self.pre_fc_norm_embedding = nn.RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        one = one_layer(config)
        self.args, self.layers = one.args, [one.layers[0]]
        self.norm = nn.RMSNorm(width, eps=eps)


def one_layer(config: dict[str, Any]) -> Any:
    """Return a model as mlx-lm builds it, of one full-attention layer, with experts where the model has them."""
    one = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "full_attention_interval": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict({**config, **one}))
    return getattr(model, "language_model", model)


@dataclass(frozen=True)
class MTPForward:
    """The forward of a head over rows, as one spec wires it."""

    spec: MTPSpec
    norm_embedding: Norm
    norm_hidden: Norm
    fc: Linear
    input_norm: Norm
    attention: Attention
    post_norm: Norm
    feed_forward: FeedForward
    norm: Norm

    @staticmethod
    def of(head: MTPHead, spec: MTPSpec, family: Family, name: str) -> "MTPForward":
        """Read a loaded head; its modules become views of joined weights.

        Raises UnsupportedModel for weights or a position encoding that the rows forward does not know.
        """
        rope = rope_frequencies(head.layers[0].self_attn.rope)
        layer = Layer.of(head.layers[0], family, head.args, 0, None, rope, name)
        assert isinstance(layer.mixer, Attention)
        return MTPForward(
            spec,
            Norm.of(head.pre_fc_norm_embedding),
            Norm.of(head.pre_fc_norm_hidden),
            linear_of(head.fc),
            layer.input_norm,
            layer.mixer,
            layer.post_norm,
            layer.feed_forward,
            Norm.of(head.norm),
        )

    @property
    def width(self) -> int:
        """H, the size of hidden states."""
        return self.norm_hidden.weight.size

    def features(self, aux_hidden_states: mx.array) -> mx.array:
        """Return the target's hidden states [R, H] as they are."""
        return aux_hidden_states

    def pre_attention(
        self, embedded: mx.array, hidden: mx.array, positions: mx.array, record: Record | None = None
    ) -> AttentionInputs:
        """Run rows up to attention.

        embedded: [R, H], of the tokens after the rows.
        hidden: [R, H], from ``features`` or from the row before.
        positions: [R] int32.
        """
        parts = [self.norm_embedding(embedded), self.norm_hidden(hidden)]
        if self.spec.hidden_first:
            parts.reverse()
        fused = linear_rows(mx.concatenate(parts, axis=-1), self.fc)
        normed = self.input_norm(fused)
        inputs = AttentionInputs(fused, *self.attention.project(normed, positions))
        record_stages(record, x=fused, normed=normed, q=inputs.queries)
        record_stages(record, k=inputs.keys_values[0], v=inputs.keys_values[1])
        return inputs

    def post_attention(
        self, inputs: AttentionInputs, attended: mx.array, record: Record | None = None
    ) -> tuple[mx.array, mx.array]:
        """Finish rows after attention.

        inputs: of the rows.
        attended: [R, H, D], attention's output.
        Returns what the output head reads and the hidden state for the next row of a chain, both [R, H].
        """
        x = self.attention.finish(inputs.projected, attended, inputs.residual)
        post_normed = self.post_norm(x)
        record_stages(record, out=x, post_normed=post_normed)
        record_feed_forward(record, self.feed_forward, post_normed)
        x = self.feed_forward(post_normed, x)
        record_stages(record, y=x)
        normed = self.norm(x)
        return normed, normed if self.spec.recycles_normed else x
