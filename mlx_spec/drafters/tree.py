"""The tree that the rows of a round form: each follows its parent. A chain is a tree without branches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import mlx.core as mx

from metal_kernels import ints


@dataclass(frozen=True)
class Tree:
    """Rows 0 to k, of which row 0 is the anchor: ``parents[i]`` is the row that row i + 1 follows.

    Parents come before their children; children in the order in which they were drawn. All arrays here are
    constants of the shape.
    """

    parents: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """R = k + 1, how many rows there are."""
        return len(self.parents) + 1

    @property
    def is_chain(self) -> bool:
        """Whether each row follows the one before it."""
        return self.parents == tuple(range(len(self.parents)))

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The rows from the anchor to each row, itself included."""
        found: list[tuple[int, ...]] = [(0,)]
        for row, parent in enumerate(self.parents, 1):
            found.append((*found[parent], row))
        return tuple(found)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How many rows after the anchor each row comes."""
        return tuple(len(path) - 1 for path in self.paths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The rows that follow each row."""
        return tuple(
            tuple(child for child, parent in enumerate(self.parents, 1) if parent == row)
            for row in range(self.num_rows)
        )

    @cached_property
    def chain(self) -> tuple[int, ...]:
        """The rows from the anchor to its first child, to that one's first child, and so on."""
        path = [0]
        while self.children[path[-1]]:
            path.append(self.children[path[-1]][0])
        return tuple(path)

    def along_chain(self, path: Sequence[int]) -> int:
        """Count the rows of a path after the anchor up to where it leaves the chain."""
        return sum(row in self.chain for row in path) - 1

    def runner_up(self, path: Sequence[int]) -> bool | None:
        """Whether a path leaves the chain for the first sibling of the rejected row; None without siblings."""
        siblings = self.children[self.chain[self.along_chain(path)]][1:]
        return siblings[0] in path if siblings else None

    @cached_property
    def lies_before(self) -> mx.array:
        """Bool [R, R]: whether a row is on the path to a row."""
        return self._table([[int(row in path) for row in range(self.num_rows)] for path in self.paths]) > 0

    def last_accepted(self, matches: mx.array) -> mx.array:
        """Return the last accepted row, int32: of the deepest whose path ``matches`` [k], bool, the first."""
        matches = mx.concatenate([mx.ones((1,), dtype=mx.bool_), matches])
        accepted = mx.all(matches[None] >= self.lies_before, axis=1)
        return mx.argmax(mx.where(accepted, ints(*self.depths), -1)).astype(mx.int32)

    def on_path(self, last: mx.array, flags: mx.array) -> mx.array:
        """Whether ``flags`` [R], bool, are true of all rows from the anchor to row ``last``."""
        return mx.all(flags >= self.lies_before[last])

    def emitted(self, last: mx.array, tokens: mx.array, following: mx.array) -> mx.array:
        """Return what each row emits: [R] int32, where the path ends with row ``last``, which emits ``following``.

        tokens: [k], of rows 1 to k. Rows off the path emit ``following`` too.
        """
        return mx.concatenate([tokens, following.reshape(1)])[self._successors[last]]

    @cached_property
    def _successors(self) -> mx.array:
        """Int32 [R, R]: for the path to each row, the number of the drafted token after each row, or k."""
        return self._table([[self._next(path, row) for row in range(self.num_rows)] for path in self.paths])

    def _next(self, path: Sequence[int], row: int) -> int:
        """Return the number among drafted tokens of the row after ``row`` on a path, or k."""
        place = path.index(row) + 1 if row in path else len(path)
        return path[place] - 1 if place < len(path) else len(self.parents)

    def _table(self, rows: Sequence[Sequence[int]]) -> mx.array:
        return ints(*(number for row in rows for number in row)).reshape(self.num_rows, self.num_rows)


@lru_cache(maxsize=256)
def tree_of(parents: tuple[int, ...]) -> Tree:
    """Return the tree of a shape, always the same object, so that its constants are made once."""
    return Tree(parents)


def chain_of(count: int) -> Tree:
    """Return the chain of ``count`` drafts after an anchor."""
    return tree_of(tuple(range(count)))


def rows_of_path(x: mx.array, path: Sequence[int]) -> mx.array:
    """Return the rows of ``x`` [R, ...] on a path: as a slice, which copies nothing, where they come first."""
    return x[: len(path)] if path[-1] == len(path) - 1 else x[ints(*path)]
