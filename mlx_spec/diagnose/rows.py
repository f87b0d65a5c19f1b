"""Checks batch invariance, of a model or of a generation: a row of a pass equals the row computed alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from metal_kernels import MAX_VERIFY_ROWS
from mlx_spec.drafters.tree import rows_of_path, tree_of
from mlx_spec.target import CachedSequence, Target
from mlx_spec.target.pages import PAGE_SLOTS

# Positions before the rows that a model is checked with, so that the rows cross the end of a page.
CONTEXT = 28


@dataclass(frozen=True)
class Difference:
    """A verify row whose logits differ from a one-row pass.

    position: of the row.
    row: its number in the pass.
    rows: how many rows the pass has.
    largest: the largest absolute difference of a logit.
    same_token: whether the most likely token is the same nevertheless.
    """

    position: int
    row: int
    rows: int
    largest: float
    same_token: bool

    def __str__(self) -> str:
        token = "same token" if self.same_token else "OTHER TOKEN"
        return (
            f"position {self.position}: row {self.row + 1} of {self.rows} differs by up to {self.largest:.3g} "
            f"from a one-row pass ({token})"
        )


def check_rows(
    target: Target, counts: Sequence[int], compared: int = MAX_VERIFY_ROWS
) -> Iterator[Difference | None]:
    """Compare rows of passes of several rows with the same rows computed one at a time.

    target: the model.
    counts: rows of each pass; passes that do not fit into the model's context are left out.
    compared: how many rows of each pass to compare, from the first on.
    Yields for each pass its first difference, or None. The rows follow a text of 28 tokens, or nothing where the
    context or the pool is small.
    """
    with text_and_rows(target, max(counts)) as (sequence, rows):
        alone = list(logits_alone(target, sequence, rows[: min(compared, target.context)]))
        for count in counts:
            if sequence.length + count <= target.context:
                logits = target.logits(target.forward([(sequence, rows[:count])]).hidden)
                found = (compare(sequence, row, logits, alone[row]) for row in range(min(count, len(alone))))
                yield next((difference for difference in found if difference is not None), None)


def check_tree(target: Target, depth: int) -> Difference | None:
    """Compare a path through a tree, ``depth`` rows after the first, with the same rows computed one at a time.

    Each path row is interleaved with an off-path row. Returns the first difference, or None.
    """
    with text_and_rows(target, 2 * depth + 1) as (sequence, rows):
        depth = min(depth, target.context - sequence.length - 1)
        tree = tree_of(tuple(2 * (row // 2) for row in range(2 * depth)))
        path = tree.paths[-1]
        logits = target.logits(target.forward([(sequence, rows[: tree.num_rows])], paths=tree.paths).hidden)
        alone = logits_alone(target, sequence, rows_of_path(rows, path))
        found = [
            compare(sequence, row, rows_of_path(logits, path), expected) for row, expected in enumerate(alone)
        ]
    return next((difference for difference in found if difference is not None), None)


@contextmanager
def text_and_rows(target: Target, count: int) -> Iterator[tuple[CachedSequence, mx.array]]:
    """Open a sequence that holds a text for the time of a check; yield it and ``count`` tokens [R] to follow."""
    pages = -(-(CONTEXT + count) // PAGE_SLOTS) + 1
    fits = target.context >= CONTEXT + count and target.pool.free_pages >= pages
    context = CONTEXT if fits else 0
    tokens = [(7919 * i + 13) % target.vocab_size for i in range(context + count)]
    sequence = target.open()
    try:
        target.prefill(sequence, tokens[:context])
        yield sequence, mx.array(tokens[context:], dtype=mx.int32)
    finally:
        sequence.free()


def logits_alone(target: Target, sequence: CachedSequence, tokens: mx.array) -> Iterator[mx.array]:
    """Yield the logits [V] of each row after a sequence, from passes of one row. The sequence is not changed."""
    alone = sequence.fork()
    try:
        for row in range(tokens.size):
            passed = target.forward([(alone, tokens[row : row + 1])])
            logits = target.logits(passed.hidden)[0]
            # A pending read of the pool would make the write copy all of it.
            mx.eval(logits, *passed.arrays)
            yield logits
            target.commit(alone, passed)
    finally:
        alone.free()


def compare(sequence: CachedSequence, row: int, logits: mx.array, expected: mx.array) -> Difference | None:
    """Compare row number ``row`` of a pass after ``sequence`` with the same row alone.

    logits: [R, V], of the pass.
    expected: [V], of the row alone.
    Returns the difference, or None where they are equal bit for bit.
    """
    found = logits[row]
    if mx.array_equal(found, expected, equal_nan=True).item():
        return None
    a, b = np.array(found.astype(mx.float32)), np.array(expected.astype(mx.float32))
    largest, same = float(np.abs(a - b).max()), bool(a.argmax() == b.argmax())
    return Difference(sequence.length + row, row, logits.shape[0], largest, same)


@dataclass
class RowCheck:
    """Recomputes every verify row as a one-row pass; pass ``check`` to a request as ``on_verified``.

    target: the model.
    rows: how many rows were compared.
    differences: of these.
    """

    target: Target
    rows: int = 0
    differences: list[Difference] = field(default_factory=list)

    def check(self, sequence: CachedSequence, tokens: mx.array, logits: mx.array) -> None:
        """Compare verified rows with one-row passes.

        sequence: what came before the rows.
        tokens: [R] int32, the rows.
        logits: [R, V], of the verify pass.
        """
        for row, expected in enumerate(logits_alone(self.target, sequence, tokens)):
            self.rows += 1
            difference = compare(sequence, row, logits, expected)
            if difference is not None:
                self.differences.append(difference)

    def __str__(self) -> str:
        if not self.differences:
            return f"Rows checked: {self.rows}, all equal to one-row passes bit for bit"
        lines = [f"Rows checked: {self.rows}, {len(self.differences)} differ from one-row passes"]
        return "\n".join([*lines, *(f"  {d}" for d in self.differences)])
