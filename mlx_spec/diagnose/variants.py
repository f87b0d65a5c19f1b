"""Measures a drafter under other contracts than the one that its checkpoint declares.

A wrong contract changes no emitted token and raises no error.
It only makes drafts worse, so it has to be measured.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_spec.diagnose.acceptance import STANDARD_ERRORS, Alignment, Hits, is_better, measure
from mlx_spec.diagnose.text import Text, read_text
from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.variants import Variant
from mlx_spec.target import Target

MAX_TEXT_TOKENS = 256
# Tokens of a chain: what it goes on with shows in the second.
DEPTH = 2
# Standard errors that count at load, where few contracts are measured.
ERRORS_AT_LOAD = 3.0
# Where no variant alone explains low acceptance, so many of the best are tried with every other one.
MOST_FIRST = 4
# Acceptance of first drafts below which two faults are looked for.
LOW = 0.35
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
    """A contract and how it drafts."""

    contract: Contract
    hits: Hits


def contracts_of(variants: Iterable[Variant], rows: bool = True) -> list[Contract]:
    """Return the contracts that depart in one point; with ``rows`` also those of hidden states of other rows."""
    return [*(Contract((variant,)) for variant in variants), *(Contract((), by) for by in ROWS if rows)]


def layer_ids_of(drafter: Drafter, variants: Iterable[Variant]) -> tuple[int, ...]:
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


def search(
    drafter: Drafter,
    contracts: Sequence[Contract],
    texts: Sequence[Text],
    depth: int,
    anchors: int,
    on_measured: Callable[[str], None] = lambda name: None,
) -> tuple[Hits, list[Found]]:
    """Measure a drafter as declared and under other contracts, and under two at once where that may explain more.

    anchors: about how many to measure each with.
    on_measured: gets the name of each contract that was measured.
    Returns the drafts as declared, and those of every other contract, the clearly better ones first.
    """
    stride = max(1, sum(len(text.anchors(depth)) for text in texts) // anchors)

    def hits(contract: Contract) -> Hits:
        found = measure(contract.of(drafter), texts, depth, stride, Alignment(shift=contract.shift))
        on_measured(contract.name)
        return found

    declared = hits(Contract())
    found = [Found(contract, hits(contract)) for contract in contracts]
    found.sort(key=lambda each: -each.hits.score)
    clear = [each for each in found if is_better(each.hits, declared)]
    best = max(clear, key=lambda each: int(each.hits.right.sum()), default=None)
    firsts = [best] if best is not None else []
    if best is None and declared.right[:, 0].mean() < LOW:
        firsts = [each for each in found if each.hits.score > declared.score][:MOST_FIRST]
    pairs = dict[frozenset[str], Found]()
    for first in firsts:
        for other in contracts:
            both = first.contract.joined(other)
            key = frozenset(both.name.split(" and "))
            if not first.contract.points & other.points and key not in pairs:
                pairs[key] = Found(both, hits(both))
    least = declared if best is None else best.hits
    better = [each for each in pairs.values() if is_better(each.hits, least)]
    better.sort(key=lambda each: -int(each.hits.right.sum()))
    clear.sort(key=lambda each: -int(each.hits.right.sum()))
    rest = [each for each in found if each not in clear]
    return declared, [*better, *clear, *rest]


def better_contract(declared: Hits, found: Sequence[Found], errors: float = STANDARD_ERRORS) -> Found | None:
    """Return the first contract that is clearly better than the declared one; None if none is."""
    return next((each for each in found if is_better(each.hits, declared, errors)), None)


def measure_at_load(
    target: Target, drafter: Drafter, variants: Sequence[Variant], tokens: Sequence[int]
) -> tuple[Hits, list[Found]]:
    """Measure a drafter on a text as ``load`` does: as declared, and under the variants that ``load`` measures.

    tokens: of the text, of which up to MAX_TEXT_TOKENS are used.
    Returns the best contract first.
    """
    chosen = [variant for variant in variants if variant.at_load]
    part = list(tokens[: min(MAX_TEXT_TOKENS, target.context)])
    text = read_text(target, "text", part, 1, layer_ids_of(drafter, chosen))
    depth = min(DEPTH, drafter.max_draft)
    found = [Found(each, measure(each.of(drafter), [text], depth)) for each in contracts_of(chosen, rows=False)]
    return measure(drafter, [text], depth), sorted(found, key=lambda each: -int(each.hits.right.sum()))


def better_at_load(declared: Hits, found: Sequence[Found], name: str) -> str | None:
    """Return a warning that names a contract that fits clearly better than the declared one, or None.

    declared, found: see ``measure_at_load``.
    name: of the drafter.
    """
    if (best := better_contract(declared, found, ERRORS_AT_LOAD)) is None:
        return None
    share, other = declared.right.mean(), best.hits.right.mean()
    return (
        f"{name}: on a test text drafts are right at {share:.0%} of the positions, and at {other:.0%} with "
        f"{best.contract.name}. Generation stays lossless, but more drafts would be accepted: the head may be "
        "wired otherwise. python -m mlx_spec.probe measures it in full."
    )
