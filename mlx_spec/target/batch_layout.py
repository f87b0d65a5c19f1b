"""The rows of a pass, sequence after sequence, and what is cached of each sequence before them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx

from metal_kernels import MAX_VERIFY_ROWS, Cached, RowSpans, resident
from mlx_spec.target.recurrent import LayerState, StateSlot

# Pages of a sequence in the smallest page table.
MIN_PAGES = 8

Paths = Sequence[Sequence[int]]
"""For each row, the path to it: rows from the first of its sequence on, itself included, numbered within it."""


@dataclass(frozen=True)
class PassContext:
    """What the layers of a pass read besides their R rows, for all S sequences.

    positions: int32 [R], of the rows.
    cached: page tables, lengths and row counts, for attention layers.
    pool: the pages, see ``PagePool.data``.
    states: what each recurrent layer keeps.
    slots: int32 [S], the state of each sequence in these.
    accepted: the rows of each sequence that follow its state.
    spans: which rows of the pass belong to each sequence, for recurrent layers.
    paths: see BatchLayout.
    """

    positions: mx.array
    cached: Cached
    pool: mx.array
    states: tuple[LayerState, ...]
    slots: mx.array
    accepted: RowSpans
    spans: RowSpans
    paths: mx.array | None = None


@dataclass(frozen=True)
class BatchLayout:
    """The R rows of S sequences and what is cached before them, as int32 arrays.

    All that changes from round to round is in here, so one compiled graph serves every split of R rows.

    positions: [R], of the rows.
    starts: [S + 1], the first row of each sequence, then R.
    counts: [S], rows of each sequence.
    lengths: [S], cached positions of each sequence.
    slots, first, accepted: [S], the StateSlot of each sequence.
    pages: [S, P], see ``page_table``.
    paths: [R, R], see ``attention_rows``; None where each row follows the one before it.
    """

    positions: mx.array
    starts: mx.array
    counts: mx.array
    lengths: mx.array
    slots: mx.array
    first: mx.array
    accepted: mx.array
    pages: mx.array
    paths: mx.array | None

    @staticmethod
    def packed(
        counts: tuple[int, ...],
        lengths: Sequence[int],
        slots: Sequence[StateSlot],
        pages: Sequence[Sequence[int]],
        paths: Paths | None = None,
    ) -> mx.array:
        """Put everything into one array, because every array that the host writes costs a transfer.

        counts: rows of each sequence.
        lengths: cached positions of each sequence.
        slots: where the recurrent state of each sequence is.
        pages: page numbers of each sequence.
        paths: of each row, for trees; its position follows from the length of its path.
        """
        positions = [length + i for length, count in zip(lengths, counts, strict=True) for i in range(count)]
        if paths is not None:
            before = [length for length, count in zip(lengths, counts, strict=True) for _ in range(count)]
            positions = [length + len(path) - 1 for length, path in zip(before, paths, strict=True)]
        numbers = [*positions, *first_rows(counts), sum(counts), *counts, *lengths]
        for part in ("slot", "first", "accepted"):
            numbers += [getattr(slot, part) for slot in slots]
        for path in paths or ():
            numbers += [*path, *[-1] * (sum(counts) - len(path))]
        return mx.array([*numbers, *(number for row in page_table(pages) for number in row)], dtype=mx.int32)

    @staticmethod
    def unpacked(numbers: mx.array, rows: int, sequences: int, has_paths: bool = False) -> "BatchLayout":
        """Split what ``packed`` made into its parts, in the device's memory."""
        sizes = [rows, sequences + 1, *[sequences] * 5, *[rows * rows] * has_paths]
        parts = mx.split(resident(numbers), list(accumulate(sizes)))
        positions, starts, counts, lengths, slots, first, accepted = parts[:7]
        paths, pages = parts[7].reshape(rows, rows) if has_paths else None, parts[-1].reshape(sequences, -1)
        return BatchLayout(positions, starts, counts, lengths, slots, first, accepted, pages, paths)


def is_prompt(counts: tuple[int, ...]) -> bool:
    """Return whether the rows are prompts, which are committed as a whole, and not rows to be verified."""
    return max(counts) > MAX_VERIFY_ROWS


def first_rows(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the number of each sequence's first row: the sum of the counts before it."""
    return tuple(sum(counts[:i]) for i in range(len(counts)))


def page_table(pages: Sequence[Sequence[int]]) -> list[list[int]]:
    """Pad lists of page numbers with 0 to one length, a power of two, so that few shapes occur."""
    size = MIN_PAGES
    while size < max(len(row) for row in pages):
        size *= 2
    return [[*row, *[0] * (size - len(row))] for row in pages]


def bounds_of(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return upper bounds of each sequence's rows, for a graph that runs every split of as many rows.

    Few values occur, so that few graphs are compiled; a loose bound only wastes threads of a launch.
    """
    bound = 1
    while bound < max(counts):
        bound *= 2
    return (min(bound, sum(counts) - len(counts) + 1),) * len(counts)
