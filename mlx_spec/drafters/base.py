"""The protocol between the engine and a drafter: everything that either knows of the other.

A drafter reads hidden states of rows that the target has committed and proposes the next tokens. It never touches
the target's cache and never decides what is accepted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from mlx_spec.target import PagePool
from mlx_spec.drafters.tree import Tree, chain_of, tree_of

Choose = Callable[[int, mx.array, mx.array], tuple[mx.array, mx.array | None]]
"""Picks a drafted token: (position, candidate ids [K], scores [K]) to (token, probabilities [K] or None)."""


@dataclass(frozen=True)
class Committed:
    """Rows that became part of the target's sequence.

    position: of the first row. tokens: [n] token ids of the rows. taps: [n, T * H], the drafter's taps.
    """

    position: int
    tokens: mx.array
    taps: mx.array


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens for the positions behind the anchor, all lazy.

    tokens: [k] int32. candidates: [k, K] token ids that each was chosen from, scores: [k, K], what it was chosen
    by (None: there is nothing to put beside it), and probabilities: [k, K], the distribution it was drawn from
    (None where it was not drawn). finite: for each named stage of the pass, a scalar bool that is false when
    the stage produced NaN or infinity. parents: None for a chain; of a tree, see there. Its siblings were drawn
    from one distribution, without replacement and in their order.
    """

    tokens: mx.array
    candidates: mx.array
    probabilities: mx.array | None = None
    finite: Mapping[str, mx.array] = field(default_factory=dict)
    scores: mx.array | None = None
    parents: tuple[int, ...] | None = None

    @property
    def tree(self) -> Tree:
        """How the anchor and the tokens stand behind each other."""
        return chain_of(self.tokens.size) if self.parents is None else tree_of(self.parents)


@dataclass(frozen=True)
class Ask:
    """One sequence's wish in a draft pass: ``count`` tokens behind its anchor, drawn by ``choose``."""

    state: Any
    anchor: int
    count: int
    choose: Choose


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

    taps: which hidden states of the target it reads (see Target). pool: the pages that its states are held in.
    """

    name: str
    pool: PagePool
    taps: tuple[int, ...]
    max_draft: int

    def open(self, position: int = 0) -> Any:
        """Return the state for a sequence whose rows it will see from ``position`` on.

        Behind 0 there is a gap: of a sequence that was decoded without the drafter, or was forgotten. Drafting
        begins with the rows that are committed next, as if nothing were before them.
        """
        ...

    def extend(self, updates: Sequence[tuple[Any, Committed]]) -> None:
        """Take in rows that the target committed, of each state its own, in order and without gaps."""
        ...

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """Draft for several sequences in one pass: for each ask its 1 to ``max_draft`` tokens behind the anchor.

        Lazy: no host synchronisation. What is drafted for a sequence may depend on the others. A drafter that has
        not seen enough of a sequence yet drafts fewer, or none.
        """
        ...

    def rewind(self, state: Any, position: int) -> int:
        """Forget rows from ``position`` on, and return where the next committed rows must begin.

        That is ``position``, or an earlier one whose rows the target has to run again because the drafter needs
        to see them once more. A position ahead of what the state holds changes nothing.
        """
        ...
