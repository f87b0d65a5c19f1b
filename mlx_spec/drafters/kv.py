"""A drafter's own keys and values of committed positions, in pages like the target's, which forks share.

A row is found by its absolute position, in slot ``position - base`` of its context's pages. Pages that no window
reaches any more are released, and ``base`` moves on.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from metal_kernels import resident
from mlx_spec.errors import PositionError
from mlx_spec.target import CachedSequence, PagePool
from mlx_spec.target.batch_layout import page_table
from mlx_spec.target.pages import PAGE_SLOTS, append_rows

# The engine bounds the number of contexts, so their pool needs no bound of its own.
UNBOUNDED = 1 << 30


def context_pool(rows: mx.array) -> PagePool:
    """Return an unbounded pool for a drafter's contexts of rows like these [n, layers, 2, KV, D]."""
    _, layers, _, kv_heads, head_dim = rows.shape
    return PagePool(layers, kv_heads, head_dim, rows.dtype, UNBOUNDED)


class ContextKV:
    """Context keys and values of one sequence.

    pool: where its pages are.
    keep: how many of the newest positions a windowed drafter needs; None for all.
    base: the first position that is held; the last is ``cursor - 1``.
    """

    def __init__(self, pool: PagePool, keep: int | None, position: int = 0) -> None:
        """Begin an empty context whose first row will be at ``position``."""
        self.pool = pool
        self.keep = keep
        self.base = position
        self._held = CachedSequence(pool)

    @property
    def cursor(self) -> int:
        """Position of the next row."""
        return self.base + self._held.length

    def fork(self) -> "ContextKV":
        """Return an independent copy that shares all pages; a shared page is copied when it is written to."""
        copy = ContextKV(self.pool, self.keep, self.base)
        copy._held = self._held.fork()
        return copy

    def moved(self, by: int) -> "ContextKV":
        """Return a copy whose cursor is larger by ``by``; what it holds stays encoded at its positions."""
        copy = self.fork()
        copy.base += by
        return copy

    def free(self) -> None:
        """Release all pages; the context is empty then, with the same cursor."""
        self._begin(self.cursor)

    def start_at(self, base: int, capture: int) -> None:
        """Empty the context and begin again at position ``base``, because older positions are outside the window.

        base: at or after the cursor.
        capture: position from which on the caller has rows.
        Raises PositionError when ``base`` comes before the capture or before the cursor.
        """
        if base < capture:
            raise PositionError(f"The context cannot begin at position {base}: its capture begins at {capture}.")
        if base < self.cursor:
            raise PositionError(f"The context cannot begin at position {base}: its cursor is at {self.cursor}.")
        self._begin(base)

    def append(self, position: int, rows: mx.array) -> None:
        """Append rows [n, layers, 2, KV, D], the first at ``position``, see ``append_to``."""
        append_to([(self, position, rows)])

    def write_ahead(self, rows: mx.array) -> None:
        """Write rows [n, layers, 2, KV, D] after the cursor, which stays where it is until ``advance``."""
        self._held.write_ahead(rows)

    def advance(self, count: int) -> None:
        """Make the first ``count`` rows of ``write_ahead`` part of the context."""
        self._held.advance(count)
        self._drop_unreachable_pages()

    def rewind(self, position: int) -> None:
        """Forget positions from ``position`` on; a position at or after the cursor changes nothing.

        Raises PositionError, with nothing changed, where the window before ``position`` is no longer held.
        """
        if position >= self.cursor:
            return
        first = self._window_before(position)
        if first < self.base:
            raise PositionError(
                f"Cannot rewind to position {position}: that needs the context from {first} on, "
                f"kept is {self.base} and later."
            )
        self._held.rewind(position - self.base)

    def rewind_or_restart(self, position: int) -> None:
        """Forget positions from ``position`` on, also where the window before it is not held.

        In this case the context is empty, and its cursor is at the first position of that window: rows from there
        on have to be appended again.
        """
        first = self._window_before(position)
        if position >= self.cursor or first >= self.base:
            self.rewind(position)
        else:
            self._begin(first)

    def _window_before(self, position: int) -> int:
        return position if self.keep is None else max(0, position - self.keep)

    def _begin(self, base: int) -> None:
        before = self._held
        # One statement, so that an interruption finds base and pages of the same context.
        self.base, self._held = base, CachedSequence(self.pool)
        before.free()

    def _drop_unreachable_pages(self) -> None:
        # One page more than the window is kept, so that a round can be undone.
        if self.keep is not None:
            self._drop(max(0, self._held.length - self.keep - PAGE_SLOTS) // PAGE_SLOTS)

    def _drop(self, pages: int) -> None:
        dropped = self._held.pages[:pages]
        self.base, self._held = self.base + pages * PAGE_SLOTS, self._held.drop_first_pages(pages)
        for page in dropped:
            self.pool.release(page)


def append_to(updates: Sequence[tuple[ContextKV, int, mx.array]]) -> None:
    """Append rows to contexts of one pool, lazily, in one write.

    updates: (context, position of the first row, rows [n, layers, 2, KV, D]) triples.
    Raises PositionError, with nothing changed, where a position is not the cursor: a gap or an overlap would shift
    every key.
    """
    for context, position, _ in updates:
        if position != context.cursor:
            raise PositionError(f"Context rows begin at position {position}, the cursor is at {context.cursor}.")
    append_rows([(context._held, rows, None) for context, _, rows in updates])
    for context, _, _ in updates:
        context._drop_unreachable_pages()


class ContextPages(NamedTuple):
    """What ``attention_rows`` reads of S contexts besides their pool.

    pages: page tables, int32 [S, P].
    lengths: int32 [S]. Slot 0 of a context holds its position ``base``.
    """

    pages: mx.array
    lengths: mx.array

    def after(self, count: mx.array) -> "ContextPages":
        """Return the same contexts with so many rows more, int32 [S], which lie after them already."""
        return ContextPages(self.pages, self.lengths + count)


def packed(contexts: Sequence[ContextKV], *columns: Sequence[int]) -> mx.array:
    """Put the pages of S contexts, and further columns of S numbers, into one array of int32.

    Every array that the host writes costs a transfer.
    """
    lengths = [context.cursor - context.base for context in contexts]
    table = page_table([context._held.pages for context in contexts])
    columns = (*columns, lengths)
    return mx.array([*(n for column in columns for n in column), *(n for row in table for n in row)], mx.int32)


def unpacked(numbers: mx.array, sequences: int, columns: int) -> tuple[list[mx.array], ContextPages]:
    """Take apart what ``packed`` put together: columns, int32 [S] each, and pages, in the device's memory."""
    *parts, lengths, pages = mx.split(resident(numbers), [sequences * (i + 1) for i in range(columns + 1)])
    return parts, ContextPages(pages.reshape(sequences, -1), lengths)
