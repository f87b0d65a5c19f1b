"""The round: draft, verify, accept, commit. It knows nothing of text, printing or servers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from metal_kernels.implementations import Implementation, implementation, using
from mlx_spec.accept import AcceptRule, rule_for
from mlx_spec.drafters.base import Committed, Drafter, Proposal
from mlx_spec.errors import ContextFull, NonFiniteError, RequestError
from mlx_spec.policy import Adaptive, CostAware, Costs, DepthPolicy, FixedDepth
from mlx_spec.sampling import Sampling
from mlx_spec.statistics import NOT_CHECKED, Exactness, Statistics
from mlx_spec.target import Pass, Target
from mlx_spec.target import Sequence as CachedSequence

# Every so many rounds the device is awaited between draft and verify, to know what each of them takes.
TIMED_EVERY = 8

NOTHING = Proposal(mx.zeros((0,), dtype=mx.int32), mx.zeros((0, 0), dtype=mx.int32))


@dataclass(frozen=True)
class Request:
    """What to generate, as plain data.

    prompt: token ids, at least one. max_tokens: -1 for no limit but the context. num_draft_tokens: None lets
    measured costs decide, "adaptive" the rounds before, 0 is plain decoding. eos_token_ids end the text.
    is_end: called with each new token in order; true ends the text with that token (stop strings, say).
    on_verified: called with (sequence, row tokens [R], logits [R, V]) before each commit, for diagnosis.
    """

    prompt: Sequence[int]
    max_tokens: int = 256
    num_draft_tokens: int | Literal["adaptive"] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    eos_token_ids: frozenset[int] = frozenset()
    prefill_step_size: int = 512
    is_end: Callable[[int], bool] = lambda token: False
    on_progress: Callable[[int, int], None] = lambda done, total: None
    on_verified: Callable[[CachedSequence, mx.array, mx.array], None] | None = None


@dataclass
class Generation:
    """A request in progress.

    tokens: prompt and text so far; the last one is the anchor, which the target has not cached yet.
    finish_reason: None while running, then "stop" or "length".
    """

    request: Request
    sequence: CachedSequence
    drafting: Any
    rule: AcceptRule
    policy: DepthPolicy
    tokens: list[int]
    statistics: Statistics = field(default_factory=Statistics)
    finish_reason: str | None = None

    @property
    def room(self) -> int:
        """How many more tokens the request allows; the context is checked by the engine."""
        limit = self.request.max_tokens
        return (1 << 30) if limit < 0 else limit - (len(self.tokens) - len(self.request.prompt))


@dataclass(frozen=True)
class Round:
    """What one round emitted: tokens, and how many of them were drafted."""

    tokens: list[int]
    from_draft: int


class Engine:
    """Runs generations on one target, with one drafter or none."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        costs: Costs | None = None,
        *,
        exactness: Exactness = NOT_CHECKED,
        kernels: Implementation | None = None,
    ) -> None:
        """Bind what a generation needs.

        costs: this machine's, for the automatic depth; without them it is the drafter's largest. exactness: what
        statistics say of it. kernels: the implementation of all operations, whatever is chosen around a call; by
        default the one that is chosen when the engine is made.
        """
        self.target = target
        self.drafter = drafter
        self.costs = costs
        self.exactness = exactness
        self.kernels = kernels or implementation()

    @property
    def taps(self) -> tuple[int, ...]:
        """The hidden states that the drafter reads."""
        return self.drafter.taps if self.drafter else ()

    def start(self, request: Request) -> Generation:
        """Check a request and prefill its prompt, all but the last token: that is the first anchor.

        Raises RequestError or ContextFull; then, and on any other exception, no page stays behind.
        """
        self._check(request)
        with using(self.kernels):
            return self._prefilled(request)

    def step(self, generation: Generation) -> Round:
        """Run one round. Raises NonFiniteError or ContextFull; whatever is raised, the generation is as before."""
        count, statistics = len(generation.tokens), generation.statistics.copy()
        try:
            with using(self.kernels):
                return self._round(generation)
        except BaseException:
            self._take_back(generation, count, statistics)
            raise

    def close(self, generation: Generation) -> None:
        """Give the pages of a generation back. It cannot be continued afterwards."""
        generation.sequence.free()
        generation.statistics.depth_reason = generation.policy.reason if self.drafter else ""

    def _prefilled(self, request: Request) -> Generation:
        generation = Generation(
            request,
            self.target.open(),
            self.drafter.open() if self.drafter else None,
            rule_for(request.sampling, self.target.vocab_size),
            self._policy(request.num_draft_tokens),
            list(request.prompt),
            Statistics(exactness=self.exactness),
        )
        started = time.perf_counter()
        try:
            self.target.prefill(
                generation.sequence,
                request.prompt[:-1],
                self.taps,
                request.prefill_step_size,
                on_rows=lambda rows, tokens: self._extend(generation, rows, tokens),
                on_progress=request.on_progress,
            )
        except BaseException:
            self.close(generation)
            raise
        generation.statistics.prompt_tokens = len(request.prompt)
        generation.statistics.prompt_seconds = time.perf_counter() - started
        return generation

    def _round(self, generation: Generation) -> Round:
        started = time.perf_counter()
        statistics, request, history = generation.statistics, generation.request, generation.tokens
        generation.sequence.require(1)
        proposal = self._propose(generation, self._depth(generation))
        depth = proposal.tokens.size
        timed = depth > 0 and statistics.rounds % TIMED_EVERY == 0

        draft_seconds = wait(proposal.tokens) if timed else 0.0
        mx.async_eval(proposal.tokens)
        rows = mx.concatenate([mx.array(history[-1:], dtype=mx.int32), proposal.tokens])
        verified = self.target.forward([(generation.sequence, rows)], self.taps)
        logits = self.target.logits(verified.hidden)
        scores = request.sampling.scores(logits, history, proposal.tokens)
        flags = [*proposal.finite.values(), mx.all(mx.isfinite(logits))]
        outcome = generation.rule.accept(proposal, scores, len(history) - 1, flags)
        verify_seconds = wait(outcome, *verified.arrays)  # the round's one host synchronisation

        drafts, count, following = unpack(outcome, proposal, len(history) - 1)
        if request.on_verified is not None:
            request.on_verified(generation.sequence, rows, logits)
        emitted, finish_reason = self._cut([*drafts[:count], following], generation)
        self._commit(generation, verified.rows(0, len(emitted)), rows[: len(emitted)])
        history.extend(emitted)
        generation.finish_reason = finish_reason
        generation.policy.update(depth, count)
        statistics.count_round(depth, count, len(emitted))
        seconds = time.perf_counter() - started
        statistics.seconds += seconds
        if timed:
            statistics.count_timed(draft_seconds, verify_seconds, seconds - draft_seconds - verify_seconds)
        return Round(emitted, min(count, len(emitted)))

    def _check(self, request: Request) -> None:
        vocab = self.target.vocab_size
        if not len(request.prompt):
            raise RequestError("The prompt is empty: at least one token is needed.")
        wrong = [t for t in request.prompt if not 0 <= t < vocab]
        if wrong:
            raise RequestError(f"The prompt holds tokens {wrong[:4]}; the vocabulary has {vocab}.")
        if request.max_tokens == 0 or request.max_tokens < -1:
            raise RequestError(f"max_tokens must be positive, or -1 for no limit, not {request.max_tokens}.")
        if len(request.prompt) > self.target.context:
            raise ContextFull(
                f"The prompt has {len(request.prompt)} tokens, {self.target.name} has {self.target.context} "
                "positions. Shorten the prompt."
            )
        request.sampling.check_vocabulary(vocab)

    def _policy(self, count: int | Literal["adaptive"] | None) -> DepthPolicy:
        most = self.drafter.max_draft if self.drafter else 0
        if count == "adaptive":
            return Adaptive(most) if most else FixedDepth(0)
        if isinstance(count, str):
            raise RequestError(f"num_draft_tokens is {count!r}; it takes a number, 'adaptive', or None.")
        if count is not None and not 0 <= count <= most:
            what = f"this drafter drafts at most {most} tokens" if most else "there is no drafter"
            raise RequestError(f"num_draft_tokens is {count}, but {what}.")
        if count is None and most and self.costs is not None:
            return CostAware(self.costs, most)
        return FixedDepth(most if count is None else count)

    def _depth(self, generation: Generation) -> int:
        # A round of depth k emits up to k + 1 tokens and caches up to k + 1 positions.
        sequence = generation.sequence
        places = min(self.target.context - sequence.length, sequence.room)
        return max(0, min(generation.policy.depth(), generation.room - 1, places - 1))

    def _propose(self, generation: Generation, depth: int) -> Proposal:
        if self.drafter is None or not depth:
            return NOTHING
        return self.drafter.propose(generation.drafting, generation.tokens[-1], depth, generation.rule.choose)

    def _cut(self, tokens: list[int], generation: Generation) -> tuple[list[int], str | None]:
        """Return the tokens of a round up to where plain decoding would end, and why it ends there."""
        request, room = generation.request, generation.room
        for i, token in enumerate(tokens):
            if token in request.eos_token_ids or request.is_end(token):
                return tokens[: i + 1], "stop"
            if i + 1 == room or generation.sequence.length + i + 1 == self.target.context:
                return tokens[: i + 1], "length"
        return tokens, None

    def _commit(self, generation: Generation, accepted: Pass, tokens: mx.array) -> None:
        self.target.commit(generation.sequence, accepted)
        self._extend(generation, accepted, tokens)

    def _take_back(self, generation: Generation, count: int, statistics: Statistics) -> None:
        """Forget what a round that broke off left behind the first ``count`` tokens."""
        del generation.tokens[count:]
        generation.finish_reason, generation.statistics = None, statistics
        generation.sequence.rewind(count - 1)
        if self.drafter is not None:
            self.drafter.rewind(generation.drafting, count - 1)

    def _extend(self, generation: Generation, rows: Pass, tokens: mx.array) -> None:
        if self.drafter is not None:
            position = generation.sequence.length - tokens.size
            self.drafter.extend(generation.drafting, Committed(position, tokens, rows.taps))


def wait(*arrays: mx.array) -> float:
    """Wait until arrays are computed and return the seconds that took."""
    started = time.perf_counter()
    mx.eval(*arrays)
    return time.perf_counter() - started


def unpack(outcome: mx.array, proposal: Proposal, position: int) -> tuple[list[int], int, int]:
    """Read back a round: drafts, how many stand, the token behind them.

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
    return values[:k], values[k], values[k + 1]
