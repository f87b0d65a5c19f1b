"""The engine: sequences are started, stepped, forked and closed. It knows nothing of text, printing or servers."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any, overload

from metal_kernels.launching.implementations import Implementation, implementation, in_words, using
from mlx_spec.decoding.accept import rule_for
from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.lookup.lookup import MAX_COPY, Lookup, LookupState
from mlx_spec.engine.at_rest import compute
from mlx_spec.engine.costs import RoundCosts, Setting
from mlx_spec.engine.draft_policy import DepthPolicy, policy_for
from mlx_spec.engine.drafter_states import MAX_DRAFTER_STATES, DrafterStates
from mlx_spec.engine.generation import Generation, Round
from mlx_spec.engine.prompt import discard, next_chunk, read_chunk, shared_part, show_progress, take_over, trim
from mlx_spec.engine.request import Request
from mlx_spec.engine.round import Snapshot, Taught, learn, run_round
from mlx_spec.engine.scheduler import Scheduler
from mlx_spec.engine.statistics import NOT_CHECKED, Exactness, Statistics
from mlx_spec.errors import DrafterFailure, MlxSpecError, RequestError
from mlx_spec.target import Target

DEPTH_FIELDS = ("num_draft_tokens", "max_draft_tokens", "num_sibling_drafts")


class Engine:
    """Runs generations on one target, with a drafter, copies, or both; any thread may call it, one at a time."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        costs: RoundCosts | None = None,
        *,
        lookup: Lookup | None = None,
        exactness: Exactness = NOT_CHECKED,
        kernels: Implementation | None = None,
        max_drafter_states: int = MAX_DRAFTER_STATES,
        reuse_replies: bool = False,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        """Bind what a generation needs.

        costs: of rounds on this machine, for the automatic depth; without them it is the drafter's largest.
        lookup: drafts by copying, alone or, with costs, where that is better than the drafter; None for no copies.
        exactness: whether its rows are exact, for statistics.
        kernels: the implementation of all operations, whatever is chosen around a call; by default the one that is
            chosen when the engine is made.
        max_drafter_states: of how many generations the drafter remembers something; of others it begins anew.
        reuse_replies: a generation that goes on from another shares all that is cached of the same tokens. On a
            GPU its text may then differ from that of a prompt which is read from its start.
        at_end: called whenever a text has come to its end and its generation is closed, trimmed or cancelled.
        Raises RequestError for fewer than the 16 that one round may have, and for a lookup of other tokens.
        """
        if lookup is not None:
            lookup.check_vocabulary(target.vocab_size)
        self.reuse_replies = reuse_replies
        self.at_end = at_end
        self.target = target
        self.drafter = drafter
        self.lookup = lookup
        self.costs = costs
        self.exactness = exactness
        self.kernels = kernels or implementation()
        self.states = DrafterStates(drafter, max_drafter_states)
        self._scheduler = Scheduler(target.context, costs)
        compute(target, drafter)

    @property
    def sources(self) -> list[str]:
        """The names of what drafts, apart from grammars."""
        return [source.name for source in (self.drafter, self.lookup) if source is not None]

    @property
    def max_draft(self) -> int:
        """The most tokens that a request may ask to be drafted: by the drafter, or without one by copying."""
        return self.states.max_draft or (self.lookup.max_draft if self.lookup else 0)

    def start(self, request: Request, after: Generation | None = None) -> Generation:
        """Check a request and return its generation at once; ``step`` reads its prompt, see ``read``.

        after: an earlier generation, finished or not, of which the prompt repeats the beginning. What is cached of
            that is shared: the whole chunks of the earlier prompt, so that the text is that of a prompt which is
            read from its start; with ``reuse_replies`` everything, replies too.
        Raises RequestError or ContextFull, and RequestError for an earlier generation that was closed.
        """
        request.check(self.target, self.max_draft)
        if after is not None and after.is_closed:
            raise RequestError(
                "A generation that was closed cannot be continued; close it after the next one began."
            )
        generation = Generation(
            request,
            self.target.open(),
            rule_for(request.sampling, self.target.vocab_size),
            self._policy(request, len(request.prompt)),
            list(request.prompt),
            Statistics(
                exactness=self.exactness, kernels=in_words(self.kernels), prompt_tokens=len(request.prompt)
            ),
            lookup=self._lookup(request),
            place=request.grammar,
        )
        try:
            if after is not None:
                take_over(self.states, generation, after, self.reuse_replies)
            if generation.drafter_state is None:
                self.states.open(generation, generation.sequence.length)
            with using(self.kernels):
                show_progress(generation)
        except BaseException:
            self.close(generation)
            raise
        return generation

    def read(self, generation: Generation) -> None:
        """Read what is left of a generation's prompt, all but its last token: that is the first anchor.

        Raises ContextFull where the pool has too few free pages, with what was read before kept.
        """
        with using(self.kernels):
            while not generation.is_read:
                read_chunk(self.target, self.states, generation)
                self._come_to_rest([generation])

    def cancel(self, generation: Generation) -> None:
        """End a generation that runs. What is cached stays until it is closed: another may go on from it."""
        has_come_to_its_end = generation.finish_reason in ("stop", "length")
        if generation.finish_reason is None:
            generation.finish_reason = "cancelled"
        self._explain_depth(generation)
        if has_come_to_its_end:
            self.settle()
            generation.statistics.exactness = self.exactness

    def settle(self) -> None:
        """Do now what waits until a first text has ended: ``exactness`` is known afterwards."""
        if self.at_end is not None:
            with using(self.kernels):
                self.at_end()
            self._come_to_rest([])

    def reusable_tokens(self, request: Request, earlier: Generation) -> int:
        """Return how many tokens of its prompt a request would share with an earlier generation, see ``start``."""
        _, sequence = shared_part(request, earlier, self.reuse_replies)
        if sequence is None:
            return 0
        length = sequence.length
        sequence.free()
        return length

    def trim(self, generation: Generation) -> None:
        """End a generation and give back what none that goes on from it would share, see ``start``."""
        self.cancel(generation)
        if not self.reuse_replies:
            trim(self.states, generation)

    @overload
    def step(self, generations: Generation) -> Round: ...

    @overload
    def step(self, generations: Sequence[Generation]) -> list[Round]: ...

    def step(self, generations: Generation | Sequence[Generation]) -> Round | list[Round]:
        """Run one round: of a generation, or of several in one pass, and return what each of them got.

        Of those whose prompts are not read yet, one gets a chunk read, or several whose rests together are no more
        than one chunk; who is read then takes part in the round, and others get an empty one.

        Up to 16 sequences take part; of more, those whose turn it is. The others, and those that are finished, get
        an empty round. What goes wrong with a generation, such as ContextFull or NonFiniteError, is never raised:
        it is ``Round.error``, of one as of several; ``Round.checked`` raises it. That generation is as before, and
        the others go on. What is raised, by an interruption for example, leaves all of them as they were.
        Raises RequestError for a generation that was closed, or that is named twice.
        """
        return self._step(generations, answering=False)

    @overload
    def answer_step(self, generations: Generation) -> Round: ...

    @overload
    def answer_step(self, generations: Sequence[Generation]) -> list[Round]: ...

    def answer_step(self, generations: Generation | Sequence[Generation]) -> Round | list[Round]:
        """Run one round for short exact answers: tokens that the full logits confirm, with log-probabilities.

        For greedy requests, of one generation or of several in one pass. The token of each row is compared with
        the largest of its full logits; at the first that differs the full logits' token is emitted, and the round
        ends with it. Tokens and log-probabilities are those of plain decoding, bit for bit.
        Errors are those of ``step``; raises RequestError too for a request that draws.
        """
        for each in listed(generations):
            if temp := each.request.sampling.temp:
                raise RequestError(
                    f"answer_step takes the most likely tokens; this request draws, with temp {temp}."
                )
        return self._step(generations, answering=True)

    def fork(self, generation: Generation, *, seed: int | None = None, **changes: Any) -> Generation:
        """Return a generation that goes on from here on its own; both share what is cached so far.

        A prompt is read to its end before.

        seed: of the fork's own draws.
        changes: of other fields of its request, such as ``is_end`` or ``max_tokens``, which counts from the start;
            not of its prompt.
        The fork of a finished generation goes on after its end; where its ``max_tokens`` is reached already, it is
        finished by length.
        Raises RequestError for settings without a meaning and for a generation that was closed.
        """
        if generation.is_closed:
            raise RequestError("A generation that was closed cannot be forked.")
        self.read(generation)
        request = changed(generation.request, seed, changes)
        request.check(self.target, self.max_draft)
        new_depth = not changes.keys().isdisjoint(DEPTH_FIELDS)
        copied = self._lookup(request) if new_depth or generation.lookup is None else generation.lookup.fork()
        fork = Generation(
            request,
            generation.sequence.fork(),
            rule_for(request.sampling, self.target.vocab_size),
            self._policy(request, len(generation.tokens)) if new_depth else deepcopy(generation.policy),
            list(generation.tokens),
            generation.statistics.copy(),
            lookup=copied,
            place=request.grammar if "grammar" in changes else generation.place,
            finish_reason=None if generation.remaining_tokens_of(request) > 0 else "length",
            last_turn=generation.last_turn,
        )
        self.states.fork(generation, fork)
        return fork

    def close(self, generation: Generation) -> None:
        """Give the pages of a generation back, finished or not. It cannot be continued afterwards."""
        self.cancel(generation)
        generation.is_closed = True
        for part in (generation, generation.boundary):
            if part is not None:
                discard(self.states, part)
        for kept in generation.marks:
            kept.free()
        generation.boundary, generation.marks = None, []

    def _step(self, asked: Generation | Sequence[Generation], answering: bool) -> Round | list[Round]:
        """Run a round, and return it as it was asked for; whatever is raised leaves no generation changed."""
        generations = listed(asked)
        if len(set(generations)) < len(generations):
            raise RequestError("A generation is named twice: it can have one part in a round only.")
        if any(generation.is_closed for generation in generations):
            raise RequestError("A generation was closed and cannot go on; fork it before, or start another.")
        unread = self._read_some(generations)
        running = self._scheduler.next([each for each in generations if each not in unread])
        before, taught = [Snapshot.of(generation) for generation in running], Taught()
        try:
            with using(self.kernels):
                rounds = unread | self._rounds(running, answering, taught)
                self._come_to_rest(running, [each.logprobs for each in rounds.values() if each.logprobs])
            for generation in running:
                generation.statistics.kernels = in_words(self.kernels)
            found = [rounds.get(generation) or Round() for generation in generations]
            for accepted in taught.accepted:
                learn(accepted)
                if accepted.finish_reason is not None:
                    self._explain_depth(accepted.generation)
            if self.costs is not None and not unread:
                for setting, shape, ms in taught.times:
                    self.costs.learn(setting, shape, ms)
            return found[0] if isinstance(asked, Generation) else found
        except BaseException:
            for snapshot in before:
                snapshot.restore(self.states)
            self._come_to_rest(running)
            raise

    def _read_some(self, generations: Sequence[Generation]) -> dict[Generation, Round]:
        """Read a chunk's worth of prompts; return an empty round, or the error, of who has to wait."""
        waiting = [each for each in generations if each.finish_reason is None and not each.is_read]
        chosen, errors = self._scheduler.to_read(waiting, [next_chunk(each) for each in waiting]), {}
        with using(self.kernels):
            for generation in chosen:
                try:
                    read_chunk(self.target, self.states, generation)
                except MlxSpecError as error:
                    errors[generation] = error
        self._come_to_rest(chosen)
        return {each: Round(error=errors.get(each)) for each in waiting if not each.is_read}

    def _come_to_rest(self, generations: Sequence[Generation], also: Any = None) -> None:
        """Compute what these generations left lazy: another thread may go on with them."""
        states = [(each.drafter_state, each.rule, each.ahead) for each in generations]
        compute(self.target.pool.data, states, also)

    def _rounds(self, running: Sequence[Generation], answering: bool, taught: Taught) -> dict[Generation, Round]:
        """Run a pass; those whose drafts were not finite take part in another one, without drafts."""
        shares, errors = self._scheduler.shares(running)
        rounds = run_round(self.target, self.states, shares, errors, taught, answering)
        failed = {generation: error for generation, error in errors.items() if isinstance(error, DrafterFailure)}
        for generation, failure in failed.items():
            del errors[generation]
            self.states.give_up(generation, str(failure))
        if failed:
            shares, more_errors = self._scheduler.shares(list(failed))
            rounds |= run_round(self.target, self.states, shares, more_errors, taught, answering)
            errors |= more_errors
        return rounds | {generation: Round(error=error) for generation, error in errors.items()}

    def _explain_depth(self, generation: Generation) -> None:
        """Say in the statistics of a generation that ends why its draft depth is what it is."""
        generation.statistics.depth_reason = generation.policy.reason if self.max_draft else ""

    def _policy(self, request: Request, length: int) -> DepthPolicy:
        """Return the policy of a request whose next round comes after so many tokens."""
        most = self.states.max_draft
        return policy_for(
            request.num_draft_tokens,
            request.num_sibling_drafts,
            most if request.max_draft_tokens is None else min(most, request.max_draft_tokens),
            self.costs,
            Setting(request.work, 1, length),
            takes_trees=self.target.takes_trees,
            max_copy=0
            if self.lookup is None
            else min(self.lookup.max_draft, request.max_draft_tokens or MAX_COPY),
        )

    def _lookup(self, request: Request) -> LookupState | None:
        """Return the state of copies for a request; beside a drafter it has them where costs decide."""
        is_wanted = request.may_draft and (not self.drafter or (request.num_draft_tokens is None and self.costs))
        return self.lookup.open() if self.lookup and is_wanted else None


def changed(request: Request, seed: int | None, changes: dict[str, Any]) -> Request:
    """Return a request with other settings. Raises RequestError for a name that is none of them."""
    allowed = [field.name for field in fields(Request) if field.name != "prompt"]
    if wrong := sorted(changes.keys() - set(allowed)):
        raise RequestError(f"A fork cannot change {', '.join(wrong)}; it can change {', '.join(allowed)}.")
    request = replace(request, **changes)
    return request if seed is None else replace(request, sampling=replace(request.sampling, seed=seed))


def listed(generations: Generation | Sequence[Generation]) -> Sequence[Generation]:
    """Return generations as a sequence, a single one too."""
    return [generations] if isinstance(generations, Generation) else generations
