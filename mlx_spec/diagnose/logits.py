"""What the logits of one row of a draft pass say: the likeliest tokens, and the right one among them."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_spec.diagnose.acceptance import expected, request
from mlx_spec.diagnose.text import Text
from mlx_spec.drafters.base import ObservedDrafter
from mlx_spec.errors import RequestError

SHOWN = 10


@dataclass(frozen=True)
class TokenLogit:
    """A token with its logit, its log-probability among all that the drafter can draft, and its rank from 0."""

    token: int
    logit: float
    logprob: float
    rank: int


@dataclass(frozen=True)
class RowLogits:
    """A row of the last draft pass of a text.

    row: its number, 1 for the first draft.
    anchor: the position after which the pass drafts.
    top: the tokens with the largest logits.
    right: the target's choice there; None where the drafter cannot draft it.
    """

    row: int
    anchor: int
    top: list[TokenLogit]
    right: TokenLogit | None


def row_logits(drafter: ObservedDrafter, text: Text, rows: Sequence[int]) -> list[RowLogits]:
    """Draft after the last anchor of a text, whose tokens the draft goes on with, and return some of its rows.

    rows: from 1 to the drafter's largest draft. Raises RequestError for others, and for a text that is too short.
    """
    depth = drafter.max_draft
    check_rows(drafter, rows)
    anchors = text.anchors(depth)
    if not anchors:
        raise RequestError(f"The text has {text.tokens.size} tokens; a pass needs {text.start + depth + 1}.")
    anchor = anchors[-1]
    logits = logits_after(drafter, text, anchor, depth)
    truth = expected(text, [anchor], depth)[0]
    ids = np.arange(logits.shape[1]) if drafter.draft_ids is None else np.array(drafter.draft_ids)
    return [row_of(logits[row - 1], ids, row, anchor, int(truth[row - 1])) for row in rows]


def check_rows(drafter: ObservedDrafter, rows: Sequence[int]) -> None:
    """Raise RequestError for a row that a draft pass does not have."""
    if wrong := [row for row in rows if not 1 <= row <= drafter.max_draft]:
        raise RequestError(f"A draft pass has rows 1 to {drafter.max_draft}; there is no row {wrong[0]}.")


def logits_after(drafter: ObservedDrafter, text: Text, anchor: int, depth: int) -> np.ndarray:
    """Return the logits [depth, V] of the rows of one pass, in float64."""
    tokens = [int(token) for token in np.array(text.tokens[anchor : anchor + depth + 1])]
    found: list[mx.array] = []

    def record(stage: str, value: mx.array) -> None:
        if stage.endswith("logits"):
            found.append(value.reshape(-1, value.shape[-1]).astype(mx.float32))

    state = drafter.open()
    try:
        drafter.extend([(state, text.committed(0, anchor, drafter.target_layer_ids))])
        mx.eval([draft.tokens for draft in drafter.observe([request(state, tokens)], record)])
        return np.array(mx.concatenate(found), dtype=np.float64)[:depth]
    finally:
        state.free()


def row_of(logits: np.ndarray, ids: np.ndarray, row: int, anchor: int, right: int) -> RowLogits:
    """Return what is in one row of logits [V] of the tokens ``ids`` [V]."""
    finite = np.where(np.isnan(logits), -np.inf, logits)
    order = np.argsort(-finite, kind="stable")
    ranks = np.argsort(order)
    most = finite[order[0]]
    logprobs = finite - (most + np.log(np.exp(finite - most).sum()))

    def token(place: int) -> TokenLogit:
        return TokenLogit(int(ids[place]), float(logits[place]), float(logprobs[place]), int(ranks[place]))

    own = np.flatnonzero(ids == right)
    return RowLogits(row, anchor, [token(place) for place in order[:SHOWN]], token(own[0]) if own.size else None)
