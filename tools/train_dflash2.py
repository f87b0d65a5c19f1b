"""The training loss and the teacher-forced acceptance of a DFlash 2 drafter.

Every anchor of a sequence starts a block; all blocks of a batch run at once, each seeing the committed positions
before its anchor. The target's own distribution is the main teacher: it says more than the one token it picked.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.dflash2.config import DFlash2Config

# What a wrong draft leaves of the weight of the rows behind it: decoding never gets to them.
AFTER_A_MISS = 0.3
# Weight, as an anchor, of a token that the target was sure of; one that it gave no chance weighs one more.
SURE_ANCHOR = 0.1
# Tokens of a group in `best_tokens`.
GROUP = 16


@dataclass(frozen=True)
class Frozen:
    """What the target contributes: its embedding rows [V, H], and the head rows [N, H] of the draft vocabulary.

    draft_index: [V] position of a token in the draft vocabulary, -1 where it has none.
    """

    embedding: mx.array
    head: mx.array
    draft_ids: mx.array
    draft_index: mx.array

    def score(self, hidden: mx.array) -> mx.array:
        """Apply the head rows of the draft vocabulary: [..., H] to [..., N]."""
        return hidden @ self.head.T


@dataclass(frozen=True)
class Seen:
    """What the target computed for a batch: taps [N, S, T * H] and final hidden states [N, S, H]."""

    taps: mx.array
    hidden: mx.array


def run_target(model: Any, tokens: mx.array, taps: tuple[int, ...]) -> Seen:
    """Run mlx-lm's model over padded sequences [N, S] and keep what the drafter learns from."""
    x, kept = model.model.embed_tokens(tokens), {}
    for index, layer in enumerate(model.model.layers):
        x = layer(x, "causal", None)
        if index in taps:
            kept[index] = x
    return Seen(mx.concatenate([kept[t] for t in taps], axis=-1), model.model.norm(x))


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


def gather_rows(values: mx.array, positions: mx.array) -> mx.array:
    """Pick values [N, S, ...] at positions [N, A, K]: [N, A, K, ...]."""
    n = values.shape[0]
    return values[mx.arange(n)[:, None, None], positions]


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


def draw_anchors(
    frozen: Frozen, tokens: mx.array, lengths: mx.array, firsts: mx.array, hidden: mx.array, count: int
) -> mx.array:
    """Draw anchors [N, count] from first .. length - 2 of each sequence, mostly tokens that surprised the target.

    Decoding drafts again where a draft failed, and drafts fail at such tokens. hidden: the target's, [N, S, H].
    """
    index = frozen.draft_index[tokens[:, 1:]]
    logits = (hidden[:, :-1] @ frozen.head.T).astype(mx.float32)
    logit = mx.take_along_axis(logits, mx.maximum(index, 0)[..., None], axis=-1)[..., 0]
    chance = mx.where(index >= 0, mx.exp(logit - mx.logsumexp(logits, axis=-1)), 0.0)
    at = mx.arange(1, tokens.shape[1])
    allowed = (at >= firsts[:, None]) & (at < lengths[:, None] - 1)
    keys = mx.log(SURE_ANCHOR + 1 - chance) + mx.random.gumbel(chance.shape)
    order = mx.argpartition(mx.where(allowed, -keys, mx.inf), kth=count - 1, axis=-1)[:, :count]
    # A reply with fewer places gives its first one several times.
    return mx.where(mx.take_along_axis(allowed, order, axis=-1), order + 1, firsts[:, None])


def selector_scores(
    model: DraftModel, hidden: mx.array, ids: mx.array, unary: mx.array, previous: mx.array
) -> mx.array:
    """Score candidates ids [..., K] behind ``previous`` [...] in float32, as the selector's walk does."""
    selector = model.candidate_selector
    edge = selector.predecessor_codebook(previous) * selector.hidden_projection(hidden)
    pairs = (selector.successor_codebook(ids) * edge[..., None, :]).astype(mx.float32)
    return unary.astype(mx.float32) + mx.sum(pairs, axis=-1)


def soft_cross_entropy(logits: mx.array, target: mx.array) -> mx.array:
    """Cross entropy of float32 logits against a distribution, over the last axis."""
    return mx.logsumexp(logits, axis=-1) - mx.sum(target * logits, axis=-1)


def loss(
    model: DraftModel,
    config: DFlash2Config,
    frozen: Frozen,
    tokens: mx.array,
    lengths: mx.array,
    anchors: mx.array,
    rows: mx.array,
    seen: Seen,
    hard: float,
) -> mx.array:
    """Loss of a batch: the unary logits and the selector, both against the teacher.

    The teacher is ``hard`` parts of the token that came and 1 - hard of the target's distribution over the draft
    vocabulary. Every wrong draft lowers the weight of the rows behind it.
    """
    steps = mx.arange(1, config.block_size)
    at = anchors[..., None] + steps
    exists = (at < lengths[:, None, None]) & (steps < rows[..., None])
    at = mx.minimum(at, tokens.shape[1] - 1)
    gold, before = gather_rows(tokens, at), gather_rows(tokens, at - 1)
    gold_index = frozen.draft_index[gold]
    counts = exists & (gold_index >= 0)
    gold_index = mx.maximum(gold_index, 0)

    hidden = block_hidden(model, config, frozen, tokens, anchors, rows, seen.taps)[:, :, 1:]
    logits = (hidden @ frozen.head.T).astype(mx.float32)
    teacher = (gather_rows(seen.hidden, at - 1) @ frozen.head.T).astype(mx.float32)
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
    seen: Seen,
) -> mx.array:
    """Return how many drafts stand behind each anchor [N, A] of a batch, up to the end of the sequence."""
    rows = mx.full(anchors.shape, config.block_size, dtype=mx.int32)
    hidden = block_hidden(model, config, frozen, tokens, anchors, rows, seen.taps)[:, :, 1:]
    flat = hidden.reshape(-1, *hidden.shape[2:])
    first = mx.take_along_axis(tokens, anchors, axis=1).reshape(-1)
    path = walk_blocks(model, config, frozen, flat, first)
    at = anchors[..., None] + mx.arange(1, config.block_size)
    exists = at < lengths[:, None, None]
    gold = gather_rows(tokens, mx.minimum(at, tokens.shape[1] - 1))
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
