"""Measures whether a head is wired as it was trained: how often its drafts are right, in this and other wirings.

A wrong wiring changes no emitted token and raises no error; it only makes drafts worse, so it has to be measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_spec.drafters.wiring import Wiring, Wirings
from mlx_spec.target import Target

MAX_TEXT_TOKENS = 256
# By how much another wiring must be better: standard errors of the difference, and share of the positions.
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
    """Whether drafts are right: bool [n] for each wiring.

    declared: as the head is declared.
    others: by name of the other wiring.
    """

    declared: np.ndarray
    others: dict[str, np.ndarray]

    def better(self) -> str | None:
        """Return the name of the other wiring that is clearly better, the best of several; None if none is."""
        gains = {name: int(hits.sum()) - int(self.declared.sum()) for name, hits in self.others.items()}
        differ = {name: int((hits != self.declared).sum()) for name, hits in self.others.items()}
        least = LEAST_GAIN * len(self.declared)
        clear = [name for name, gain in gains.items() if gain > max(least, STANDARD_ERRORS * differ[name] ** 0.5)]
        return max(clear, key=lambda name: gains[name], default=None)


def better_wiring(measured: Measured, name: str) -> str | None:
    """Return a warning that names the wiring that fits a head clearly better than its own, or None.

    measured: see ``measure_wirings``.
    name: of the head.
    """
    if (other := measured.better()) is None:
        return None
    share, best = measured.declared.mean(), measured.others[other].mean()
    return (
        f"{name}: on a test text drafts are right at {share:.0%} of the positions, and at {best:.0%} with "
        f"{other}. Generation stays lossless, but more drafts would be accepted: the head may be wired otherwise."
    )


@dataclass(frozen=True)
class Text:
    """A text of n tokens, and what the target computes for it.

    tokens: [n] int32.
    states: by target layer id, its output [n, H], see ``Target``.
    expected: [n - 1] int32, the target's greedy choices from row 1 on: entry i is its choice of token i + 2.
    """

    tokens: mx.array
    states: dict[int, mx.array]
    expected: mx.array

    def aux_hidden_states(self, layer_ids: Sequence[int]) -> mx.array:
        """Return the outputs of T target layers side by side: [n, T * H]."""
        return mx.concatenate([self.states[layer] for layer in layer_ids], axis=-1)


def read_text(target: Target, tokens: Sequence[int], layer_ids: Sequence[int]) -> Text:
    """Run up to MAX_TEXT_TOKENS tokens of a text through the target, and keep the outputs of these layers."""
    ids = mx.array(list(tokens[: min(MAX_TEXT_TOKENS, target.context)]), dtype=mx.int32)
    rows = target.forward([(target.open(), ids)], layer_ids)
    states = mx.split(rows.aux_hidden_states, len(layer_ids), axis=-1)
    expected = mx.argmax(target.logits(rows.hidden[1:]), axis=-1)
    return Text(ids, dict(zip(layer_ids, states, strict=True)), expected)


def measure_wirings(target: Target, wirings: Wirings, tokens: Sequence[int]) -> Measured:
    """Measure the declared wiring of a head and the others on a text.

    target: the head's.
    wirings: of the head.
    tokens: ids of the text.
    """
    every = [wirings.declared, *wirings.others.values()]
    text = read_text(target, tokens, sorted({layer for wiring in every for layer in wiring.target_layer_ids}))
    return Measured(
        hits(wirings.declared, text, wirings),
        {name: hits(wiring, text, wirings) for name, wiring in wirings.others.items()},
    )


def hits(wiring: Wiring, text: Text, wirings: Wirings) -> np.ndarray:
    """Return whether drafts are the target's choices: bool [steps * (n - steps)], step by step of all chains.

    A chain starts at each row of the text and reads the text's tokens, not its drafts, so that each of its steps
    is an independent measurement.
    """
    forward, tokens, steps, right = wiring.forward, text.tokens, wirings.steps, []
    starts = mx.arange(tokens.size - steps)
    keys, values, visible = list[mx.array](), list[mx.array](), list[mx.array]()
    hidden = forward.features(text.aux_hidden_states(wiring.target_layer_ids)[: starts.size])
    for step in range(steps):
        embedded = wirings.embed(tokens[step + 1 : step + 1 + starts.size])
        inputs = forward.pre_attention(embedded, hidden, (starts + step).astype(mx.int32))
        keys.append(inputs.keys_values[0])
        values.append(inputs.keys_values[1])
        # A row sees the text's rows up to its start, and the rows of its own chain.
        visible.append(starts[None] <= starts[:, None] if step == 0 else starts[None] == starts[:, None])
        by_head = (x.swapaxes(0, 1)[None] for x in (inputs.queries, mx.concatenate(keys), mx.concatenate(values)))
        attended = mx.fast.scaled_dot_product_attention(
            *by_head, scale=forward.attention.scale, mask=mx.concatenate(visible, axis=1)
        )
        scored, hidden = forward.post_attention(inputs, attended[0].swapaxes(0, 1))
        right.append(wiring.head.best(scored) == text.expected[step : step + starts.size])
    return np.array(mx.concatenate(right))
