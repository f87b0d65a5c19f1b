"""Sibling drafts: runner-up candidates beside the tokens of a drafted chain. They cost no draft pass."""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from metal_kernels import ints
from mlx_spec.drafters.base import Draft


def with_siblings(draft: Draft, siblings: Sequence[int]) -> Draft:
    """Add up to ``siblings[i]`` siblings to token i of a chain: the candidates that rank next.

    draft: the chain. A draft without ranks, or of a tree, is returned as it is.
    siblings: how many for each token, from the first on.
    Returns a tree whose rows are the chain, then the siblings in the order of their tokens. The ranks are those
    that the chain was drawn by, so siblings are the next draws without replacement.
    """
    if draft.ranks is None or draft.parents is not None:
        return draft
    most = draft.candidates.shape[1] - 1
    counts = [min(count, most) for count in siblings]
    # For each sibling, the number of the chain's token beside it, and its rank there.
    beside = [index for index, count in enumerate(counts) for _ in range(count)]
    places = [1 + i for count in counts for i in range(count)]
    if not beside:
        return draft
    ranked_at = sorted(set(beside))
    candidates, tokens = draft.candidates[ints(*ranked_at)], draft.tokens[ints(*ranked_at)]
    # The chain's token ranks first, also among equal values.
    ranks = mx.where(candidates == tokens[:, None], mx.inf, draft.ranks[ints(*ranked_at)])
    ranked = mx.take_along_axis(candidates, mx.argsort(-ranks, axis=-1), axis=-1)
    chosen = ranked[ints(*(ranked_at.index(i) for i in beside)), ints(*places)].astype(mx.int32)
    part, probabilities = ints(*beside), draft.probabilities
    return replace(
        draft,
        tokens=mx.concatenate([draft.tokens, chosen]),
        candidates=mx.concatenate([draft.candidates, draft.candidates[part]]),
        ranks=mx.concatenate([draft.ranks, draft.ranks[part]]),
        probabilities=None if probabilities is None else mx.concatenate([probabilities, probabilities[part]]),
        parents=(*range(draft.tokens.size), *beside),
    )
