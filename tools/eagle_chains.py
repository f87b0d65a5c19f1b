"""Chains of an EAGLE head from every position of a batch, with gradients."""

import mlx.core as mx

from mlx_spec.drafters.eagle.contract import Contract, HeadConfig
from mlx_spec.drafters.eagle.head import EagleHead
from tools.chain_loss import attend, project


def features(head: EagleHead, contract: Contract, taps: mx.array) -> mx.array:
    """Turn the target's hidden states [N, S, T * H] into what the head reads, [N, S, H]."""
    if not contract.fused:
        return taps
    if "input_norm" in head:
        taps = head.input_norm(taps)
    if "fc_norm" in head:
        parts = mx.split(taps, len(head.fc_norm), axis=-1)
        taps = mx.concatenate([norm(part) for norm, part in zip(head.fc_norm, parts, strict=True)], axis=-1)
    return head.fc(taps) if "fc" in head else taps


def chains(
    head: EagleHead,
    contract: Contract,
    config: HeadConfig,
    embedding: mx.array,
    tokens: mx.array,
    taps: mx.array,
    steps: int,
) -> list[mx.array]:
    """Run a chain of ``steps`` from every row but the last, each step with the token that came.

    embedding: [V, H]. tokens: [N, S], taps: [N, S, T * H] of the target. Returns for each step [N, S - 1, H], what
    the output head reads; entry i of step j is for token i + j + 2.
    """
    size, layer = tokens.shape[1], head.layers[0]
    at = mx.arange(size - 1)
    hidden, own, out = features(head, contract, taps[:, :-1]), list[tuple[mx.array, mx.array]](), list[mx.array]()
    heads = {"num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads}
    for step in range(steps):
        embedded = embedding[tokens[:, mx.minimum(at + 1 + step, size - 1)]]
        if contract.fused:
            normed = layer.hidden_norm(hidden)
            x = mx.concatenate([layer.input_layernorm(embedded), normed], axis=-1)
            residual = normed if contract.norm_before_residual else hidden
        else:
            x = residual = head.fc(mx.concatenate([embedded, hidden], axis=-1))
        queries, keys, values, _ = project(layer.self_attn, heads, x, step)
        own.append((keys, values))
        attended = attend(queries, own).swapaxes(1, 2).reshape(*residual.shape[:2], -1)
        x = residual + layer.self_attn.o_proj(attended)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        out.append(head.norm(x) if "norm" in head else x)
        hidden = out[-1] if contract.norm_output else x
    return out
