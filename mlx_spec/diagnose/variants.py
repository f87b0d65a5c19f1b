"""Measures a drafter under other contracts than the one that its checkpoint declares.

A wrong contract changes no emitted token and raises no error.
It only makes drafts worse, so it has to be measured.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_spec.diagnose.acceptance import (
    LEAST_NATS,
    STANDARD_ERRORS,
    Alignment,
    Hits,
    is_better,
    is_gain,
    least_gain,
    measure,
    nats_gained,
)
from mlx_spec.diagnose.text import Text, read_text
from mlx_spec.drafters.base import ObservedDrafter
from mlx_spec.drafters.variants import Variant
from mlx_spec.target import Target

MAX_TEXT_TOKENS = 256
# Tokens of a chain: what it goes on with shows in the second.
DEPTH = 2
# Standard errors that count at load, where few contracts are measured.
ERRORS_AT_LOAD = 3.0
# Where hardly a draft is right under any contract, as with random weights, load names none.
LEAST_SHARE = 0.05
# About how many anchors each contract is measured with, and those that may be better.
SAMPLED, EVERY = 72, 1 << 30
# Standard errors from which on a contract may be better, and how many of those are measured again.
PROMISING, MOST_SECOND = 1.0, 4
# Where no variant alone explains low acceptance, so many of the best are tried with every other one.
MOST_FIRST = 4
# Acceptance of first drafts below which two faults are looked for.
LOW = 0.5
ROWS = {
    -1: ("hidden states of the row before", "give each row the hidden state of the row before it"),
    1: ("hidden states of the row after", "give each row the hidden state of the row after it"),
}
TEXT = """The train left the harbour at seven and followed the river for an hour. On the other side of the
water lay fields, then a small town with a white church, then fields again. "We will be there before noon," said
the woman at the window, and she was right: at eleven they saw the mountains. There are three things to remember
about the place. First, the market is open on Tuesdays and on Saturdays. Second, the bridge is closed in winter.
Third, nobody there is ever in a hurry.

def mean(values):
    if not values:
        raise ValueError("mean() needs at least one value")
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

1. Open the file and read its first line.
2. If the line is empty, stop and return nothing.
3. Otherwise split the line at the comma, and return both parts as numbers.
"""


@dataclass(frozen=True)
class Contract:
    """A contract by the variants that lead to it from the declared one, none for that itself.

    shift: see Alignment.
    """

    variants: tuple[Variant, ...] = ()
    shift: int = 0

    @property
    def name(self) -> str:
        """What is otherwise, in words."""
        parts = [*(variant.name for variant in self.variants), *([ROWS[self.shift][0]] if self.shift else [])]
        return " and ".join(parts) or "as declared"

    @property
    def fixes(self) -> list[str]:
        """How the checkpoint, or the engine, would have it."""
        return [*(variant.fix for variant in self.variants), *([ROWS[self.shift][1]] if self.shift else [])]

    @property
    def points(self) -> set[str]:
        """What it is about."""
        return {variant.point for variant in self.variants} | ({"rows"} if self.shift else set())

    def joined(self, other: "Contract") -> "Contract":
        """Return the contract that departs in the points of both."""
        return Contract((*self.variants, *other.variants), self.shift + other.shift)

    def of(self, drafter: Any) -> Any:
        """Return the drafter under this contract."""
        for variant in self.variants:
            drafter = variant.change(drafter)
        return drafter


@dataclass(frozen=True)
class Found:
    """A contract and how it drafts, beside another after the same anchors.

    base: the other: the declared contract, or for one with two departures that with the first, if it is better.
    other: how that drafts.
    """

    contract: Contract
    hits: Hits
    other: Hits
    errors: float = STANDARD_ERRORS
    base: Contract = Contract()

    @property
    def is_better(self) -> bool:
        """Whether it is clearly better than the other."""
        return is_better(self.hits, self.other, self.errors)

    @property
    def is_promising(self) -> bool:
        """Whether more anchors may show that it is better."""
        if is_gain(self.hits.scores - self.other.scores, errors=PROMISING):
            return True
        return all(is_gain(nats, PROMISING, LEAST_NATS) for nats in nats_gained(self.hits, self.other))

    @property
    def least_gain(self) -> float:
        """What it gains in the quarter of the positions where it gains least, in nats a draft."""
        return least_gain(self.hits, self.other)


def contracts_of(variants: Iterable[Variant], rows: bool = True) -> list[Contract]:
    """Return the contracts that depart in one point; with ``rows`` also those of hidden states of other rows."""
    return [*(Contract((variant,)) for variant in variants), *(Contract((), by) for by in ROWS if rows)]


def layer_ids_of(drafter: ObservedDrafter, variants: Iterable[Variant]) -> tuple[int, ...]:
    """Return all target layers that a drafter reads under its own contract or another."""
    every = [
        drafter,
        *(
            variant.change(drafter)
            for variant in variants
            if "states" in variant.point or variant.point == "hidden state"
        ),
    ]
    return tuple(sorted({layer for each in every for layer in each.target_layer_ids}))


@dataclass
class Search:
    """Measures a drafter under other contracts, and under two at once where that may explain more.

    texts, depth: what to draft after, and how many tokens.
    on_measured: gets the name of each contract that was measured.
    """

    drafter: ObservedDrafter
    texts: Sequence[Text]
    depth: int
    on_measured: Callable[[str], None] = lambda name: None
    _known: dict[tuple[Contract, int], Hits] = field(default_factory=dict)

    def run(self, contracts: Sequence[Contract]) -> list[Found]:
        """Measure all contracts; return them with the clearly better ones first, the best of these before all."""
        found = sorted((self.compared(each) for each in contracts), key=lambda each: -each.hits.score)
        clear = self.clear(found)
        pairs = self.clear([self.joined(first, other) for first, other in self.pairs(found, clear, contracts)])
        rest = [each for each in found if each.contract not in [better.contract for better in clear]]
        return [*pairs, *clear, *rest]

    def pairs(
        self, found: Sequence[Found], clear: Sequence[Found], contracts: Sequence[Contract]
    ) -> list[tuple[Found, Contract]]:
        """Return which two contracts to try together.

        The best one with every other; where no single one is better, and acceptance is low, each of a few that
        come first.
        """
        firsts = list(clear[:1])
        if not clear and self.hits(Contract(), SAMPLED).right[:, 0].mean() < LOW:
            firsts = [each for each in found if each.hits.score > each.other.score][:MOST_FIRST]
        chosen: dict[frozenset[Contract], tuple[Found, Contract]] = {}
        for first in firsts:
            for other in contracts:
                if not first.contract.points & other.points:
                    chosen.setdefault(frozenset((first.contract, other)), (first, other))
        return list(chosen.values())

    def clear(self, found: Iterable[Found]) -> list[Found]:
        """Return the clearly better ones, the best first; what only may be better is measured everywhere."""
        certain = sorted((each for each in found if each.is_better), key=lambda each: -each.least_gain)
        if len(certain) == 1:
            return certain
        promising = [each for each in found if each.is_promising]
        # Which of several is meant, more anchors show as well.
        again = certain or sorted(promising, key=lambda each: -each.least_gain)
        second = [each for each in map(self.everywhere, again[:MOST_SECOND]) if each.is_better]
        measured = [each.contract for each in second]
        rest = [each for each in certain if each.contract not in measured]
        return [*sorted(second, key=lambda each: -each.least_gain), *rest]

    def compared(self, contract: Contract) -> Found:
        """Measure a contract after some anchors."""
        return Found(contract, self.hits(contract, SAMPLED), self.hits(Contract(), SAMPLED))

    def joined(self, first: Found, other: Contract) -> Found:
        """Measure two contracts at once, beside the first of them, or beside none where that is not better."""
        both, base = first.contract.joined(other), first.contract if first.is_better else Contract()
        return Found(both, self.hits(both, SAMPLED), self.hits(base, SAMPLED), base=base)

    def everywhere(self, found: Found) -> Found:
        """Measure again after all anchors."""
        hits, other = self.hits(found.contract, EVERY), self.hits(found.base, EVERY)
        return Found(found.contract, hits, other, base=found.base)

    def hits(self, contract: Contract, anchors: int) -> Hits:
        """Draft under a contract after about so many anchors; what was measured is remembered."""
        if (contract, anchors) not in self._known:
            stride = max(1, sum(len(text.anchors(self.depth)) for text in self.texts) // anchors)
            drafter, alignment = contract.of(self.drafter), Alignment(shift=contract.shift)
            self._known[contract, anchors] = measure(drafter, self.texts, self.depth, stride, alignment)
            self.on_measured(contract.name)
        return self._known[contract, anchors]


def better_contract(found: Sequence[Found]) -> Found | None:
    """Return the first contract that is clearly better than the other; None if none is."""
    return next((each for each in found if each.is_better), None)


def measure_at_load(
    target: Target, drafter: ObservedDrafter, variants: Sequence[Variant], tokens: Sequence[int]
) -> tuple[Hits, list[Found]]:
    """Measure a drafter on a text as ``load`` does: as declared, and under the variants that ``load`` measures.

    tokens: of the text, of which up to MAX_TEXT_TOKENS are used.
    Returns the best contract first.
    """
    chosen = [variant for variant in variants if variant.at_load]
    part = list(tokens[: min(MAX_TEXT_TOKENS, target.context)])
    text = read_text(target, "text", part, 1, layer_ids_of(drafter, chosen))
    depth = min(DEPTH, drafter.max_draft)
    declared = measure(drafter, [text], depth)
    found = [
        Found(each, measure(each.of(drafter), [text], depth), declared, ERRORS_AT_LOAD)
        for each in contracts_of(chosen, rows=False)
    ]
    return declared, sorted(found, key=lambda each: -int(each.hits.right.sum()))


def better_at_load(declared: Hits, found: Sequence[Found], name: str) -> str | None:
    """Return a warning that names a contract that fits clearly better than the declared one, or None.

    declared, found: see ``measure_at_load``.
    name: of the drafter.
    """
    best = better_contract(found)
    if best is None or best.hits.right.mean() < LEAST_SHARE:
        return None
    share, other = declared.right.mean(), best.hits.right.mean()
    return (
        f"{name}: on a test text drafts are right at {share:.0%} of the positions, and at {other:.0%} with "
        f"{best.contract.name}. Generation stays lossless, but more drafts would be accepted: the head may be "
        "wired otherwise. python -m mlx_spec.probe measures it in full."
    )
