"""What recurrent layers keep of sequences: states, and the rows after them that the next pass begins with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from metal_kernels import DeltaInputs
from mlx_spec.errors import PositionError


class LayerState(NamedTuple):
    """What one recurrent layer keeps of P sequences: their states, and R rows after these.

    state: float32 [P, Hv, Dv, Dk].
    conv_state: [P, W - 1, C], the convolution's last inputs.
    projected: [R, N], the rows' projections.
    k: [R, Hk, Dk] and v: [R, Hv, Dv], what the convolution made of them.
    """

    state: mx.array
    conv_state: mx.array
    projected: mx.array
    k: mx.array
    v: mx.array

    @staticmethod
    def joined(parts: Sequence["LayerState"]) -> "LayerState":
        """Concatenate states, and rows."""
        return LayerState(*(mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True)))

    @property
    def rows(self) -> DeltaInputs:
        """The rows, as far as the state depends on them."""
        return DeltaInputs(self.k, self.v, self.projected, self.projected)


@dataclass(frozen=True)
class RecurrentState:
    """What the recurrent layers keep of one sequence: a state, and accepted rows after it.

    layers: of each layer, immutable and mostly shared: by the sequences of one pass, by forks.
    slot: which of the states. first, accepted: which of the rows belong to the sequence.
    """

    layers: tuple[LayerState, ...]
    slot: int = 0
    first: int = 0
    accepted: int = 0

    def without(self, count: int) -> "RecurrentState":
        """Forget the newest ``count`` rows. Raises PositionError when one of them is part of the state already."""
        if count > self.accepted:
            raise PositionError(
                f"Recurrent layers can forget up to {self.accepted} of the newest rows, not {count}. "
                "Fork a sequence before a pass that may have to be undone."
            )
        return replace(self, accepted=self.accepted - count)

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays, for ``mx.eval``."""
        return [array for layer in self.layers for array in layer]


@dataclass(frozen=True)
class StateSlot:
    """Where a sequence is in what layers keep: see RecurrentState."""

    slot: int
    first: int
    accepted: int


def joined_states(states: Sequence[RecurrentState]) -> tuple[tuple[LayerState, ...], list[StateSlot]]:
    """Return what the layers keep of all these sequences, and where each of them is in it.

    Sequences that last ran in one pass share it already; then nothing is copied.
    """
    distinct = list({id(state.layers): state.layers for state in states}.values())
    first_slots, first_rows = {}, {}
    slots = rows = 0
    for layers in distinct:
        first_slots[id(layers)], first_rows[id(layers)] = slots, rows
        slots, rows = (slots + layers[0].state.shape[0], rows + layers[0].k.shape[0]) if layers else (0, 0)
    places = [
        StateSlot(
            first_slots[id(state.layers)] + state.slot, first_rows[id(state.layers)] + state.first, state.accepted
        )
        for state in states
    ]
    if len(distinct) == 1:
        return distinct[0], places
    return tuple(LayerState.joined(parts) for parts in zip(*distinct, strict=True)), places
