"""The training loss and the teacher-forced acceptance of a DFlash 2 drafter.

Every anchor of a sequence starts a block; all blocks of a batch run at once, each with the positions before its
anchor as context. The main teacher is the target's distribution, which holds more than the one token it chose.
"""

import mlx.core as mx
from mlx import nn

from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.dflash2.config import DFlash2Config
from tools.teacher import AFTER_A_MISS, Frozen, expected_head_rows, gather_rows, soft_cross_entropy

# Tokens of a group in `best_tokens`.
GROUP = 32


def block_hidden(
    model: DraftModel,
    config: DFlash2Config,
    frozen: Frozen,
    tokens: mx.array,
    anchors: mx.array,
    rows: mx.array,
    aux_hidden_states: mx.array,
) -> mx.array:
    """Run every block of a batch; return final-normed hidden states [N, A, B, H].

    model: the drafter, with its config.
    frozen: the target's embedding.
    tokens: [N, S], the text.
    anchors: [N, A], positions.
    rows: [N, A], rows of each block; later rows are masked.
    aux_hidden_states: [N, S, T * H], of the target.
    """
    (n, size), a, b = tokens.shape, anchors.shape[1], config.block_size
    ids = mx.full((n, a, b), config.mask_token_id, dtype=mx.int32)
    ids[:, :, 0] = mx.take_along_axis(tokens, anchors, axis=1)
    x = frozen.embedding[ids].reshape(n * a, b, -1)
    context = model.context(aux_hidden_states)
    # The text before the anchor, then the rows of the block itself that exist.
    past = mx.broadcast_to((mx.arange(size) < anchors[..., None])[:, :, None], (n, a, b, size))
    own = mx.broadcast_to((mx.arange(b) < rows[..., None])[:, :, None], (n, a, b, b))
    visible = mx.concatenate([past, own], axis=-1)[:, None, None]

    def attend(index: int, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        past_keys, past_values = model.layers[index].self_attn.keys_values(context)
        past = model.rotate(past_keys, 0), past_values
        return attend_blocks(queries.reshape(n, a, *queries.shape[1:]), past, (keys, values), visible)

    return model(x, anchors.reshape(-1), attend).reshape(n, a, b, -1)


def attend_blocks(
    queries: mx.array, past: tuple[mx.array, mx.array], own: tuple[mx.array, mx.array], visible: mx.array
) -> mx.array:
    """Attend from the rows of all blocks to the text and to the rows of their own block.

    queries: [N, A, B, heads, D].
    past: keys and values [N, S, kv heads, D] of the text.
    own: keys and values [N * A, B, kv heads, D] of the blocks.
    visible: bool [N, 1, 1, A, B, S + B].
    Returns [N * A, B, heads, D].
    """
    n, a, b, heads, dim = queries.shape
    size, kv = past[0].shape[1:3]
    # All queries that share keys are one matrix product: with the text, and with their block.
    grouped = (queries * dim**-0.5).reshape(n, a, b, kv, -1, dim)
    to_past = grouped.transpose(0, 3, 4, 1, 2, 5).reshape(n, kv, -1, dim) @ past[0].transpose(0, 2, 3, 1)
    to_own = grouped.transpose(0, 1, 3, 4, 2, 5).reshape(n * a, kv, -1, dim) @ own[0].transpose(0, 2, 3, 1)
    to_own = to_own.reshape(n, a, kv, -1, b, b).transpose(0, 2, 3, 1, 4, 5)
    scores = mx.concatenate([to_past.reshape(*to_own.shape[:-1], size), to_own], axis=-1)
    weights = mx.softmax(mx.where(visible, scores, -mx.inf), axis=-1, precise=True)
    out = weights.reshape(n, kv, -1, size + b)[..., :size] @ past[1].swapaxes(1, 2)
    out = out.reshape(n, kv, -1, a, b, dim).transpose(0, 3, 1, 2, 4, 5)
    inside = weights[..., size:].transpose(0, 3, 1, 2, 4, 5).reshape(n * a, kv, -1, b)
    out = out + (inside @ own[1].swapaxes(1, 2)).reshape(out.shape)
    return out.transpose(0, 1, 4, 2, 3, 5).reshape(n * a, b, heads, dim)


def best_tokens(logits: mx.array, k: int) -> mx.array:
    """Return the indices of the k largest logits [..., N], in any order: [..., k].

    The k groups with the largest maxima hold the k largest logits, and partitioning few numbers is faster than
    partitioning all. Group g has the indices g, g + N / GROUP, and so on, so that maxima are elementwise.
    """
    if logits.shape[-1] % GROUP or logits.shape[-1] < 2 * k * GROUP:
        return mx.argpartition(-logits, kth=k - 1, axis=-1)[..., :k]
    width, largest = logits.shape[-1] // GROUP, logits
    while largest.shape[-1] > width:
        largest = mx.maximum(*mx.split(largest, 2, axis=-1))
    best = mx.argpartition(-largest, kth=k - 1, axis=-1)[..., :k]
    members = (mx.arange(GROUP)[:, None] * width + best[..., None, :]).flatten(-2)
    inside = mx.take_along_axis(logits, members, axis=-1)
    found = mx.argpartition(-inside, kth=k - 1, axis=-1)[..., :k]
    return mx.take_along_axis(members, found, axis=-1)


def selector_scores(
    model: DraftModel, hidden: mx.array, ids: mx.array, unary: mx.array, previous: mx.array
) -> mx.array:
    """Score candidates as the selector's walk does, in float32: [..., K].

    hidden: [..., H].
    ids, unary: [..., K], the candidates and their logits.
    previous: [...], the token before.
    """
    selector = model.candidate_selector
    edge = selector.predecessor_codebook(previous) * selector.hidden_projection(hidden)
    pairs = (selector.successor_codebook(ids) * edge[..., None, :]).astype(mx.float32)
    return unary.astype(mx.float32) + mx.sum(pairs, axis=-1)


def logit(hidden: mx.array, row: mx.array) -> mx.array:
    """Return the dot products [...] of hidden states and head rows [..., H], in float32."""
    return mx.sum(hidden.astype(mx.float32) * row.astype(mx.float32), axis=-1)


def log_normaliser(frozen: Frozen, hidden: mx.array, logits: mx.array) -> mx.array:
    """Return the logsumexp [...] of logits [..., N], those that ``frozen`` scores for hidden states [..., H].

    The gradient is computed from the mean head row under the drafter's distribution, without an array of the
    logits' size.
    """
    mean_logit = logit(hidden, mx.stop_gradient(expected_head_rows(frozen, logits)))
    value = mx.logsumexp(logits.astype(mx.float32), axis=-1)
    return mean_logit + mx.stop_gradient(value - mean_logit)


def draft_positions(
    config: DFlash2Config, tokens: mx.array, lengths: mx.array, anchors: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the positions of the drafts after anchors [N, A], and which of them exist: [N, A, B - 1]."""
    at = anchors[..., None] + mx.arange(1, config.block_size)
    return mx.minimum(at, tokens.shape[1] - 1), at < lengths[:, None, None]


def loss(
    model: DraftModel,
    config: DFlash2Config,
    frozen: Frozen,
    tokens: mx.array,
    lengths: mx.array,
    anchors: mx.array,
    rows: mx.array,
    final_hidden: mx.array,
    expected: mx.array,
    aux_hidden_states: mx.array,
    hard: float,
) -> mx.array:
    """Return the mean cross entropy of the drafts of a batch, of unary logits and of selector scores, a scalar.

    model: the drafter, with its config.
    frozen: the target's embedding and head.
    tokens: [N, S], the text.
    lengths: [N], tokens of each sequence.
    anchors: [N, A], positions.
    rows: [N, A], rows of each block.
    final_hidden: [N, S, H], the target's.
    expected: [N, S, H], see ``expected_head_rows``.
    aux_hidden_states: [N, S, T * H], of the target.
    hard: share of the text's token in the teacher; the rest is the target's distribution.
    Every wrong draft lowers the weight of the rows after it, see AFTER_A_MISS.
    """
    at, exists = draft_positions(config, tokens, lengths, anchors)
    exists = exists & (mx.arange(1, config.block_size) < rows[..., None])
    gold, before = gather_rows(tokens, at), gather_rows(tokens, at - 1)
    gold_index = frozen.draft_index[gold]
    counts = exists & (gold_index >= 0)
    gold_index = mx.maximum(gold_index, 0)

    hidden = block_hidden(model, config, frozen, tokens, anchors, rows, aux_hidden_states)[:, :, 1:]
    logits = mx.stop_gradient(frozen.score(hidden))
    k = config.selector_top_k
    found = best_tokens(logits, k)
    has_gold = mx.any(found == gold_index[..., None], axis=-1, keepdims=True)
    found = mx.concatenate(
        [found[..., : k - 1], mx.where(has_gold, found[..., k - 1 :], gold_index[..., None])], axis=-1
    )
    # Products with the candidates' head rows only, so that gradients need no arrays of the vocabulary's size.
    rows_found = frozen.head[found]
    unary = (rows_found @ hidden[..., None])[..., 0]
    by_target = (rows_found @ gather_rows(final_hidden, at - 1)[..., None])[..., 0]
    gold_logit, mean_logit = (
        logit(hidden, row) for row in (frozen.head[gold_index], gather_rows(expected, at - 1))
    )
    unary_loss = log_normaliser(frozen, hidden, logits) - hard * gold_logit - (1 - hard) * mean_logit

    scores = selector_scores(model, hidden, frozen.draft_ids[found], unary, before)
    shares = mx.softmax(by_target.astype(mx.float32), axis=-1)
    is_gold = found == gold_index[..., None]
    shares = hard * is_gold + (1 - hard) * shares
    missed = mx.argmax(scores, axis=-1) != mx.argmax(is_gold, axis=-1)
    misses = mx.cumsum(missed.astype(mx.float32), axis=-1, inclusive=False)
    weights = mx.where(counts, AFTER_A_MISS**misses, 0.0)
    return mx.sum(weights * (unary_loss + soft_cross_entropy(scores, shares))) / mx.maximum(mx.sum(weights), 1.0)


def walk_blocks(
    model: DraftModel, config: DFlash2Config, frozen: Frozen, hidden: mx.array, anchor: mx.array
) -> mx.array:
    """Return the drafts [N, B - 1] of a greedy selector walk through many blocks.

    hidden: [N, B - 1, H], of all rows but the anchors'.
    anchor: [N], token ids.
    """
    logits = frozen.score(hidden).astype(mx.float32)
    k = config.selector_top_k
    found = best_tokens(logits, k)
    unary, ids = mx.take_along_axis(logits, found, axis=-1), frozen.draft_ids[found]
    previous, path = anchor, []
    for t in range(hidden.shape[1]):
        scores = selector_scores(model, hidden[:, t], ids[:, t], unary[:, t], previous)
        best = mx.argmax(scores, axis=-1, keepdims=True)
        previous = mx.take_along_axis(ids[:, t], best, axis=-1)[:, 0]
        path.append(previous)
    return mx.stack(path, axis=1)


def accepted_drafts(
    model: DraftModel,
    config: DFlash2Config,
    frozen: Frozen,
    tokens: mx.array,
    lengths: mx.array,
    anchors: mx.array,
    aux_hidden_states: mx.array,
) -> mx.array:
    """Return how many greedy drafts after each anchor equal the text, up to its end: [N, A]; see ``loss``."""
    rows = mx.full(anchors.shape, config.block_size, dtype=mx.int32)
    hidden = block_hidden(model, config, frozen, tokens, anchors, rows, aux_hidden_states)[:, :, 1:]
    flat = hidden.reshape(-1, *hidden.shape[2:])
    first = mx.take_along_axis(tokens, anchors, axis=1).reshape(-1)
    path = walk_blocks(model, config, frozen, flat, first)
    at, exists = draft_positions(config, tokens, lengths, anchors)
    gold = gather_rows(tokens, at)
    right = (path.reshape(gold.shape) == gold) & exists
    return mx.sum(mx.cumprod(right.astype(mx.int32), axis=-1), axis=-1)


def initialise(model: nn.Module) -> None:
    """Set initial weights: convolutions start as the identity, the selector without effect."""
    for layer in model.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            conv.kernel_projection.weight = mx.zeros_like(conv.kernel_projection.weight)
    selector = model.candidate_selector
    # One codebook starts at zero, so that the first steps train the unary logits alone.
    selector.successor_codebook.weight = mx.zeros_like(selector.successor_codebook.weight)
    selector.predecessor_codebook.weight = mx.random.normal(selector.predecessor_codebook.weight.shape)
