"""The protocol between the engine and a drafter: all that each knows of the other.

A drafter reads hidden states of rows that the target has committed, and drafts the tokens that follow. It never
touches the target's cache and never decides what is accepted.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx

from mlx_spec.drafters.stages import Record
from mlx_spec.drafters.tree import Tree, chain_of, tree_of
from mlx_spec.errors import RequestError
from mlx_spec.target import PagePool


class Drawn(NamedTuple):
    """A drafted token.

    token: int32 scalar.
    ranks: [K] float32, of the candidates; the token's is the largest.
    probabilities: [K] float32, of the candidates; None where the rule needs none later.
    """

    token: mx.array
    ranks: mx.array
    probabilities: mx.array | None = None


class DraftRule(Protocol):
    """How a request draws drafted tokens from candidates.

    way: equal for rules whose ``draw`` differs by its arguments alone; one graph serves these.
    """

    @property
    def way(self) -> Hashable: ...

    def noise(self, position: int, count: int, candidates: int) -> mx.array | None:
        """Return what draws for ``count`` positions from ``position`` on read besides scores.

        Float32 [count, V] or [count, candidates]; None where they read nothing else.
        """
        ...

    def ranks(self, ids: mx.array, scores: mx.array, noise: mx.array | None) -> mx.array:
        """Return values of candidates, float32 [..., K], of which the largest is drawn.

        ids: int32 [..., K].
        scores: [..., K].
        noise: of their positions, see ``noise``: [..., V or candidates].
        """
        ...

    def probabilities(self, scores: mx.array) -> mx.array | None:
        """Return the distribution that is drawn from, float32 [..., K], where it is needed later."""
        ...

    def draw(self, ids: mx.array, scores: mx.array, noise: mx.array | None) -> Drawn:
        """Draw one of the candidates ids [K] int32 with scores [K], lazily.

        noise: that of one position, see ``noise``.
        """
        ...


@dataclass(frozen=True)
class Committed:
    """Rows that became part of the target's sequence.

    position: of the first row.
    tokens: [n] int32, the rows' token ids.
    aux_hidden_states: [n, T * H], outputs of the drafter's ``target_layer_ids`` side by side.
    ahead: what the drafter computed of these rows already, see ``DraftsAhead``.
    """

    position: int
    tokens: mx.array
    aux_hidden_states: mx.array
    ahead: "Ahead | None" = None


@dataclass(frozen=True)
class Draft:
    """Drafted tokens for the positions after the anchor, all lazy.

    tokens: [k] int32.
    candidates: [k, K] int32, the token ids that each was chosen from, the best first.
    probabilities: [k, K] float32, the distribution that each was drawn from; None where it was not drawn.
    finite: by name of a stage of the draft pass, whether all its numbers are finite: bool of any shape.
    ranks: [k, K] float32, of the candidates, the drawn one's is the largest; None if the drafter gives none, then
        no siblings can be added.
    parents: see ``Tree``; None for a chain. Siblings are drawn from one distribution, without replacement, in
        their order.
    """

    tokens: mx.array
    candidates: mx.array
    probabilities: mx.array | None = None
    finite: Mapping[str, mx.array] = field(default_factory=dict)
    ranks: mx.array | None = None
    parents: tuple[int, ...] | None = None

    def first(self, count: int) -> "Draft":
        """Return a chain of the first ``count`` tokens at most."""
        if count >= self.tokens.size:
            return self
        parts = (self.tokens, self.candidates, self.probabilities, self.ranks)
        tokens, candidates, probabilities, ranks = (None if x is None else x[:count] for x in parts)
        assert tokens is not None and candidates is not None
        return Draft(tokens, candidates, probabilities, self.finite, ranks)

    @property
    def tree(self) -> Tree:
        """The tree that anchor and tokens form."""
        return chain_of(self.tokens.size) if self.parents is None else tree_of(self.parents)


@dataclass(frozen=True)
class DraftRequest:
    """What one sequence asks of a draft pass.

    state: the drafter's state of this sequence.
    anchor: the token that the drafts follow.
    count: tokens to draft.
    rule: draws each of them.
    """

    state: Any
    anchor: int
    count: int
    rule: DraftRule


@dataclass(frozen=True)
class Unread:
    """The rows of one sequence's round whose outcome the host has not read.

    position: of the anchor.
    tree: of the rows.
    tokens: [k + 1] int32, of the rows.
    aux_hidden_states: [k + 1, T * H], see Committed.
    outcome: int32, what ``AcceptRule.accept`` returned.
    """

    position: int
    tree: Tree
    tokens: mx.array
    aux_hidden_states: mx.array
    outcome: mx.array

    @cached_property
    def became(self) -> "Outcome":
        """What will have become of the rows, lazily."""
        return Outcome.of(self.tree, self.outcome)


class Outcome(NamedTuple):
    """What became of a round's k + 1 rows, lazily.

    path: int32 [k + 1], the accepted rows from the anchor on, then any others; None where these come in order.
    accepted: int32 [1], how many drafts are accepted.
    emitted: int32 [k + 1], the tokens after the rows of the path; ``following`` after the last of them.
    following: int32 [1], the token after the accepted ones: the next anchor.
    """

    path: mx.array | None
    accepted: mx.array
    emitted: mx.array
    following: mx.array

    @staticmethod
    def of(tree: Tree, outcome: mx.array) -> "Outcome":
        """Take apart what ``AcceptRule.accept`` returned for the rows of a tree."""
        k = tree.num_rows - 1
        last, following = outcome[k], outcome[k + 1]
        emitted = tree.emitted(last, outcome[:k], following)
        path = None if tree.is_chain else tree.rows_to(last)
        emitted = emitted if path is None else emitted[path]
        return Outcome(path, tree.depth_of(last).reshape(1), emitted, following.reshape(1))

    def rows(self, x: mx.array) -> mx.array:
        """Return what was computed of the rows, [k + 1, ...], in the order of the path."""
        return x if self.path is None else x[self.path]


@dataclass(frozen=True)
class Ahead:
    """A draft that was made before the host read the round before.

    draft: the drafted tokens.
    rows: what the drafter keeps of that round's rows, in the order of the accepted path.
    """

    draft: Draft
    rows: Any = None


def noise_after(accepted: mx.array, noise: mx.array | None, count: int) -> mx.array | None:
    """Return the noise of the ``count`` positions after accepted rows, of that of all positions which may come.

    accepted: int32 [1], how many drafts are accepted.
    noise: from the position on that follows when none is; see ``DraftRule.noise``.
    """
    return None if noise is None else noise[accepted + mx.arange(count)]


def check_count(count: int, most: int) -> None:
    """Raise RequestError for a count of tokens outside 1 to what a drafter drafts at most."""
    if not 1 <= count <= most:
        raise RequestError(f"This drafter drafts 1 to {most} tokens a round, not {count}.")


def stacked(rows: Sequence[mx.array | None]) -> mx.array | None:
    """Stack the distributions [K] that tokens were drawn from, or return None where none is needed."""
    kept = [row for row in rows if row is not None]
    return mx.stack(kept) if kept else None


def nothing_drafted() -> Draft:
    """Return a draft without tokens."""
    return Draft(mx.zeros((0,), dtype=mx.int32), mx.zeros((0, 0), dtype=mx.int32))


class DrafterState(Protocol):
    """What a drafter remembers of one sequence."""

    def fork(self) -> "DrafterState":
        """Return an independent copy."""
        ...

    def free(self) -> None:
        """Free what it holds; the state is not used afterwards."""
        ...


@runtime_checkable
class DraftsAhead(Protocol):
    """A drafter that can draft after a round of which the host has read nothing yet."""

    def propose_ahead(self, state: Any, count: int, rule: DraftRule, unread: Unread) -> Ahead | None:
        """Draft ``count`` tokens after the rows that a round will accept, lazily.

        state: it holds all rows before the round's anchor, and stays what it is. Once the accepted rows are added
            to it, with the result as ``Committed.ahead``, the draft is that of the next round.
        Returns None where the drafter has not seen enough of the sequence.
        """
        ...


class Drafter(Protocol):
    """Drafts tokens.

    name: of its kind.
    pool: the pages of its states.
    target_layer_ids: the target layers whose outputs it reads, see Target.
    max_draft: the most tokens of a draft.
    """

    name: str
    pool: PagePool
    target_layer_ids: tuple[int, ...]
    max_draft: int

    def open(self, position: int = 0) -> Any:
        """Return the state of a sequence whose rows are committed to the drafter from ``position`` on.

        Rows before it are missing: the sequence was decoded without the drafter, or its state was freed. The
        drafter drafts as if the sequence began there.
        """
        ...

    def extend(self, updates: Sequence[tuple[Any, Committed]]) -> None:
        """Add rows that the target committed to their states, in order and without gaps.

        Raises PositionError, with nothing changed, for a gap or an overlap.
        """
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft for several sequences in one pass, lazily: nothing is synchronised with the host.

        Returns a draft for each request, of as many tokens as it asks for, or of fewer where the drafter has not
        seen enough of the sequence. The drafts of a sequence may depend on the others of the pass.
        Raises RequestError for a count outside 1 to ``max_draft``.
        """
        ...

    def rewind(self, state: Any, position: int) -> int:
        """Forget rows from ``position`` on, and return the position where the next committed rows must begin.

        That is ``position``, or an earlier one: the target has to run the rows in between again, because the
        drafter needs their hidden states. A position after the state's last row changes nothing.
        Raises PositionError, with nothing changed, where what the drafter needs before that is lost.
        """
        ...


class ObservedDrafter(Drafter, Protocol):
    """A drafter that can be diagnosed.

    Its states have ``moved(by)``: a copy whose rows to come, those that wait included, have positions that are
    larger by ``by``.
    """

    @property
    def draft_ids(self) -> mx.array | None:
        """The tokens [N] that its draft logits are of; None for all, in order."""
        ...

    @property
    def is_quantized(self) -> bool:
        """Whether its linear maps are quantised."""
        ...

    def observe(self, requests: Sequence[DraftRequest], record: Record) -> list[Draft]:
        """Do what ``propose`` does, and hand every stage of the pass to ``record``, in the order of computing.

        Nothing is compiled or fused that would hide a stage. Rows of several sequences lie side by side.
        """
        ...
