"""The context writer: keys and values made from the target's hidden states of committed positions."""

from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx

from metal_kernels import Linear, context_kv, linear_rows
from mlx_spec.drafters.context import ContextKV, append_to
from mlx_spec.drafters.dflash2.block import DraftModel


class ContextWriter:
    """Turns target features into context keys and values, all layers in one projection.

    The k_proj and v_proj weights of all layers are laid side by side once, where they are packed alike.
    """

    def __init__(self, model: DraftModel) -> None:
        """Join the projections of a loaded model, whose modules become views of them."""
        self.model = model
        attentions = [layer.self_attn for layer in model.layers]
        self.linears = Linear.joined([p for a in attentions for p in (a.k_proj, a.v_proj)])
        self.norms = mx.stack([a.k_norm.weight for a in attentions])
        self.eps = attentions[0].k_norm.eps
        self.rope = model.rope

    def write(self, updates: Sequence[tuple[ContextKV, int, mx.array]]) -> None:
        """Append to each context the rows at a position ff. whose target features are [n, T * H].

        Rows that the window would drop at once are not computed. Raises PositionError, see ContextKV.
        """
        parts = [self._inside(*update) for update in updates]
        features = [part for _, _, part in parts]
        positions = [mx.arange(at, at + part.shape[0], dtype=mx.int32) for _, at, part in parts]
        if len(parts) == 1:
            written = [self.rows(features[0], positions[0])]
        else:
            ends = list(accumulate(part.shape[0] for part in features))[:-1]
            written = list(mx.split(self.rows(mx.concatenate(features), mx.concatenate(positions)), ends))
        append_to([(context, at, rows) for (context, at, _), rows in zip(parts, written, strict=True)])

    def _inside(self, context: ContextKV, position: int, features: mx.array) -> tuple[ContextKV, int, mx.array]:
        count = features.shape[0]
        if context.keep is not None and count > context.keep and position == context.cursor:
            skipped = count - context.keep
            context.start_at(position + skipped, capture=position)
            position, features = position + skipped, features[skipped:]
        return context, position, features

    def rows(self, features: mx.array, positions: mx.array) -> mx.array:
        """Return the context keys and values [n, layers, 2, KV, D] of rows at ``positions`` [n] int32."""
        count, layers = features.shape[0], len(self.model.layers)
        projected = linear_rows(self.model.context(features), self.linears).reshape(count, layers, 2, -1)
        return context_kv(projected, self.norms, positions, self.rope, eps=self.eps)
