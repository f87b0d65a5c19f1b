"""Chains of an MTP head from every position of a batch, with gradients."""

from typing import Any

import mlx.core as mx

from mlx_spec.drafters.mtp.contract import Contract
from mlx_spec.drafters.mtp.head import MTPHead
from tools.chain_loss import attend, project


def chains(
    head: MTPHead,
    contract: Contract,
    config: dict[str, Any],
    embedding: mx.array,
    tokens: mx.array,
    hidden: mx.array,
    steps: int,
) -> list[mx.array]:
    """Run a chain of ``steps`` from every row but the last, each step with the token that came.

    config: of the head's layer. embedding: [V, H]. tokens: [N, S], hidden: [N, S, H] of the target, at the head's
    tap. Returns for each step [N, S - 1, H], what the output head reads; entry i of step j is for token i + j + 2.
    """
    size, layer = tokens.shape[1], head.layers[0]
    at, own, out = mx.arange(size - 1), list[tuple[mx.array, mx.array]](), list[mx.array]()
    hidden = hidden[:, :-1]
    for step in range(steps):
        embedded = embedding[tokens[:, mx.minimum(at + 1 + step, size - 1)]]
        parts = [head.pre_fc_norm_embedding(embedded), head.pre_fc_norm_hidden(hidden)]
        x = head.fc(mx.concatenate(parts[::-1] if contract.hidden_first else parts, axis=-1))
        queries, key, value, gate = project(layer.self_attn, config, layer.input_layernorm(x), step)
        own.append((key, value))
        attended = attend(queries, own).swapaxes(1, 2).reshape(*x.shape[:2], -1)
        x = x + layer.self_attn.o_proj(attended if gate is None else attended * mx.sigmoid(gate))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        out.append(head.norm(x))
        hidden = out[-1] if contract.recycles_normed else x
    return out
