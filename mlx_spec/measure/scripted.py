"""A drafter of real cost and chosen acceptance, to time rounds of models that have no trained drafter."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.drafters.base import Ahead, Committed, Draft, Drafter, DraftRequest, DraftRule, DraftsAhead, Unread


@dataclass
class ScriptedState:
    """The state of the real drafter, the position of the next committed row, and the number of the text."""

    real: Any
    position: int
    text: int

    def fork(self) -> "ScriptedState":
        """Return an independent copy."""
        return ScriptedState(self.real.fork(), self.position, self.text)

    def free(self) -> None:
        """Free the real state."""
        self.real.free()


class ScriptedAcceptance:
    """Runs a drafter, and puts the right tokens in place of its own with a given chance.

    The chance is that of each draft after accepted ones. What the real drafter computes is still waited for. So a
    round costs what it would cost with a trained drafter of this acceptance.
    """

    def __init__(self, real: Drafter, texts: Sequence[Sequence[int]], acceptance: float, seed: int = 0) -> None:
        """Draft the tokens of texts.

        real: the drafter whose passes are run.
        texts: of plain decoding, prompts included. Sequences are opened in their order, again and again.
        acceptance: from 0 to 1.
        """
        self.name, self.pool = real.name, real.pool
        self.target_layer_ids, self.max_draft = real.target_layer_ids, real.max_draft
        self.real: Any = real
        self._is_ahead, self._opened = isinstance(real, DraftsAhead), 0
        rng, more = np.random.default_rng(seed), 2 * real.max_draft + 2
        # -1 where the drafter errs, and after the end: there its own token stays, which is right by chance only.
        self._texts = [
            mx.array([*np.where(rng.random(len(text)) < acceptance, text, -1).tolist(), *[-1] * more], mx.int32)
            for text in texts
        ]
        mx.eval(self._texts)

    def open(self, position: int = 0) -> ScriptedState:
        """Return the state of a sequence, see ``Drafter``."""
        self._opened += 1
        return ScriptedState(self.real.open(position), position, (self._opened - 1) % len(self._texts))

    def extend(self, updates: Sequence[tuple[ScriptedState, Committed]]) -> None:
        """Add committed rows, see ``Drafter``."""
        self.real.extend([(state.real, rows) for state, rows in updates])
        for state, rows in updates:
            state.position = rows.position + rows.tokens.size

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft with the real drafter, and correct what the script says."""
        drafts = self.real.propose([replace(request, state=request.state.real) for request in requests])
        firsts = [request.state.position + 1 for request in requests]
        return [
            corrected(draft, self._texts[request.state.text][first : first + draft.tokens.size])
            for draft, request, first in zip(drafts, requests, firsts, strict=True)
        ]

    def propose_ahead(self, state: ScriptedState, count: int, rule: DraftRule, unread: Unread) -> Ahead | None:
        """Draft before the host has read a round, where the real drafter can, see ``DraftsAhead``."""
        made = self.real.propose_ahead(state.real, count, rule, unread) if self._is_ahead else None
        if made is None:
            return None
        accepted = unread.tree.depth_of(unread.outcome[unread.tree.num_rows - 1])
        right = self._texts[state.text][unread.position + 2 + accepted + mx.arange(count)]
        return replace(made, draft=corrected(made.draft, right))

    def rewind(self, state: ScriptedState, position: int) -> int:
        """Forget rows, see ``Drafter``."""
        state.position = self.real.rewind(state.real, position)
        return state.position


def corrected(draft: Draft, right: mx.array) -> Draft:
    """Return a draft with the right tokens [k] int32, but for its own where these are negative."""
    return replace(draft, tokens=mx.where(right < 0, draft.tokens, right))
