"""The tree that the rows of a round form: each row follows its parent. A chain is a tree without branches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import mlx.core as mx

from metal_kernels import ints


@dataclass(frozen=True)
class Tree:
    """Rows 0 to k of a round; row 0 is the anchor, row i + 1 is drafted token i.

    parents: ``parents[i]`` is the row that row i + 1 follows. Parents come before their children, siblings in the
        order in which they were drawn.
    All arrays that a tree holds are constants of its shape.
    """

    parents: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """R, the number of rows: k + 1."""
        return len(self.parents) + 1

    @property
    def is_chain(self) -> bool:
        """Whether each row follows the one before it."""
        return self.parents == tuple(range(len(self.parents)))

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """For each row, the rows from the anchor to it, itself included."""
        found: list[tuple[int, ...]] = [(0,)]
        for row, parent in enumerate(self.parents, 1):
            found.append((*found[parent], row))
        return tuple(found)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """For each row, its distance from the anchor."""
        return tuple(len(path) - 1 for path in self.paths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For each row, the rows that follow it."""
        return tuple(
            tuple(child for child, parent in enumerate(self.parents, 1) if parent == row)
            for row in range(self.num_rows)
        )

    @cached_property
    def chain(self) -> tuple[int, ...]:
        """The path of first children, from the anchor on."""
        path = [0]
        while self.children[path[-1]]:
            path.append(self.children[path[-1]][0])
        return tuple(path)

    def along_chain(self, path: Sequence[int]) -> int:
        """Return how many rows of a path after the anchor are in the chain."""
        return sum(row in self.chain for row in path) - 1

    def runner_up(self, path: Sequence[int]) -> bool | None:
        """Return whether a path goes on with the first sibling of the chain's first rejected row.

        None where this row has no siblings.
        """
        siblings = self.children[self.chain[self.along_chain(path)]][1:]
        return siblings[0] in path if siblings else None

    @cached_property
    def lies_before(self) -> mx.array:
        """Bool [R, R]: whether row j is on the path to row i."""
        return self._table([[int(row in path) for row in range(self.num_rows)] for path in self.paths]) > 0

    def last_accepted(self, matches: mx.array) -> mx.array:
        """Return the last accepted row, int32: the deepest row, first of these, with a path of matching rows.

        matches: [k] bool, of rows 1 to k.
        """
        matches = mx.concatenate([mx.ones((1,), dtype=mx.bool_), matches])
        accepted = mx.all(matches[None] >= self.lies_before, axis=1)
        return mx.argmax(mx.where(accepted, ints(*self.depths), -1)).astype(mx.int32)

    def on_path(self, last: mx.array, flags: mx.array) -> mx.array:
        """Return whether ``flags`` [R], bool, hold for all rows from the anchor to row ``last``."""
        return mx.all(flags >= self.lies_before[last])

    def emitted(self, last: mx.array, tokens: mx.array, following: mx.array) -> mx.array:
        """Return the token that each row of the accepted path emits: [R] int32.

        last: int32, the last row of the path.
        tokens: [k] int32, of rows 1 to k.
        following: int32, the token that row ``last`` emits; entries of rows off the path are this token too.
        """
        return mx.concatenate([tokens, following.reshape(1)])[self._successors[last]]

    def rows_to(self, last: mx.array) -> mx.array:
        """Return the rows of the path to row ``last``, int32, from the anchor on: [R], filled up with any rows."""
        return self._paths[last]

    def depth_of(self, row: mx.array) -> mx.array:
        """Return how far a row is from the anchor, int32."""
        return row if self.is_chain else ints(*self.depths)[row]

    @cached_property
    def _paths(self) -> mx.array:
        """Int32 [R, R]: row i holds the path to row i, then zeros."""
        return self._table([[*path, *[0] * (self.num_rows - len(path))] for path in self.paths])

    @cached_property
    def _successors(self) -> mx.array:
        """Int32 [R, R]: for the path to row i, the number of the drafted token after row j, or k."""
        return self._table([[self._next(path, row) for row in range(self.num_rows)] for path in self.paths])

    def _next(self, path: Sequence[int], row: int) -> int:
        """Return the number of the drafted token after ``row`` on a path, or k where there is none."""
        index = path.index(row) + 1 if row in path else len(path)
        return path[index] - 1 if index < len(path) else len(self.parents)

    def _table(self, rows: Sequence[Sequence[int]]) -> mx.array:
        return ints(*(number for row in rows for number in row)).reshape(self.num_rows, self.num_rows)


@lru_cache(maxsize=256)
def tree_of(parents: tuple[int, ...]) -> Tree:
    """Return the tree of a shape; always the same object, so that its constants are made once."""
    return Tree(parents)


def chain_of(count: int) -> Tree:
    """Return the chain of ``count`` drafts after an anchor."""
    return tree_of(tuple(range(count)))


def rows_of_path(x: mx.array, path: Sequence[int]) -> mx.array:
    """Return the rows of ``x`` [R, ...] on a path; first rows are a slice, which copies nothing."""
    return x[: len(path)] if path[-1] == len(path) - 1 else x[ints(*path)]
