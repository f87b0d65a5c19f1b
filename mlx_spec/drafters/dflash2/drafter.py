"""The DFlash 2 drafter (DFlash 1 included): a whole block of tokens in one pass.

Sources: Z Lab's ``dflash`` 0.1.0 and its published checkpoints.
"""

import copy
from collections.abc import Sequence

import mlx.core as mx

from metal_kernels import MAX_VERIFY_ROWS, Cached, attention_rows, topk_rows
from mlx_spec.drafters.base import Committed, Draft, DraftRequest
from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.dflash2.config import DFlash2Config
from mlx_spec.drafters.dflash2.selector import gather_candidates, walk
from mlx_spec.drafters.dflash2.writer import BlockState, ContextWriter
from mlx_spec.drafters.draft_head import logits_of_first
from mlx_spec.drafters.kv import ContextKV, context_pool, pages_of
from mlx_spec.drafters.stages import Record, record_stages
from mlx_spec.errors import RequestError
from mlx_spec.target import Target


class DFlash2Drafter:
    """Drafts with a block forward over mask tokens, then a walk through the best candidates of each row."""

    name = "dflash2"

    def __init__(self, config: DFlash2Config, model: DraftModel, target: Target) -> None:
        """Bind a loaded model to the target whose embedding and output head it uses."""
        self.config = config
        self.model = model
        self.target_layer_ids = config.target_layer_ids
        self.max_draft = config.block_size - 1
        self.walk = walk
        self.writer = ContextWriter(model)
        self.mask = target.embed(mx.array([config.mask_token_id]))
        self._embed = target.embed
        self._ids = None if config.draft_token_ids is None else mx.array(config.draft_token_ids)
        nothing = mx.zeros((1, len(self.target_layer_ids) * target.hidden_size), dtype=target.dtype)
        self.pool = context_pool(self.writer.project(nothing, mx.array([0], dtype=mx.int32)))
        self._head = (
            target.head_for(self._ids) if self._ids is not None else logits_of_first(config.vocab_size, target)
        )

    def changed(self, config: DFlash2Config, model: DraftModel | None = None) -> "DFlash2Drafter":
        """Return the same drafter with another configuration, and with another model where one is given.

        Of the configuration count the layers that it reads, visibility, the mask token and the output multiplier.
        """
        other = copy.copy(self)
        other.config, other.target_layer_ids = config, config.target_layer_ids
        other.mask = self._embed(mx.array([config.mask_token_id]))
        if model is not None:
            other.model, other.writer = model, ContextWriter(model)
        return other

    @property
    def draft_ids(self) -> mx.array | None:
        """The tokens [N] that draft logits are of; None for all, in order."""
        return self._ids

    def open(self, position: int = 0) -> BlockState:
        """Return the state for a sequence whose context begins at ``position``."""
        return BlockState(ContextKV(self.pool, self.config.context_window, position))

    def extend(self, updates: Sequence[tuple[BlockState, Committed]]) -> None:
        """Let committed rows wait for the next draft.

        Raises PositionError, with nothing changed, for a gap or an overlap.
        """
        for state, rows in updates:
            state.check(rows.position)
        for state, rows in updates:
            state.add(rows.position, rows.aux_hidden_states)
        many = [state for state, _ in updates if state.waiting_rows > MAX_VERIFY_ROWS]
        if many:
            # Otherwise the features of a long prompt, or of many rounds, would be held until the next draft.
            self.writer.write(many)
            mx.async_eval(self.pool.data)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft after all anchors, in one block forward whose blocks are as long as the longest request's.

        Raises RequestError for a count outside 1 to ``max_draft``.
        """
        return self._propose(requests, None)

    def observe(self, requests: Sequence[DraftRequest], record: Record) -> list[Draft]:
        """Do what ``propose`` does, and record every stage; those of layer l begin with ``layers.l``.

        The rows of all blocks lie side by side.
        """

        def flat(stage: str, value: mx.array) -> None:
            record(stage, value if stage.startswith("ctx_") else value.flatten(0, 1))

        return self._propose(requests, flat)

    def _propose(self, requests: Sequence[DraftRequest], record: Record | None) -> list[Draft]:
        for request in requests:
            if not 1 <= request.count <= self.max_draft:
                raise RequestError(
                    f"This drafter drafts 1 to {self.max_draft} tokens a round, not {request.count}."
                )
        most = max((request.count for request in requests), default=0)
        if not most:
            return []
        states, anchors = [request.state for request in requests], [request.anchor for request in requests]
        hidden = self.block(states, anchors, most + 1, record)[:, 1:]
        logits = self._head(hidden)
        unary, ids, are_finite = topk_rows(logits, self.config.selector_top_k)
        ids = ids if self._ids is None else self._ids[ids]
        selector = self.model.get("candidate_selector")
        candidates = gather_candidates(selector, hidden, ids, self._transform(unary))
        record_stages(record, hidden=hidden, logits=logits, hidden_projection=candidates.gates)
        # Of several sequences each has its own flags.
        of_logits = are_finite[None] if len(requests) == 1 else finite_blocks(logits)
        finite = {"block forward": finite_blocks(hidden), "draft logits": of_logits}
        if selector is not None:
            finite["candidate selector"] = finite_blocks(candidates.gates)
        return self.walk(selector, candidates, requests, [request.state.position for request in requests], finite)

    def rewind(self, state: BlockState, position: int) -> int:
        """Forget rows from ``position`` on, and return the position that the next committed row must have.

        Raises PositionError, with nothing changed, when the window before them is lost.
        """
        state.rewind(position)
        return state.position

    def block(
        self, states: Sequence[BlockState], anchors: Sequence[int], rows: int, record: Record | None = None
    ) -> mx.array:
        """Return the final-normed hidden states [N, rows, H] of a block forward.

        states: of N sequences, whose waiting rows are written.
        anchors: their token ids.
        rows: of each block, the anchor included.
        """
        self.writer.write(states, record)
        embedded = self._embed(mx.array(list(anchors)))[:, None]
        masks = mx.broadcast_to(self.mask, (len(anchors), rows - 1, self.mask.shape[-1]))
        scale = self.model.embedding_scale
        x = mx.concatenate([embedded, masks], axis=1)
        scaled = x if scale == 1.0 else x * scale

        pool, pages, lengths = pages_of([state.context for state in states])
        cached = Cached(pages, lengths, (rows,) * len(states))

        def attend(layer: int, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
            attended = attention_rows(
                queries.flatten(0, 1),
                keys.flatten(0, 1),
                values.flatten(0, 1),
                pool,
                layer,
                cached,
                scale=self.config.head_dim**-0.5,
                window=self.config.windows[layer],
                block=not self.config.causal[layer],
            )
            return attended.reshape(queries.shape)

        # One position for all spares the device an array.
        cursors = [state.position for state in states]
        if record is not None:
            record_stages(record, embedded=x, positions=mx.array(cursors)[:, None] + mx.arange(rows))
        return self.model(
            scaled, cursors[0] if len(cursors) == 1 else mx.array(cursors, dtype=mx.int32), attend, record
        )

    def _transform(self, unary: mx.array) -> mx.array:
        unary = unary * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return unary if cap is None else mx.tanh(unary / cap) * cap


def finite_blocks(x: mx.array) -> mx.array:
    """Whether all numbers of each block are finite: [N, ...] to bool [N]."""
    return mx.all(mx.isfinite(x), axis=tuple(range(1, x.ndim)))
