"""Is a head wired as it was trained? How often its drafts are right on a short text, and in other wirings.

A wrong wiring changes no token and raises no error; it only makes drafts worse, so it has to be measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_spec.drafters.chain import ChainDrafter, HeadRows
from mlx_spec.drafters.draft_head import DraftHead
from mlx_spec.target import Target

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
class Wiring:
    """One way to run a head over a text: its forward, the taps [n, T * H] that it reads, its output head."""

    rows: HeadRows
    taps: mx.array
    head: DraftHead


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


def better_wiring(measured: Measured, name: str) -> str | None:
    """Return a sentence that names a wiring that fits a head clearly better than its own, or None."""
    if (other := measured.better()) is None:
        return None
    share, best = measured.declared.mean(), measured.others[other].mean()
    return (
        f"{name}: on a test text drafts are right at {share:.0%} of the positions, and at {best:.0%} with "
        f"{other}. The text stays exact, but drafting is slower than it could be: the head may be wired otherwise."
    )


def read_text(
    target: Target, tokens: Sequence[int], taps: Sequence[int]
) -> tuple[mx.array, list[mx.array], mx.array]:
    """Run a text through the target: its tokens [n], at most 256, each tap [n, H], and the target's choices.

    The choices [n - 1] are those of row 1 on: entry i stands for token i + 2.
    """
    ids = mx.array(list(tokens[: min(MOST_TOKENS, target.context)]), dtype=mx.int32)
    rows = target.forward([(target.open(), ids)], taps)
    return ids, list(mx.split(rows.taps, len(taps), axis=-1)), mx.argmax(target.logits(rows.hidden[1:]), axis=-1)


def measure_wirings(
    drafter: ChainDrafter,
    declared: Wiring,
    others: dict[str, Wiring],
    tokens: mx.array,
    expected: mx.array,
    steps: int,
) -> Measured:
    """Measure each wiring on the first ``steps`` drafts behind every row; tokens, expected: see ``read_text``."""
    return Measured(
        hits(drafter, declared, tokens, expected, steps),
        {name: hits(drafter, wiring, tokens, expected, steps) for name, wiring in others.items()},
    )


def hits(drafter: ChainDrafter, wiring: Wiring, tokens: mx.array, expected: mx.array, steps: int) -> np.ndarray:
    """Whether the drafts of ``steps`` steps behind each row are the target's choices: bool [steps * (n - steps)].

    A chain goes on with the text's tokens, so each of its steps says something of its own.
    """
    rows, right = wiring.rows, []
    at = mx.arange(tokens.size - steps)
    keys, values, seen = list[mx.array](), list[mx.array](), list[mx.array]()
    hidden = rows.features(wiring.taps[: at.size])
    for step in range(steps):
        embedded = drafter.embed(tokens[step + 1 : step + 1 + at.size])
        entered = rows.enter(embedded, hidden, (at + step).astype(mx.int32))
        keys.append(entered.keys_values[0])
        values.append(entered.keys_values[1])
        # True rows up to its own, and those of its own chain.
        seen.append(at[None] <= at[:, None] if step == 0 else at[None] == at[:, None])
        by_head = (x.swapaxes(0, 1)[None] for x in (entered.queries, mx.concatenate(keys), mx.concatenate(values)))
        attended = mx.fast.scaled_dot_product_attention(
            *by_head, scale=rows.attention.scale, mask=mx.concatenate(seen, axis=1)
        )
        scored, hidden = rows.leave(entered, attended[0].swapaxes(0, 1))
        right.append(wiring.head.best(scored) == expected[step : step + at.size])
    return np.array(mx.concatenate(right))
