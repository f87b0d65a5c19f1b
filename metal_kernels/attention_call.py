"""What attention is asked for: rows, what is cached before them, and what each sees."""

from dataclasses import dataclass, replace

import mlx.core as mx


@dataclass(frozen=True)
class Cached:
    """What the S sequences of a pass hold, and how many of its rows belong to each.

    pages: int32 [S, P]. The first ceil(length / slots) of a sequence's entries are its pages; no others are read.
    lengths: int32 [S], positions held.
    counts: rows of each sequence; all rows of one sequence come before those of the next.
    starts: int32 [S + 1], the first row of each sequence, then R. With it, counts are upper bounds, so that one
        graph serves however the rows are shared out; only the kernel takes that, for S > 1.
    held: the lengths where the host knows them; prompts then take MLX's fused attention.
    """

    pages: mx.array
    lengths: mx.array
    counts: tuple[int, ...]
    starts: mx.array | None = None
    held: tuple[int, ...] | None = None


@dataclass(frozen=True)
class View:
    """What a row sees and how its scores are made; see attention_rows."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: mx.array | None = None
    block: bool = False


@dataclass(frozen=True)
class Call:
    """What attention_rows was given."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    pool: mx.array
    layer: int
    cached: Cached
    view: View
    paths: mx.array | None

    def sequence(self, index: int) -> "Call":
        """Return the part of one sequence."""
        start, count = sum(self.cached.counts[:index]), self.cached.counts[index]
        rows = slice(start, start + count)
        return replace(
            self,
            queries=self.queries[rows],
            keys=self.keys[rows],
            values=self.values[rows],
            cached=Cached(
                self.cached.pages[index : index + 1],
                self.cached.lengths[index : index + 1],
                (count,),
                held=self.cached.held and self.cached.held[index : index + 1],
            ),
            paths=None if self.paths is None else self.paths[rows, :count],
        )
