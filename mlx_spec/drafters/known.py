"""Tokens that the host knows before a round, as drafts: forced by a grammar, or copied. No draft pass is run."""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from mlx_spec.drafters.base import Draft


def with_known(draft: Draft, tokens: Sequence[int]) -> Draft:
    """Put known tokens in place of the first ones of a chain, and after its end.

    draft: the chain, of any length. One without known tokens, or of a tree, is returned as it is.
    A known token is its only candidate, drawn with probability 1. It is judged as any draft: a copy can be wrong,
    and a text that a grammar forces be spelt in other tokens. No siblings are added to such a draft.
    """
    if not tokens or draft.parents is not None:
        return draft
    count, width = len(tokens), max(1, draft.candidates.shape[1])
    known = mx.array(list(tokens), dtype=mx.int32)
    candidates, certain = mx.broadcast_to(known[:, None], (count, width)), mx.ones((count, width))
    if draft.tokens.size <= count:
        return Draft(known, candidates, certain, draft.finite)
    probabilities = draft.probabilities
    return replace(
        draft,
        tokens=mx.concatenate([known, draft.tokens[count:]]),
        candidates=mx.concatenate([candidates, draft.candidates[count:]]),
        probabilities=None if probabilities is None else mx.concatenate([certain, probabilities[count:]]),
        ranks=None,
    )
