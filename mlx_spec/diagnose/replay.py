"""The first bad round of a recorded run: where drafter or target first differ from recomputation from scratch."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_spec.decoding.accept import AcceptRule
from mlx_spec.diagnose.record import RecordedRun
from mlx_spec.drafters.base import Committed, Drafter, DraftRequest
from mlx_spec.engine import Engine, Request
from mlx_spec.errors import RequestError
from mlx_spec.target import Target


@dataclass(frozen=True)
class BadRound:
    """A round that recomputation does not confirm.

    round: its number, from 0.
    position: of its anchor.
    part: "target" where another token follows, "drafter" where other tokens are drafted.
    recorded, expected: token ids.
    """

    round: int
    position: int
    part: str
    recorded: tuple[int, ...]
    expected: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"round {self.round} at position {self.position}: the {self.part}'s state is corrupted, "
            f"recorded {list(self.recorded)}, from scratch {list(self.expected)}"
        )


def first_bad_round(
    engine: Engine, run: RecordedRun, on_round: Callable[[], None] = lambda: None
) -> BadRound | None:
    """Recompute a run from scratch, round by round; return the first round that differs, None where none does.

    The target's tokens come from plain decoding of the same request. Drafts come from a state to which only
    committed rows were ever shown.
    on_round: called after each round.
    Raises RequestError for a run whose tokens plain decoding does not give.
    """
    if run.sampling.temp and run.sampling.accept == "rejection":
        raise RequestError("A run with --accept rejection cannot be replayed: plain decoding draws other tokens.")
    expected = plain_tokens(engine, run)
    wrong = next((i for i, (a, b) in enumerate(zip(run.tokens, expected, strict=True)) if a != b), None)
    bad_position = None if wrong is None else len(run.prompt) + wrong
    drafts = FreshDrafts(engine, run)
    try:
        for number, each in enumerate(run.rounds):
            if each.drafts and engine.drafter is not None:
                proposed = drafts.propose(each.position, len(each.drafts))
                if proposed != each.drafts:
                    return BadRound(number, each.position, "drafter", each.drafts, proposed)
            end = each.position + each.accepted + 1
            if bad_position is not None and bad_position <= end:
                at = bad_position - len(run.prompt)
                emitted = slice(at, at + 1)
                return BadRound(number, each.position, "target", run.tokens[emitted], expected[emitted])
            drafts.commit(end)
            on_round()
    finally:
        drafts.free()
    return None


def plain_tokens(engine: Engine, run: RecordedRun) -> tuple[int, ...]:
    """Return as many tokens as were recorded, by plain decoding."""
    count = len(run.tokens)
    generation = engine.start(
        Request(
            run.prompt,
            max_tokens=count,
            num_draft_tokens=0,
            sampling=run.sampling,
            prefill_step_size=run.prefill_step_size,
        )
    )
    try:
        while generation.finish_reason is None:
            engine.step(generation)
        return tuple(generation.tokens[len(run.prompt) :])
    finally:
        engine.close(generation)


class FreshDrafts:
    """Drafts after any position of a recorded text, from committed rows alone."""

    def __init__(self, engine: Engine, run: RecordedRun) -> None:
        self.target: Target = engine.target
        self.drafter: Drafter | None = engine.drafter
        generation = engine.start(Request(run.prompt, sampling=run.sampling))
        self.rule: AcceptRule = generation.rule
        engine.close(generation)
        self.text = [*run.prompt, *run.tokens]
        self.sequence = self.target.open()
        self.state = None if self.drafter is None else self.drafter.open()
        self._prefill(len(run.prompt) - 1, run.prefill_step_size)

    def _prefill(self, count: int, step_size: int) -> None:
        if self.drafter is None:
            return
        layer_ids = self.drafter.target_layer_ids
        self.target.prefill(self.sequence, self.text[:count], layer_ids, step_size, self._show)

    def _show(self, rows: object, tokens: mx.array) -> None:
        assert self.drafter is not None
        aux = getattr(rows, "aux_hidden_states")  # noqa: B009
        begin = self.sequence.length - tokens.size
        self.drafter.extend([(self.state, Committed(begin, tokens, aux))])

    def commit(self, end: int) -> None:
        """Run the rows up to position ``end`` one at a time."""
        if self.drafter is None:
            return
        while self.sequence.length < min(end, len(self.text) - 1):
            token = mx.array([self.text[self.sequence.length]], dtype=mx.int32)
            rows = self.target.forward([(self.sequence, token)], self.drafter.target_layer_ids)
            mx.eval(*rows.arrays)
            self.target.commit(self.sequence, rows)
            self._show(rows, token)

    def propose(self, position: int, count: int) -> tuple[int, ...]:
        """Draft after the anchor at a position."""
        self.commit(position)
        assert self.drafter is not None
        (draft,) = self.drafter.propose([DraftRequest(self.state, self.text[position], count, self.rule)])
        return tuple(int(token) for token in np.array(draft.tokens))

    def free(self) -> None:
        """Give the memory back."""
        self.sequence.free()
        if self.state is not None:
            self.state.free()
