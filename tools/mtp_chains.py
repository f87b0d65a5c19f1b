"""Chains of an MTP head behind anchors of a batch, with gradients."""

from typing import Any

import mlx.core as mx

from mlx_spec.drafters.mtp.head import MTPHead
from mlx_spec.drafters.mtp.spec import MTPSpec
from tools.chain_loss import attend, project, token_behind
from tools.teacher import gather_rows


def chains(
    head: MTPHead,
    spec: MTPSpec,
    config: dict[str, Any],
    embedding: mx.array,
    tokens: mx.array,
    hidden: mx.array,
    anchors: mx.array,
    steps: int,
) -> list[mx.array]:
    """Run a chain of ``steps`` behind every anchor [N, A], each step with the token that came.

    config: of the head's layer. embedding: [V, H]. tokens: [N, S], hidden: [N, S, H] of the target, at the head's
    tap. Returns for each step [N, A, H], what the output head reads; that of step j is for token anchor + j + 1.
    """
    layer = head.layers[0]

    def read(token: mx.array, hidden: mx.array) -> mx.array:
        parts = [head.pre_fc_norm_embedding(embedding[token]), head.pre_fc_norm_hidden(hidden)]
        return head.fc(mx.concatenate(parts[::-1] if spec.hidden_first else parts, axis=-1))

    # Row i holds hidden state i and token i + 1.
    places, own, out = anchors - 1, list[tuple[mx.array, mx.array]](), list[mx.array]()
    _, *context, _ = project(layer.self_attn, config, layer.input_layernorm(read(tokens[:, 1:], hidden[:, :-1])))
    hidden = gather_rows(hidden, places)
    for step in range(steps):
        x = read(token_behind(tokens, anchors, step), hidden)
        queries, key, value, gate = project(layer.self_attn, config, layer.input_layernorm(x), places + step)
        if step:
            own.append((key, value))
        attended = attend(queries, tuple(context), own, places)
        x = x + layer.self_attn.o_proj(attended if gate is None else attended * mx.sigmoid(gate))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        out.append(head.norm(x))
        hidden = out[-1] if spec.recycles_normed else x
    return out
