"""The training loss and the teacher-forced acceptance of a DFlash 2 drafter.

Every anchor of a sequence starts a block; all blocks of a batch run at once, each seeing the committed positions
before its anchor. The target's own distribution is the main teacher: it says more than the one token it picked.
"""

import mlx.core as mx
from mlx import nn

from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.dflash2.config import DFlash2Config
from tools.teacher import AFTER_A_MISS, Frozen, gather_rows, soft_cross_entropy

# Tokens of a group in `best_tokens`.
GROUP = 16


def block_hidden(
    model: DraftModel,
    config: DFlash2Config,
    frozen: Frozen,
    tokens: mx.array,
    anchors: mx.array,
    rows: mx.array,
    taps: mx.array,
) -> mx.array:
    """Run every block of a batch: final-normed hidden states [N, A, B, H].

    tokens: [N, S], anchors: [N, A] positions, rows: [N, A] number of rows of each block (the others are unseen).
    """
    (n, size), a, b = tokens.shape, anchors.shape[1], config.block_size
    ids = mx.full((n, a, b), config.mask_token_id, dtype=mx.int32)
    ids[:, :, 0] = mx.take_along_axis(tokens, anchors, axis=1)
    x = frozen.embedding[ids].reshape(n * a, b, -1)
    context = model.context(taps)
    # Context before the anchor, and the rows of the own block that exist.
    past = mx.broadcast_to((mx.arange(size) < anchors[..., None])[:, :, None], (n, a, b, size))
    own = mx.eye(a, dtype=mx.bool_)[None, :, None, :, None] & (mx.arange(b) < rows[..., None])[:, None, None]
    own = mx.broadcast_to(own, (n, a, b, a, b)).reshape(n, a * b, a * b)
    visible = mx.concatenate([past.reshape(n, a * b, size), own], axis=-1)[:, None]

    def attend(index: int, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        past_keys, past_values = model.layers[index].self_attn.keys_values(context)
        past_keys = model.rotate(past_keys, 0)
        keys = mx.concatenate([past_keys, keys.reshape(n, a * b, *keys.shape[2:])], axis=1)
        values = mx.concatenate([past_values, values.reshape(n, a * b, *values.shape[2:])], axis=1)
        out = mx.fast.scaled_dot_product_attention(
            queries.reshape(n, a * b, *queries.shape[2:]).swapaxes(1, 2),
            keys.swapaxes(1, 2),
            values.swapaxes(1, 2),
            scale=config.head_dim**-0.5,
            mask=visible,
        )
        return out.swapaxes(1, 2).reshape(queries.shape)

    return model(x, anchors.reshape(-1), attend).reshape(n, a, b, -1)


def best_tokens(logits: mx.array, k: int) -> mx.array:
    """Return the positions of the k largest logits [..., N], in any order: [..., k].

    The groups with the k largest maxima hold the k largest logits, and sorting few is faster than sorting all.
    """
    if logits.shape[-1] % GROUP or logits.shape[-1] < 2 * k * GROUP:
        return mx.argpartition(-logits, kth=k - 1, axis=-1)[..., :k]
    groups = logits.reshape(*logits.shape[:-1], -1, GROUP)
    best = mx.argpartition(-mx.max(groups, axis=-1), kth=k - 1, axis=-1)[..., :k]
    inside = mx.take_along_axis(groups, best[..., None], axis=-2).flatten(-2)
    found = mx.argpartition(-inside, kth=k - 1, axis=-1)[..., :k]
    return mx.take_along_axis(best, found // GROUP, axis=-1) * GROUP + found % GROUP


def selector_scores(
    model: DraftModel, hidden: mx.array, ids: mx.array, unary: mx.array, previous: mx.array
) -> mx.array:
    """Score candidates ids [..., K] behind ``previous`` [...] in float32, as the selector's walk does."""
    selector = model.candidate_selector
    edge = selector.predecessor_codebook(previous) * selector.hidden_projection(hidden)
    pairs = (selector.successor_codebook(ids) * edge[..., None, :]).astype(mx.float32)
    return unary.astype(mx.float32) + mx.sum(pairs, axis=-1)


def drafted_places(
    config: DFlash2Config, tokens: mx.array, lengths: mx.array, anchors: mx.array
) -> tuple[mx.array, mx.array]:
    """Return where the drafts behind anchors [N, A] stand, within the batch, and which exist: [N, A, B - 1]."""
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
    taps: mx.array,
    hard: float,
) -> mx.array:
    """Loss of a batch: the unary logits and the selector, both against the teacher.

    The teacher is ``hard`` parts of the token that came and 1 - hard of the target's distribution over the draft
    vocabulary. Every wrong draft lowers the weight of the rows behind it.
    """
    at, exists = drafted_places(config, tokens, lengths, anchors)
    exists = exists & (mx.arange(1, config.block_size) < rows[..., None])
    gold, before = gather_rows(tokens, at), gather_rows(tokens, at - 1)
    gold_index = frozen.draft_index[gold]
    counts = exists & (gold_index >= 0)
    gold_index = mx.maximum(gold_index, 0)

    hidden = block_hidden(model, config, frozen, tokens, anchors, rows, taps)[:, :, 1:]
    logits = (hidden @ frozen.head.T).astype(mx.float32)
    teacher = (gather_rows(final_hidden, at - 1) @ frozen.head.T).astype(mx.float32)
    teacher = mx.softmax(teacher, axis=-1)
    gold_logit = mx.take_along_axis(logits, gold_index[..., None], axis=-1)[..., 0]
    total = mx.logsumexp(logits, axis=-1)
    unary_loss = total - hard * gold_logit - (1 - hard) * mx.sum(teacher * logits, axis=-1)

    k = config.selector_top_k
    found = best_tokens(mx.stop_gradient(logits), k)
    has_gold = mx.any(found == gold_index[..., None], axis=-1, keepdims=True)
    found = mx.concatenate(
        [found[..., : k - 1], mx.where(has_gold, found[..., k - 1 :], gold_index[..., None])], axis=-1
    )
    unary = mx.take_along_axis(logits, found, axis=-1)
    scores = selector_scores(model, hidden, frozen.draft_ids[found], unary, before)
    shares = mx.take_along_axis(teacher, found, axis=-1)
    shares = shares / mx.maximum(mx.sum(shares, axis=-1, keepdims=True), 1e-9)
    is_gold = found == gold_index[..., None]
    shares = hard * is_gold + (1 - hard) * shares
    # A distribution needs weight 1: the gold token can be missing from neither part.
    shares = shares / mx.sum(shares, axis=-1, keepdims=True)
    missed = mx.argmax(scores, axis=-1) != mx.argmax(is_gold, axis=-1)
    misses = mx.cumsum(missed.astype(mx.float32), axis=-1, inclusive=False)
    weights = mx.where(counts, AFTER_A_MISS**misses, 0.0)
    return mx.sum(weights * (unary_loss + soft_cross_entropy(scores, shares))) / mx.maximum(mx.sum(weights), 1.0)


def walk_blocks(
    model: DraftModel, config: DFlash2Config, frozen: Frozen, hidden: mx.array, anchor: mx.array
) -> mx.array:
    """Greedy selector walk of many blocks: hidden [N, B - 1, H], anchor [N] token ids, to tokens [N, B - 1]."""
    logits = (hidden @ frozen.head.T).astype(mx.float32)
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


def drafts_standing(
    model: DraftModel,
    config: DFlash2Config,
    frozen: Frozen,
    tokens: mx.array,
    lengths: mx.array,
    anchors: mx.array,
    taps: mx.array,
) -> mx.array:
    """Return how many drafts stand behind each anchor [N, A] of a batch, up to the end of the sequence."""
    rows = mx.full(anchors.shape, config.block_size, dtype=mx.int32)
    hidden = block_hidden(model, config, frozen, tokens, anchors, rows, taps)[:, :, 1:]
    flat = hidden.reshape(-1, *hidden.shape[2:])
    first = mx.take_along_axis(tokens, anchors, axis=1).reshape(-1)
    path = walk_blocks(model, config, frozen, flat, first)
    at, exists = drafted_places(config, tokens, lengths, anchors)
    gold = gather_rows(tokens, at)
    right = (path.reshape(gold.shape) == gold) & exists
    return mx.sum(mx.cumprod(right.astype(mx.int32), axis=-1), axis=-1)


def initialise(model: nn.Module) -> None:
    """Give the convolutions the identity they start from; everything else keeps MLX's initial values."""
    for layer in model.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            conv.kernel_projection.weight = mx.zeros_like(conv.kernel_projection.weight)
    selector = model.candidate_selector
    # One codebook starts at zero, so that the first steps train the unary logits undisturbed.
    selector.successor_codebook.weight = mx.zeros_like(selector.successor_codebook.weight)
    selector.predecessor_codebook.weight = mx.random.normal(selector.predecessor_codebook.weight.shape)
