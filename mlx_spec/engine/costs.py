"""What passes cost on a machine, as curves: milliseconds by rows, drafted tokens and sequences."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, Protocol

from metal_kernels import MAX_VERIFY_ROWS


class Setting(NamedTuple):
    """What rounds of equal shapes may differ by in their costs.

    work: what a round does besides its passes, see ``Request.work``.
    sequences: that take part.
    cached: how many tokens the longest of them has in its cache.
    """

    work: Hashable = None
    sequences: int = 1
    cached: int = 0


ALONE = Setting()
"""One sequence, with nothing cached."""


class Shape(NamedTuple):
    """The passes of a round.

    depth: tokens of the deepest draft, 0 for plain decoding.
    rows: of the verify pass.
    drafting: sequences of the draft pass.
    """

    depth: int
    rows: int
    drafting: int = 1


class RoundCosts(Protocol):
    """What the policies know of whole rounds."""

    def round_ms(self, setting: Setting, shape: Shape) -> float:
        """Return the expected milliseconds of a round."""
        ...

    def table(self, setting: Setting, hopeful: bool = False) -> Sequence[Sequence[float]]:
        """Return the milliseconds of rounds in which one sequence drafts, by depth and rows: both from 0 to 16.

        hopeful: of shapes of which little is known, as little as they may well take.
        """
        ...

    def wants_plain(self, setting: Setting, ratio: float) -> bool:
        """Whether the cost of a plain round is known so badly that one should be run.

        ratio: what a token is expected to take when it is drafted, to what it takes in plain decoding.
        """
        ...

    def learn(self, setting: Setting, shape: Shape, ms: float) -> None:
        """Learn from what a round took."""
        ...


@dataclass(frozen=True)
class Costs:
    """Milliseconds on this machine; between and beyond the measured counts the nearest two are extrapolated.

    As the costs of rounds they are fixed: a round takes what its two passes take.

    verify: by the rows of a pass.
    draft: by the tokens that are drafted.
    draft_more: what each further sequence adds to a draft of so many tokens; empty where it is not known.
    """

    verify: Mapping[int, float]
    draft: Mapping[int, float]
    draft_more: Mapping[int, float] = field(default_factory=dict)

    def __hash__(self) -> int:
        return id(self)

    def verify_ms(self, rows: int) -> float:
        """Return the cost of a verify pass."""
        return interpolate(self.verify, rows)

    def draft_ms(self, count: int, sequences: int = 1) -> float:
        """Return the cost of a draft pass of so many sequences; none, and none without a drafter, is free."""
        if not count or not self.draft:
            return 0.0
        more = interpolate(self.draft_more, count) if self.draft_more else 0.0
        return interpolate(self.draft, count) + (sequences - 1) * more

    def round_ms(self, setting: Setting, shape: Shape) -> float:
        """Return the cost of both passes."""
        return self.draft_ms(shape.depth, shape.drafting) + self.verify_ms(shape.rows)

    def table(self, setting: Setting, hopeful: bool = False) -> Sequence[Sequence[float]]:
        """Return the costs of both passes by depth and rows."""
        return table_of(self)

    def wants_plain(self, setting: Setting, ratio: float) -> bool:
        """Return False: nothing would be learned."""
        return False

    def learn(self, setting: Setting, shape: Shape, ms: float) -> None:
        """Learn nothing."""


@cache
def table_of(costs: Costs) -> list[list[float]]:
    """Return the cost of both passes, by depth and rows from 0 to 16."""
    counts = range(MAX_VERIFY_ROWS + 1)
    verify = [costs.verify_ms(rows) for rows in counts]
    return [[costs.draft_ms(depth) + ms for ms in verify] for depth in counts]


def interpolate(points: Mapping[int, float], x: int) -> float:
    """Read a piecewise linear curve, given by at least one point, at ``x``."""
    known = sorted(points)
    if x in points or len(known) == 1:
        return points.get(x, points[known[0]])
    upper = next((i for i, at in enumerate(known) if at > x), len(known) - 1)
    low, high = known[max(upper - 1, 0)], known[max(upper, 1)]
    return points[low] + (points[high] - points[low]) * (x - low) / (high - low)
