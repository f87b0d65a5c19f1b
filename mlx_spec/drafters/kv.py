"""A drafter's own keys and values of committed positions, in pages like the target's, which forks share.

Everything is found by absolute position: slot ``position - base`` of a context's pages. Pages that the window has
has passed are given back, and ``base`` moves on. There is no ring and no ring order.
"""

from collections.abc import Sequence

import mlx.core as mx

from metal_kernels import resident
from mlx_spec.errors import PositionError
from mlx_spec.target import CachedSequence, PagePool
from mlx_spec.target.batch_layout import page_table
from mlx_spec.target.pages import PAGE_SLOTS, append_rows

# How many drafters' contexts there are is bounded, so their pool needs no bound of its own.
UNBOUNDED = 1 << 30


def context_pool(rows: mx.array) -> PagePool:
    """Return the pool of a drafter's contexts, for rows like these [n, layers, 2, KV, D]; it grows as they do."""
    _, layers, _, kv_heads, head_dim = rows.shape
    return PagePool(layers, kv_heads, head_dim, rows.dtype, UNBOUNDED)


class ContextKV:
    """Context keys and values of one sequence, in the pages of ``pool``.

    Positions ``base .. cursor - 1`` are held.
    keep: how many of the newest a windowed drafter needs, None for all.
    position: of the first row.
    """

    def __init__(self, pool: PagePool, keep: int | None, position: int = 0) -> None:
        self.pool = pool
        self.keep = keep
        self.base = position
        self._held = CachedSequence(pool)

    @property
    def cursor(self) -> int:
        """Position of the next row."""
        return self.base + self._held.length

    def fork(self) -> "ContextKV":
        """Return an independent copy that shares every page; one that is written to is copied."""
        copy = ContextKV(self.pool, self.keep, self.base)
        copy._held = self._held.fork()
        return copy

    def free(self) -> None:
        """Give all pages back; the context is empty then, and begins at its cursor."""
        self._begin(self.cursor)

    def start_at(self, base: int, capture: int) -> None:
        """Let the context begin at position ``base`` of rows that were captured from ``capture`` on.

        Used where older positions are outside the window, so that they need not be written. Raises PositionError
        when ``base`` comes before the capture or before the cursor.
        """
        if base < capture:
            raise PositionError(f"The context cannot begin at position {base}: its capture begins at {capture}.")
        if base < self.cursor:
            raise PositionError(f"The context cannot begin at position {base}: its cursor is at {self.cursor}.")
        self._begin(base)

    def append(self, position: int, rows: mx.array) -> None:
        """Add rows [n, layers, 2, KV, D], the first at ``position``, see ``append_to``."""
        append_to([(self, position, rows)])

    def rewind(self, position: int) -> None:
        """Forget positions from ``position`` on; a position ahead of the cursor changes nothing.

        Raises PositionError, with nothing changed, when the pages no longer hold the window before ``position``.
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
        """Forget positions from ``position`` on; where the window before it is lost, begin again with that window.

        Then the context is empty, and rows from ``cursor`` on, which is before ``position``, are needed.
        """
        first = self._window_before(position)
        if position >= self.cursor or first >= self.base:
            self.rewind(position)
        else:
            self._begin(first)

    def pages(self) -> tuple[mx.array, mx.array, mx.array]:
        """Return the pool [pages, layers, 2, PAGE_SLOTS, KV, D], the page table [1, P] and the length [1]."""
        return pages_of([self])

    def _window_before(self, position: int) -> int:
        return position if self.keep is None else max(0, position - self.keep)

    def _begin(self, base: int) -> None:
        left = self._held
        # One statement: base and pages belong together whenever someone looks.
        self.base, self._held = base, CachedSequence(self.pool)
        left.free()

    def _forget_what_is_outside(self) -> None:
        # A page more than the window stays, so that a round can be undone.
        if self.keep is not None:
            self._drop(max(0, self._held.length - self.keep - PAGE_SLOTS) // PAGE_SLOTS)

    def _drop(self, pages: int) -> None:
        left = self._held.pages[:pages]
        self.base, self._held = self.base + pages * PAGE_SLOTS, self._held.drop_first_pages(pages)
        for page in left:
            self.pool.release(page)


def append_to(updates: Sequence[tuple[ContextKV, int, mx.array]]) -> None:
    """Add rows to contexts of one pool, lazily.

    updates: of each context the position of its first row, and rows [n, layers, 2, KV, D].
    Raises PositionError, with nothing changed, when a position is not the cursor: a gap or an overlap would shift
    every key.
    """
    for context, position, _ in updates:
        if position != context.cursor:
            raise PositionError(f"Context rows begin at position {position}, the cursor is at {context.cursor}.")
    append_rows([(context._held, rows, None) for context, _, rows in updates])
    for context, _, _ in updates:
        context._forget_what_is_outside()


def pages_of(contexts: Sequence[ContextKV]) -> tuple[mx.array, mx.array, mx.array]:
    """Return the pool of contexts, their page tables [S, P] and lengths [S] int32; see attention_rows.

    The first slot of a context holds its position ``base``.
    """
    table = page_table([context._held.pages for context in contexts])
    numbers = [context.cursor - context.base for context in contexts]
    # In one piece: what the host writes costs by the piece.
    joined = mx.array([*numbers, *(page for row in table for page in row)], dtype=mx.int32)
    lengths, pages = mx.split(resident(joined), [len(contexts)])
    return contexts[0].pool.data, pages.reshape(len(contexts), -1), lengths
