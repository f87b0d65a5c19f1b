"""The training loss of a head that drafts as a chain, and how far its drafts stand: chains from every position.

A chain from row i sees the true rows up to i, and its own later rows, which are made of its own output. So the
head learns to go on from what it will be given. Sources: EAGLE-3's training-time test (arXiv:2503.01840), FastMTP
(arXiv:2509.18362).
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from tools.train_dflash2 import AFTER_A_MISS, SURE_ANCHOR, Frozen, soft_cross_entropy

Score = Callable[[mx.array], mx.array]
"""Maps a step's outputs [N, S, H] to draft logits [N, S, V_d]."""


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


def attend(queries: mx.array, rows: list[tuple[mx.array, mx.array]]) -> mx.array:
    """Attend from the newest rows of all chains [N, heads, S, D] to the true rows up to each and to its chain.

    rows: keys and values [N, kv_heads, S, D] of each step so far. Later steps' are seen by their own chain alone,
    so their scores are no matrices.
    """
    repeats = queries.shape[1] // rows[0][0].shape[1]
    (keys, values), *later = [(mx.repeat(k, repeats, axis=1), mx.repeat(v, repeats, axis=1)) for k, v in rows]
    at = mx.arange(queries.shape[2])
    queries = queries * queries.shape[-1] ** -0.5
    scores = mx.where(at <= at[:, None], queries @ keys.swapaxes(2, 3), -mx.inf)
    own = [mx.sum(queries * k, axis=-1, keepdims=True) for k, _ in later]
    weights = mx.softmax(mx.concatenate([scores, *own], axis=-1), axis=-1, precise=True)
    attended = weights[..., : at.size] @ values
    for step, (_, value) in enumerate(later):
        attended = attended + weights[..., at.size + step, None] * value
    return attended


def shifted(values: mx.array, by: int) -> mx.array:
    """Move values [N, S, ...] to the front: entry i becomes entry i + by; the end is repeated."""
    return values[:, mx.minimum(mx.arange(values.shape[1] - 1) + by, values.shape[1] - 1)]


def loss(
    outputs: list[mx.array],
    score: Score,
    frozen: Frozen,
    tokens: mx.array,
    lengths: mx.array,
    firsts: mx.array,
    final_hidden: mx.array,
    hard: float,
) -> mx.array:
    """Loss of the outputs [N, S - 1, H] of each step of all chains.

    It counts the tokens from ``firsts`` [N] to before ``lengths`` [N]. The teacher is ``hard`` parts of the token
    that came and 1 - hard of the target's distribution over the draft vocabulary, from ``final_hidden`` [N, S, H].
    Every wrong draft lowers the weight of the steps behind it. Decoding begins a chain where drafts failed, so
    chains behind tokens that surprised the target weigh most.
    """
    teacher = final_hidden @ frozen.head.T
    chain = SURE_ANCHOR + 1 - token_shares(teacher[:, :-1], frozen, tokens[:, 1:])
    total, weight, misses = mx.array(0.0), mx.array(0.0), mx.zeros(outputs[0].shape[:2])
    for step, output in enumerate(outputs):
        at = mx.arange(output.shape[1]) + step + 2
        gold = frozen.draft_index[shifted(tokens, step + 2)]
        counts = (at >= firsts[:, None]) & (at < lengths[:, None]) & (gold >= 0)
        weights = chain * counts * AFTER_A_MISS**misses
        logits = score(output).astype(mx.float32)
        there = mx.take_along_axis(logits, mx.maximum(gold, 0)[..., None], axis=-1)[..., 0]
        shares = mx.softmax(shifted(teacher, step + 1).astype(mx.float32), axis=-1)
        soft = soft_cross_entropy(logits, shares)
        total += mx.sum(weights * (hard * (mx.logsumexp(logits, axis=-1) - there) + (1 - hard) * soft))
        weight += mx.sum(weights)
        misses += mx.argmax(logits, axis=-1) != gold
    return total / mx.maximum(weight, 1.0)


def token_shares(logits: mx.array, frozen: Frozen, tokens: mx.array) -> mx.array:
    """Return the probabilities [N, S] of tokens [N, S] by draft logits [N, S, V_d], 0 outside the vocabulary."""
    index, logits = frozen.draft_index[tokens], logits.astype(mx.float32)
    there = mx.take_along_axis(logits, mx.maximum(index, 0)[..., None], axis=-1)[..., 0]
    return mx.where(index >= 0, mx.exp(there - mx.logsumexp(logits, axis=-1)), 0.0)


def standing(
    outputs: list[mx.array], score: Score, frozen: Frozen, tokens: mx.array, lengths: mx.array
) -> mx.array:
    """Return how many greedy drafts of each chain stand, up to the end of the sequence: [N, S - 1].

    Chain i is that of the anchor at position i + 1.
    """
    right = []
    for step, output in enumerate(outputs):
        drafted = frozen.draft_ids[mx.argmax(score(output), axis=-1)]
        there = mx.arange(output.shape[1]) + step + 2 < lengths[:, None]
        right.append((drafted == shifted(tokens, step + 2)) & there)
    return mx.sum(mx.cumprod(mx.stack(right).astype(mx.int32), axis=0), axis=0)
