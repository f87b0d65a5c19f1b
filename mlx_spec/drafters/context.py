"""A drafter's own keys and values of committed positions.

Everything is found by absolute position. A slot holds the position ``base + slot``; when the buffer is full the
rows that the window still sees move to its front and ``base`` moves on. There is no ring and no ring order.
"""

import mlx.core as mx

from mlx_spec.errors import PositionError

FIRST_SLOTS = 256
PAGE_SLOTS = 32


class ContextKV:
    """Context keys and values of one sequence.

    ``rows``: [slots, layers, 2, KV, D]. Positions ``base .. cursor - 1`` are held; ``keep`` is how many of the
    newest a windowed drafter needs, None for all.
    """

    def __init__(self, keep: int | None) -> None:
        self.keep = keep
        self.base = self.cursor = 0
        self.rows: mx.array | None = None

    def fork(self) -> "ContextKV":
        """Return an independent copy; MLX copies the buffer when one of the two is written."""
        copy = ContextKV(self.keep)
        copy.base, copy.cursor = self.base, self.cursor
        copy.rows = None if self.rows is None else self.rows[:]
        return copy

    def start_at(self, base: int, capture: int) -> None:
        """Let the context begin at position ``base`` of rows that were captured from ``capture`` on.

        Used where older positions are outside the window, so that they need not be written. Raises PositionError
        when ``base`` lies behind the capture or behind the cursor.
        """
        if base < capture:
            raise PositionError(f"The context cannot begin at position {base}: its capture begins at {capture}.")
        if base < self.cursor:
            raise PositionError(f"The context cannot begin at position {base}: its cursor is at {self.cursor}.")
        self.base = self.cursor = base
        self.rows = None

    def append(self, position: int, rows: mx.array) -> None:
        """Add rows [n, layers, 2, KV, D] whose first stands at ``position``.

        Raises PositionError when ``position`` is not the cursor: a gap or an overlap would shift every key.
        """
        if position != self.cursor:
            raise PositionError(f"Context rows begin at position {position}, the cursor is at {self.cursor}.")
        self._make_room(rows)
        assert self.rows is not None
        first = self.cursor - self.base
        self.rows[mx.arange(first, first + rows.shape[0])] = rows
        self.cursor += rows.shape[0]

    def rewind(self, position: int) -> None:
        """Forget positions from ``position`` on; a position ahead of the cursor changes nothing.

        Raises PositionError when the buffer no longer holds the window before ``position``.
        """
        first = self._window_before(position)
        if position < self.cursor and first < self.base:
            raise PositionError(
                f"Cannot rewind to position {position}: that needs the context from {first} on, "
                f"kept is {self.base} and later."
            )
        self.cursor = min(self.cursor, position)

    def rewind_or_restart(self, position: int) -> None:
        """Forget positions from ``position`` on; where the window before it is lost, begin again with that window.

        Then the context is empty, and rows from ``cursor`` on, which stands before ``position``, are needed.
        """
        first = self._window_before(position)
        if position >= self.cursor or first >= self.base:
            self.rewind(position)
        else:
            self.base = self.cursor = first
            self.rows = None

    def pages(self) -> tuple[mx.array, mx.array, mx.array]:
        """Return what is held as a pool [pages, PAGE_SLOTS, layers, 2, KV, D], its page table and its length.

        Position ``base`` stands in the first slot. Raises PositionError before anything was written.
        """
        if self.rows is None:
            raise PositionError("The context holds no rows yet.")
        pool = self.rows.reshape(-1, PAGE_SLOTS, *self.rows.shape[1:])
        length = mx.array([self.cursor - self.base], dtype=mx.int32)
        return pool, mx.arange(pool.shape[0], dtype=mx.int32)[None], length

    def _window_before(self, position: int) -> int:
        return position if self.keep is None else max(0, position - self.keep)

    def _make_room(self, rows: mx.array) -> None:
        needed = self.cursor - self.base + rows.shape[0]
        slots = 0 if self.rows is None else self.rows.shape[0]
        if needed <= slots:
            return
        held = self.cursor - self.base
        kept = held if self.keep is None else min(held, self.keep)
        size = FIRST_SLOTS
        while size < 2 * (kept + rows.shape[0]):
            size *= 2
        empty = mx.zeros((size - kept, *rows.shape[1:]), dtype=rows.dtype)
        self.rows = empty if self.rows is None else mx.concatenate([self.rows[held - kept : held], empty])
        self.base = self.cursor - kept
