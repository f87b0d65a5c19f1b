"""Leaves: beside tokens of a drafted chain, the candidates that were next in line. They cost no draft pass."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx

from metal_kernels import ints
from mlx_spec.drafters.base import Proposal

Rank = Callable[[int, mx.array, mx.array], mx.array]
"""Orders candidates: (position, ids [K], scores [K]) to values [K], of which the largest is drafted."""


def with_leaves(proposal: Proposal, leaves: Sequence[int], rank: Rank, position: int) -> Proposal:
    """Put ``leaves[i]`` candidates beside token i of a chain, as far as there are so many.

    rank: of the rule that drew the chain, so that its next ones are what the rule would draw next, without
    replacement. position: of the first drafted token. A drafter that does not tell its scores gets no leaves.
    """
    if proposal.scores is None or proposal.parents is not None:
        return proposal
    most = proposal.candidates.shape[1] - 1
    counts = [min(count, most) for count in leaves]
    places = [place for place, count in enumerate(counts) for _ in range(count)]
    if not places:
        return proposal
    ranks = [rank + 1 for count in counts for rank in range(count)]
    at = sorted(set(places))
    candidates, tokens = proposal.candidates[ints(*at)], proposal.tokens[ints(*at)]
    values = mx.stack([rank(position + i, proposal.candidates[i], proposal.scores[i]) for i in at])
    # The chain's token is the first whatever the order of equal values.
    values = mx.where(candidates == tokens[:, None], mx.inf, values)
    ranked = mx.take_along_axis(candidates, mx.argsort(-values, axis=-1), axis=-1)
    chosen = ranked[ints(*(at.index(place) for place in places)), ints(*ranks)].astype(mx.int32)
    beside, probabilities = ints(*places), proposal.probabilities
    return replace(
        proposal,
        tokens=mx.concatenate([proposal.tokens, chosen]),
        candidates=mx.concatenate([proposal.candidates, proposal.candidates[beside]]),
        scores=mx.concatenate([proposal.scores, proposal.scores[beside]]),
        probabilities=None if probabilities is None else mx.concatenate([probabilities, probabilities[beside]]),
        parents=(*range(proposal.tokens.size), *places),
    )
