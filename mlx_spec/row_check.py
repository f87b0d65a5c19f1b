"""Does a verify row equal the same row computed alone? The row contract, checked on a running generation."""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_spec.target import Sequence, Target


@dataclass(frozen=True)
class Difference:
    """A verify row whose logits differ from a one-row pass.

    position: of the row; row and rows: its number in the pass, and how many rows that had. largest: the largest
    absolute difference of a logit. same_token: whether the most likely token is the same nevertheless.
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


@dataclass
class RowCheck:
    """Recomputes every verify row as a one-row pass; give ``check`` to a generation as ``on_verified``."""

    target: Target
    rows: int = 0
    differences: list[Difference] = field(default_factory=list)

    def check(self, sequence: Sequence, tokens: mx.array, logits: mx.array) -> None:
        """Compare the rows [R] that were verified behind ``sequence`` and gave ``logits`` [R, V]."""
        alone = sequence.fork()
        try:
            for row in range(tokens.size):
                passed = self.target.forward([(alone, tokens[row : row + 1])])
                expected = self.target.logits(passed.hidden)[0]
                self._compare(alone.length, row, tokens.size, logits[row], expected)
                self.target.commit(alone, passed)
        finally:
            alone.free()

    def _compare(self, position: int, row: int, rows: int, found: mx.array, expected: mx.array) -> None:
        self.rows += 1
        if mx.array_equal(found, expected).item():
            return
        a, b = np.array(found.astype(mx.float32)), np.array(expected.astype(mx.float32))
        largest, same = float(np.abs(a - b).max()), bool(a.argmax() == b.argmax())
        self.differences.append(Difference(position, row, rows, largest, same))

    def __str__(self) -> str:
        if not self.differences:
            return f"Rows checked: {self.rows}, all equal to one-row passes bit for bit"
        lines = [f"Rows checked: {self.rows}, {len(self.differences)} differ from one-row passes"]
        return "\n".join([*lines, *(f"  {d}" for d in self.differences)])
