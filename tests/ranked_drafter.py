"""A drafter that knows the text of plain decoding, and has its tokens at the ranks of its candidates asked for."""

from collections.abc import Callable

import mlx.core as mx
from choosing import drawn_at
from scripted_drafters import ScriptedDrafter, ScriptedState, always_right

from mlx_spec.drafters.base import Draft, DraftRule
from mlx_spec.target import Target

Ranks = Callable[[int, int, int], int | None]
"""The rank of the right token: (number of the proposal, index in its block, absolute position) to it.

0 is the token that is drafted, 1 the first sibling beside it; None is nowhere."""

CANDIDATES = 16
# Candidates are this far apart, so that no noise changes their order.
STEP = 1000.0


class RankedDrafter(ScriptedDrafter):
    """Drafts from 16 candidates, the right token among them at the rank that is asked for."""

    def __init__(
        self, target: Target, text: list[int], ranks: Ranks, target_layer_ids: tuple[int, ...] = ()
    ) -> None:
        super().__init__(target, text, always_right, target_layer_ids=target_layer_ids)
        self.ranks = ranks

    def draft(self, state: ScriptedState, anchor: int, count: int, rule: DraftRule) -> Draft:
        assert anchor == self.text[len(state.tokens)], "the anchor is not the text's next token"
        state.proposals += 1
        rows, ranks, tokens, drawn_from = [], [], [], []
        for index in range(count):
            position = len(state.tokens) + 1 + index
            right = self.text[position] if position < len(self.text) else 0
            rank = self.ranks(state.proposals, index, position)
            ids = [(right + 1 + place) % self.vocab_size for place in range(CANDIDATES)]
            if rank is not None:
                ids[rank] = right
            # A fixed order of the candidates that is not that of their scores.
            order = [(5 * place + position) % CANDIDATES for place in range(CANDIDATES)]
            rows.append(mx.array([ids[place] for place in order], dtype=mx.int32))
            scores = mx.array([-STEP * place for place in order])
            token, rank_values, probabilities = drawn_at(rule, position, rows[-1], scores)
            tokens.append(token)
            ranks.append(rank_values)
            drawn_from.append(probabilities)
        drawn = None if any(p is None for p in drawn_from) else mx.stack(drawn_from)
        return Draft(
            mx.stack(tokens).astype(mx.int32), mx.stack(rows), drawn, {"script": mx.array(True)}, mx.stack(ranks)
        )
