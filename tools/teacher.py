"""What the target contributes to a drafter's training: its hidden states, its distributions, and where to learn.

Decoding starts a round behind a draft that failed, and drafts fail at tokens that surprise the target. So anchors,
the tokens behind which drafting is learned, are drawn mostly from those.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

# What a wrong draft siblings of the weight of the drafts behind it: decoding never gets to them.
AFTER_A_MISS = 0.3
# Weight, as an anchor, of a token that the target was sure of; one that it gave no chance weighs one more.
SURE_ANCHOR = 0.1


@dataclass(frozen=True)
class Frozen:
    """The target's embedding rows [V, H], and its head rows [N, H] of the draft vocabulary.

    draft_index: [V] position of a token in the draft vocabulary, -1 where it has none.
    """

    embedding: mx.array
    head: mx.array
    draft_ids: mx.array
    draft_index: mx.array

    def score(self, hidden: mx.array) -> mx.array:
        """Apply the head rows of the draft vocabulary: [..., H] to [..., N]."""
        return hidden @ self.head.T


def freeze_target(model: Any, draft_ids: list[int]) -> Frozen:
    """Take the embedding and the head rows of the draft vocabulary out of a dequantised model."""
    embedding = model.model.embed_tokens.weight
    head = (getattr(model, "lm_head", None) or model.model.embed_tokens).weight
    index = np.full(embedding.shape[0], -1, dtype=np.int32)
    index[draft_ids] = np.arange(len(draft_ids))
    ids = mx.array(draft_ids)
    return Frozen(embedding, head[ids], ids, mx.array(index))


def run_target(model: Any, tokens: mx.array, target_layer_ids: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """Run mlx-lm's model over padded sequences [N, S]: final hidden states [N, S, H] and target_layer_ids [N, S, T * H]."""
    x, kept = model.model.embed_tokens(tokens), {}
    for index, layer in enumerate(model.model.layers):
        x = layer(x, "causal", None)
        if index in target_layer_ids:
            kept[index] = x
    return model.model.norm(x), mx.concatenate([kept[t] for t in target_layer_ids], axis=-1)


def token_shares(frozen: Frozen, tokens: mx.array, hidden: mx.array) -> mx.array:
    """Return the probabilities [N, S - 1] that the target gave to all tokens [N, S] but the first.

    They are taken over the draft vocabulary, and 0 outside it. hidden: the target's, final [N, S, H].
    """
    index, logits = frozen.draft_index[tokens[:, 1:]], frozen.score(hidden).astype(mx.float32)
    there = mx.take_along_axis(logits[:, :-1], mx.maximum(index, 0)[..., None], axis=-1)[..., 0]
    return mx.where(index >= 0, mx.exp(there - mx.logsumexp(logits, axis=-1)[:, :-1]), 0.0)


def expected_head_rows(frozen: Frozen, logits: mx.array) -> mx.array:
    """Return the mean head row [..., H] under the distribution of logits [..., N] over the draft vocabulary.

    Its product with a hidden state is the mean logit: all that a cross entropy takes of a teacher's distribution.
    """
    return mx.softmax(logits, axis=-1, precise=True) @ frozen.head


def watch(
    model: Any, frozen: Frozen, target_layer_ids: tuple[int, ...]
) -> Callable[[mx.array], tuple[mx.array, ...]]:
    """Return what runs the target over sequences: token shares, final hidden states and target_layer_ids of each."""

    def see(tokens: mx.array) -> tuple[mx.array, ...]:
        hidden, tapped = run_target(model, tokens, target_layer_ids)
        return token_shares(frozen, tokens, hidden), hidden, tapped

    return see


def draw_anchors(shares: mx.array, lengths: mx.array, firsts: mx.array, count: int) -> mx.array:
    """Draw anchors [N, count] from first .. length - 2 of each sequence, mostly tokens that surprised the target.

    shares: see ``token_shares``.
    """
    at = mx.arange(1, shares.shape[1] + 1)
    allowed = (at >= firsts[:, None]) & (at < lengths[:, None] - 1)
    keys = mx.log(SURE_ANCHOR + 1 - shares) + mx.random.gumbel(shares.shape)
    order = mx.argpartition(mx.where(allowed, -keys, mx.inf), kth=count - 1, axis=-1)[:, :count]
    # A reply with fewer places gives its first one several times.
    return mx.where(mx.take_along_axis(allowed, order, axis=-1), order + 1, firsts[:, None])


def gather_rows(values: mx.array, positions: mx.array) -> mx.array:
    """Pick values [N, S, ...] at positions [N, ...]."""
    sequences = mx.arange(values.shape[0]).reshape(-1, *[1] * (positions.ndim - 1))
    return values[sequences, positions]


def soft_cross_entropy(logits: mx.array, target: mx.array) -> mx.array:
    """Cross entropy of float32 logits against a distribution, over the last axis."""
    return mx.logsumexp(logits, axis=-1) - mx.sum(target * logits, axis=-1)
