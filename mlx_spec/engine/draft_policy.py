"""How many tokens to draft next: the depth with the least expected time per emitted token."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Protocol

from metal_kernels import MAX_ROWS

# A round's evidence fades by this factor, so acceptance follows the text.
DECAY = 0.94
# Rounds between two looks at drafting while parked; doubles until the drafts of a look all stand.
FIRST_WAIT, LONGEST_WAIT = 8, 256
PROBE_ROUNDS = 2
# What a draft's chance to stand is taken for where nothing is known, and the runner-up's where the draft fell.
PRIOR, RUNNER_UP = 0.75, 0.25
# What is known of a runner-up that is not verified fades by this factor, so that it is looked at again.
FORGET = 0.98
# Drafting must promise this much less time a token than plain decoding, or it stays parked; leaves than none.
MARGIN = 0.98


@dataclass(frozen=True)
class Offer:
    """Drafts that a sequence has for a pass with others. chances[i]: that the first i + 1 of them all stand.

    optional: they take rows only as far as that pays.
    """

    chances: tuple[float, ...]
    optional: bool = False


class DepthPolicy(Protocol):
    """Chooses the depth of each round; 0 is plain decoding. It can change the speed, never the text."""

    def depth(self) -> int:
        """Return how many tokens to draft in the next round, which the sequence has to itself."""
        ...

    def offer(self) -> Offer:
        """Return what may be drafted in the next round, whose rows are shared with other sequences."""
        ...

    def leaves(self, depth: int) -> tuple[int, ...]:
        """Return how many runners-up to verify beside each of ``depth`` drafts, in a pass of one sequence."""
        ...

    def update(self, drafted: int, accepted: int, runner_up: bool | None) -> None:
        """Learn from a round's chain. runner_up: whether the leaf beside the draft that fell stands, if any."""
        ...

    @property
    def reason(self) -> str:
        """Say in a few words why the depth is what it is."""
        ...


def likely(count: int) -> tuple[float, ...]:
    """Return the chances of drafts of which nothing is known."""
    return tuple(PRIOR ** (i + 1) for i in range(count))


@dataclass(frozen=True)
class FixedDepth:
    """Always the same depth, and so many leaves, which are spread over the drafts from the first one on."""

    count: int
    beside: int = 0

    def depth(self) -> int:
        """Return the fixed depth."""
        return self.count

    def offer(self) -> Offer:
        """Ask for the fixed depth."""
        return Offer(likely(self.count))

    def leaves(self, depth: int) -> tuple[int, ...]:
        """Spread the fixed number of leaves."""
        return tuple(self.beside // depth + (place < self.beside % depth) for place in range(depth))

    def update(self, drafted: int, accepted: int, runner_up: bool | None) -> None:
        """Learn nothing."""

    @property
    def reason(self) -> str:
        """Name the fixed depth."""
        return f"fixed at {self.count}" + (f", a tree with {self.beside} leaves" if self.beside else "")


@dataclass
class Adaptive:
    """One deeper after a round whose drafts all stood, one shallower after a round in which none did.

    It needs no measured costs, and begins at ``count``.
    """

    max_depth: int
    count: int = 3

    def __post_init__(self) -> None:
        self.count = min(self.count, self.max_depth)

    def depth(self) -> int:
        """Return the depth of the next round."""
        return self.count

    def offer(self) -> Offer:
        """Ask for the depth of the next round."""
        return Offer(likely(self.count))

    def leaves(self, depth: int) -> tuple[int, ...]:
        """Draft chains."""
        return (0,) * depth

    def update(self, drafted: int, accepted: int, runner_up: bool | None) -> None:
        """Grow or shrink, between one and the most; a round cut short by its end says nothing."""
        if drafted == self.count:
            step = (accepted == drafted) - (accepted == 0)
            self.count = max(1, min(self.count + step, self.max_depth))

    @property
    def reason(self) -> str:
        """Name the depth that it came to."""
        return f"adaptive, at {self.count}"


@dataclass(frozen=True)
class Costs:
    """Milliseconds on this machine: ``verify[r]`` of a pass over r rows, ``draft[k]`` of drafting k tokens.

    draft_more[k]: what each further sequence adds to a draft of k tokens; nothing where it is not known.
    Between and beyond the measured counts the nearest two are carried on in a straight line.
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


@dataclass
class CostAware:
    """Minimises (draft + verify time) / expected tokens from measured costs and recent acceptance.

    reach[i]: decayed (tries, successes) of drafts at position i + 1 whose predecessors all stood. It begins with
    weak confidence at the drafter's usual level and parks when plain decoding is cheaper; parked, it looks again
    after 8 rounds, then 16, up to 256, and from 8 on where all drafts of such a look stood.
    Where it ``may_branch``, it puts a leaf beside each draft for which that is cheaper still. runners_up[i]:
    decayed (tries, successes) of leaves at position i + 1, where the draft itself fell.
    """

    costs: Costs
    max_depth: int
    prior: float = PRIOR
    may_branch: bool = False
    reach: list[list[float]] = field(default_factory=list)
    runners_up: list[list[float]] = field(default_factory=list)
    _wait: int = FIRST_WAIT
    _parked_for: int = 0
    _probing: int = 0

    def __post_init__(self) -> None:
        self.reach = [[4.0, 4.0 * self.prior] for _ in range(self.max_depth)]
        self.runners_up = [[4.0, 4.0 * RUNNER_UP] for _ in range(self.max_depth)]
        most = max(MAX_ROWS, self.max_depth + 1)
        # Read many times a round.
        self._verify_ms = [self.costs.verify_ms(rows) for rows in range(most + 1)]

    def depth(self) -> int:
        """Return the best depth, or a probe of drafting when it has been parked for long."""
        best = min(range(self.max_depth + 1), key=self.ms_per_token)
        if best and self.ms_per_token(best) < MARGIN * self.ms_per_token(0):
            self._wait, self._parked_for = FIRST_WAIT, 0
            return best
        return self._best_draft() if self._looks_again() else 0

    def offer(self) -> Offer:
        """Offer every depth, or ask for a probe of drafting when there were no rows for it for long."""
        chances = tuple(self._standing(self.max_depth))
        return Offer(chances[: self._best_draft()]) if self._looks_again() else Offer(chances, optional=True)

    def leaves(self, depth: int) -> tuple[int, ...]:
        """Return where a leaf makes a pass of ``depth`` drafts cheaper for each expected token."""
        gains = self._gains(depth)
        places = sorted(range(depth), key=lambda place: -gains[place])[: self._best_at(depth)[1]]
        return tuple(int(place in places) for place in range(depth))

    def update(self, drafted: int, accepted: int, runner_up: bool | None) -> None:
        """Learn how far the drafts of a round stood, and whether the next in line did where one fell."""
        if not drafted:
            self._parked_for += 1
            return
        if not self._probing or accepted == drafted:
            self._wait, self._parked_for = FIRST_WAIT, 0
        self._probing = max(0, self._probing - 1)
        for i in range(min(accepted + 1, drafted)):
            tries, successes = self.reach[i]
            self.reach[i] = [DECAY * tries + 1, DECAY * successes + (i < accepted)]
        if accepted < drafted:
            tries, successes = self.runners_up[accepted]
            known, weight = (FORGET, 4.0 * (1 - FORGET)) if runner_up is None else (DECAY, 1.0)
            chance = RUNNER_UP if runner_up is None else float(runner_up)
            self.runners_up[accepted] = [known * tries + weight, known * successes + weight * chance]

    def ms_per_token(self, depth: int) -> float:
        """Return the expected milliseconds per emitted token at a depth, with the leaves that pay there."""
        return self._best_at(depth)[0]

    @property
    def reason(self) -> str:
        """Compare the best drafting depth with plain decoding."""
        best = self._best_draft()
        drafting, plain = self.ms_per_token(best), self.ms_per_token(0)
        parked, leaves = drafting >= MARGIN * plain, sum(self.leaves(best))
        shape = f"a tree with {leaves} leaves" if leaves else "a chain"
        return (
            f"{'parked' if parked else f'about {best}'}: drafting {best}, {shape}, is expected to cost "
            f"{drafting:.1f} ms a token, plain decoding {plain:.1f}"
        )

    def _best_at(self, depth: int) -> tuple[float, int]:
        """Return the least milliseconds per token at a depth, and the number of leaves that gives it."""
        tokens, draft_ms = 1.0 + sum(self._standing(depth)), self.costs.draft_ms(depth)
        chain = (draft_ms + self._verify_ms[depth + 1]) / tokens, 0
        if not self.may_branch:
            return chain
        gains = sorted(self._gains(depth), reverse=True)[: max(0, MAX_ROWS - 1 - depth)]
        trees = [
            ((draft_ms + self._verify_ms[depth + 1 + leaves]) / (tokens + gained), leaves)
            for leaves, gained in enumerate(accumulate(gains), 1)
        ]
        best = min(trees, default=chain)
        return best if best[0] < MARGIN * chain[0] else chain

    def _gains(self, depth: int) -> list[float]:
        """Return the tokens that a leaf beside each draft is expected to add."""
        standing = [1.0, *self._standing(depth)]
        return [
            (standing[place] - standing[place + 1]) * self.runners_up[place][1] / self.runners_up[place][0]
            for place in range(depth)
        ]

    def _standing(self, depth: int) -> Iterator[float]:
        return accumulate((successes / tries for tries, successes in self.reach[:depth]), mul)

    def _looks_again(self) -> bool:
        if not self._probing and self._parked_for >= self._wait:
            self._wait, self._parked_for = min(2 * self._wait, LONGEST_WAIT), 0
            self._probing = PROBE_ROUNDS
        return self._probing > 0

    def _best_draft(self) -> int:
        return min(range(1, self.max_depth + 1), key=self.ms_per_token)
