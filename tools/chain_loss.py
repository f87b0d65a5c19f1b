"""The training loss of a head that drafts as a chain, and how many of its drafts are accepted.

A chain after an anchor reads the rows of the text before it, and its own later rows, which are computed from its
own output, as in decoding. Sources: EAGLE-3's training-time test (arXiv:2503.01840), FastMTP (arXiv:2509.18362).
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from tools.teacher import AFTER_A_MISS, Frozen, gather_rows, soft_cross_entropy

Score = Callable[[mx.array], mx.array]
"""Maps a step's outputs [N, A, H] to draft logits [N, A, V_d]."""


def project(
    attention: Any, config: dict[str, Any], x: mx.array, positions: mx.array | None = None
) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
    """Project rows with an attention module, norms and position encoding included.

    attention: a module of mlx-lm.
    config: of the layer.
    x: [N, R, hidden], the rows.
    positions: [N, R], of the rows; without them row i has position i.
    Returns queries, keys and values [N, heads, R, D], and gates [N, R, heads * D] or None.
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
    queries, keys = rotate(attention.rope, queries, positions), rotate(attention.rope, keys, positions)
    return queries, keys, values.swapaxes(1, 2), gates


def rotate(rope: Any, rows: mx.array, positions: mx.array | None) -> mx.array:
    """Encode positions [N, R], or i for row i, in rows [N, R, heads, D]; returns [N, heads, R, D]."""
    if positions is None:
        return rope(rows.swapaxes(1, 2))
    alone = rows.reshape(-1, rows.shape[2], 1, rows.shape[3])
    return rope(alone, offset=positions.reshape(-1)).reshape(rows.shape).swapaxes(1, 2)


def attend(
    queries: mx.array,
    context: tuple[mx.array, mx.array],
    own: list[tuple[mx.array, mx.array]],
    rows: mx.array,
) -> mx.array:
    """Attend from the newest row of each chain to rows of the text and to the chain's own rows.

    queries: [N, heads, A, D], of the newest rows of A chains in each of N sequences.
    context: keys and values [N, kv_heads, S, D] of the text's rows.
    own: keys and values [N, kv_heads, A, D] of each later step; a chain sees its own alone, so that scores need no
        matrix product.
    rows: [N, A], the text's row that each chain starts with, the last that it sees.
    Returns [N, A, heads * D].
    """
    repeats = queries.shape[1] // context[0].shape[1]
    (keys, values), *later = [[mx.repeat(part, repeats, axis=1) for part in pair] for pair in (context, *own)]
    size = keys.shape[2]
    queries = queries * queries.shape[-1] ** -0.5
    seen = (mx.arange(size) <= rows[..., None])[:, None]
    scores = mx.where(seen, queries @ keys.swapaxes(2, 3), -mx.inf)
    scores = mx.concatenate([scores, *[mx.sum(queries * k, axis=-1, keepdims=True) for k, _ in later]], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    attended = weights[..., :size] @ values
    for step, (_, value) in enumerate(later):
        attended = attended + weights[..., size + step, None] * value
    return attended.swapaxes(1, 2).reshape(*rows.shape, -1)


def token_after(tokens: mx.array, anchors: mx.array, distance: int) -> mx.array:
    """Return the token [N, A] of the text ``distance`` positions after each anchor, or the sequence's last."""
    return gather_rows(tokens, mx.minimum(anchors + distance, tokens.shape[1] - 1))


def loss(
    outputs: list[mx.array],
    score: Score,
    frozen: Frozen,
    tokens: mx.array,
    lengths: mx.array,
    anchors: mx.array,
    final_hidden: mx.array,
    hard: float,
) -> mx.array:
    """Return the mean cross entropy of all drafts of all chains, a scalar.

    outputs: [N, A, H] of each step.
    score: the output head of drafts.
    frozen: the target's embedding and head.
    tokens: [N, S], the text.
    lengths: [N], tokens of each sequence.
    anchors: [N, A], positions.
    final_hidden: [N, S, H], the target's, for its distributions over the draft vocabulary.
    hard: share of the text's token in the teacher; the rest is the target's distribution.
    Every wrong draft lowers the weight of the steps after it, see AFTER_A_MISS.
    """
    total, weight, misses = mx.array(0.0), mx.array(0.0), mx.zeros(anchors.shape)
    for step, output in enumerate(outputs):
        gold = frozen.draft_index[token_after(tokens, anchors, step + 1)]
        weights = ((anchors + step + 1 < lengths[:, None]) & (gold >= 0)) * AFTER_A_MISS**misses
        logits = score(output).astype(mx.float32)
        gold_logit = mx.take_along_axis(logits, mx.maximum(gold, 0)[..., None], axis=-1)[..., 0]
        before = gather_rows(final_hidden, mx.minimum(anchors + step, tokens.shape[1] - 1))
        soft = soft_cross_entropy(logits, mx.softmax(frozen.score(before).astype(mx.float32), axis=-1))
        total += mx.sum(weights * (hard * (mx.logsumexp(logits, axis=-1) - gold_logit) + (1 - hard) * soft))
        weight += mx.sum(weights)
        misses += mx.argmax(logits, axis=-1) != gold
    return total / mx.maximum(weight, 1.0)


def every_anchor(tokens: mx.array) -> mx.array:
    """Return all anchors [N, S - 1] of sequences [N, S]: every token but the first."""
    return mx.broadcast_to(mx.arange(1, tokens.shape[1]), (tokens.shape[0], tokens.shape[1] - 1))


def accepted_drafts(
    outputs: list[mx.array], score: Score, frozen: Frozen, tokens: mx.array, lengths: mx.array, anchors: mx.array
) -> mx.array:
    """Return how many greedy drafts of each chain equal the text, up to its end: [N, A]; see ``loss``."""
    right = []
    for step, output in enumerate(outputs, 1):
        drafted = frozen.draft_ids[mx.argmax(score(output), axis=-1)]
        right.append((drafted == token_after(tokens, anchors, step)) & (anchors + step < lengths[:, None]))
    return mx.sum(mx.cumprod(mx.stack(right).astype(mx.int32), axis=0), axis=0)
