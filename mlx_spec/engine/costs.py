"""What passes cost on a machine, as curves: milliseconds by rows, drafted tokens and sequences."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Costs:
    """Milliseconds on this machine; between and beyond the measured counts the nearest two are extrapolated.

    verify: by the rows of a pass.
    draft: by the tokens that are drafted.
    draft_more: what each further sequence adds to a draft of so many tokens; empty where it is not known.
    """

    verify: Mapping[int, float]
    draft: Mapping[int, float]
    draft_more: Mapping[int, float] = field(default_factory=dict)

    def verify_ms(self, rows: int) -> float:
        """Return the cost of a verify pass."""
        return interpolate(self.verify, rows)

    def draft_ms(self, count: int, sequences: int = 1) -> float:
        """Return the cost of a draft pass of so many sequences; drafting nothing is free."""
        if not count:
            return 0.0
        more = interpolate(self.draft_more, count) if self.draft_more else 0.0
        return interpolate(self.draft, count) + (sequences - 1) * more


def interpolate(points: Mapping[int, float], x: int) -> float:
    """Read a piecewise linear curve, given by at least one point, at ``x``."""
    known = sorted(points)
    if x in points or len(known) == 1:
        return points.get(x, points[known[0]])
    upper = next((i for i, at in enumerate(known) if at > x), len(known) - 1)
    low, high = known[max(upper - 1, 0)], known[max(upper, 1)]
    return points[low] + (points[high] - points[low]) * (x - low) / (high - low)
