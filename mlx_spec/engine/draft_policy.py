"""How many tokens to draft next: the depth with the least expected time per emitted token."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Protocol

from metal_kernels import MAX_VERIFY_ROWS
from mlx_spec.engine.costs import Costs

# A round's evidence fades by this factor, so acceptance follows the text.
DECAY = 0.94
# Rounds between probes while drafting is paused; doubled after each probe that is not fully accepted.
FIRST_WAIT, LONGEST_WAIT = 8, 256
PROBE_ROUNDS = 2
# Prior acceptance probability of a draft, and of its runner-up where the draft is rejected.
PRIOR, RUNNER_UP = 0.75, 0.25
# Evidence on a runner-up that is not verified fades by this factor, so that it is tried again.
FORGET = 0.98
# Drafting must promise this much less time a token than plain decoding, or it is paused; siblings less than none.
MARGIN = 0.98
# And a copy so much less than a draft: text that stood before is easier than other text for a drafter, too.
COPY_MARGIN = 0.9

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DepthOffer:
    """Drafts that a sequence has for a pass with others.

    chances[i]: that the first i + 1 of them are all accepted.
    optional: they take rows only as far as that pays.
    is_drafted: they need a draft pass.
    """

    chances: tuple[float, ...]
    optional: bool = False
    is_drafted: bool = True


class DepthPolicy(Protocol):
    """Chooses the depth of each round; 0 is plain decoding. It can change the speed, never the text."""

    def depth(self) -> int:
        """Return how many tokens to draft in the next round, which the sequence has to itself."""
        ...

    def offer(self) -> DepthOffer:
        """Return what may be drafted in the next round, whose rows are shared with other sequences."""
        ...

    def copied(self, chances: Sequence[float]) -> int:
        """Return how many tokens of a copy to draft in the next round in place of the drafter's, 0 for none.

        chances[i]: that the first i + 1 of them are all accepted.
        """
        ...

    def siblings(self, depth: int) -> tuple[int, ...]:
        """Return how many runners-up to verify beside each of ``depth`` drafts, in a pass of one sequence."""
        ...

    def update(self, drafted: int, accepted: int, runner_up: bool | None) -> None:
        """Learn from a round's chain.

        drafted, accepted: how many tokens of it.
        runner_up: whether the sibling of the rejected draft is accepted, None where there is no sibling.
        """
        ...

    @property
    def reason(self) -> str:
        """Why the depth is what it is, in a few words."""
        ...


def policy_for(
    num_draft_tokens: int | str | None,
    num_sibling_drafts: int | None,
    max_draft: int,
    costs: Costs | None,
    *,
    takes_trees: bool,
    max_copy: int = 0,
) -> DepthPolicy:
    """Return the policy of a request.

    num_draft_tokens, num_sibling_drafts: see Request.
    max_draft: the most tokens of the drafter's drafts, 0 without a drafter.
    costs: of passes on this machine, where they are known.
    takes_trees: whether the target verifies trees.
    max_copy: the most tokens of a copy, 0 where nothing is copied.
    """
    if not max_draft:
        if num_draft_tokens is None and max_copy and costs is not None:
            return CopiesAlone(costs)
        return FixedDepth(num_draft_tokens if isinstance(num_draft_tokens, int) else max_copy)
    if num_draft_tokens == "adaptive":
        return Adaptive(max_draft)
    if num_draft_tokens is None and costs is not None:
        return CostAware(costs, max_draft, may_branch=num_sibling_drafts is None and takes_trees)
    count = max_draft if num_draft_tokens is None else int(num_draft_tokens)
    return FixedDepth(count, num_sibling_drafts or 0)


def likely(count: int) -> tuple[float, ...]:
    """Return the chances of drafts of which nothing is known."""
    return tuple(PRIOR ** (i + 1) for i in range(count))


def cheapest_copy(chances: Sequence[float], verify_ms: Sequence[float]) -> tuple[float, int]:
    """Return the least expected milliseconds per emitted token of a copy, and how many of its tokens give that.

    chances: see ``DepthPolicy.copied``.
    verify_ms: of passes, by rows.
    """
    tokens = accumulate(chances, initial=1.0)
    return min((verify_ms[rows] / count, rows - 1) for rows, count in enumerate(tokens, 1))


def pass_times(costs: Costs, max_depth: int) -> list[float]:
    """Return the milliseconds of verify passes by rows, which are read many times a round."""
    return [costs.verify_ms(rows) for rows in range(max(MAX_VERIFY_ROWS, max_depth + 1) + 1)]


@dataclass
class CopiesAlone:
    """Without a drafter: copies as far as they pay, and plain decoding otherwise."""

    costs: Costs

    def __post_init__(self) -> None:
        self._verify_ms = pass_times(self.costs, 0)

    def depth(self) -> int:
        """Ask no drafter."""
        return 0

    def offer(self) -> DepthOffer:
        """Offer nothing."""
        return DepthOffer(())

    def copied(self, chances: Sequence[float]) -> int:
        """Copy what is cheaper than plain decoding."""
        ms_per_token, count = cheapest_copy(chances, self._verify_ms)
        return count if ms_per_token < MARGIN * self._verify_ms[1] else 0

    def siblings(self, depth: int) -> tuple[int, ...]:
        """Verify chains."""
        return (0,) * depth

    def update(self, drafted: int, accepted: int, runner_up: bool | None) -> None:
        """Learn nothing: copies bring their chances."""

    @property
    def reason(self) -> str:
        """Name what decides."""
        return "copies, as far as they are expected to pay"


@dataclass(frozen=True)
class FixedDepth:
    """Always the same depth, and so many siblings, spread over the drafts from the first one on."""

    count: int
    beside: int = 0

    def depth(self) -> int:
        """Return the fixed depth."""
        return self.count

    def offer(self) -> DepthOffer:
        """Ask for the fixed depth."""
        return DepthOffer(likely(self.count))

    def copied(self, chances: Sequence[float]) -> int:
        """Copy the fixed number of tokens: it is not the drafter's where copies are asked for."""
        return min(self.count, len(chances))

    def siblings(self, depth: int) -> tuple[int, ...]:
        """Spread the fixed number of siblings."""
        return tuple(self.beside // depth + (position < self.beside % depth) for position in range(depth))

    def update(self, drafted: int, accepted: int, runner_up: bool | None) -> None:
        """Learn nothing."""

    @property
    def reason(self) -> str:
        """Name the fixed depth."""
        return f"fixed at {self.count}" + (f", a tree with {self.beside} siblings" if self.beside else "")


@dataclass
class Adaptive:
    """One deeper after a round whose drafts were all accepted, one shallower after a round in which none was.

    It needs no measured costs, and begins at ``count``.
    """

    max_depth: int
    count: int = 3

    def __post_init__(self) -> None:
        self.count = min(self.count, self.max_depth)

    def depth(self) -> int:
        """Return the depth of the next round."""
        return self.count

    def offer(self) -> DepthOffer:
        """Ask for the depth of the next round."""
        return DepthOffer(likely(self.count))

    def copied(self, chances: Sequence[float]) -> int:
        """Copy nothing: without costs a copy cannot be compared with what the drafter drafts."""
        return 0

    def siblings(self, depth: int) -> tuple[int, ...]:
        """Draft chains."""
        return (0,) * depth

    def update(self, drafted: int, accepted: int, runner_up: bool | None) -> None:
        """Grow or shrink, between one and the most; a round cut short by its end teaches nothing."""
        if drafted == self.count:
            step = (accepted == drafted) - (accepted == 0)
            self.count = max(1, min(self.count + step, self.max_depth))

    @property
    def reason(self) -> str:
        """Name the depth that it came to."""
        return f"adaptive, at {self.count}"


@dataclass
class CostAware:
    """Minimises (draft + verify time) / expected tokens from measured costs and recent acceptance.

    It begins with weak confidence at the drafter's usual level and pauses drafting when plain decoding is cheaper;
    paused, it probes after 8 rounds, then 16, up to 256, and from 8 on after a probe that was fully accepted.

    costs: of passes on this machine.
    max_depth: the most tokens of a draft.
    prior: the acceptance that it begins with.
    may_branch: it adds a sibling to each draft for which that is cheaper still.
    reach[i]: decayed (tries, successes) of drafts at position i + 1 whose predecessors were all accepted.
    runners_up[i]: decayed (tries, successes) of siblings at position i + 1, where the draft itself was rejected.
    """

    costs: Costs
    max_depth: int
    prior: float = PRIOR
    may_branch: bool = False
    reach: list[list[float]] = field(default_factory=list)
    runners_up: list[list[float]] = field(default_factory=list)
    _wait: int = FIRST_WAIT
    _paused_for: int = 0
    _probing: int = 0
    _is_paused: bool = False

    def __post_init__(self) -> None:
        self.reach = [[4.0, 4.0 * self.prior] for _ in range(self.max_depth)]
        self.runners_up = [[4.0, 4.0 * RUNNER_UP] for _ in range(self.max_depth)]
        self._verify_ms = pass_times(self.costs, self.max_depth)

    def depth(self) -> int:
        """Return the best depth, or a probe of drafting when it has been paused for long."""
        best = min(range(self.max_depth + 1), key=self.ms_per_token)
        pays = best > 0 and self.ms_per_token(best) < MARGIN * self.ms_per_token(0)
        if pays == self._is_paused:
            self._is_paused = not pays
            logger.info("Drafting is %s: %s", "resumed" if pays else "paused", self.reason)
        if pays:
            self._wait, self._paused_for = FIRST_WAIT, 0
            return best
        return self._best_draft() if self._probes_now() else 0

    def offer(self) -> DepthOffer:
        """Offer every depth, or ask for a probe of drafting when there were no rows for it for long."""
        chances = tuple(self._reached(self.max_depth))
        return (
            DepthOffer(chances[: self._best_draft()]) if self._probes_now() else DepthOffer(chances, optional=True)
        )

    def copied(self, chances: Sequence[float]) -> int:
        """Copy what is cheaper than plain decoding and than the best draft."""
        ms_per_token, count = cheapest_copy(chances, self._verify_ms)
        if ms_per_token >= MARGIN * self.ms_per_token(0):
            return 0
        drafted = min(map(self.ms_per_token, range(1, self.max_depth + 1)))
        return count if ms_per_token < COPY_MARGIN * drafted else 0

    def siblings(self, depth: int) -> tuple[int, ...]:
        """Return where a sibling makes a pass of ``depth`` drafts cheaper for each expected token."""
        gains = self._gains(depth)
        positions = sorted(range(depth), key=lambda position: -gains[position])[: self._best_at(depth)[1]]
        return tuple(int(position in positions) for position in range(depth))

    def update(self, drafted: int, accepted: int, runner_up: bool | None) -> None:
        """Learn how many drafts of a round were accepted, and whether the runner-up was where one was rejected."""
        if not drafted:
            self._paused_for += 1
            return
        if not self._probing or accepted == drafted:
            self._wait, self._paused_for = FIRST_WAIT, 0
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
        """Return the expected milliseconds per emitted token at a depth, with the siblings that pay there."""
        return self._best_at(depth)[0]

    @property
    def reason(self) -> str:
        """Compare the best drafting depth with plain decoding."""
        best = self._best_draft()
        drafting, plain = self.ms_per_token(best), self.ms_per_token(0)
        paused, siblings = drafting >= MARGIN * plain, sum(self.siblings(best))
        shape = f"a tree with {siblings} siblings" if siblings else "a chain"
        return (
            f"{'paused' if paused else f'about {best}'}: drafting {best}, {shape}, is expected to cost "
            f"{drafting:.1f} ms a token, plain decoding {plain:.1f}"
        )

    def _best_at(self, depth: int) -> tuple[float, int]:
        """Return the least milliseconds per token at a depth, and the number of siblings that gives it."""
        tokens, draft_ms = 1.0 + sum(self._reached(depth)), self.costs.draft_ms(depth)
        chain = (draft_ms + self._verify_ms[depth + 1]) / tokens, 0
        if not self.may_branch:
            return chain
        gains = sorted(self._gains(depth), reverse=True)[: max(0, MAX_VERIFY_ROWS - 1 - depth)]
        trees = [
            ((draft_ms + self._verify_ms[depth + 1 + siblings]) / (tokens + gained), siblings)
            for siblings, gained in enumerate(accumulate(gains), 1)
        ]
        best = min(trees, default=chain)
        return best if best[0] < MARGIN * chain[0] else chain

    def _gains(self, depth: int) -> list[float]:
        """Return the tokens that a sibling beside each draft is expected to add."""
        reached = [1.0, *self._reached(depth)]
        return [
            (reached[position] - reached[position + 1])
            * self.runners_up[position][1]
            / self.runners_up[position][0]
            for position in range(depth)
        ]

    def _reached(self, depth: int) -> Iterator[float]:
        return accumulate((successes / tries for tries, successes in self.reach[:depth]), mul)

    def _probes_now(self) -> bool:
        if not self._probing and self._paused_for >= self._wait:
            self._wait, self._paused_for = min(2 * self._wait, LONGEST_WAIT), 0
            self._probing = PROBE_ROUNDS
        return self._probing > 0

    def _best_draft(self) -> int:
        return min(range(1, self.max_depth + 1), key=self.ms_per_token)
