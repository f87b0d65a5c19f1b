"""The protocol between the engine and a drafter: everything that either knows of the other.

A drafter reads hidden states of rows that the target has committed and proposes the next tokens. It never touches
the target's cache and never decides what is accepted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from mlx_spec.drafters.tree import Tree, chain_of, tree_of
from mlx_spec.target import PagePool

SampleDraft = Callable[[int, mx.array, mx.array], tuple[mx.array, mx.array | None]]
"""Picks a drafted token: (position, candidate ids [K], scores [K]) to (token, probabilities [K] or None)."""


@dataclass(frozen=True)
class Committed:
    """Rows that became part of the target's sequence.

    position: of the first row.
    tokens: [n], the rows' token ids.
    aux_hidden_states: [n, T * H], of the layers that the drafter asked for, side by side.
    """

    position: int
    tokens: mx.array
    aux_hidden_states: mx.array


@dataclass(frozen=True)
class Draft:
    """Drafted tokens for the positions after the anchor, all lazy.

    tokens: [k] int32.
    candidates: [k, K], the token ids that each was chosen from, the best first.
    probabilities: [k, K], the distribution that each was drawn from; None where it was not drawn.
    finite: for each named stage of the draft pass, whether all its numbers are finite: bool of any shape.
    scores: [k, K], of the candidates; None if the drafter gives none, then no siblings can be added.
    parents: None for a chain; of a tree, see there. Its siblings were drawn from one distribution, without
        replacement and in their order.
    """

    tokens: mx.array
    candidates: mx.array
    probabilities: mx.array | None = None
    finite: Mapping[str, mx.array] = field(default_factory=dict)
    scores: mx.array | None = None
    parents: tuple[int, ...] | None = None

    @property
    def tree(self) -> Tree:
        """How the anchor and the tokens follow each other."""
        return chain_of(self.tokens.size) if self.parents is None else tree_of(self.parents)


@dataclass(frozen=True)
class DraftRequest:
    """What one sequence wants of a draft pass.

    state: the drafter's, of this sequence.
    anchor: the token that drafts follow.
    count: tokens to draft.
    sample_draft: draws each of them.
    """

    state: Any
    anchor: int
    count: int
    sample_draft: SampleDraft


def nothing_drafted() -> Draft:
    """Return a draft without tokens."""
    return Draft(mx.zeros((0,), dtype=mx.int32), mx.zeros((0, 0), dtype=mx.int32))


def stack_drawn(rows: list[mx.array | None]) -> mx.array | None:
    """Stack the distributions [K] that tokens were drawn from, or return None when there were none."""
    drawn = [row for row in rows if row is not None]
    return mx.stack(drawn) if drawn else None


class DrafterState(Protocol):
    """What a drafter remembers of one sequence."""

    def fork(self) -> "DrafterState":
        """Return an independent copy."""
        ...

    def free(self) -> None:
        """Give back what it holds; it is not used afterwards."""
        ...


class Drafter(Protocol):
    """Proposes tokens.

    name: of its kind.
    pool: the pages of its states.
    target_layer_ids: the layers whose states it reads (see Target).
    max_draft: the most tokens of a draft.
    """

    name: str
    pool: PagePool
    target_layer_ids: tuple[int, ...]
    max_draft: int

    def open(self, position: int = 0) -> Any:
        """Return the state for a sequence whose rows it will see from ``position`` on.

        After position 0 there is a gap: the sequence was decoded without the drafter, or was forgotten. Drafting
        begins with the rows that are committed next, as if nothing were before them.
        """
        ...

    def extend(self, updates: Sequence[tuple[Any, Committed]]) -> None:
        """Take in rows that the target committed, of each state its own, in order and without gaps.

        Raises PositionError, with nothing changed, for a gap or an overlap.
        """
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft for several sequences in one pass: for each request 1 to ``max_draft`` tokens after its anchor.

        Lazy: no host synchronisation. What is drafted for a sequence may depend on the others. A drafter that has
        not seen enough of a sequence yet drafts fewer, or none.
        """
        ...

    def rewind(self, state: Any, position: int) -> int:
        """Forget rows from ``position`` on, and return where the next committed rows must begin.

        That is ``position``, or an earlier one whose rows the target has to run again because the drafter needs
        to see them once more. A position ahead of what the state holds changes nothing.
        Raises PositionError, with nothing changed, where what the drafter needs before that is lost.
        """
        ...
