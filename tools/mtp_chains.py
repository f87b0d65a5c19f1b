"""Chains of an MTP head after anchors of a batch, with gradients."""

from typing import Any

import mlx.core as mx

from mlx_spec.drafters.mtp.head import MTPHead
from mlx_spec.drafters.mtp.spec import MTPSpec
from tools.chain_loss import attend, project, token_after
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
    """Run a chain after every anchor; its steps read the text's tokens, and the head's own output.

    head: with its spec.
    config: of the head's layer.
    embedding: [V, H].
    tokens: [N, S], the text.
    hidden: [N, S, H], of the target, from the layer that the head reads.
    anchors: [N, A], positions.
    steps: of each chain.
    Returns for each step [N, A, H], what the output head reads; step j drafts the token at anchor + j + 1.
    """
    layer = head.layers[0]

    def read(token: mx.array, hidden: mx.array) -> mx.array:
        parts = [head.pre_fc_norm_embedding(embedding[token]), head.pre_fc_norm_hidden(hidden)]
        return head.fc(mx.concatenate(parts[::-1] if spec.hidden_first else parts, axis=-1))

    # Row i holds hidden state i and token i + 1.
    rows, own, out = anchors - 1, list[tuple[mx.array, mx.array]](), list[mx.array]()
    _, *context, _ = project(layer.self_attn, config, layer.input_layernorm(read(tokens[:, 1:], hidden[:, :-1])))
    hidden = gather_rows(hidden, rows)
    for step in range(steps):
        x = read(token_after(tokens, anchors, step), hidden)
        queries, key, value, gate = project(layer.self_attn, config, layer.input_layernorm(x), rows + step)
        if step:
            own.append((key, value))
        attended = attend(queries, tuple(context), own, rows)
        x = x + layer.self_attn.o_proj(attended if gate is None else attended * mx.sigmoid(gate))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        out.append(head.norm(x))
        hidden = out[-1] if spec.recycles_normed else x
    return out
