"""The round: draft, verify, accept, commit. It knows nothing of text, printing or servers."""

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar, overload

import mlx.core as mx
import numpy as np

from metal_kernels import MAX_ROWS
from metal_kernels.implementations import Implementation, implementation, using
from mlx_spec.decoding.accept import rule_for
from mlx_spec.drafters.base import Committed, Drafter
from mlx_spec.errors import ContextFull, RequestError
from mlx_spec.engine.verify import judge, split
from mlx_spec.engine.slot import Lane, only, paths_of, unpack, up_to_difference, wait
from mlx_spec.drafters.siblings import with_leaves
from mlx_spec.decoding.logprobs import MOST_TOP
from mlx_spec.engine.draft_policy import Adaptive, CostAware, Costs, DepthPolicy, FixedDepth
from mlx_spec.engine.request import Generation, Request, Round
from mlx_spec.engine.row_shares import share_rows
from mlx_spec.engine.statistics import NOT_CHECKED, Exactness, Statistics
from mlx_spec.target import Pass, Target, rooms
from mlx_spec.target import Sequence as CachedSequence
from mlx_spec.drafters.tree import of_path

# Every so many rounds the device is awaited between draft and verify, to know what each of them takes.
TIMED_EVERY = 8
# Generations of which the drafter remembers something at a time; those not used for longest start anew.
MOST_DRAFTER_STATES = 64

Result = TypeVar("Result")


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
        max_drafter_states: int = MOST_DRAFTER_STATES,
    ) -> None:
        """Bind what a generation needs.

        costs: this machine's, for the automatic depth; without them it is the drafter's largest. exactness: what
        statistics say of it. kernels: the implementation of all operations, whatever is chosen around a call; by
        default the one that is chosen when the engine is made. max_drafter_states: of how many generations the
        drafter remembers something. Raises RequestError for fewer than the 16 that one round may have.
        """
        if max_drafter_states < MAX_ROWS:
            raise RequestError(f"max_drafter_states must be at least {MAX_ROWS}, not {max_drafter_states}.")
        self.target = target
        self.drafter = drafter
        self.costs = costs
        self.exactness = exactness
        self.kernels = kernels or implementation()
        self.max_drafter_states = max_drafter_states
        # The least recently used first.
        self._remembered: dict[Generation, None] = {}
        self._turns = 0

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

    @overload
    def step(self, generations: Generation) -> Round: ...

    @overload
    def step(self, generations: Sequence[Generation]) -> list[Round]: ...

    def step(self, generations: Generation | Sequence[Generation]) -> Round | list[Round]:
        """Run one round: of a generation, or of several in one pass, and return what each of them got.

        Up to 16 sequences take part; of more, those whose turn it is. The others, and those that are finished, get
        an empty round. What goes wrong with a generation, such as ContextFull or NonFiniteError, is raised for a
        single one, and is ``Round.error`` among several; that generation is as before, and the others go on. What
        is raised otherwise, an interruption say, leaves all of them as they were.
        Raises RequestError for a generation that was closed, or that is named twice.
        """
        if isinstance(generations, Generation):
            return self._round([generations], only)
        return self._round(generations, list)

    def answer_step(self, generation: Generation) -> Round:
        """Run one round for a short exact answer: tokens that the full logits confirm, with log-probabilities.

        For greedy requests. The token of each row is compared with the largest of its full logits; at the first
        that differs the full logits' token stands, and the round ends with it. Tokens and log-probabilities are
        those of plain decoding, bit for bit. Raises as ``step`` does, and RequestError for a request that draws.
        """
        if temp := generation.request.sampling.temp:
            raise RequestError(f"answer_step takes the likeliest tokens; this request draws, with temp {temp}.")
        return self._round([generation], only, answering=True)

    def fork(self, generation: Generation, *, seed: int | None = None, **changes: Any) -> Generation:
        """Return a generation that goes on from here on its own; both share what is cached so far.

        seed: of the fork's own draws. changes: of other fields of its request, such as ``is_end`` or
        ``max_tokens``, which counts from the start. The fork of a finished generation goes on behind its end.
        Raises RequestError for settings without a meaning and for a generation that was closed.
        """
        if generation.is_closed:
            raise RequestError("A generation that was closed cannot be forked.")
        request = replace(generation.request, **changes)
        if seed is not None:
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        self._check(request)
        changed = not changes.keys().isdisjoint(("num_draft_tokens", "num_leaves"))
        policy = self._policy(request) if changed else deepcopy(generation.policy)
        fork = Generation(
            request,
            generation.sequence.fork(),
            None,
            rule_for(request.sampling, self.target.vocab_size),
            policy,
            list(generation.tokens),
            generation.statistics.copy(),
            last_turn=generation.last_turn,
        )
        if generation.drafting is not None and fork.may_draft:
            fork.drafting = generation.drafting.fork()
            self._remember(fork)
        return fork

    def close(self, generation: Generation) -> None:
        """Give the pages of a generation back, finished or not. It cannot be continued afterwards."""
        generation.sequence.free()
        self._forget(generation)
        generation.statistics.depth_reason = generation.policy.reason if self.drafter else ""

    def _prefilled(self, request: Request) -> Generation:
        generation = Generation(
            request,
            self.target.open(),
            None,
            rule_for(request.sampling, self.target.vocab_size),
            self._policy(request),
            list(request.prompt),
            Statistics(exactness=self.exactness),
            last_turn=self._turns,
        )
        started = time.perf_counter()
        try:
            if self.drafter is not None and generation.may_draft:
                generation.drafting = self.drafter.open()
                self._remember(generation)
            self.target.prefill(
                generation.sequence,
                request.prompt[:-1],
                self._taps_for([generation]),
                request.prefill_step_size,
                on_rows=lambda rows, tokens: self._extend([generation], [rows], [tokens]),
                on_progress=request.on_progress,
            )
        except BaseException:
            self.close(generation)
            raise
        generation.statistics.prompt_tokens = len(request.prompt)
        generation.statistics.prompt_seconds = time.perf_counter() - started
        return generation

    def _round(
        self, generations: Sequence[Generation], result: Callable[[list[Round]], Result], answering: bool = False
    ) -> Result:
        """Run a round and return what ``result`` makes of it; whatever is raised leaves no generation changed."""
        if len(set(generations)) < len(generations):
            raise RequestError("A generation is named twice: it can have one part in a round only.")
        if any(generation.is_closed for generation in generations):
            raise RequestError("A generation was closed and cannot go on; fork it before, or start another.")
        started = time.perf_counter()
        lanes = [Lane.of(generation) for generation in self._next(generations)]
        try:
            with using(self.kernels):
                self._draft(lanes)
                running = [lane for lane in lanes if lane.error is None]
                if running:
                    self._verify(running, started, answering)
            rounds = {lane.generation: replace(lane.done, error=lane.error) for lane in lanes}
            return result([rounds.get(generation) or Round([], 0) for generation in generations])
        except BaseException:
            for lane in lanes:
                self._take_back(lane)
            raise

    def _draft(self, lanes: list[Lane]) -> None:
        """Give each lane its proposal, or the reason why it cannot run."""
        places = rooms([lane.generation.sequence for lane in lanes], MAX_ROWS)
        for lane, places_left in zip(lanes, places, strict=True):
            with lane.keeping_errors():
                if not places_left:
                    raise out_of_pages(lane.generation.sequence)
        running = [(lane, room) for lane, room in zip(lanes, places, strict=True) if room]
        depths = self._depths([lane.generation for lane, _ in running], [room for _, room in running])
        drafting = [(lane, depth) for (lane, _), depth in zip(running, depths, strict=True) if depth]
        if self.drafter is not None and drafting:
            proposals = self.drafter.propose([lane.ask(depth) for lane, depth in drafting])
            for (lane, depth), proposal in zip(drafting, proposals, strict=True):
                with lane.keeping_errors():
                    lane.take(proposal, running[0][1] if len(running) == 1 else depth + 1)
            if len(running) == 1:
                self._branch(running[0][0])

    def _branch(self, lane: Lane) -> None:
        """Put leaves beside the drafts of a lane that has the pass to itself; several lanes need the rows."""
        generation = lane.generation
        leaves = generation.policy.leaves(len(lane.tree.chain) - 1)
        lane.proposal = with_leaves(lane.proposal, leaves, generation.rule.rank, lane.count)

    def _verify(self, lanes: list[Lane], started: float, answering: bool) -> None:
        """Run the pass over the rows of all lanes, and let each take what stands."""
        drafts = [lane.proposal.tokens for lane in lanes if lane.proposal.tokens.size]
        timed = bool(drafts) and lanes[0].generation.statistics.rounds % TIMED_EVERY == 0
        draft_seconds = wait(*drafts) if timed else 0.0
        mx.async_eval(*drafts)
        rows = [lane.rows for lane in lanes]
        verified = self.target.forward(
            [(lane.generation.sequence, tokens) for lane, tokens in zip(lanes, rows, strict=True)],
            self._taps_for([lane.generation for lane in lanes]),
            paths_of(lanes),
        )
        logits = self.target.logits(verified.hidden)
        judge(lanes, logits, answering)
        results = [array for lane in lanes for array in lane.arrays]
        verify_seconds = wait(*results, *verified.arrays)  # the round's one host synchronisation

        of_lanes = split(lanes, logits)
        for lane, drafted, scored in zip(lanes, rows, of_lanes, strict=True):
            if lane.error is None:
                with lane.keeping_errors():
                    self._read(lane, drafted, scored)
        going = [(index, lane) for index, lane in enumerate(lanes) if lane.error is None]
        accepted = [verified.path(index, lane.standing) for index, lane in going]
        tokens = [of_path(rows[index], lane.standing) for index, lane in going]
        self._commit([lane.generation for _, lane in going], accepted, tokens)
        seconds = time.perf_counter() - started
        for _, lane in going:
            self._emit(lane, seconds)
        if timed and lanes[0].error is None:
            statistics = lanes[0].generation.statistics
            statistics.count_timed(draft_seconds, verify_seconds, seconds - draft_seconds - verify_seconds)

    def _read(self, lane: Lane, rows: mx.array, logits: mx.array) -> None:
        """Read back what a lane says, and where it ends."""
        generation = lane.generation
        assert lane.outcome is not None
        lane.said, lane.path = unpack(lane.outcome, lane.proposal, lane.count - 1)
        if generation.request.on_verified is not None:
            seen = [rows, logits] if lane.tree.is_chain else [of_path(x, lane.path) for x in (rows, logits)]
            generation.request.on_verified(generation.sequence, *seen)
        if lane.answers is not None:
            answers = np.array(lane.answers)
            lane.said = up_to_difference(lane.said, [int(answers[row]) for row in lane.path])
            lane.path = lane.path[: len(lane.said)]
        lane.said, lane.finish_reason = self._cut(lane.said, generation)

    def _emit(self, lane: Lane, seconds: float) -> None:
        """Let a generation have what its lane says, now that this is committed."""
        generation, statistics, tree = lane.generation, lane.generation.statistics, lane.tree
        generation.tokens.extend(lane.said)
        generation.finish_reason = lane.finish_reason
        drafted, accepted, emitted = len(tree.chain) - 1, tree.along_chain(lane.path), len(lane.said)
        if lane.could_draft or self.drafter is None:
            generation.policy.update(drafted, accepted, tree.runner_up(lane.path))
        leaves, accepted_leaves = tree.rows - 1 - drafted, len(lane.path) - 1 - accepted
        statistics.count_round(drafted, accepted, emitted, leaves, accepted_leaves)
        statistics.seconds += seconds
        logprobs = lane.logprobs.read(lane.standing) if lane.logprobs else []
        lane.done = Round(lane.said, min(len(lane.path) - 1, emitted), logprobs)

    def _next(self, generations: Sequence[Generation]) -> list[Generation]:
        """Return those whose turn it is: of more than there are rows, those that waited longest."""
        running = [generation for generation in generations if generation.finish_reason is None]
        if len(running) > MAX_ROWS:
            running = sorted(running, key=lambda generation: generation.last_turn)[:MAX_ROWS]
        for generation in running:
            self._turns += 1
            generation.last_turn = self._turns
        return running

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
        if not 0 <= request.top_logprobs <= min(MOST_TOP, vocab):
            raise RequestError(
                f"top_logprobs must lie between 0 and {min(MOST_TOP, vocab)}, not {request.top_logprobs}."
            )
        request.sampling.check_vocabulary(vocab)

    def _policy(self, request: Request) -> DepthPolicy:
        most, count = self.drafter.max_draft if self.drafter else 0, request.num_draft_tokens
        leaves = self._leaves(request)
        if count == "adaptive":
            return Adaptive(most) if most else FixedDepth(0)
        if isinstance(count, str):
            raise RequestError(f"num_draft_tokens is {count!r}; it takes a number, 'adaptive', or None.")
        if count is not None and not 0 <= count <= most:
            what = f"this drafter drafts at most {most} tokens" if most else "there is no drafter"
            raise RequestError(f"num_draft_tokens is {count}, but {what}.")
        if count is None and most and self.costs is not None:
            return CostAware(self.costs, most, may_branch=leaves is None and self.target.takes_trees)
        return FixedDepth(most if count is None else count, leaves or 0)

    def _leaves(self, request: Request) -> int | None:
        """Return how many leaves a request asks for, None where it leaves that open, and refuse what cannot be."""
        leaves, count = request.num_leaves, request.num_draft_tokens
        if not leaves or count == 0:
            return leaves
        if not isinstance(count, int):
            raise RequestError(
                f"num_leaves is {leaves}; it needs a number of num_draft_tokens too, not {count!r}."
            )
        if not 0 < leaves < MAX_ROWS - count:
            raise RequestError(
                f"num_leaves is {leaves}, but beside an anchor and {count} drafts a pass has "
                f"{max(0, MAX_ROWS - 1 - count)} rows."
            )
        if not self.target.takes_trees:
            raise RequestError(
                f"num_leaves is {leaves}, but {self.target.name} has recurrent layers, which step through rows in "
                "one order: leave num_leaves out."
            )
        return leaves

    def _depths(self, generations: Sequence[Generation], places: Sequence[int]) -> list[int]:
        most = [self._most(generation, room) for generation, room in zip(generations, places, strict=True)]
        if len(generations) <= 1:
            return [min(generation.policy.depth(), most[0]) for generation in generations]
        return share_rows([generation.policy.offer() for generation in generations], most, MAX_ROWS, self.costs)

    def _most(self, generation: Generation, places: int) -> int:
        """Return how deep may be drafted where ``places`` more positions fit into the pool."""
        if generation.drafting is None:
            return 0
        # A round of depth k emits up to k + 1 tokens and caches up to k + 1 positions.
        places = min(self.target.context - generation.sequence.length, places)
        return max(0, min(generation.room - 1, places - 1))

    def _cut(self, tokens: list[int], generation: Generation) -> tuple[list[int], str | None]:
        """Return the tokens of a round up to where plain decoding would end, and why it ends there."""
        request, room = generation.request, generation.room
        for i, token in enumerate(tokens):
            if token in request.eos_token_ids or request.is_end(token):
                return tokens[: i + 1], "stop"
            if i + 1 == room or generation.sequence.length + i + 1 == self.target.context:
                return tokens[: i + 1], "length"
        return tokens, None

    def _commit(
        self, generations: Sequence[Generation], accepted: Sequence[Pass], tokens: Sequence[mx.array]
    ) -> None:
        """Make accepted rows part of their sequences, and show them to the drafter with their tokens."""
        sequences = [generation.sequence for generation in generations]
        self.target.commit_all(list(zip(sequences, accepted, strict=True)))
        self._extend(generations, accepted, tokens)

    def _take_back(self, lane: Lane) -> None:
        """Forget what a round that broke off left behind of a generation."""
        generation = lane.generation
        del generation.tokens[lane.count :]
        generation.finish_reason, generation.statistics = None, lane.statistics
        generation.sequence.rewind(lane.count - 1)
        if self.drafter is not None and generation.drafting is not None:
            self.drafter.rewind(generation.drafting, lane.count - 1)

    def _extend(
        self, generations: Sequence[Generation], passes: Sequence[Pass], tokens: Sequence[mx.array]
    ) -> None:
        """Show the drafter committed rows; of generations that it remembers nothing of, it begins with them."""
        if self.drafter is None:
            return
        updates = []
        for generation, rows, ids in zip(generations, passes, tokens, strict=True):
            if generation.may_draft:
                position = generation.sequence.length - ids.size
                if generation.drafting is None:
                    generation.drafting = self.drafter.open(position)
                self._remember(generation)
                updates.append((generation.drafting, Committed(position, ids, rows.taps)))
        if updates:
            self.drafter.extend(updates)

    def _taps_for(self, generations: Sequence[Generation]) -> tuple[int, ...]:
        return self.taps if any(generation.may_draft for generation in generations) else ()

    def _remember(self, generation: Generation) -> None:
        """Keep what the drafter knows of a generation, and drop what was not used for longest."""
        if generation.drafting is not None:
            self._remembered.pop(generation, None)
            self._remembered[generation] = None
        if len(self._remembered) > self.max_drafter_states:
            self._forget(next(iter(self._remembered)))

    def _forget(self, generation: Generation) -> None:
        """Let the drafter forget a generation; should it go on, it begins anew there."""
        self._remembered.pop(generation, None)
        if generation.drafting is not None:
            generation.drafting.free()
            generation.drafting = None


def out_of_pages(sequence: CachedSequence) -> ContextFull:
    """Return the error of a sequence that has no page for one more position."""
    try:
        sequence.require(1)
    except ContextFull as error:
        return error
    return ContextFull(
        f"Other sequences of this round take the last of {sequence.pool.max_pages} KV pages; "
        "close a sequence or load the model with a larger max_kv_size."
    )
