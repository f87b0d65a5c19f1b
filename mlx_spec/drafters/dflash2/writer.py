"""The drafter's context: keys and values made from the target's hidden states of committed positions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import mlx.core as mx

from metal_kernels import context_kv, linear_rows
from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.kv import ContextKV, append_to
from mlx_spec.errors import PositionError
from mlx_spec.target.linears import joined_linears


@dataclass
class BlockState:
    """What the drafter remembers of a sequence.

    context: keys and values of committed rows. waiting: features [n, T * H] of those behind them, whose keys and
    values are not written yet. A draft writes all of them at once, so rounds without one cost next to nothing.
    """

    context: ContextKV
    waiting: list[mx.array] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where the next committed row stands."""
        return self.context.cursor + self.waiting_rows

    @property
    def waiting_rows(self) -> int:
        """How many rows wait."""
        return sum(features.shape[0] for features in self.waiting)

    def fork(self) -> "BlockState":
        """Return an independent copy."""
        return BlockState(self.context.fork(), list(self.waiting))

    def free(self) -> None:
        """Give the pages of the context back."""
        self.waiting = []
        self.context.free()

    def add(self, position: int, features: mx.array) -> None:
        """Let rows wait whose first stands at ``position``. Raises PositionError for a gap or an overlap."""
        if position != self.position:
            raise PositionError(f"Context rows begin at position {position}, the cursor is at {self.position}.")
        self.waiting.append(features)

    def rewind(self, position: int) -> None:
        """Forget rows from ``position`` on, see ``ContextKV.rewind``."""
        keep = position - self.context.cursor
        if keep <= 0:
            self.waiting = []
            self.context.rewind(position)
        elif keep < self.waiting_rows:
            self.waiting = [mx.concatenate(self.waiting)[:keep]]


class ContextWriter:
    """Turns target features into context keys and values, all layers in one projection.

    The k_proj and v_proj weights of all layers are laid side by side once, where they are packed alike.
    """

    def __init__(self, model: DraftModel) -> None:
        """Join the projections of a loaded model, whose modules become views of them."""
        self.model = model
        attentions = [layer.self_attn for layer in model.layers]
        self.linears = joined_linears([p for a in attentions for p in (a.k_proj, a.v_proj)])
        self.norms = mx.stack([a.k_norm.weight for a in attentions])
        self.eps = attentions[0].k_norm.eps
        self.rope = model.rope

    def write(self, states: Sequence[BlockState]) -> None:
        """Write what waits; rows that the window would drop at once are not computed."""
        behind = [state for state in states if state.waiting]
        if not behind:
            return
        parts = [self._inside(state.context, mx.concatenate(state.waiting)) for state in behind]
        features = [part for _, _, part in parts]
        positions = [mx.arange(at, at + part.shape[0], dtype=mx.int32) for _, at, part in parts]
        if len(parts) == 1:
            written = [self.project(features[0], positions[0])]
        else:
            ends = list(accumulate(part.shape[0] for part in features))[:-1]
            written = list(mx.split(self.project(mx.concatenate(features), mx.concatenate(positions)), ends))
        append_to([(context, at, rows) for (context, at, _), rows in zip(parts, written, strict=True)])
        for state in behind:
            state.waiting = []

    def _inside(self, context: ContextKV, features: mx.array) -> tuple[ContextKV, int, mx.array]:
        count, position = features.shape[0], context.cursor
        if context.keep is not None and count > context.keep:
            skipped = count - context.keep
            context.start_at(position + skipped, capture=position)
            position, features = position + skipped, features[skipped:]
        return context, position, features

    def project(self, features: mx.array, positions: mx.array) -> mx.array:
        """Return the context keys and values [n, layers, 2, KV, D] of rows at ``positions`` [n] int32."""
        count, layers = features.shape[0], len(self.model.layers)
        projected = linear_rows(self.model.context(features), self.linears).reshape(count, layers, 2, -1)
        return context_kv(projected, self.norms, positions, self.rope, eps=self.eps)
