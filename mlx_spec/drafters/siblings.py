"""Sibling drafts: candidates that were next in line at tokens of a drafted chain. They cost no draft pass."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx

from metal_kernels import ints
from mlx_spec.drafters.base import Draft

Rank = Callable[[int, mx.array, mx.array], mx.array]
"""Orders candidates: (position, ids [K], scores [K]) to values [K], of which the largest is drafted."""


def with_siblings(draft: Draft, siblings: Sequence[int], rank: Rank, anchor_position: int) -> Draft:
    """Add up to ``siblings[i]`` siblings to token i of a chain: the candidates that were next in line there.

    siblings: by token of the chain.
    rank: of the rule that drew the chain, so that siblings are what the rule would draw next, without replacement.
    anchor_position: of the token that the chain follows.
    A draft without scores gets no siblings.
    """
    if draft.scores is None or draft.parents is not None:
        return draft
    most = draft.candidates.shape[1] - 1
    counts = [min(count, most) for count in siblings]
    places = [place for place, count in enumerate(counts) for _ in range(count)]
    if not places:
        return draft
    ranks = [rank + 1 for count in counts for rank in range(count)]
    at = sorted(set(places))
    candidates, tokens = draft.candidates[ints(*at)], draft.tokens[ints(*at)]
    values = mx.stack([rank(anchor_position + 1 + i, draft.candidates[i], draft.scores[i]) for i in at])
    # The chain's token is the first whatever the order of equal values.
    values = mx.where(candidates == tokens[:, None], mx.inf, values)
    ranked = mx.take_along_axis(candidates, mx.argsort(-values, axis=-1), axis=-1)
    chosen = ranked[ints(*(at.index(place) for place in places)), ints(*ranks)].astype(mx.int32)
    at_places, probabilities = ints(*places), draft.probabilities
    return replace(
        draft,
        tokens=mx.concatenate([draft.tokens, chosen]),
        candidates=mx.concatenate([draft.candidates, draft.candidates[at_places]]),
        scores=mx.concatenate([draft.scores, draft.scores[at_places]]),
        probabilities=None if probabilities is None else mx.concatenate([probabilities, probabilities[at_places]]),
        parents=(*range(draft.tokens.size), *places),
    )
