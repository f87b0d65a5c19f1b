"""What the target contributes to a drafter's training: hidden states, distributions, and the choice of anchors.

Decoding starts a round after a rejected draft, and drafts are rejected mostly at tokens that the target gave
little probability. So anchors, the tokens that training drafts follow, are drawn mostly from these.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

# Factor on the weights of all drafts after a wrong one, because decoding rejects them unseen.
AFTER_A_MISS = 0.3
# Weight, as an anchor, of a token with probability 1 by the target; one with probability 0 has a weight 1 larger.
SURE_ANCHOR = 0.1


@dataclass(frozen=True)
class Frozen:
    """Weights of the target that training reads.

    embedding: [V, H].
    head: [N, H], its output head's rows of the draft vocabulary.
    draft_ids: [N], the draft vocabulary.
    draft_index: [V] int32, index of a token in the draft vocabulary, -1 where it is not in it.
    """

    embedding: mx.array
    head: mx.array
    draft_ids: mx.array
    draft_index: mx.array

    def score(self, hidden: mx.array) -> mx.array:
        """Apply the head rows of the draft vocabulary: [..., H] to [..., N]."""
        return hidden @ self.head.T


def freeze_target(model: Any, draft_ids: list[int]) -> Frozen:
    """Return the embedding, and the head rows of the draft vocabulary, of a dequantised model of mlx-lm."""
    embedding = model.model.embed_tokens.weight
    head = (getattr(model, "lm_head", None) or model.model.embed_tokens).weight
    index = np.full(embedding.shape[0], -1, dtype=np.int32)
    index[draft_ids] = np.arange(len(draft_ids))
    ids = mx.array(draft_ids)
    return Frozen(embedding, head[ids], ids, mx.array(index))


def run_target(model: Any, tokens: mx.array, target_layer_ids: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """Run a model of mlx-lm over padded sequences.

    tokens: [N, S].
    target_layer_ids: T layers whose outputs are returned.
    Returns final hidden states [N, S, H], and the layers' outputs side by side [N, S, T * H].
    """
    x, kept = model.model.embed_tokens(tokens), {}
    for index, layer in enumerate(model.model.layers):
        x = layer(x, "causal", None)
        if index in target_layer_ids:
            kept[index] = x
    return model.model.norm(x), mx.concatenate([kept[index] for index in target_layer_ids], axis=-1)


def token_shares(frozen: Frozen, tokens: mx.array, hidden: mx.array) -> mx.array:
    """Return the target's probabilities [N, S - 1] of all tokens but the first, within the draft vocabulary.

    tokens: [N, S]; tokens outside the draft vocabulary have probability 0.
    hidden: [N, S, H], the target's final hidden states.
    """
    index, logits = frozen.draft_index[tokens[:, 1:]], frozen.score(hidden).astype(mx.float32)
    own = mx.take_along_axis(logits[:, :-1], mx.maximum(index, 0)[..., None], axis=-1)[..., 0]
    return mx.where(index >= 0, mx.exp(own - mx.logsumexp(logits, axis=-1)[:, :-1]), 0.0)


def expected_head_rows(frozen: Frozen, logits: mx.array) -> mx.array:
    """Return the mean head row [..., H] under the distribution of logits [..., N] over the draft vocabulary.

    Its product with a hidden state is the mean logit, all that a cross entropy needs of a teacher's distribution.
    """
    return mx.softmax(logits, axis=-1, precise=True) @ frozen.head


def watch(
    model: Any, frozen: Frozen, target_layer_ids: tuple[int, ...]
) -> Callable[[mx.array], tuple[mx.array, ...]]:
    """Return a function that runs the target over tokens [N, S].

    It returns token shares [N, S - 1], final hidden states [N, S, H], and the outputs of ``target_layer_ids``
    [N, S, T * H].
    """

    def see(tokens: mx.array) -> tuple[mx.array, ...]:
        hidden, aux_hidden_states = run_target(model, tokens, target_layer_ids)
        return token_shares(frozen, tokens, hidden), hidden, aux_hidden_states

    return see


def draw_anchors(shares: mx.array, lengths: mx.array, firsts: mx.array, count: int) -> mx.array:
    """Draw anchors [N, count] of each sequence, mostly tokens that the target gave little probability.

    shares: [N, S - 1], see ``token_shares``.
    lengths: [N], tokens of each sequence; its last token is no anchor.
    firsts: [N], the first token of each sequence that may be one.
    count: anchors of a sequence, without repetition where it has as many.
    """
    positions = mx.arange(1, shares.shape[1] + 1)
    allowed = (positions >= firsts[:, None]) & (positions < lengths[:, None] - 1)
    keys = mx.log(SURE_ANCHOR + 1 - shares) + mx.random.gumbel(shares.shape)
    order = mx.argpartition(mx.where(allowed, -keys, mx.inf), kth=count - 1, axis=-1)[:, :count]
    # A reply with fewer positions has its first one several times.
    return mx.where(mx.take_along_axis(allowed, order, axis=-1), order + 1, firsts[:, None])


def gather_rows(values: mx.array, positions: mx.array) -> mx.array:
    """Return the entries of ``values`` [N, S, ...] at ``positions`` [N, ...] of their sequence."""
    sequences = mx.arange(values.shape[0]).reshape(-1, *[1] * (positions.ndim - 1))
    return values[sequences, positions]


def soft_cross_entropy(logits: mx.array, target: mx.array) -> mx.array:
    """Return the cross entropy of float32 logits with a distribution ``target``, over the last axis."""
    return mx.logsumexp(logits, axis=-1) - mx.sum(target * logits, axis=-1)
