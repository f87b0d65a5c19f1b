"""Chains of an EAGLE head after anchors of a batch, with gradients."""

import mlx.core as mx

from mlx_spec.drafters.eagle.head import EagleHead
from mlx_spec.drafters.eagle.spec import EagleSpec, HeadConfig
from tools.chain_loss import attend, project, token_after
from tools.teacher import gather_rows


def features(head: EagleHead, spec: EagleSpec, aux_hidden_states: mx.array) -> mx.array:
    """Fuse outputs of T target layers [N, R, T * H] into the hidden states [N, R, H] that the head reads."""
    if not spec.fused:
        return aux_hidden_states
    x = head.input_norm(aux_hidden_states) if "input_norm" in head else aux_hidden_states
    if "fc_norm" in head:
        parts = mx.split(x, len(head.fc_norm), axis=-1)
        x = mx.concatenate([norm(part) for norm, part in zip(head.fc_norm, parts, strict=True)], axis=-1)
    return head.fc(x) if "fc" in head else x


def chains(
    head: EagleHead,
    spec: EagleSpec,
    config: HeadConfig,
    embedding: mx.array,
    tokens: mx.array,
    aux_hidden_states: mx.array,
    anchors: mx.array,
    steps: int,
) -> list[mx.array]:
    """Run a chain after every anchor; its steps read the text's tokens, and the head's own output.

    head: with its spec and config.
    embedding: [V, H].
    tokens: [N, S], the text.
    aux_hidden_states: [N, S, T * H], of the target.
    anchors: [N, A], positions.
    steps: of each chain.
    Returns for each step [N, A, H], what the output head reads; step j drafts the token at anchor + j + 1.
    """
    layer = head.layers[0]
    heads = {"num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads}

    def read(token: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        embedded = embedding[token]
        if not spec.fused:
            x = head.fc(mx.concatenate([embedded, hidden], axis=-1))
            return x, x
        normed = layer.hidden_norm(hidden)
        x = mx.concatenate([layer.input_layernorm(embedded), normed], axis=-1)
        return x, normed if spec.norm_before_residual else hidden

    # Row i holds hidden state i and token i + 1.
    rows, own, out = anchors - 1, list[tuple[mx.array, mx.array]](), list[mx.array]()
    x, _ = read(tokens[:, 1:], features(head, spec, aux_hidden_states[:, :-1]))
    _, *context, _ = project(layer.self_attn, heads, x)
    hidden = features(head, spec, gather_rows(aux_hidden_states, rows))
    for step in range(steps):
        x, residual = read(token_after(tokens, anchors, step), hidden)
        queries, key, value, _ = project(layer.self_attn, heads, x, rows + step)
        if step:
            own.append((key, value))
        x = residual + layer.self_attn.o_proj(attend(queries, tuple(context), own, rows))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        out.append(head.norm(x) if "norm" in head else x)
        hidden = out[-1] if spec.norm_output else x
    return out
