"""A drafter for several generations at once, each of which has a text of its own to be right about."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from choosing import drawn_at

from mlx_spec.drafters.base import Committed, Draft, DraftRequest, DraftRule
from mlx_spec.target import Target

# A candidate that leads by this much is chosen by every rule, whatever the noise.
LEAD = 1000.0


@dataclass
class BranchState:
    """The position of the next committed row, and the text (prompt included) that drafts follow, if any."""

    position: int
    text: Sequence[int] = ()

    def fork(self) -> "BranchState":
        return BranchState(self.position, self.text)

    def free(self) -> None:
        self.text = ()


class BranchDrafter:
    """Drafts the text of a state where a lot decides so, and another token elsewhere.

    Set ``generation.drafter_state.text`` when the text is known. It asserts that committed rows come without gap.
    """

    name = "branches"

    def __init__(self, target: Target, share: float = 0.7, max_draft: int = 7) -> None:
        self.target_layer_ids, self.max_draft, self.share = (1,), max_draft, share
        self.vocab_size = target.vocab_size
        self.proposals = 0

    def open(self, position: int = 0) -> BranchState:
        return BranchState(position)

    def extend(self, updates: Sequence[tuple[BranchState, Committed]]) -> None:
        for state, rows in updates:
            self.take(state, rows)

    def take(self, state: BranchState, rows: Committed) -> None:
        assert rows.position == state.position, "a gap or an overlap in the committed rows"
        assert rows.aux_hidden_states.shape[0] == rows.tokens.size
        state.position += rows.tokens.size

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self.draft(request.state, request.anchor, request.count, request.rule) for request in requests]

    def draft(self, state: BranchState, anchor: int, count: int, rule: DraftRule) -> Draft:
        assert 1 <= count <= self.max_draft
        self.proposals += 1
        lots = np.random.default_rng([state.position, anchor]).random(count)
        tokens = []
        for index in range(count):
            at = state.position + 1 + index
            right = state.text[at] if at < len(state.text) else 0
            token = (right + int(lots[index] > self.share)) % self.vocab_size
            ids = mx.array([token, (token + 1) % self.vocab_size], dtype=mx.int32)
            tokens.append(drawn_at(rule, at, ids, mx.array([LEAD, 0.0])).token)
        return Draft(mx.stack(tokens).astype(mx.int32), mx.zeros((count, 0), dtype=mx.int32))

    def rewind(self, state: BranchState, position: int) -> int:
        state.position = min(state.position, position)
        return state.position

    def know(self, generation: Any, text: Sequence[int]) -> None:
        """Give a generation's state the text, where it has a state."""
        if generation.drafter_state is not None:
            generation.drafter_state.text = text
