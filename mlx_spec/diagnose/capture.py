"""The target's hidden states beside those of mlx-lm's own forward, so that a drafter is not the first suspect."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

from mlx_spec.diagnose.stages import UNIT_ROUNDOFF, float64
from mlx_spec.diagnose.text import Text
from mlx_spec.drafters.reference import Array

logger = logging.getLogger(__name__)
# Tokens of a text that are run again.
TOKENS = 32
# Units of the type's rounding, times the root of the number of layers, from which on hidden states differ.
UNITS = 32.0


@dataclass(frozen=True)
class Captured:
    """A hidden state that a drafter reads, beside mlx-lm's.

    layer: its target layer id.
    difference: root mean square, relative to mlx-lm's state.
    nearest: the layer id of the state of mlx-lm that is nearest, and by how many rows it is later.
    bound: the largest difference that rounding explains.
    """

    layer: int
    difference: float
    nearest: tuple[int, int]
    bound: float

    @property
    def departs(self) -> bool:
        """Whether it is another state, or differs by more than rounding."""
        return self.nearest != (self.layer, 0) or not self.difference < self.bound


def captured(folder: Path, dtype: mx.Dtype, text: Text, layer_ids: Sequence[int]) -> list[Captured]:
    """Compare the states of a text that a drafter reads with mlx-lm's of the same tokens.

    folder: of the target's checkpoint.
    dtype: of the target.
    Nothing where mlx-lm cannot load the folder or run it, as experts in bfloat16 on a CPU.
    """
    tokens = text.tokens[:TOKENS]
    try:
        theirs = [float64(state) for state in mlx_lm_states(folder, tokens)]
    except Exception as error:  # its loader raises what it likes
        logger.info("The hidden states are not compared with mlx-lm's: %s", error)
        return []
    bound = UNITS * max(len(theirs) - 1, 1) ** 0.5 * UNIT_ROUNDOFF[dtype]
    found = []
    for layer in layer_ids:
        own = float64(text.states[layer][: tokens.size])
        places = [(other, by) for other in range(len(theirs)) for by in (0, -1, 1)]
        # Its own place comes first among equals: some layers change nothing.
        places.sort(key=lambda place: place != (layer, 0))
        nearest = min(places, key=lambda place: difference(own, theirs[place[0]], place[1]))
        found.append(Captured(layer, difference(own, theirs[layer], 0), nearest, bound))
    return found


def mlx_lm_states(folder: Path, tokens: mx.array) -> list[mx.array]:
    """Return the output [n, H] of every layer, and the normed one, by the forward of mlx-lm.

    The loaded target would not do: its modules of mlx-lm have no settings of position encodings and windows.
    """
    loaded: Any = load_model(folder, lazy=True)[0]
    model, outputs = getattr(loaded, "language_model", loaded).model, list[mx.array]()
    model.layers = [Layer(layer, outputs) for layer in model.layers]
    normed = model(tokens[None])
    states = [output[0] for output in [*outputs, normed]]
    mx.eval(states)
    return states


class Layer:
    """A layer that runs in float32, as far as its weights allow, keeps its output, and lets its weights go.

    So weights of one layer are in memory at a time, and what MLX rounds in bfloat16 is not in the comparison.
    """

    def __init__(self, layer: Any, outputs: list[mx.array]) -> None:
        self._layer, self._outputs = layer, outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        output: mx.array = self._layer(x.astype(mx.float32), *args, **kwargs)
        mx.eval(output)
        self._outputs.append(output)
        self._layer = None
        return output


def difference(own: Array, other: Array, shift: int) -> float:
    """Return how far states [n, H] are from others, ``shift`` rows later, relative to these."""
    rows = slice(1, -1) if len(own) > 2 else slice(None)
    moved = np.roll(other, -shift, axis=0)[rows]
    size = float(np.sqrt(np.mean(np.square(moved))))
    return float(np.sqrt(np.mean(np.square(own[rows] - moved)))) / max(size, 1e-30)
