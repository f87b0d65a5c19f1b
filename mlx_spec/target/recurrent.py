"""What recurrent layers keep of sequences: states, and rows after them that the next pass steps through first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from metal_kernels import DeltaInputs
from mlx_spec.errors import PositionError


class LayerState(NamedTuple):
    """What one recurrent layer keeps of P sequences: their states, and R rows after these.

    state: float32 [P, Hv, Dv, Dk], of the delta rule.
    conv_state: [P, W - 1, C], the convolution's last inputs.
    projected: [R, N], the rows' projections.
    k: [R, Hk, Dk], the rows' keys after the convolution.
    v: [R, Hv, Dv], the rows' values after the convolution.
    """

    state: mx.array
    conv_state: mx.array
    projected: mx.array
    k: mx.array
    v: mx.array

    @staticmethod
    def joined(parts: Sequence["LayerState"]) -> "LayerState":
        """Concatenate the states and the rows of several layer states."""
        return LayerState(*(mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True)))

    @property
    def rows(self) -> DeltaInputs:
        """What the state takes of the rows."""
        return DeltaInputs(self.k, self.v, self.projected, self.projected)


@dataclass(frozen=True)
class RecurrentState:
    """What the recurrent layers keep of one sequence: a state, and accepted rows after it.

    layers: of each layer; immutable, and shared by the sequences of a pass and by forks.
    slot: the sequence's state in ``layers``.
    first: the first of its rows in ``layers``.
    accepted: how many rows it has.
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
    """Where a sequence is in layer states; see RecurrentState for the fields."""

    slot: int
    first: int
    accepted: int


def joined_states(states: Sequence[RecurrentState]) -> tuple[tuple[LayerState, ...], list[StateSlot]]:
    """Return layer states that hold all these sequences, and the slot of each.

    Sequences that last ran in one pass share their layer states; then nothing is copied.
    """
    distinct = list({id(state.layers): state.layers for state in states}.values())
    first_slots, first_rows = {}, {}
    slots = rows = 0
    for layers in distinct:
        first_slots[id(layers)], first_rows[id(layers)] = slots, rows
        slots, rows = (slots + layers[0].state.shape[0], rows + layers[0].k.shape[0]) if layers else (0, 0)
    found = [
        StateSlot(
            first_slots[id(state.layers)] + state.slot, first_rows[id(state.layers)] + state.first, state.accepted
        )
        for state in states
    ]
    if len(distinct) == 1:
        return distinct[0], found
    return tuple(LayerState.joined(parts) for parts in zip(*distinct, strict=True)), found
