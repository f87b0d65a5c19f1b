"""How the rows of a pass are laid out, sequence after sequence, and what comes before them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import mlx.core as mx

from metal_kernels import MAX_CHUNK_ROWS, MAX_VERIFY_ROWS, Cached, RowSpans, ints, resident
from mlx_spec.target.recurrent import LayerState, StateSlot

# Page numbers in the smallest page table.
MIN_TABLE = 8

Paths = Sequence[Sequence[int]]
"""For each row, the rows from the first of its sequence to it, itself included, numbered within the sequence."""


@dataclass(frozen=True)
class RowChunk:
    """Up to MAX_CHUNK_ROWS rows of each sequence of a pass, as a recurrent layer takes them.

    index: their numbers in the pass. spans: the sequences' rows among them.
    """

    index: mx.array
    spans: RowSpans


@dataclass(frozen=True)
class PassContext:
    """What comes before the rows of a pass, for all of its sequences.

    positions: int32 [R], of the rows.
    cached, pool: the pages, for attention layers.
    states: of each recurrent layer. slots, accepted: where the sequences are in it.
    chunks: the rows as recurrent layers take them.
    paths: see BatchLayout.
    """

    positions: mx.array
    cached: Cached
    pool: mx.array
    states: tuple[LayerState, ...]
    slots: mx.array
    accepted: RowSpans
    chunks: tuple[RowChunk, ...]
    paths: mx.array | None = None


@dataclass(frozen=True)
class BatchLayout:
    """The R rows of S sequences and what comes before them, as int32 arrays.

    All that changes from round to round is in here: a graph that reads it serves however the rows are shared out.
    positions: [R].
    starts: [S + 1], the first row of each sequence, then R.
    counts: [S], its rows.
    lengths: [S], the positions it holds.
    slots, first, accepted: [S], its StateSlot.
    pages: [S, P], see ``page_table``.
    paths: [R, R], see attention_rows; None where each row follows the one before it.
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
        places: Sequence[StateSlot],
        pages: Sequence[Sequence[int]],
        paths: Paths | None = None,
    ) -> mx.array:
        """Put everything into one array, because every array that the host writes costs a transfer.

        paths: of each row within its sequence, for trees.
        """
        positions = [length + i for length, count in zip(lengths, counts, strict=True) for i in range(count)]
        if paths is not None:
            before = [length for length, count in zip(lengths, counts, strict=True) for _ in range(count)]
            positions = [length + len(path) - 1 for length, path in zip(before, paths, strict=True)]
        numbers = [*positions, *first_rows(counts), sum(counts), *counts, *lengths]
        for part in ("slot", "first", "accepted"):
            numbers += [getattr(place, part) for place in places]
        for path in paths or ():
            numbers += [*path, *[-1] * (sum(counts) - len(path))]
        return mx.array([*numbers, *(number for row in page_table(pages) for number in row)], dtype=mx.int32)

    @staticmethod
    def unpacked(numbers: mx.array, rows: int, sequences: int, has_paths: bool = False) -> "BatchLayout":
        """Return the parts of what ``packed`` made, in the device's memory."""
        sizes = [rows, sequences + 1, *[sequences] * 5, *[rows * rows] * has_paths]
        parts = mx.split(resident(numbers), list(accumulate(sizes)))
        positions, starts, counts, lengths, slots, first, accepted = parts[:7]
        paths, pages = parts[7].reshape(rows, rows) if has_paths else None, parts[-1].reshape(sequences, -1)
        return BatchLayout(positions, starts, counts, lengths, slots, first, accepted, pages, paths)

    def one_chunk(self, longest: int) -> tuple[RowChunk, ...]:
        """Return all rows as one chunk; no sequence has more than ``longest`` of them."""
        spans = RowSpans(self.starts[:-1], self.counts, longest)
        return (RowChunk(mx.arange(self.positions.size), spans),)


@lru_cache(maxsize=1024)
def chunks_of(counts: tuple[int, ...]) -> tuple[RowChunk, ...]:
    """Cut the rows of sequences, one sequence after another, ``counts`` of each, into chunks."""
    starts, chunks = first_rows(counts), []
    for begin in range(0, max(counts), MAX_CHUNK_ROWS):
        size = tuple(min(max(count - begin, 0), MAX_CHUNK_ROWS) for count in counts)
        index = [start + begin + i for start, rows in zip(starts, size, strict=True) for i in range(rows)]
        spans = RowSpans(ints(*first_rows(size)), ints(*size), max(size))
        chunks.append(RowChunk(ints(*index), spans))
    return tuple(chunks)


def is_prompt(counts: tuple[int, ...]) -> bool:
    """Whether rows are a prompt, which becomes part of its sequence as a whole, or rows to be verified."""
    return max(counts) > MAX_VERIFY_ROWS


def first_rows(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the first row of each sequence: the sum of the counts before it."""
    return tuple(sum(counts[:i]) for i in range(len(counts)))


def page_table(pages: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return page numbers, S rows of a power of two, so that few shapes occur; unused places hold page 0."""
    size = MIN_TABLE
    while size < max(len(row) for row in pages):
        size *= 2
    return [[*row, *[0] * (size - len(row))] for row in pages]


def bounds_of(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the most rows that each sequence may have in a graph that runs these.

    Few values occur, so that few graphs are made; a bound wastes some threads of a launch, no more.
    """
    most = 1
    while most < max(counts):
        most *= 2
    return (min(most, sum(counts) - len(counts) + 1),) * len(counts)
