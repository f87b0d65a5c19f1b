"""Which rows of a pass belong to which sequence."""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from metal_kernels.launching.constants import ints


@dataclass(frozen=True)
class RowSpans:
    """The rows of S sequences: sequence s has ``count[s]`` rows, from row ``first[s]`` on.

    first, count: int32 [S]. They stay on the device, so a count may be the result of the pass before; nothing
    recompiles and nobody waits when they change. longest: no count is larger.
    """

    first: mx.array
    count: mx.array
    longest: int

    @staticmethod
    @cache
    def all_rows(rows: int) -> "RowSpans":
        """Return the spans of one sequence that has all rows of a pass."""
        return RowSpans(ints(0), ints(rows), rows)

    @property
    def sequences(self) -> int:
        """S, the number of sequences."""
        return self.first.shape[0]

    def require(self, rows: int) -> None:
        """Raise ValueError unless the spans can describe ``rows`` rows, as far as the host can see."""
        for name, value in (("first", self.first), ("count", self.count)):
            if value.shape != (self.sequences,) or value.dtype != mx.int32:
                raise ValueError(
                    f"first and count must be int32 [{self.sequences}]; {name} is {value.dtype} {value.shape}."
                )
        if not 1 <= self.longest <= rows:
            raise ValueError(f"A sequence can have 1 to all of the {rows} rows, not {self.longest}.")

    def require_like(self, new: "RowSpans") -> None:
        """Raise ValueError unless the sequences with these accepted rows can be those with ``new`` rows."""
        if self.sequences != new.sequences:
            raise ValueError(f"{self.sequences} sequences have accepted rows, {new.sequences} have new ones.")

    def require_slots(self, slots: mx.array | None, states: int) -> None:
        """Raise ValueError unless ``slots`` can say which of ``states`` states each sequence starts from."""
        if slots is None and states != self.sequences:
            raise ValueError(f"{self.sequences} sequences with {states} states need slots.")
        if slots is not None and (slots.shape != (self.sequences,) or slots.dtype != mx.int32):
            raise ValueError(f"slots must be int32 [{self.sequences}], not {slots.dtype} {slots.shape}.")

    def own_slots(self) -> mx.array:
        """Return the slots of sequences that start from the state of their own number: int32 [S]."""
        return ints(*range(self.sequences))

    def gather(self, x: mx.array) -> mx.array:
        """Lay out rows [R, ...] by sequence: [S, longest, ...]. After a sequence's rows come any others."""
        return x[mx.clip(self._rows(), 0, x.shape[0] - 1)]

    def scatter(self, x: mx.array, rows: int) -> mx.array:
        """Take [S, longest, ...] back to [rows, ...]; rows of no sequence are zero."""
        place = mx.where(self.present(), self._rows(), rows)
        out = mx.zeros((rows + 1, *x.shape[2:]), dtype=x.dtype)
        out[place.reshape(-1)] = x.reshape(-1, *x.shape[2:])
        return out[:rows]

    def present(self) -> mx.array:
        """Which entries of ``gather`` are rows of their sequence: bool [S, longest]."""
        return mx.arange(self.longest)[None] < self.count[:, None]

    def _rows(self) -> mx.array:
        return self.first[:, None] + mx.arange(self.longest)[None]
