"""The pool of KV pages, and sequences as lists of pages.

A page holds the keys and values of all attention layers for PAGE_SLOTS successive positions. Forked sequences
share pages; a shared page is copied when one of its owners writes into it. Only accepted rows are ever written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_spec.errors import ContextFull, PositionError
from mlx_spec.target.recurrent import RecurrentState

PAGE_SLOTS = 32


class PagePool:
    """Owns the pages of all sequences of one model."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: mx.Dtype, max_pages: int) -> None:
        """Begin with 8 pages; ``data`` doubles up to ``max_pages`` as pages are needed."""
        self.max_pages = max_pages
        self._page = (layers, 2, PAGE_SLOTS, kv_heads, head_dim)
        self._owners = [0] * min(8, max_pages)
        # A row for each page, layer, side and slot: one index an update is what scatters fastest.
        self._rows = mx.zeros((len(self._owners) * layers * 2 * PAGE_SLOTS, kv_heads * head_dim), dtype=dtype)

    @property
    def data(self) -> mx.array:
        """The pages, [pages, layers, 2 (keys, values), PAGE_SLOTS, KV heads, head dim]."""
        return self._rows.reshape(-1, *self._page)

    @property
    def pages_in_use(self) -> int:
        """How many pages belong to at least one sequence."""
        return sum(1 for owners in self._owners if owners)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self._rows.nbytes // len(self._owners)

    @property
    def free_pages(self) -> int:
        """How many pages can still be allocated."""
        return self.max_pages - self.pages_in_use

    def allocate(self, pages: list[int]) -> None:
        """Append a free page to its owner's ``pages``. Raises ContextFull when all ``max_pages`` are in use.

        It is listed before it is marked as owned, so that an interruption in between loses no page.
        """
        if not self.free_pages:
            raise ContextFull(
                f"All {self.max_pages} KV pages of {PAGE_SLOTS} tokens are in use; "
                "close a sequence or load the model with a larger max_cached_tokens."
            )
        if 0 not in self._owners:
            self._grow()
        pages.append(self._owners.index(0))
        self._owners[pages[-1]] = 1

    def owners(self, page: int) -> int:
        """Return how many sequences own a page."""
        return self._owners[page]

    def is_shared(self, page: int) -> bool:
        """Return whether a page has more than one owner."""
        return self._owners[page] > 1

    def share(self, page: int) -> None:
        """Add an owner to a page."""
        self._owners[page] += 1

    def release(self, page: int) -> None:
        """Remove an owner from a page; a page without owners is free."""
        self._owners[page] = max(0, self._owners[page] - 1)

    def copy(self, page: int, into: int) -> None:
        """Copy the contents of a page into another, lazily."""
        rows = mx.arange(self._rows.shape[0] // len(self._owners))
        self._rows[into * rows.size + rows] = self._rows[page * rows.size + rows]

    def write(self, pages: Sequence[int], slots: Sequence[int], rows: mx.array) -> None:
        """Write rows, lazily.

        pages, slots: R numbers each, where a row goes.
        rows: [R, layers, 2, KV, D].
        A scatter by an index array that the next graph runs before it reads: only then MLX updates the pool in
        place. Slice updates, and a write after a read, copy all of it.
        """
        sides = np.arange(self._page[0] * 2)
        first = np.array(pages)[:, None] * sides.size + sides
        index = mx.array((first * PAGE_SLOTS + np.array(slots)[:, None]).ravel(), dtype=mx.uint32)
        self._rows[index] = rows.reshape(index.size, -1)

    def _grow(self) -> None:
        more = min(len(self._owners), self.max_pages - len(self._owners))
        empty = mx.zeros((self._rows.shape[0] // len(self._owners) * more, self._rows.shape[1]), self._rows.dtype)
        self._rows = mx.concatenate([self._rows, empty])
        self._owners += [0] * more


@dataclass
class CachedSequence:
    """A sequence as a list of pages and the number of accepted positions in them.

    pool: where the pages are.
    pages: their numbers, in order of positions.
    length: accepted positions.
    recurrent: state of the recurrent layers after these; None for an empty sequence, and for models without such.
    """

    pool: PagePool
    pages: list[int] = field(default_factory=list)
    length: int = 0
    recurrent: RecurrentState | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that hold the contents, for ``mx.eval``."""
        return [self.pool.data, *(self.recurrent.arrays if self.recurrent else ())]

    @property
    def free_positions(self) -> int:
        """How many more positions fit into the pool if no other sequence allocates a page."""
        left = -self.length % PAGE_SLOTS
        # Writing into a shared page needs a free one for the copy.
        pages = self.pool.free_pages - (left > 0 and self.pool.is_shared(self.pages[-1]))
        return left + pages * PAGE_SLOTS if pages >= 0 else 0

    def fork(self) -> "CachedSequence":
        """Return a sequence with the same contents that shares all pages and states."""
        for page in self.pages:
            self.pool.share(page)
        return CachedSequence(self.pool, list(self.pages), self.length, self.recurrent)

    def append(self, rows: mx.array, recurrent: RecurrentState | None = None) -> None:
        """Append accepted rows [R, layers, 2, KV, D], see ``append_rows``."""
        append_rows([(self, rows, recurrent)])

    def write_ahead(self, rows: mx.array) -> None:
        """Write rows [R, layers, 2, KV, D] after the last position, lazily; they are no part of the sequence.

        They become part of it by ``advance``, unless something else was written there meanwhile.
        Raises ContextFull, with nothing changed, when the pool has too few free pages.
        """
        self.reserve(rows.shape[0])
        self.pool.write(*self._slots(rows.shape[0]), rows)

    def advance(self, count: int) -> None:
        """Make the first ``count`` rows of ``write_ahead`` part of the sequence."""
        self.length += count

    def rewind(self, position: int) -> None:
        """Forget all positions from ``position`` on.

        With recurrent layers a sequence can only go back into the rows that were committed last, or to 0.
        Raises PositionError, with nothing changed, for a position that is not cached or cannot be reached.
        """
        if not 0 <= position <= self.length:
            raise PositionError(f"Cannot rewind to position {position}: the sequence holds {self.length}.")
        recurrent = None
        if position and self.recurrent is not None:
            earliest = self.length - self.recurrent.accepted
            if position < earliest:
                raise PositionError(
                    f"Cannot rewind to position {position}: this model's recurrent layers can go back from "
                    f"{self.length} to {earliest}, or to 0. Fork the sequence at a position that is needed again."
                )
            recurrent = self.recurrent.without(self.length - position)
        keep = -(-position // PAGE_SLOTS)
        for page in self.pages[keep:]:
            self.pool.release(page)
        del self.pages[keep:]
        self.length, self.recurrent = position, recurrent

    def drop_first_pages(self, pages: int) -> "CachedSequence":
        """Return a sequence of all but the first ``pages`` pages, whose positions count from 0 again.

        It replaces this one; the caller releases the pages that are dropped.
        """
        return CachedSequence(self.pool, self.pages[pages:], self.length - pages * PAGE_SLOTS)

    def free(self) -> None:
        """Give all pages back."""
        self.rewind(0)

    def require(self, count: int) -> None:
        """Raise ContextFull when the pool has too few free pages for ``count`` more positions."""
        needed = self._pages_for(count) - len(self.pages) + len(self._shared())
        if needed > self.pool.free_pages:
            raise ContextFull(
                f"{count} more tokens after position {self.length} need {needed} KV pages, "
                f"{self.pool.free_pages} of {self.pool.max_pages} are free; "
                "close a sequence or load the model with a larger max_cached_tokens."
            )

    def reserve(self, count: int) -> None:
        """Allocate pages for ``count`` more positions, and copy shared ones.

        Raises ContextFull, with nothing changed, when the pool has too few free pages.
        """
        self.require(count)
        for i in self._shared():
            self.pool.allocate(self.pages)
            self.pool.copy(self.pages[i], self.pages[-1])
            # The shared page is moved to the end, so that it is listed until it is released.
            self.pages[i], self.pages[-1] = self.pages[-1], self.pages[i]
            self.pool.release(self.pages.pop())
        while len(self.pages) < self._pages_for(count):
            self.pool.allocate(self.pages)

    def _slots(self, count: int) -> tuple[list[int], list[int]]:
        """Return page and slot of each of the next positions, whose pages are reserved."""
        positions = range(self.length, self.length + count)
        return [self.pages[p // PAGE_SLOTS] for p in positions], [p % PAGE_SLOTS for p in positions]

    def _pages_for(self, count: int) -> int:
        return -(-(self.length + count) // PAGE_SLOTS)

    def _shared(self) -> list[int]:
        """Return the indices in ``pages``, from the first page that is not full on, of pages with other owners."""
        return [i for i in range(self.length // PAGE_SLOTS, len(self.pages)) if self.pool.is_shared(self.pages[i])]


def append_rows(parts: Sequence[tuple[CachedSequence, mx.array, RecurrentState | None]]) -> None:
    """Append accepted rows to sequences of one pool, in one write.

    parts: for each sequence its rows [R, layers, 2, KV, D], and the state of recurrent layers after these rows.
    Raises ContextFull when the pool has too few free pages; contents and lengths are unchanged then, but some
    sequences may own more pages.
    """
    pages, slots = list[int](), list[int]()
    for sequence, rows, _ in parts:
        if count := rows.shape[0]:
            sequence.reserve(count)
            own_pages, own_slots = sequence._slots(count)
            pages, slots = pages + own_pages, slots + own_slots
    ends = [sequence.length + rows.shape[0] for sequence, rows, _ in parts]
    if pages:
        written = [rows for _, rows, _ in parts if rows.shape[0]]
        parts[0][0].pool.write(pages, slots, written[0] if len(written) == 1 else mx.concatenate(written))
    for (sequence, _, recurrent), end in zip(parts, ends, strict=True):
        # One statement, so that an interruption finds length and state at the same position.
        sequence.length, sequence.recurrent = end, recurrent


def reserve_positions(sequences: Sequence[CachedSequence], most: int) -> list[int]:
    """Return how many positions each sequence of one pool can append, at most ``most``, if all of them do.

    Pages are given in the sequences' order: first those for one position of each, then more. A sequence for which
    there is no page gets 0. Nothing is allocated.
    """
    free = min((sequence.pool.free_pages for sequence in sequences), default=0)
    owners, found = dict[int, int](), list[int]()
    for sequence in sequences:
        left = -sequence.length % PAGE_SLOTS
        # All owners of a partial page but the last to write have to copy it.
        page = sequence.pages[-1] if left else -1
        shared = owners.setdefault(page, sequence.pool.owners(page)) > 1 if left else False
        needed = shared if left else 1
        if needed > free:
            found.append(0)
            continue
        free -= needed
        if shared:
            owners[page] -= 1
        found.append(left or PAGE_SLOTS)
    for index, positions in enumerate(found):
        if 0 < positions < most and free:
            free -= 1
            found[index] += PAGE_SLOTS
    return [min(positions, most) for positions in found]
