"""Sibling drafts: runner-up candidates beside the tokens of a drafted chain. They cost no draft pass."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx

from metal_kernels import ints
from mlx_spec.drafters.base import Draft

Rank = Callable[[int, mx.array, mx.array], mx.array]
"""Ranks candidates: (position, ids [K], scores [K]) to values [K], of which the largest is drafted."""


def with_siblings(draft: Draft, siblings: Sequence[int], rank: Rank, anchor_position: int) -> Draft:
    """Add up to ``siblings[i]`` siblings to token i of a chain: the candidates that rank next.

    draft: the chain. A draft without scores, or of a tree, is returned as it is.
    siblings: how many for each token, from the first on.
    rank: that of the rule that drew the chain, so that siblings are its next draws without replacement.
    anchor_position: position of the anchor.
    Returns a tree whose rows are the chain, then the siblings in the order of their tokens.
    """
    if draft.scores is None or draft.parents is not None:
        return draft
    most = draft.candidates.shape[1] - 1
    counts = [min(count, most) for count in siblings]
    # For each sibling, the number of the chain's token beside it, and its rank there.
    beside = [index for index, count in enumerate(counts) for _ in range(count)]
    ranks = [1 + i for count in counts for i in range(count)]
    if not beside:
        return draft
    ranked_at = sorted(set(beside))
    candidates, tokens = draft.candidates[ints(*ranked_at)], draft.tokens[ints(*ranked_at)]
    values = mx.stack([rank(anchor_position + 1 + i, draft.candidates[i], draft.scores[i]) for i in ranked_at])
    # The chain's token ranks first, also among equal values.
    values = mx.where(candidates == tokens[:, None], mx.inf, values)
    ranked = mx.take_along_axis(candidates, mx.argsort(-values, axis=-1), axis=-1)
    chosen = ranked[ints(*(ranked_at.index(i) for i in beside)), ints(*ranks)].astype(mx.int32)
    part, probabilities = ints(*beside), draft.probabilities
    return replace(
        draft,
        tokens=mx.concatenate([draft.tokens, chosen]),
        candidates=mx.concatenate([draft.candidates, draft.candidates[part]]),
        scores=mx.concatenate([draft.scores, draft.scores[part]]),
        probabilities=None if probabilities is None else mx.concatenate([probabilities, probabilities[part]]),
        parents=(*range(draft.tokens.size), *beside),
    )
