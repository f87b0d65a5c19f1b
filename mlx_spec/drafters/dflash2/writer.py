"""The drafter's context: keys and values made from the target's hidden states of committed positions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import mlx.core as mx

from metal_kernels import MAX_VERIFY_ROWS, context_kv, linear_rows
from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.kv import ContextKV, append_to
from mlx_spec.drafters.stages import Record, record_stages
from mlx_spec.errors import PositionError
from mlx_spec.target.graphs import Graph, Graphs
from mlx_spec.target.linears import joined_linears, module_rows


@dataclass
class BlockState:
    """What the drafter remembers of a sequence.

    context: keys and values of committed rows.
    waiting: features [n, T * H] of the rows after these, whose keys and values are not written yet. A draft writes
        all of them at once, so rounds without one cost next to nothing.
    written: how many of these rows lie after the context's cursor already, see ``ContextKV.write_ahead``.
    """

    context: ContextKV
    waiting: list[mx.array] = field(default_factory=list)
    written: int = 0

    @property
    def position(self) -> int:
        """Position of the next committed row."""
        return self.context.cursor + self.waiting_rows

    @property
    def waiting_rows(self) -> int:
        """How many rows wait."""
        return sum(features.shape[0] for features in self.waiting)

    def fork(self) -> "BlockState":
        """Return an independent copy."""
        return BlockState(self.context.fork(), list(self.waiting))

    def moved(self, by: int) -> "BlockState":
        """Return a copy whose waiting rows, and rows to come, have positions that are larger by ``by``."""
        return BlockState(self.context.moved(by), list(self.waiting))

    def free(self) -> None:
        """Give the pages of the context back."""
        self.waiting, self.written = [], 0
        self.context.free()

    def check(self, position: int) -> None:
        """Raise PositionError where rows from ``position`` on would leave a gap or an overlap."""
        if position != self.position:
            raise PositionError(f"Context rows begin at position {position}, the cursor is at {self.position}.")

    def add(self, position: int, features: mx.array) -> None:
        """Let rows wait.

        position: of the first.
        features: [n, T * H].
        Raises PositionError for a gap or an overlap.
        """
        self.check(position)
        self.waiting.append(features)

    def settle(self) -> bool:
        """Make what waits part of the context where all of it is written, and say whether nothing waits then."""
        if self.waiting and self.written == self.waiting_rows:
            self.context.advance(self.written)
            self.waiting = []
        self.written = 0
        return not self.waiting

    def rewind(self, position: int) -> None:
        """Forget rows from ``position`` on.

        Raises PositionError, with nothing changed, when the window before them is lost; see ``ContextKV.rewind``.
        """
        keep, self.written = position - self.context.cursor, 0
        if keep <= 0:
            self.context.rewind(position)
            self.waiting = []
        elif keep < self.waiting_rows:
            self.waiting = [mx.concatenate(self.waiting)[:keep]]


class ContextWriter:
    """Turns target features into context keys and values, all layers in one projection.

    The k_proj and v_proj weights of all layers are laid side by side, where they are quantised alike: a copy
    beside those of the block forward.
    """

    def __init__(self, model: DraftModel) -> None:
        """Join the projections of a loaded model, whose modules become views of them."""
        self.model = model
        attentions = [layer.self_attn for layer in model.layers]
        self.linears = joined_linears([p for a in attentions for p in (a.k_proj, a.v_proj)])
        self.norms = mx.stack([a.k_norm.weight for a in attentions])
        self.eps = attentions[0].k_norm.eps
        self.rope = model.rope
        self._graphs = Graphs()

    def write(self, states: Sequence[BlockState], record: Record | None = None) -> None:
        """Write what waits, but for rows that the window would drop at once: these are not computed."""
        due = [state for state in states if not state.settle()]
        if not due:
            return
        for state in due:
            self._skip_outside(state)
        features = [state.waiting[0] for state in due]
        starts = [state.context.cursor for state in due]
        positions = [
            mx.arange(at, at + rows.shape[0], dtype=mx.int32) for at, rows in zip(starts, features, strict=True)
        ]
        ends = list(accumulate(rows.shape[0] for rows in features))
        project: Graph = self.project if record is None else partial(self.project, record=record)
        if record is None and ends[-1] <= MAX_VERIFY_ROWS:
            project = self._graphs.of((), project)
        if len(due) == 1:
            written = [project(features[0], positions[0])]
        else:
            written = list(mx.split(project(mx.concatenate(features), mx.concatenate(positions)), ends[:-1]))
        append_to([(state.context, at, rows) for state, at, rows in zip(due, starts, written, strict=True)])
        for state in due:
            state.waiting = []

    def write_ahead(self, state: BlockState, features: mx.array) -> None:
        """Write rows that may become part of a context, see ``ContextKV.write_ahead``; nothing waits before them.

        features: [n, T * H], n up to MAX_VERIFY_ROWS.
        """
        first = state.context.cursor
        positions = mx.arange(first, first + features.shape[0], dtype=mx.int32)
        state.context.write_ahead(self._graphs.of((), self.project)(features, positions))

    def _skip_outside(self, state: BlockState) -> None:
        """Make one array of what waits, of rows inside the window only. The state's position stays what it is."""
        features, context = mx.concatenate(state.waiting), state.context
        skipped = 0 if context.keep is None else max(0, features.shape[0] - context.keep)
        state.waiting = [features[skipped:]]
        if skipped:
            context.start_at(context.cursor + skipped, capture=context.cursor)

    def project(self, features: mx.array, positions: mx.array, record: Record | None = None) -> mx.array:
        """Return context keys and values [n, layers, 2, KV, D].

        features: [n, T * H], in the target's floating type.
        positions: [n] int32.
        """
        count, layers = features.shape[0], len(self.model.layers)
        fused = self.model.context(features)
        projected = linear_rows(fused, self.linears).reshape(count, layers, 2, -1)
        written = context_kv(projected, self.norms, positions, self.rope, eps=self.eps)
        if record is not None:
            record_stages(record, ctx_combined=module_rows(features, self.model.fc), ctx_normed=fused)
        record_stages(record, ctx_keys_values=written, ctx_positions=positions)
        return written
