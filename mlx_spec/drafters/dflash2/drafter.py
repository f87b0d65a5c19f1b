"""The DFlash 2 drafter (DFlash 1 included): a whole block of tokens in one pass.

Sources: Z Lab's ``dflash`` 0.1.0 and its published checkpoints.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx

from metal_kernels import MAX_VERIFY_ROWS, Cached, attention_rows, kv_sides, topk_rows
from mlx_spec.drafters.base import (
    Ahead,
    Committed,
    Draft,
    DraftRequest,
    DraftRule,
    Unread,
    check_count,
    noise_after,
)
from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.dflash2.config import DFlash2Config
from mlx_spec.drafters.dflash2.forward import BlockForward, BlockLayer
from mlx_spec.drafters.dflash2.selector import Candidates, Walked, walk
from mlx_spec.drafters.dflash2.writer import BlockState, ContextWriter
from mlx_spec.drafters.draft_head import logits_of_first
from mlx_spec.drafters.kv import ContextKV, ContextPages, context_pool, packed, unpacked
from mlx_spec.drafters.stages import Record, record_stages
from mlx_spec.target import Target
from mlx_spec.target.graphs import Graphs
from mlx_spec.target.linears import module_rows

# Stages whose rows do not lie in blocks.
ROWS = (".q", ".k", ".v", ".attended")


class Drafted(NamedTuple):
    """What a draft pass computed for N blocks.

    candidates: [N, k, K] int32, of each row, best first.
    walked: what was picked of them.
    finite: by stage of the pass, bool [N].
    """

    candidates: mx.array
    walked: Walked
    finite: dict[str, mx.array]

    def of(self, n: int, count: int) -> Draft:
        """Return the first ``count`` tokens of block n."""
        tokens, ranks, probabilities = self.walked
        return Draft(
            tokens[n, :count],
            self.candidates[n, :count],
            None if (drawn := probabilities[n]) is None else drawn[:count],
            {stage: flags[n] for stage, flags in self.finite.items()},
            ranks[n, :count],
        )


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
        self.forward = BlockForward.of(model, config)
        self.writer = ContextWriter(model)
        self.mask = target.embed(mx.array([config.mask_token_id]))
        self._embed = target.embed
        self._ids = None if config.draft_token_ids is None else mx.array(config.draft_token_ids)
        nothing = mx.zeros((1, len(self.target_layer_ids) * target.hidden_size), dtype=target.dtype)
        self.pool = context_pool(self.writer.project(nothing, mx.array([0], dtype=mx.int32)))
        self._head = (
            target.head_for(self._ids) if self._ids is not None else logits_of_first(config.vocab_size, target)
        )
        self._graphs = Graphs()

    def changed(self, config: DFlash2Config, model: DraftModel) -> "DFlash2Drafter":
        """Return the same drafter with another configuration and model.

        Of the configuration count the layers that it reads, visibility, the mask token and the output multiplier.
        model: its modules become views of joined weights.
        """
        other = copy.copy(self)
        other.config, other.model, other.target_layer_ids = config, model, config.target_layer_ids
        other.mask = self._embed(mx.array([config.mask_token_id]))
        other.forward, other.writer, other._graphs = BlockForward.of(model, config), ContextWriter(model), Graphs()
        return other

    @property
    def draft_ids(self) -> mx.array | None:
        """The tokens [N] that draft logits are of; None for all, in order."""
        return self._ids

    @property
    def is_quantized(self) -> bool:
        """Whether its linear maps are quantised."""
        return self.forward.layers[0].attention.output.quantization is not None

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
            state.written = rows.tokens.size if rows.ahead is not None else 0
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
            of_blocks = not stage.startswith("ctx_") and not stage.endswith(ROWS)
            record(stage, value.flatten(0, 1) if of_blocks else value)

        record("rope_frequencies", self.model.rope.frequencies)
        return self._propose(requests, flat)

    def _propose(self, requests: Sequence[DraftRequest], record: Record | None) -> list[Draft]:
        for request in requests:
            check_count(request.count, self.max_draft)
        most = max((request.count for request in requests), default=0)
        if not most:
            return []
        states, rules = [request.state for request in requests], [request.rule for request in requests]
        self.writer.write(states, record)
        positions = [state.position for state in states]
        numbers = packed([state.context for state in states], [request.anchor for request in requests], positions)
        noises = [
            rule.noise(position + 1, most, self.config.selector_top_k)
            for rule, position in zip(rules, positions, strict=True)
        ]
        ways = tuple(rule.way for rule in rules)
        drafting = partial(self._pass, most, rules, record)
        graph = drafting if record is not None else self._graphs.of((most, ways), drafting)
        drafted = Drafted(*graph(numbers, self.pool.data, noises))
        return [drafted.of(n, request.count) for n, request in enumerate(requests)]

    def propose_ahead(self, state: BlockState, count: int, rule: DraftRule, unread: Unread) -> Ahead:
        """Draft after rows that the host has not read, see ``DraftsAhead``.

        Keys and values of all of them are written after the context; those of rejected rows are never seen.
        """
        check_count(count, self.max_draft)
        self.writer.write([state])
        became, most = unread.became, unread.tree.num_rows
        self.writer.write_ahead(state, became.rows(unread.aux_hidden_states))
        numbers = packed([state.context], [0], [state.position])
        noise = rule.noise(state.position + 2, most - 1 + count, self.config.selector_top_k)
        graph = self._graphs.of(("ahead", count, rule.way), partial(self._pass_ahead, count, rule))
        drafted = graph(numbers, self.pool.data, noise, became.accepted, became.following)
        return Ahead(Drafted(*drafted).of(0, count))

    def _pass_ahead(
        self,
        count: int,
        rule: DraftRule,
        numbers: mx.array,
        pool: mx.array,
        noise: mx.array | None,
        accepted: mx.array,
        following: mx.array,
    ) -> Drafted:
        """Draft as ``_pass`` does, for one sequence, after the accepted rows of a round.

        numbers: as there, of the context before these rows, with their anchor's position.
        noise: of all positions that may come.
        accepted, following: see ``Outcome``.
        """
        (_, positions), pages = unpacked(numbers, 1, 2)
        after, noises = accepted + 1, [noise_after(accepted, noise, count)]
        return self._draft(count, [rule], following, positions + after, pages.after(after), pool, noises)

    def _pass(
        self,
        count: int,
        rules: Sequence[DraftRule],
        record: Record | None,
        numbers: mx.array,
        pool: mx.array,
        noises: Sequence[mx.array | None],
    ) -> Drafted:
        """Draft ``count`` tokens for N sequences.

        rules: of these; only what ``way`` tells apart is read.
        record: takes the stages of the pass, where one is given, which is not compiled then.
        numbers: see ``packed``: anchors, their positions, and the contexts.
        pool: see ``PagePool.data``.
        noises: of the rules, see ``DraftRule.noise``.
        """
        (anchors, positions), pages = unpacked(numbers, len(rules), 2)
        return self._draft(count, rules, anchors, positions, pages, pool, noises, record)

    def _draft(
        self,
        count: int,
        rules: Sequence[DraftRule],
        anchors: mx.array,
        positions: mx.array,
        pages: ContextPages,
        pool: mx.array,
        noises: Sequence[mx.array | None],
        record: Record | None = None,
    ) -> Drafted:
        hidden = self._block(anchors, positions, pages, pool, count + 1, record)[:, 1:]
        logits = self._head(hidden)
        unary, ids, are_finite = topk_rows(logits, self.config.selector_top_k)
        ids = ids if self._ids is None else self._ids[ids]
        selector = self.model.get("candidate_selector")
        gates = mx.zeros((*ids.shape[:2], 0))
        if selector is not None:
            gates = module_rows(hidden, selector.hidden_projection).astype(mx.float32)
        candidates = Candidates(ids, self._transform(unary).astype(mx.float32), gates)
        record_stages(record, hidden=hidden, logits=logits)
        if selector is not None:
            record_stages(record, hidden_projection=gates)
        # Of several sequences each has its own flags.
        of_logits = are_finite[None] if len(rules) == 1 else finite_blocks(logits)
        finite = {"block forward": finite_blocks(hidden), "draft logits": of_logits}
        if selector is not None:
            finite["candidate selector"] = finite_blocks(candidates.gates)
        return Drafted(candidates.ids, self.walk(selector, candidates, anchors, rules, noises), finite)

    def rewind(self, state: BlockState, position: int) -> int:
        """Forget rows from ``position`` on, and return the position that the next committed row must have.

        Raises PositionError, with nothing changed, when the window before them is lost.
        """
        state.rewind(position)
        return state.position

    def _block(
        self,
        anchors: mx.array,
        positions: mx.array,
        pages: ContextPages,
        pool: mx.array,
        rows: int,
        record: Record | None = None,
    ) -> mx.array:
        embedded = self._embed(anchors)[:, None]
        masks = mx.broadcast_to(self.mask, (anchors.size, rows - 1, self.mask.shape[-1]))
        scale = self.model.embedding_scale
        x = mx.concatenate([embedded, masks], axis=1)
        scaled = x if scale == 1.0 else x * scale
        cached = Cached(pages.pages, pages.lengths, (rows,) * anchors.size)

        def attend(layer: BlockLayer, queries: mx.array, keys_values: mx.array) -> mx.array:
            attention = layer.attention
            return attention_rows(
                queries,
                *kv_sides(keys_values),
                pool,
                attention.index,
                cached,
                scale=attention.scale,
                window=attention.window,
                block=layer.sees_block,
            )

        of_rows = positions[:, None] + mx.arange(rows, dtype=mx.int32)
        record_stages(record, embedded=x, positions=of_rows)
        return self.forward(scaled, of_rows.flatten(), attend, record)

    def _transform(self, unary: mx.array) -> mx.array:
        unary = unary * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return unary if cap is None else mx.tanh(unary / cap) * cap


def finite_blocks(x: mx.array) -> mx.array:
    """Whether all numbers of each block are finite: [N, ...] to bool [N]."""
    return mx.all(mx.isfinite(x), axis=tuple(range(1, x.ndim)))
