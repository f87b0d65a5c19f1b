"""Tokens that a grammar forces, as drafts: they cost no draft pass."""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from mlx_spec.drafters.base import Draft


def with_forced(draft: Draft, tokens: Sequence[int]) -> Draft:
    """Put tokens that must come in place of the first ones of a chain, and after its end.

    draft: the chain, of any length. One without forced tokens, or of a tree, is returned as it is.
    A forced token is its only candidate, drawn with probability 1. It is judged as any draft: a text can be spelt
    in other tokens. No siblings are added to such a draft.
    """
    if not tokens or draft.parents is not None:
        return draft
    count, width = len(tokens), max(1, draft.candidates.shape[1])
    forced = mx.array(list(tokens), dtype=mx.int32)
    candidates, certain = mx.broadcast_to(forced[:, None], (count, width)), mx.ones((count, width))
    if draft.tokens.size <= count:
        return Draft(forced, candidates, certain, draft.finite)
    probabilities = draft.probabilities
    return replace(
        draft,
        tokens=mx.concatenate([forced, draft.tokens[count:]]),
        candidates=mx.concatenate([candidates, draft.candidates[count:]]),
        probabilities=None if probabilities is None else mx.concatenate([certain, probabilities[count:]]),
        ranks=None,
    )
