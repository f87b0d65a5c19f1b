"""The training loss of an MTP head and how far its drafts stand: chains from every position.

A chain from row i sees the true rows up to i, and its own later rows, which are made of its own output. So the
head learns to go on from what it will be given. Sources: FastMTP (arXiv:2509.18362), EAGLE-3 (arXiv:2503.01840).
"""

from typing import Any

import mlx.core as mx

from mlx_spec.drafters.mtp.contract import Contract
from mlx_spec.drafters.mtp.head import MTPHead
from tools.train_dflash2 import AFTER_A_MISS, Frozen, soft_cross_entropy


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
    at, seen, keys, values, out = mx.arange(size - 1), [], [], [], []
    hidden = hidden[:, :-1]
    for step in range(steps):
        embedded = embedding[tokens[:, mx.minimum(at + 1 + step, size - 1)]]
        parts = [head.pre_fc_norm_embedding(embedded), head.pre_fc_norm_hidden(hidden)]
        x = head.fc(mx.concatenate(parts[::-1] if contract.hidden_first else parts, axis=-1))
        queries, key, value, gate = project(layer.self_attn, config, layer.input_layernorm(x), step)
        # Rows up to its own in the first step, and only its own in later ones.
        seen.append(at <= at[:, None] if step == 0 else at == at[:, None])
        keys.append(key)
        values.append(value)
        attended = mx.fast.scaled_dot_product_attention(
            queries,
            mx.concatenate(keys, axis=2),
            mx.concatenate(values, axis=2),
            scale=queries.shape[-1] ** -0.5,
            mask=mx.concatenate(seen, axis=1),
        )
        attended = attended.swapaxes(1, 2).reshape(*x.shape[:2], -1)
        x = x + layer.self_attn.o_proj(attended if gate is None else attended * mx.sigmoid(gate))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        out.append(head.norm(x))
        hidden = out[-1] if contract.recycles_normed else x
    return out


def project(
    attention: Any, config: dict[str, Any], x: mx.array, offset: int
) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
    """Return queries, keys and values [N, heads, S, D], and gates [N, S, H * D] or None, of rows x [N, S, hidden].

    attention: a module of mlx-lm. Row i is rotated to position i + offset.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    keys = attention.k_proj(x).reshape(*x.shape[:2], kv_heads, -1)
    values = attention.v_proj(x).reshape(keys.shape)
    queries = attention.q_proj(x).reshape(*x.shape[:2], heads, -1)
    gates = None
    if queries.shape[-1] == 2 * keys.shape[-1]:
        queries, gates = mx.split(queries, 2, axis=-1)
        gates = gates.reshape(*x.shape[:2], -1)
    if "q_norm" in attention:
        queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    queries, keys = (attention.rope(rows.swapaxes(1, 2), offset=offset) for rows in (queries, keys))
    return queries, keys, values.swapaxes(1, 2), gates


def shifted(values: mx.array, by: int) -> mx.array:
    """Move values [N, S, ...] to the front: entry i becomes entry i + by; the end is repeated."""
    return values[:, mx.minimum(mx.arange(values.shape[1] - 1) + by, values.shape[1] - 1)]


def loss(
    outputs: list[mx.array],
    frozen: Frozen,
    tokens: mx.array,
    lengths: mx.array,
    firsts: mx.array,
    final_hidden: mx.array,
    hard: float,
) -> mx.array:
    """Loss of what ``chains`` returned, over the tokens from ``firsts`` [N] to before ``lengths`` [N].

    The teacher is ``hard`` parts of the token that came and 1 - hard of the target's distribution over the draft
    vocabulary, from ``final_hidden`` [N, S, H]. Every wrong draft lowers the weight of the steps behind it.
    """
    teacher = (final_hidden @ frozen.head.T).astype(mx.float32)
    total, weight, misses = mx.array(0.0), mx.array(0.0), mx.zeros(outputs[0].shape[:2])
    for step, output in enumerate(outputs):
        at = mx.arange(output.shape[1]) + step + 2
        gold = frozen.draft_index[shifted(tokens, step + 2)]
        counts = (at >= firsts[:, None]) & (at < lengths[:, None]) & (gold >= 0)
        weights = counts * AFTER_A_MISS**misses
        logits = (output @ frozen.head.T).astype(mx.float32)
        there = mx.take_along_axis(logits, mx.maximum(gold, 0)[..., None], axis=-1)[..., 0]
        shares = mx.softmax(shifted(teacher, step + 1), axis=-1)
        soft = soft_cross_entropy(logits, shares)
        total += mx.sum(weights * (hard * (mx.logsumexp(logits, axis=-1) - there) + (1 - hard) * soft))
        weight += mx.sum(weights)
        misses += mx.argmax(logits, axis=-1) != gold
    return total / mx.maximum(weight, 1.0)


def standing(outputs: list[mx.array], frozen: Frozen, tokens: mx.array, lengths: mx.array) -> mx.array:
    """Return how many greedy drafts of each chain stand, up to the end of the sequence: [N, S - 1].

    Chain i is that of the anchor at position i + 1.
    """
    right = []
    for step, output in enumerate(outputs):
        drafted = frozen.draft_ids[mx.argmax(output @ frozen.head.T, axis=-1)]
        there = mx.arange(output.shape[1]) + step + 2 < lengths[:, None]
        right.append((drafted == shifted(tokens, step + 2)) & there)
    return mx.sum(mx.cumprod(mx.stack(right).astype(mx.int32), axis=0), axis=0)
