"""What the drafter remembers of each generation: a bounded number of states, the least recently used go first."""

import logging
from collections.abc import Sequence

import mlx.core as mx

from metal_kernels import MAX_VERIFY_ROWS, is_traceable
from mlx_spec.drafters.base import Committed, Draft, Drafter, DraftRequest, DraftsAhead, Unread
from mlx_spec.engine.generation import Generation
from mlx_spec.errors import PositionError, RequestError
from mlx_spec.target import Pass

MAX_DRAFTER_STATES = 64

logger = logging.getLogger(__name__)


class DrafterStates:
    """The only place that opens, forks, extends, rewinds and frees states of a drafter.

    Without a drafter nothing is remembered, and nothing is drafted.
    """

    def __init__(self, drafter: Drafter | None, max_states: int = MAX_DRAFTER_STATES) -> None:
        """Raise RequestError for fewer states than the 16 sequences that one round may have."""
        if max_states < MAX_VERIFY_ROWS:
            raise RequestError(f"max_drafter_states must be at least {MAX_VERIFY_ROWS}, not {max_states}.")
        self.drafter = drafter
        self.max_states = max_states
        # Where a device computes while the host reads and decides.
        self.drafts_ahead = is_traceable() and isinstance(drafter, DraftsAhead)
        # The least recently used first.
        self._used: dict[Generation, None] = {}

    @property
    def name(self) -> str:
        """The name of the drafter's kind, "" without one."""
        return self.drafter.name if self.drafter else ""

    @property
    def max_draft(self) -> int:
        """The most tokens of a draft, 0 without a drafter."""
        return self.drafter.max_draft if self.drafter else 0

    def target_layer_ids(self, generations: Sequence[Generation]) -> tuple[int, ...]:
        """Return the layers whose states the drafter reads of these generations."""
        wanted = self.drafter is not None and any(generation.may_draft for generation in generations)
        return self.drafter.target_layer_ids if self.drafter is not None and wanted else ()

    def propose(self, requests: Sequence[tuple[Generation, int]]) -> list[Draft]:
        """Draft so many tokens, at least one, for each of these generations, in one draft pass."""
        if self.drafter is None or not requests:
            return []
        return self.drafter.propose(
            [
                DraftRequest(generation.drafter_state, generation.tokens[-1], count, generation.rule)
                for generation, count in requests
            ]
        )

    def propose_ahead(self, generation: Generation, count: int, unread: Unread) -> None:
        """Draft for the next round of a generation, before the host has read what this one accepts.

        Nothing is drafted for a generation that the drafter remembers nothing of, or by one that cannot do this.
        """
        if isinstance(self.drafter, DraftsAhead) and generation.drafter_state is not None and count:
            generation.ahead = self.drafter.propose_ahead(generation.drafter_state, count, generation.rule, unread)

    def open(self, generation: Generation, position: int = 0) -> None:
        """Begin to remember a generation whose rows from ``position`` on will be shown."""
        if self.drafter is not None and generation.may_draft:
            generation.drafter_state = self.drafter.open(position)
            self._use(generation)

    def fork(self, generation: Generation, fork: Generation) -> None:
        """Remember of a fork what is remembered of its generation."""
        if generation.drafter_state is not None and fork.may_draft:
            fork.drafter_state = generation.drafter_state.fork()
            self._use(fork)

    def extend(self, committed: Sequence[tuple[Generation, Pass, mx.array]]) -> None:
        """Show the drafter rows that the target committed, with their tokens.

        Of a generation that it remembers nothing of, it begins with these rows.
        """
        updates = []
        for generation, rows, tokens in committed:
            if self.drafter is None or not generation.may_draft:
                continue
            position = generation.sequence.length - tokens.size
            if generation.drafter_state is None:
                self.open(generation, position)
            self._use(generation)
            committed_rows = Committed(position, tokens, rows.aux_hidden_states, generation.ahead)
            updates.append((generation.drafter_state, committed_rows))
        if self.drafter is not None and updates:
            self.drafter.extend(updates)

    def rewind(self, generation: Generation, position: int) -> None:
        """Forget what was shown of a generation from ``position`` on."""
        generation.ahead = None
        if self.drafter is not None and generation.drafter_state is not None:
            self.drafter.rewind(generation.drafter_state, position)

    def move(self, generation: Generation, to: Generation) -> None:
        """Remember of one generation what was remembered of another, and of that nothing."""
        self.forget(to)
        to.drafter_state, generation.drafter_state = generation.drafter_state, None
        if self._used.pop(generation, 0) is None:
            self._use(to)

    def continue_from(self, source: Generation, generation: Generation) -> None:
        """Remember of a generation what is remembered of another up to where the first one's sequence ends.

        Nothing, where the drafter cannot go back to there: it begins anew with the rows that follow.
        """
        self.fork(source, generation)
        if self.drafter is None or generation.drafter_state is None:
            return
        try:
            position = self.drafter.rewind(generation.drafter_state, generation.sequence.length)
        except PositionError:
            position = -1
        if position != generation.sequence.length:
            self.forget(generation)

    def forget(self, generation: Generation) -> None:
        """Free the state of a generation; should it go on, the drafter begins anew there."""
        self._used.pop(generation, None)
        generation.ahead = None
        if generation.drafter_state is not None:
            generation.drafter_state.free()
            generation.drafter_state = None

    def give_up(self, generation: Generation, reason: str) -> None:
        """Draft no more for a generation, and say why in its statistics."""
        self.forget(generation)
        generation.statistics.drafter_failure = reason
        logger.info("Drafting ends for a generation of %d tokens: %s", len(generation.tokens), reason)

    def _use(self, generation: Generation) -> None:
        self._used.pop(generation, None)
        self._used[generation] = None
        if len(self._used) > self.max_states:
            oldest = next(iter(self._used))
            self.forget(oldest)
            logger.info(
                "The drafter forgets a generation of %d tokens: it remembers at most %d.",
                len(oldest.tokens),
                self.max_states,
            )
