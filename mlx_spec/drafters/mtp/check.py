"""Is a head wired as it was trained? How often its first draft is right on a short text, wired in other ways too.

A wrong wiring changes no token and raises no error; it only makes drafts worse, so it has to be measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_spec.drafters.mtp.drafter import MTPDrafter
from mlx_spec.drafters.mtp.head import HeadRows
from mlx_spec.target import Target
from mlx_spec.target.layers import Norm

MOST_TOKENS = 256
# How clearly another wiring must win: in standard errors of the difference, and in share of the positions.
STANDARD_ERRORS, LEAST_GAIN = 3.0, 0.02
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
class Measured:
    """How often first drafts are right, by the wiring: as declared, and otherwise. hits: bool [n], of each."""

    declared: np.ndarray
    others: dict[str, np.ndarray]

    def better(self) -> str | None:
        """Return the name of the other wiring that is clearly better, the best if there are several."""
        gains = {name: int(hits.sum()) - int(self.declared.sum()) for name, hits in self.others.items()}
        differ = {name: int((hits != self.declared).sum()) for name, hits in self.others.items()}
        least = LEAST_GAIN * len(self.declared)
        clear = [name for name, gain in gains.items() if gain > max(least, STANDARD_ERRORS * differ[name] ** 0.5)]
        return max(clear, key=lambda name: gains[name], default=None)


def better_wiring(target: Target, drafter: MTPDrafter, tokens: Sequence[int], name: str) -> str | None:
    """Return a sentence that names a wiring that fits the head clearly better than its own, or None.

    tokens: of a text, such as ``TEXT``; at most 256 are used.
    """
    measured = measure(target, drafter, tokens)
    if (other := measured.better()) is None:
        return None
    share, best = measured.declared.mean(), measured.others[other].mean()
    return (
        f"{name}: on a test text the first draft is right at {share:.0%} of the positions, and at {best:.0%} with "
        f"{other}. The text stays exact, but drafting is slower than it could be: the head may be wired otherwise."
    )


def measure(target: Target, drafter: MTPDrafter, tokens: Sequence[int]) -> Measured:
    """Measure a head as its contract wires it and in every way that differs from that in one point."""
    ids = mx.array(list(tokens[: min(MOST_TOKENS, target.context)]), dtype=mx.int32)
    before, after = target.num_layers - 1, target.num_layers
    sequence = target.open()
    taps = mx.split(target.forward([(sequence, ids)], (before, after)).taps, 2, axis=-1)
    expected = mx.argmax(target.logits(taps[1][1:]), axis=-1)
    rows, declared = drafter.rows, drafter.rows.contract
    swapped = replace(declared, hidden_first=not declared.hidden_first)
    tap = taps[1 if declared.reads_normed else 0]
    stage = "before" if declared.reads_normed else "behind"
    ways = {
        f"the hidden state {stage} the final norm": (rows, taps[0 if declared.reads_normed else 1]),
        "embedding and hidden state swapped": (replace(rows, contract=swapped), tap),
        "its norm weights one larger": (shifted(rows, 1.0), tap),
        "its norm weights one smaller": (shifted(rows, -1.0), tap),
    }
    return Measured(
        hits(drafter, rows, tap, ids, expected),
        {name: hits(drafter, other, seen, ids, expected) for name, (other, seen) in ways.items()},
    )


def hits(drafter: MTPDrafter, rows: HeadRows, tap: mx.array, tokens: mx.array, expected: mx.array) -> np.ndarray:
    """Whether each row's draft is the target's choice. tap: [n, H], tokens: [n], expected and result: [n - 1]."""
    return np.array(drafter.first_drafts(rows, tap[:-1], tokens[1:]) == expected)


def shifted(rows: HeadRows, by: float) -> HeadRows:
    """Return a head whose norm weights are all larger by ``by``."""

    def other(norm: Norm) -> Norm:
        return Norm(norm.weight + by, norm.eps)

    qk_norm = rows.attention.qk_norm and (rows.attention.qk_norm[0] + by, rows.attention.qk_norm[1] + by)
    return replace(
        rows,
        norm_embedding=other(rows.norm_embedding),
        norm_hidden=other(rows.norm_hidden),
        input_norm=other(rows.input_norm),
        post_norm=other(rows.post_norm),
        norm=other(rows.norm),
        attention=replace(rows.attention, qk_norm=qk_norm),
    )
