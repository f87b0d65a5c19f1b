"""A request in progress, and what a round brought it: plain data."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_spec.decoding.accept import AcceptRule
from mlx_spec.decoding.grammar import Place
from mlx_spec.decoding.logprobs import TokenLogprobs
from mlx_spec.drafters.base import Ahead
from mlx_spec.drafters.lookup.lookup import LookupState
from mlx_spec.engine.draft_policy import DepthPolicy
from mlx_spec.engine.request import Request
from mlx_spec.engine.statistics import Statistics
from mlx_spec.target import CachedSequence

UNLIMITED = 1 << 30


@dataclass(eq=False)
class Generation:
    """A request in progress.

    sequence: what the target has cached, all tokens but the last one.
    rule: how drafts are drawn and judged.
    policy: how many are drafted.
    tokens: prompt and text so far. The last one is the anchor, which the next pass begins with.
    statistics: what was done so far.
    drafter_state: what the drafter remembers, see DrafterStates; None where it remembers nothing.
    lookup: what it may copy from, None where it does not.
    place: where the text stands in the grammar of its request, if it has one.
    finish_reason: None while running, then "stop", "length", or "cancelled".
    is_closed: its pages were given back.
    last_turn: the number of the last turn that it had, counted over all generations of the engine.
    judged: what ``is_end`` said of the tokens after ``tokens``, where a round broke off then: how many there
        were, and each token with its answer. The same tokens come again, and are not shown to it twice.
    planned: how many tokens the next round drafts, where that was decided in the round before.
    ahead: the draft of the next round, where it was made before the host read the one before.
    boundary: the generation as it was at the last chunk boundary of its prompt, for one that goes on from it.
    marks: what the target had cached at some chunk boundaries before that, in order. Only of models with recurrent
        layers, which cannot go back; one that departs earlier goes on from there.
    """

    request: Request
    sequence: CachedSequence
    rule: AcceptRule
    policy: DepthPolicy
    tokens: list[int]
    statistics: Statistics = field(default_factory=Statistics)
    drafter_state: Any = None
    lookup: LookupState | None = None
    place: Place | None = None
    finish_reason: str | None = None
    is_closed: bool = False
    last_turn: int = 0
    judged: tuple[int, list[tuple[int, bool]]] = field(default_factory=lambda: (0, []))
    planned: int | None = None
    ahead: Ahead | None = None
    boundary: "Generation | None" = None
    marks: list[CachedSequence] = field(default_factory=list)

    @property
    def anchor_position(self) -> int:
        """Position of the anchor; what the target has cached ends before it."""
        return len(self.tokens) - 1

    @property
    def is_read(self) -> bool:
        """Whether the prompt is read, so that rounds may begin."""
        return self.sequence.length >= len(self.request.prompt) - 1

    @property
    def sequences(self) -> list[CachedSequence]:
        """All that the target has cached for it; pages and states are shared among them."""
        return [self.sequence, *([self.boundary.sequence] if self.boundary else []), *self.marks]

    @property
    def remaining_tokens(self) -> int:
        """How many more tokens the request allows; the context is checked by the engine."""
        return self.remaining_tokens_of(self.request)

    def remaining_tokens_of(self, request: Request) -> int:
        """Return how many more tokens another request of the same prompt would allow."""
        if request.max_tokens < 0:
            return UNLIMITED
        return request.max_tokens - (len(self.tokens) - len(self.request.prompt))

    @property
    def may_draft(self) -> bool:
        """Whether the drafter is asked: the request allows it, and its drafts were finite so far."""
        return self.request.may_draft and not self.statistics.drafter_failure

    def cut(self, tokens: Sequence[int], context: int) -> tuple[list[int], str | None]:
        """Return new tokens up to where plain decoding would end, and why it ends there.

        context: how many positions there are.
        """
        remaining, left = self.remaining_tokens, context - self.sequence.length
        if self.judged[0] != len(self.tokens):
            self.judged = len(self.tokens), []
        for count, token in enumerate(tokens, 1):
            if token in self.request.eos_token_ids or self._is_end(count - 1, token):
                return list(tokens[:count]), "stop"
            if count in (remaining, left):
                return list(tokens[:count]), "length"
        return list(tokens), None

    def _is_end(self, index: int, token: int) -> bool:
        """Ask ``is_end`` of new token number ``index``, unless it was asked before."""
        answers = self.judged[1]
        if answers[index : index + 1] not in ([(token, False)], [(token, True)]):
            del answers[index:]
            answers.append((token, bool(self.request.is_end(token))))
        return answers[index][1]


@dataclass(frozen=True)
class Round:
    """What one round emitted for a generation.

    tokens: in order.
    num_from_draft: how many of them were drafted, the first ones.
    logprobs: of each token, where the request asks for them.
    finish_reason: why the text ended with these tokens, if it did.
    error: why there are none, where this generation failed; it is as before, and others of the round went on.
    """

    tokens: list[int] = field(default_factory=list)
    num_from_draft: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None

    def checked(self) -> "Round":
        """Return this round, or raise its error."""
        if self.error is not None:
            raise self.error
        return self
