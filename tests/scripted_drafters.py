"""A drafter that knows the text of plain decoding and errs on purpose, and running requests to their end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
from choosing import drawn_at
from started import started

from mlx_spec.drafters.base import Committed, Draft, DraftRequest, DraftRule
from mlx_spec.engine import Engine, Request
from mlx_spec.engine.statistics import Statistics
from mlx_spec.target import Target

Script = Callable[[int, int, int], bool]
"""Whether a drafted token is right: (number of the proposal, index in its block, absolute position) to bool."""

# A candidate that leads by this much is chosen by every rule, whatever the noise.
LEAD = 1000.0


def always_right(proposal: int, index: int, position: int) -> bool:
    return True


def always_wrong(proposal: int, index: int, position: int) -> bool:
    return False


def right_then_wrong(count: int) -> Script:
    """Right for the first ``count`` tokens of every block, then wrong."""
    return lambda proposal, index, position: index < count


def wrong_at(wrong: int) -> Script:
    """Wrong at one absolute position, right everywhere else."""
    return lambda proposal, index, position: position != wrong


def mixture(seed: int, share: float = 0.7) -> Script:
    """Right with probability ``share`` at each drafted token, the same for the same seed."""
    return lambda proposal, index, position: np.random.default_rng([seed, proposal, index]).random() < share


@dataclass
class ScriptedState:
    """What was committed so far, and how many proposals were made.

    begin: where the committed rows began that it saw; the tokens before are those of the text.
    """

    tokens: list[int] = field(default_factory=list)
    proposals: int = 0
    begin: int = 0

    def fork(self) -> "ScriptedState":
        return ScriptedState(list(self.tokens), self.proposals, self.begin)

    def free(self) -> None:
        self.tokens.clear()


class ScriptedDrafter:
    """Drafts ``text`` (prompt included) where ``script`` is true, and another token where it is false.

    It asserts what the engine owes a drafter: committed rows come in order without gap or overlap and are the
    text, hidden states have their shape, the anchor is the text's next token and the depth is in range. After the
    end of ``text`` it drafts token 0.
    """

    name = "scripted"

    def __init__(
        self,
        target: Target,
        text: Sequence[int],
        script: Script,
        max_draft: int = 7,
        target_layer_ids: tuple[int, ...] = (),
    ) -> None:
        self.text = list(text)
        self.script = script
        self.max_draft = max_draft
        self.target_layer_ids = target_layer_ids
        self.vocab_size = target.vocab_size
        self.tap_width = len(target_layer_ids) * target.hidden_size

    def open(self, position: int = 0) -> ScriptedState:
        return ScriptedState(self.text[:position], begin=position)

    def extend(self, updates: Sequence[tuple[ScriptedState, Committed]]) -> None:
        for state, rows in updates:
            self.take(state, rows)

    def take(self, state: ScriptedState, rows: Committed) -> None:
        assert rows.position == len(state.tokens), "a gap or an overlap in the committed rows"
        assert rows.aux_hidden_states.shape == (rows.tokens.size, self.tap_width)
        state.tokens += [int(t) for t in np.array(rows.tokens)]
        assert state.tokens == self.text[: len(state.tokens)], "committed rows are not the text"

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self.draft(request.state, request.anchor, request.count, request.rule) for request in requests]

    def draft(self, state: ScriptedState, anchor: int, count: int, rule: DraftRule) -> Draft:
        assert 1 <= count <= self.max_draft
        assert anchor == self.text[len(state.tokens)], "the anchor is not the text's next token"
        state.proposals += 1
        chosen, candidates, probabilities = [], [], []
        for index in range(count):
            position = len(state.tokens) + 1 + index
            first = self._drafted(state.proposals, index, position)
            ids = mx.array([first, *((first + step) % self.vocab_size for step in (1, 2, 3))], dtype=mx.int32)
            token, _, drawn_from = drawn_at(rule, position, ids, mx.array([LEAD, 0.0, 0.0, 0.0]))
            chosen.append(token)
            candidates.append(ids)
            probabilities.append(drawn_from)
        drawn = None if any(p is None for p in probabilities) else mx.stack(probabilities)
        return Draft(mx.stack(chosen).astype(mx.int32), mx.stack(candidates), drawn)

    def rewind(self, state: ScriptedState, position: int) -> int:
        del state.tokens[position:]
        return len(state.tokens)

    def _drafted(self, proposal: int, index: int, position: int) -> int:
        right = self.text[position] if position < len(self.text) else 0
        # 1 to 7 further is another token in any vocabulary of 8 or more.
        return right if self.script(proposal, index, position) else (right + 1 + position % 7) % self.vocab_size


@dataclass(frozen=True)
class Finished:
    """A request that was run to its end. text: prompt and new tokens. rounds: the tokens of each round."""

    text: list[int]
    finish_reason: str | None
    statistics: Statistics
    rounds: list[list[int]]


def run(engine: Engine, request: Request, policy: Any = None) -> Finished:
    """Run a request to its end, with ``policy`` in place of the engine's where one is given.

    Checks after every round that all but the anchor is cached, and at the end that the pages came back.
    """
    pages = engine.target.pool.pages_in_use
    generation = started(engine, request)
    rounds = []
    try:
        if policy is not None:
            generation.policy = policy
        while generation.finish_reason is None:
            rounds.append(engine.step(generation).checked().tokens)
            assert generation.sequence.length == len(generation.tokens) - 1
    finally:
        engine.close(generation)
    assert engine.target.pool.pages_in_use == pages
    return Finished(generation.tokens, generation.finish_reason, generation.statistics, rounds)


def plain(target: Target, request: Request) -> Finished:
    """Run a request to its end without drafting."""
    return run(Engine(target), replace(request, num_draft_tokens=0))
