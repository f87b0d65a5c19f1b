"""How many tokens to draft next: the depth with the least expected time per emitted token."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Protocol

from metal_kernels import MAX_VERIFY_ROWS
from mlx_spec.engine.costs import ALONE, RoundCosts, Setting

# A round's evidence fades by this factor, so acceptance follows the text.
DECAY = 0.96
# Rounds between probes while drafting is paused. They double up to the longest, and on until probes take no more
# than a share of the time.
FIRST_WAIT, LONGEST_WAIT, PROBE_SHARE = 8, 64, 0.015
PROBE_ROUNDS = 4
# Tokens of a probe whose rows others could have.
PROBE_DEPTH = 1
# Prior acceptance of a draft, and of its runner-up where the draft is rejected; each counts for 4 tries.
PRIOR, RUNNER_UP = 0.75, 0.25
PRIOR_TRIES = 4.0
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

    def offer(self, sequences: int = 2) -> DepthOffer:
        """Return what may be drafted in the next round, whose rows are shared among so many sequences."""
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

        drafted, accepted: how many tokens of it; drafted is 0 where they were not the drafter's.
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
    costs: RoundCosts | None,
    setting: Setting = ALONE,
    *,
    takes_trees: bool,
    max_copy: int = 0,
) -> DepthPolicy:
    """Return the policy of a request.

    num_draft_tokens, num_sibling_drafts: see Request.
    max_draft: the most tokens of the drafter's drafts, 0 without a drafter.
    costs: of rounds on this machine, where they are known.
    setting: of the request's first round.
    takes_trees: whether the target verifies trees.
    max_copy: the most tokens of a copy, 0 where nothing is copied.
    """
    if not max_draft:
        if num_draft_tokens is None and max_copy and costs is not None:
            return CopiesAlone(costs, setting)
        return FixedDepth(num_draft_tokens if isinstance(num_draft_tokens, int) else max_copy)
    if num_draft_tokens == "adaptive":
        return Adaptive(max_draft)
    if num_draft_tokens is None and costs is not None:
        may_branch = num_sibling_drafts is None and takes_trees
        return CostAware(costs, max_draft, may_branch=may_branch, setting=setting)
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


@dataclass
class CopiesAlone:
    """Without a drafter: copies as far as they pay, and plain decoding otherwise.

    costs: of rounds on this machine.
    setting: of the next round.
    """

    costs: RoundCosts
    setting: Setting = ALONE

    def depth(self) -> int:
        """Ask no drafter."""
        return 0

    def offer(self, sequences: int = 2) -> DepthOffer:
        """Offer nothing."""
        return DepthOffer(())

    def copied(self, chances: Sequence[float]) -> int:
        """Copy what is cheaper than plain decoding, but for a look at that where its cost is known badly."""
        times = self.costs.table(self.setting)[0]
        ms_per_token, count = cheapest_copy(chances, times)
        ratio = ms_per_token / times[1]
        return count if ratio < MARGIN and not self.costs.wants_plain(self.setting, ratio) else 0

    def siblings(self, depth: int) -> tuple[int, ...]:
        """Verify chains."""
        return (0,) * depth

    def update(self, drafted: int, accepted: int, runner_up: bool | None) -> None:
        """Count the tokens; copies bring their chances."""
        self.setting = self.setting._replace(cached=self.setting.cached + 1 + accepted)

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

    def offer(self, sequences: int = 2) -> DepthOffer:
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

    def offer(self, sequences: int = 2) -> DepthOffer:
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
    """Minimises the expected time of a round / its expected tokens, from costs and recent acceptance.

    It begins with weak confidence at the drafter's usual level, and pauses drafting where plain decoding is
    cheaper. Paused, it probes after 8 rounds, then 16, up to 64, or later where probes are expensive. While it
    drafts, it looks at plain decoding where the costs of that are known badly.

    costs: of rounds on this machine.
    max_depth: the most tokens of a draft.
    prior: the acceptance that it begins with.
    may_branch: it adds a sibling to each draft for which that is cheaper still.
    setting: of the next round, where the sequence has it to itself.
    reach[i]: decayed (tries, successes) of drafts at position i + 1 whose predecessors were all accepted, and for
        how many tries the rate of the position before, or ``prior``, counts in addition; that fades, too.
    runners_up[i]: decayed (tries, successes) of siblings at position i + 1, where the draft itself was rejected.
    """

    costs: RoundCosts
    max_depth: int
    prior: float = PRIOR
    may_branch: bool = False
    setting: Setting = ALONE
    reach: list[list[float]] = field(default_factory=list)
    runners_up: list[list[float]] = field(default_factory=list)
    _wait: int = FIRST_WAIT
    _paused_for: int = 0
    _probing: int = 0
    _is_paused: bool = False

    def __post_init__(self) -> None:
        # A pass has a row for the anchor, too.
        self.max_depth = min(self.max_depth, MAX_VERIFY_ROWS - 1)
        self.reach = [[0.0, 0.0, PRIOR_TRIES] for _ in range(self.max_depth)]
        self.runners_up = [[PRIOR_TRIES, PRIOR_TRIES * RUNNER_UP] for _ in range(self.max_depth)]

    def depth(self) -> int:
        """Return the best depth, or a probe of what has not been tried for long: drafting, or plain decoding."""
        plain, *drafting = (ms for ms, _ in self._best(self.costs.table(self.setting)))
        ratio = min(drafting) / plain
        pays = ratio < MARGIN
        if pays == self._is_paused:
            self._is_paused = not pays
            logger.info("Drafting is %s: %s", "resumed" if pays else "paused", self.reason)
        if pays:
            self._wait, self._paused_for = FIRST_WAIT, 0
            return 0 if self.costs.wants_plain(self.setting, ratio) else self._best_draft()
        return self._best_draft() if self._probes_now() else 0

    def offer(self, sequences: int = 2) -> DepthOffer:
        """Offer every depth, or ask for a probe of drafting when there were no rows for it for long.

        A probe takes the time of all sequences, so each of them probes the more rarely the more they are.
        """
        chances = tuple(self._reached(self.max_depth))
        is_probe = self._probes_now(sequences)
        return (
            DepthOffer(chances[:PROBE_DEPTH], optional=False) if is_probe else DepthOffer(chances, optional=True)
        )

    def copied(self, chances: Sequence[float]) -> int:
        """Copy what is cheaper than plain decoding and than the best draft."""
        table = self.costs.table(self.setting)
        ms_per_token, count = cheapest_copy(chances, table[0])
        plain, *drafting = (ms for ms, _ in self._best(table))
        return count if ms_per_token < min(MARGIN * plain, COPY_MARGIN * min(drafting)) else 0

    def siblings(self, depth: int) -> tuple[int, ...]:
        """Return where a sibling makes a pass of ``depth`` drafts cheaper for each expected token."""
        gains = self._gains(depth)
        best = self._best_at(depth, self.costs.table(self.setting), gains, 1.0 + sum(self._reached(depth)))
        positions = sorted(range(depth), key=lambda position: -gains[position])[: best[1]]
        return tuple(int(position in positions) for position in range(depth))

    def update(self, drafted: int, accepted: int, runner_up: bool | None) -> None:
        """Learn how many drafts of a round were accepted, and whether the runner-up was where one was rejected."""
        emitted = 1 + accepted + bool(runner_up)
        self.setting = self.setting._replace(cached=self.setting.cached + emitted)
        if not drafted:
            self._paused_for += 1
            return
        if not self._probing:
            self._wait, self._paused_for = FIRST_WAIT, 0
        self._probing = max(0, self._probing - 1)
        for i in range(min(accepted + 1, drafted)):
            tries, successes, borrowed = self.reach[i]
            self.reach[i] = [DECAY * tries + 1, DECAY * successes + (i < accepted), DECAY * borrowed]
        if accepted < drafted:
            tries, successes = self.runners_up[accepted]
            known, weight = (FORGET, PRIOR_TRIES * (1 - FORGET)) if runner_up is None else (DECAY, 1.0)
            chance = RUNNER_UP if runner_up is None else float(runner_up)
            self.runners_up[accepted] = [known * tries + weight, known * successes + weight * chance]

    def ms_per_token(self, depth: int) -> float:
        """Return the expected milliseconds per emitted token at a depth, with the siblings that pay there."""
        return self._best(self.costs.table(self.setting))[depth][0]

    @property
    def reason(self) -> str:
        """Compare the best drafting depth with plain decoding."""
        plain, *others = (ms for ms, _ in self._best(self.costs.table(self.setting)))
        drafting = min(others)
        best = others.index(drafting) + 1
        paused, siblings = drafting >= MARGIN * plain, sum(self.siblings(best))
        shape = f"a tree with {siblings} siblings" if siblings else "a chain"
        return (
            f"{'paused' if paused else f'about {best}'}: drafting {best}, {shape}, is expected to cost "
            f"{drafting:.1f} ms a token, plain decoding {plain:.1f}"
        )

    def _best(self, table: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
        """Return for each depth the least milliseconds per token, and the number of siblings that gives it."""
        gains = self._gains(self.max_depth)
        tokens = accumulate((1.0, *self._reached(self.max_depth)))
        return [self._best_at(depth, table, gains[:depth], expected) for depth, expected in enumerate(tokens)]

    def _best_at(
        self, depth: int, table: Sequence[Sequence[float]], gains: Sequence[float], tokens: float
    ) -> tuple[float, int]:
        """Return the least milliseconds per token at a depth, and the number of siblings that gives it.

        table: see ``RoundCosts.table``.
        gains: see ``_gains``.
        tokens: that a chain of this depth is expected to bring.
        """
        ms = table[depth]
        chain = ms[depth + 1] / tokens, 0
        if not self.may_branch:
            return chain
        most = max(0, MAX_VERIFY_ROWS - 1 - depth)
        gained = accumulate(sorted(gains, reverse=True)[:most])
        trees = [(ms[depth + 1 + siblings] / (tokens + more), siblings) for siblings, more in enumerate(gained, 1)]
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
        return accumulate(self._rates(depth), mul)

    def _rates(self, depth: int) -> Iterator[float]:
        """Yield the chance of each draft, where those before it are accepted."""
        rate = self.prior
        for tries, successes, borrowed in self.reach[:depth]:
            rate = (successes + borrowed * rate) / (tries + borrowed)
            yield rate

    def _probes_now(self, sequences: int = 1) -> bool:
        if not self._probing and self._paused_for >= self._wait * sequences:
            self._wait, self._paused_for = min(2 * self._wait, self._longest_wait()), 0
            self._probing = PROBE_ROUNDS
        return self._probing > 0

    def _longest_wait(self) -> int:
        """Return the rounds after which a probe of one token takes no more than its share of the time."""
        table = self.costs.table(self.setting)
        more = table[1][2] / table[0][1] - 1
        return max(LONGEST_WAIT, int(PROBE_ROUNDS * more / PROBE_SHARE))

    def _best_draft(self) -> int:
        """Return the depth of at least one that promises most, those counted in that should be tried once."""
        best = self._best(self.costs.table(self.setting, hopeful=True))
        return min(range(1, self.max_depth + 1), key=lambda depth: best[depth][0])
