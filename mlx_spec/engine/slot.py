"""The part of one generation in a round: its drafts, and what the host reads of how they were judged."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_spec.drafters.base import Ask, Proposal
from mlx_spec.errors import NonFiniteError, RequestError
from mlx_spec.decoding.logprobs import RowLogprobs
from mlx_spec.engine.request import Generation, Round
from mlx_spec.engine.statistics import Statistics
from mlx_spec.drafters.tree import Tree

NOTHING = Proposal(mx.zeros((0,), dtype=mx.int32), mx.zeros((0, 0), dtype=mx.int32))


@dataclass(eq=False)
class Lane:
    """The part of one generation in a round.

    count, statistics, could_draft: the generation's number of tokens, its counters, and whether the drafter knew
    it, before the round. outcome: see accept. answers: int32 [k + 1], what each row says by its full logits, where
    these have the last word. logprobs: of what the rows say, where they are asked for. path: the rows that stand.
    said: what is emitted; finish_reason: why the text ends with it, if it does.
    error: what went wrong in this lane alone; then the generation stays as it is.
    """

    generation: Generation
    count: int
    statistics: Statistics
    could_draft: bool
    proposal: Proposal = NOTHING
    outcome: mx.array | None = None
    answers: mx.array | None = None
    logprobs: RowLogprobs | None = None
    path: tuple[int, ...] = ()
    said: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    done: Round = field(default_factory=lambda: Round([], 0))
    error: Exception | None = None

    @staticmethod
    def of(generation: Generation) -> "Lane":
        """Begin a round of a generation."""
        return Lane(
            generation, len(generation.tokens), generation.statistics.copy(), generation.drafting is not None
        )

    @property
    def rows(self) -> mx.array:
        """The anchor and the drafts: [k + 1] int32."""
        anchor = mx.array(self.generation.tokens[-1:], dtype=mx.int32)
        return mx.concatenate([anchor, self.proposal.tokens])

    @property
    def tree(self) -> Tree:
        """How the rows stand behind each other."""
        return self.proposal.tree

    @property
    def standing(self) -> tuple[int, ...]:
        """The rows that say what is emitted."""
        return self.path[: len(self.said)]

    @property
    def arrays(self) -> list[mx.array]:
        """All that the host reads of the lane."""
        results = [array for array in (self.outcome, self.answers) if array is not None]
        return results + (self.logprobs.arrays if self.logprobs else [])

    def ask(self, count: int) -> Ask:
        """Return the lane's wish for ``count`` drafts."""
        generation = self.generation
        return Ask(generation.drafting, generation.tokens[-1], count, generation.rule.choose)

    def take(self, proposal: Proposal, rows: int) -> None:
        """Take what was drafted. Raises RequestError where anchor and drafts are more than ``rows``."""
        if proposal.tree.rows > rows:
            raise RequestError(
                f"The drafter proposed {proposal.tree.rows - 1} tokens, but beside the anchor this pass has "
                f"{rows - 1} rows for them."
            )
        self.proposal = proposal

    @contextmanager
    def keeping_errors(self) -> Iterator[None]:
        """Keep an exception for this lane's round, so that the others go on."""
        try:
            yield
        except Exception as error:
            self.error = error


def up_to_difference(said: list[int], answers: list[int]) -> list[int]:
    """Return tokens up to the first that is not the row's answer, which takes its place."""
    differs = next(
        (i for i, (token, answer) in enumerate(zip(said, answers, strict=False)) if token != answer), None
    )
    return said if differs is None else [*said[:differs], answers[differs]]


def paths_of(lanes: Sequence[Lane]) -> list[Sequence[int]] | None:
    """Return the path to each row of a pass, or None where no lane's rows branch."""
    if all(lane.tree.is_chain for lane in lanes):
        return None
    return [path for lane in lanes for path in lane.tree.paths]


def only(rounds: Sequence[Round]) -> Round:
    """Return the one round there is, or raise its error."""
    (done,) = rounds
    if done.error is not None:
        raise done.error
    return done


def wait(*arrays: mx.array) -> float:
    """Wait until arrays are computed and return the seconds that took."""
    started = time.perf_counter()
    mx.eval(*arrays)
    return time.perf_counter() - started


def unpack(outcome: mx.array, proposal: Proposal, position: int) -> tuple[list[int], tuple[int, ...]]:
    """Read back a round: the tokens that it says, and the row that says each of them.

    Raises NonFiniteError naming the first stage that produced NaN or infinity.
    """
    values = [int(v) for v in np.array(outcome)]
    k = proposal.tokens.size
    for stage, finite in zip([*proposal.finite, "target logits"], values[k + 2 :], strict=True):
        if not finite:
            raise NonFiniteError(
                f"The {stage} at position {position} holds NaN or infinity, so no token can be taken from it. "
                "Load the model in bfloat16 or float32, and check its weights."
            )
    path = proposal.tree.paths[values[k]]
    return [*(values[row - 1] for row in path[1:]), values[k + 1]], path
