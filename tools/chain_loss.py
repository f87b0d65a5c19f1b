"""The training loss of a head that drafts as a chain, and how far its drafts stand.

A chain behind an anchor sees the true rows before it, and its own later rows, which are made of its own output. So
the head learns to go on from what it will be given. Sources: EAGLE-3's training-time test (arXiv:2503.01840),
FastMTP (arXiv:2509.18362).
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
    """Return queries, keys and values [N, heads, R, D], and gates [N, R, H * D] or None, of rows x [N, R, hidden].

    attention: a module of mlx-lm. positions: [N, R] of the rows; without them row i is at i.
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
    """Rotate rows [N, R, heads, D] to their positions [N, R], or row i to i: [N, heads, R, D]."""
    if positions is None:
        return rope(rows.swapaxes(1, 2))
    alone = rows.reshape(-1, rows.shape[2], 1, rows.shape[3])
    return rope(alone, offset=positions.reshape(-1)).reshape(rows.shape).swapaxes(1, 2)


def attend(
    queries: mx.array,
    context: tuple[mx.array, mx.array],
    own: list[tuple[mx.array, mx.array]],
    places: mx.array,
) -> mx.array:
    """Attend from the newest rows [N, heads, A, D] of all chains to true rows and to their chain: [N, A, H * D].

    context: keys and values [N, kv_heads, S, D] of the true rows, each chain sees those up to its place in places
    [N, A]. own: those of the chains' steps behind it, [N, kv_heads, A, D] each; they are seen by their own chain
    alone, so their scores are no matrices.
    """
    repeats = queries.shape[1] // context[0].shape[1]
    (keys, values), *later = [[mx.repeat(rows, repeats, axis=1) for rows in pair] for pair in (context, *own)]
    size = keys.shape[2]
    queries = queries * queries.shape[-1] ** -0.5
    seen = (mx.arange(size) <= places[..., None])[:, None]
    scores = mx.where(seen, queries @ keys.swapaxes(2, 3), -mx.inf)
    scores = mx.concatenate([scores, *[mx.sum(queries * k, axis=-1, keepdims=True) for k, _ in later]], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    attended = weights[..., :size] @ values
    for step, (_, value) in enumerate(later):
        attended = attended + weights[..., size + step, None] * value
    return attended.swapaxes(1, 2).reshape(*places.shape, -1)


def token_behind(tokens: mx.array, anchors: mx.array, by: int) -> mx.array:
    """Return the token [N, A] that came so many places behind each anchor, or the sequence's last."""
    return gather_rows(tokens, mx.minimum(anchors + by, tokens.shape[1] - 1))


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
    """Loss of the outputs [N, A, H] of each step of all chains.

    The teacher is ``hard`` parts of the token that came and 1 - hard of the target's distribution over the draft
    vocabulary, from ``final_hidden`` [N, S, H]. Every wrong draft lowers the weight of the steps behind it.
    """
    total, weight, misses = mx.array(0.0), mx.array(0.0), mx.zeros(anchors.shape)
    for step, output in enumerate(outputs):
        gold = frozen.draft_index[token_behind(tokens, anchors, step + 1)]
        weights = ((anchors + step + 1 < lengths[:, None]) & (gold >= 0)) * AFTER_A_MISS**misses
        logits = score(output).astype(mx.float32)
        there = mx.take_along_axis(logits, mx.maximum(gold, 0)[..., None], axis=-1)[..., 0]
        before = gather_rows(final_hidden, mx.minimum(anchors + step, tokens.shape[1] - 1))
        soft = soft_cross_entropy(logits, mx.softmax(frozen.score(before).astype(mx.float32), axis=-1))
        total += mx.sum(weights * (hard * (mx.logsumexp(logits, axis=-1) - there) + (1 - hard) * soft))
        weight += mx.sum(weights)
        misses += mx.argmax(logits, axis=-1) != gold
    return total / mx.maximum(weight, 1.0)


def every_anchor(tokens: mx.array) -> mx.array:
    """Return all anchors [N, S - 1] of sequences [N, S]: every token but the first."""
    return mx.broadcast_to(mx.arange(1, tokens.shape[1]), (tokens.shape[0], tokens.shape[1] - 1))


def standing(
    outputs: list[mx.array], score: Score, frozen: Frozen, tokens: mx.array, lengths: mx.array, anchors: mx.array
) -> mx.array:
    """Return how many greedy drafts of each chain stand, up to the end of the sequence: [N, A]."""
    right = []
    for step, output in enumerate(outputs, 1):
        drafted = frozen.draft_ids[mx.argmax(score(output), axis=-1)]
        right.append((drafted == token_behind(tokens, anchors, step)) & (anchors + step < lengths[:, None]))
    return mx.sum(mx.cumprod(mx.stack(right).astype(mx.int32), axis=0), axis=0)
