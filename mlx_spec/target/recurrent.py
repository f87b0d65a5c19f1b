"""What came before the rows of a pass: the pages and the recurrent states of its sequences."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

from metal_kernels import MAX_ROWS, Cached, DeltaRows, RowSpans, ints, resident
from mlx_spec.errors import PositionError

# Rows of a sequence that a recurrent layer takes at a time; prompts are cut into pieces of so many.
PIECE_ROWS = 32
# Page numbers in the smallest page table.
MIN_TABLE = 8

Paths = SequenceOf[SequenceOf[int]]
"""For each row, the rows from the first of its sequence to it, itself included, numbered within the sequence."""


class Held(NamedTuple):
    """What one recurrent layer holds of P sequences: their states, and R rows behind these.

    state: float32 [P, Hv, Dv, Dk]. conv_state: [P, W - 1, C], the convolution's last inputs. projected: [R, N],
    the rows' projections. k: [R, Hk, Dk] and v: [R, Hv, Dv], what the convolution made of them.
    """

    state: mx.array
    conv_state: mx.array
    projected: mx.array
    k: mx.array
    v: mx.array

    @staticmethod
    def joined(parts: SequenceOf["Held"]) -> "Held":
        """Lay states beside states and rows behind rows."""
        return Held(*(mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True)))

    @property
    def rows(self) -> DeltaRows:
        """The rows, as far as the state depends on them."""
        return DeltaRows(self.k, self.v, self.projected, self.projected)


@dataclass(frozen=True)
class Recurrent:
    """The recurrent layers' past of one sequence: a state, and rows behind it that the next pass begins with.

    layers: what each layer holds, immutable and mostly shared: by the sequences of one pass, by forks. slot: which
    of the states. first, accepted: which of the rows belong to the sequence.
    """

    layers: tuple[Held, ...]
    slot: int = 0
    first: int = 0
    accepted: int = 0

    def without(self, count: int) -> "Recurrent":
        """Forget the newest ``count`` rows. Raises PositionError when the state is already behind one of them."""
        if count > self.accepted:
            raise PositionError(
                f"Recurrent layers can forget up to {self.accepted} of the newest rows, not {count}. "
                "Fork a sequence before a pass that may have to be undone."
            )
        return replace(self, accepted=self.accepted - count)

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays, for ``mx.eval``."""
        return [array for held in self.layers for array in held]


@dataclass(frozen=True)
class Place:
    """Where a sequence stands in what layers hold: see Recurrent."""

    slot: int
    first: int
    accepted: int


def side_by_side(pasts: SequenceOf[Recurrent]) -> tuple[tuple[Held, ...], list[Place]]:
    """Return what the layers hold of all these sequences, and where each of them stands in it.

    Sequences that last ran in one pass share it already; then nothing is copied.
    """
    distinct = list({id(past.layers): past.layers for past in pasts}.values())
    states, rows = {}, {}
    slots = first = 0
    for layers in distinct:
        states[id(layers)], rows[id(layers)] = slots, first
        slots, first = (slots + layers[0].state.shape[0], first + layers[0].k.shape[0]) if layers else (0, 0)
    places = [
        Place(states[id(past.layers)] + past.slot, rows[id(past.layers)] + past.first, past.accepted)
        for past in pasts
    ]
    if len(distinct) == 1:
        return distinct[0], places
    return tuple(Held.joined(parts) for parts in zip(*distinct, strict=True)), places


@dataclass(frozen=True)
class Piece:
    """Up to PIECE_ROWS rows of each sequence of a pass: their numbers in the pass, and the sequences' spans."""

    index: mx.array
    spans: RowSpans


@lru_cache(maxsize=1024)
def pieces_of(counts: tuple[int, ...]) -> tuple[Piece, ...]:
    """Cut the rows of sequences, one behind another, ``counts`` of each, into pieces."""
    starts, pieces = running(counts), []
    for begin in range(0, max(counts), PIECE_ROWS):
        size = tuple(min(max(count - begin, 0), PIECE_ROWS) for count in counts)
        index = [start + begin + i for start, rows in zip(starts, size, strict=True) for i in range(rows)]
        spans = RowSpans(ints(*running(size)), ints(*size), max(size))
        pieces.append(Piece(ints(*index), spans))
    return tuple(pieces)


def is_prompt(counts: tuple[int, ...]) -> bool:
    """Whether rows are a prompt, which becomes part of its sequence as a whole, or rows to be verified."""
    return max(counts) > MAX_ROWS


def running(counts: SequenceOf[int]) -> tuple[int, ...]:
    """Return the sum of the counts before each."""
    return tuple(sum(counts[:i]) for i in range(len(counts)))


@dataclass(frozen=True)
class Layout:
    """How the R rows of S sequences lie and what they stand behind, int32 arrays.

    All that changes from round to round is in here: a graph that reads it serves however the rows are shared out.
    positions: [R]. starts: [S + 1], the first row of each sequence, then R. counts: [S], its rows. lengths: [S],
    the positions it holds. pages: [S, P], see ``page_table``. slots, first, accepted: [S], its Place.
    paths: [R, R], see attention_rows; None where each row stands behind the one before it.
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
        lengths: SequenceOf[int],
        places: SequenceOf[Place],
        pages: SequenceOf[SequenceOf[int]],
        paths: Paths | None = None,
    ) -> mx.array:
        """Lay rows out one sequence behind another, all in one array: what the host writes costs by the piece.

        paths: of each row within its sequence, for trees.
        """
        positions = [length + i for length, count in zip(lengths, counts, strict=True) for i in range(count)]
        if paths is not None:
            behind = [length for length, count in zip(lengths, counts, strict=True) for _ in range(count)]
            positions = [length + len(path) - 1 for length, path in zip(behind, paths, strict=True)]
        numbers = [*positions, *running(counts), sum(counts), *counts, *lengths]
        for part in ("slot", "first", "accepted"):
            numbers += [getattr(place, part) for place in places]
        for path in paths or ():
            numbers += [*path, *[-1] * (sum(counts) - len(path))]
        return mx.array([*numbers, *(number for row in page_table(pages) for number in row)], dtype=mx.int32)

    @staticmethod
    def unpacked(numbers: mx.array, rows: int, sequences: int, has_paths: bool = False) -> "Layout":
        """Return the parts of what ``packed`` made, in the device's memory."""
        sizes = [rows, sequences + 1, *[sequences] * 5, *[rows * rows] * has_paths]
        parts = mx.split(resident(numbers), list(accumulate(sizes)))
        positions, starts, counts, lengths, slots, first, accepted = parts[:7]
        paths, pages = parts[7].reshape(rows, rows) if has_paths else None, parts[-1].reshape(sequences, -1)
        return Layout(positions, starts, counts, lengths, slots, first, accepted, pages, paths)

    def pieces(self, longest: int) -> "tuple[Piece, ...]":
        """Return all rows as one piece; no sequence has more than ``longest`` of them."""
        spans = RowSpans(self.starts[:-1], self.counts, longest)
        return (Piece(mx.arange(self.positions.size), spans),)


def page_table(pages: SequenceOf[SequenceOf[int]]) -> list[list[int]]:
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


@dataclass(frozen=True)
class Past:
    """What the rows of a pass stand behind, for all of its sequences.

    positions: int32 [R], of the rows. cached, pool: the pages, for attention layers. held: by each recurrent
    layer. slots, accepted: where the sequences stand in it. pieces: the rows as recurrent layers take them.
    paths: see Layout.
    """

    positions: mx.array
    cached: Cached
    pool: mx.array
    held: tuple[Held, ...]
    slots: mx.array
    accepted: RowSpans
    pieces: tuple[Piece, ...]
    paths: mx.array | None = None
