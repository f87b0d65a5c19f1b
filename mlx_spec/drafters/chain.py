"""The chain drafter: a head of one decoder layer, MTP or EAGLE, that drafts one token a step.

A row of the head reads a hidden state of the target and the token after it. So a committed row is pending until
its successor is committed, too; then its keys and values enter the context. The rows of a chain, which read the
head's own output, are kept beside the context and forgotten when the round ends.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from metal_kernels import MAX_VERIFY_ROWS, Cached, attention_rows, topk_rows
from mlx_spec.drafters.base import (
    Ahead,
    Committed,
    Draft,
    DraftRequest,
    DraftRule,
    Unread,
    check_count,
    noise_after,
    nothing_drafted,
    stacked,
)
from mlx_spec.drafters.draft_head import DraftHead
from mlx_spec.drafters.kv import ContextKV, ContextPages, append_to, context_pool, packed, unpacked
from mlx_spec.drafters.stages import Record, record_stages, within
from mlx_spec.errors import PositionError
from mlx_spec.target import Target
from mlx_spec.target.graphs import Graphs
from mlx_spec.target.layers import Attention

# A pass has a row for the anchor, too.
MAX_DRAFTS = MAX_VERIFY_ROWS - 1
# Candidates of a drafted token; sampled drafts are drawn among these.
CANDIDATES = 16


class AttentionInputs(NamedTuple):
    """Rows before attention.

    residual: [R, H], what attention's output is added to.
    projected: [R, N], the joined projection.
    queries: [R, heads, D], positions encoded.
    keys_values: [2, R, KV, D], positions encoded.
    """

    residual: mx.array
    projected: mx.array
    queries: mx.array
    keys_values: mx.array

    def select(self, part: slice | mx.array) -> "AttentionInputs":
        """Return some of the rows."""
        return AttentionInputs(
            self.residual[part], self.projected[part], self.queries[part], self.keys_values[:, part]
        )

    @property
    def context_rows(self) -> mx.array:
        """Keys and values as a context of one layer holds them: [R, 1, 2, KV, D]."""
        return self.keys_values.transpose(1, 0, 2, 3)[:, None]


class HeadForward(Protocol):
    """The forward pass of a head over rows, in the two parts before and after attention."""

    @property
    def attention(self) -> Attention:
        """Attention of its layer, whose scale and window are used."""
        ...

    @property
    def width(self) -> int:
        """H, the size of the hidden states that it reads and returns."""
        ...

    def features(self, aux_hidden_states: mx.array) -> mx.array:
        """Fuse outputs of T target layers [R, T * H] into hidden states [R, H]."""
        ...

    def pre_attention(
        self, embedded: mx.array, hidden: mx.array, positions: mx.array, record: Record | None = None
    ) -> AttentionInputs:
        """Run rows up to attention: embeddings and hidden states [R, H], positions [R] int32."""
        ...

    def post_attention(
        self, inputs: AttentionInputs, attended: mx.array, record: Record | None = None
    ) -> tuple[mx.array, mx.array]:
        """Run rows from attention's output [R, heads, D] to the end.

        Returns what the output head reads, and the hidden state for the next row of a chain, both [R, H].
        """
        ...


@dataclass
class ChainState:
    """What the head remembers of a sequence.

    context: keys and values of the rows before the pending ones.
    hidden: [m, H], the target's hidden states of the m pending rows.
    following: [m - 1] int32, the tokens after all pending rows but the newest.
    first: position of the first pending row, where the context ends.
    written: how many of the pending rows lie after the context's cursor already, see ``ContextKV.write_ahead``.
    """

    context: ContextKV
    hidden: mx.array
    following: mx.array
    first: int = 0
    written: int = 0

    @property
    def position(self) -> int:
        """Position of the next committed row."""
        return self.first + self.hidden.shape[0]

    def fork(self) -> "ChainState":
        """Return an independent copy."""
        return ChainState(self.context.fork(), self.hidden, self.following, self.first)

    def moved(self, by: int) -> "ChainState":
        """Return a copy whose pending rows, and rows to come, have positions that are larger by ``by``."""
        return ChainState(self.context.moved(by), self.hidden, self.following, self.first + by)

    def move(self, count: int) -> None:
        """Take the first ``count`` pending rows for rows of the context, where their keys and values are."""
        # One statement, so that an interruption finds the four at the same position.
        pending = self.hidden[count:], self.following[count:], self.first + count, 0
        self.hidden, self.following, self.first, self.written = pending

    def settle(self) -> None:
        """Make all pending rows but the newest part of the context, where they are written already."""
        if self.written and self.written == self.following.size:
            self.context.advance(self.written)
            self.move(self.written)
        self.written = 0

    def free(self) -> None:
        """Release the pages of the context."""
        self.context.free()


class ChainDrafter:
    """Drafts a chain: each step reads the head's own output and the token that was just drafted."""

    def __init__(
        self,
        name: str,
        forward: HeadForward,
        target_layer_ids: tuple[int, ...],
        target: Target,
        head: DraftHead,
        embed: Callable[[mx.array], mx.array] | None = None,
    ) -> None:
        """Bind a head to its target.

        name: of the kind.
        forward: of the head.
        target_layer_ids: the target layers whose outputs ``forward.features`` takes.
        target: to draft for.
        head: the output head.
        embed: looks up embeddings, [R] int32 to [R, H]; None for the target's.
        """
        self.name = name
        self.forward = forward
        self.target_layer_ids = target_layer_ids
        self.max_draft = MAX_DRAFTS
        self.head = head
        self.embed = embed or target.embed
        self._graphs = Graphs()
        self._nothing = mx.zeros((0, forward.width), dtype=target.dtype), mx.zeros((0,), dtype=mx.int32)
        like = mx.zeros((1, forward.width), dtype=target.dtype), mx.zeros((1,), dtype=mx.int32)
        self.pool = context_pool(forward.pre_attention(self.embed(like[1]), *like).context_rows)

    def changed(self, **changes: Any) -> "ChainDrafter":
        """Return the same drafter but for some attributes: forward, target_layer_ids, head or embed."""
        other = copy.copy(self)
        vars(other).update(changes, _graphs=Graphs())
        return other

    @property
    def draft_ids(self) -> mx.array | None:
        """The tokens [N] int32 that draft logits are of; None for all, in order."""
        return self.head.ids

    @property
    def is_quantized(self) -> bool:
        """Whether its linear maps are quantised."""
        return self.forward.attention.output.quantization is not None

    def open(self, position: int = 0) -> ChainState:
        """Return the state of a sequence whose rows begin at ``position``."""
        return ChainState(ContextKV(self.pool, self.forward.attention.window, position), *self._nothing, position)

    def extend(self, updates: Sequence[tuple[ChainState, Committed]]) -> None:
        """Add committed rows to the pending ones.

        Raises PositionError, with nothing changed, for a gap or an overlap.
        """
        for state, committed in updates:
            if committed.position != state.position:
                raise PositionError(
                    f"Rows begin at position {committed.position}, the drafter's at {state.position}."
                )
        for state, committed in updates:
            self._extend(state, committed)

    def _extend(self, state: ChainState, committed: Committed) -> None:
        if committed.ahead is not None:
            count = committed.tokens.size
            state.hidden, state.following = committed.ahead.rows[: count + 1], committed.tokens.astype(mx.int32)
            state.written = count
            return
        state.written = 0
        if state.hidden.shape[0] > MAX_VERIFY_ROWS:
            self._complete_all(state)
            mx.async_eval(self.pool.data)
        known = committed.tokens if state.hidden.shape[0] else committed.tokens[1:]
        hidden = mx.concatenate([state.hidden, self.forward.features(committed.aux_hidden_states)])
        if hidden.shape[0] > MAX_VERIFY_ROWS:
            # Otherwise the graph of a prompt's last layer would be kept in memory until the first draft.
            mx.async_eval(hidden)
        state.hidden, state.following = hidden, mx.concatenate([state.following, known.astype(mx.int32)])

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft for several sequences, each step for all of them at once; nothing for one without committed rows.

        Raises RequestError for a count outside 1 to ``max_draft``.
        """
        return self._propose(requests, None)

    def observe(self, requests: Sequence[DraftRequest], record: Record) -> list[Draft]:
        """Do what ``propose`` does, and record every stage.

        Those of the pending rows, the newest of each sequence included, have no prefix up to attention; those of
        step i, of the newest rows alone, begin with ``steps.i``.
        """
        record("rope_frequencies", self.forward.attention.rope.frequencies)
        return self._propose(requests, record)

    def _propose(self, requests: Sequence[DraftRequest], record: Record | None) -> list[Draft]:
        for request in requests:
            check_count(request.count, self.max_draft)
            request.state.settle()
        ready = [request for request in requests if request.state.hidden.shape[0]]
        drafts = iter(self._chains(ready, record) if ready else [])
        return [next(drafts) if request.state.hidden.shape[0] else nothing_drafted() for request in requests]

    def propose_ahead(self, state: ChainState, count: int, rule: DraftRule, unread: Unread) -> Ahead | None:
        """Draft after rows that the host has not read, see ``DraftsAhead``.

        Keys and values of all of them are written after the context; those of rejected rows are never seen.
        """
        check_count(count, self.max_draft)
        state.settle()
        if not state.hidden.shape[0]:
            return None
        self._complete_all(state)
        became, most = unread.became, unread.tree.num_rows
        inputs, chosen, rows, hidden = self._graphs.of("begin ahead", self._enter_ahead)(
            mx.concatenate([unread.tokens[:1], became.emitted]),
            state.hidden,
            became.rows(unread.aux_hidden_states),
            mx.array([state.first], dtype=mx.int32),
            became.accepted,
        )
        state.context.write_ahead(rows)
        numbers = packed([state.context], [state.first])
        noise = rule.noise(unread.position + 2, most - 1 + count, self.candidates)
        graph = self._graphs.of(("ahead", count, rule.way), partial(self._pass_ahead, count, rule))
        steps = [Step(*step) for step in graph(inputs, chosen, numbers, self.pool.data, noise, became.accepted)]
        return Ahead(draft_of(steps, 0), hidden)

    def _enter_ahead(
        self,
        following: mx.array,
        pending: mx.array,
        aux_hidden_states: mx.array,
        first: mx.array,
        accepted: mx.array,
    ) -> tuple[AttentionInputs, mx.array, mx.array, mx.array]:
        """Run the pending row and a round's R rows after it up to attention.

        following: int32 [R + 1], the tokens after them.
        pending: [1, H], the pending row's hidden state.
        aux_hidden_states: [R, T * H], of the round's rows, the accepted ones first.
        first: int32 [1], position of the pending row.
        accepted: see ``Outcome``.
        Returns the newest accepted row, its hidden state, the context rows of all rows before the last, and the
        hidden states of all [R + 1, H].
        """
        hidden = mx.concatenate([pending, self.forward.features(aux_hidden_states)])
        positions = first + mx.arange(following.size, dtype=mx.int32)
        inputs = self.forward.pre_attention(self.embed(following), hidden, positions)
        newest = accepted + 1
        return inputs.select(newest), hidden[newest], inputs.context_rows[:-1], hidden

    def _pass_ahead(
        self,
        count: int,
        rule: DraftRule,
        inputs: AttentionInputs,
        hidden: mx.array,
        numbers: mx.array,
        pool: mx.array,
        noise: mx.array | None,
        accepted: mx.array,
    ) -> list["Step"]:
        """Draft as ``_pass`` does, for one sequence, after the accepted rows of a round.

        numbers: as there, of the context before these rows, with the position of the pending row.
        noise: of all positions that may come.
        accepted: see ``Outcome``.
        """
        (first,), pages = unpacked(numbers, 1, 1)
        after, noises = accepted + 1, [noise_after(accepted, noise, count)]
        inputs = AttentionInputs(*inputs)
        return self._draft(count, [rule], inputs, hidden, first + after, pages.after(after), pool, noises)

    def _chains(self, requests: Sequence[DraftRequest], record: Record | None) -> list[Draft]:
        states, rules = [request.state for request in requests], [request.rule for request in requests]
        inputs, hidden = self._begin(requests, record)
        most = max(request.count for request in requests)
        numbers = packed([state.context for state in states], [state.position - 1 for state in states])
        noises = [
            rule.noise(state.position + 1, most, self.candidates)
            for rule, state in zip(rules, states, strict=True)
        ]
        ways = tuple(rule.way for rule in rules)
        chains = partial(self._pass, most, rules, record)
        graph = chains if record is not None else self._graphs.of(("chains", most, ways), chains)
        steps = [Step(*step) for step in graph(inputs, hidden, numbers, self.pool.data, noises)]
        return [draft_of(steps[: request.count], n) for n, request in enumerate(requests)]

    def _pass(
        self,
        count: int,
        rules: Sequence[DraftRule],
        record: Record | None,
        inputs: AttentionInputs,
        hidden: mx.array,
        numbers: mx.array,
        pool: mx.array,
        noises: Sequence[mx.array | None],
    ) -> list["Step"]:
        """Draft ``count`` tokens for N sequences.

        rules: of these; only what ``way`` tells apart is read.
        record: takes the stages of the pass, where one is given, which is not compiled then.
        inputs, hidden: of the first row of each chain, see ``_begin``.
        numbers: see ``packed``: the positions of these rows, and the contexts.
        pool: see ``PagePool.data``.
        noises: of the rules, see ``DraftRule.noise``.
        """
        (first,), pages = unpacked(numbers, len(rules), 1)
        return self._draft(count, rules, AttentionInputs(*inputs), hidden, first, pages, pool, noises, record)

    def _draft(
        self,
        count: int,
        rules: Sequence[DraftRule],
        inputs: AttentionInputs,
        hidden: mx.array,
        first: mx.array,
        pages: ContextPages,
        pool: mx.array,
        noises: Sequence[mx.array | None],
        record: Record | None = None,
    ) -> list["Step"]:
        queries, keys_values, steps = list[mx.array](), list[mx.array](), list[Step]()
        for index in range(count):
            step = within(f"steps.{index}", record)
            if index:
                embedded, positions = self.embed(steps[-1].tokens), first + index
                record_stages(step, recycled=hidden, embedded=embedded, positions=positions)
                inputs = self.forward.pre_attention(embedded, hidden, positions, step)
            queries.append(inputs.queries[:, None])
            keys_values.append(inputs.keys_values[:, :, None])
            rows = mx.concatenate(queries, axis=1), mx.concatenate(keys_values, axis=2)
            attended = self._attend(pool, pages, *rows)[:, -1]
            record_stages(step, attended=attended)
            scored, hidden = self.forward.post_attention(inputs, attended, step)
            own = [None if noise is None else noise[index] for noise in noises]
            steps.append(self._step(scored, rules, own, step))
        return steps

    def _begin(self, requests: Sequence[DraftRequest], record: Record | None) -> tuple[AttentionInputs, mx.array]:
        """Run the pending rows of N sequences up to attention, and move all but the newest of each to the context.

        Returns the newest row of each, and the target's hidden states of these rows [N, H].
        """
        states = [request.state for request in requests]
        counts = [state.hidden.shape[0] for state in states]
        newest = [end - 1 for end in accumulate(counts)]
        anchors = mx.array([request.anchor for request in requests], dtype=mx.int32)
        following = [part for n, state in enumerate(states) for part in (state.following, anchors[n : n + 1])]
        positions = [state.first + i for state, count in zip(states, counts, strict=True) for i in range(count)]
        hidden = states[0].hidden if len(states) == 1 else mx.concatenate([state.hidden for state in states])
        numbers = mx.array([*positions, *newest], dtype=mx.int32)
        begin = partial(self._enter, len(states), record)
        is_graph = record is None and len(positions) <= MAX_VERIFY_ROWS
        graph = self._graphs.of(("begin", len(states)), begin) if is_graph else begin
        inputs, chosen, rows = graph(mx.concatenate(following), hidden, numbers)
        moved = [
            (state, rows[last + 1 - count : last], count - 1)
            for state, count, last in zip(states, counts, newest, strict=True)
            if count > 1
        ]
        self._complete(moved)
        return AttentionInputs(*inputs), chosen

    def _enter(
        self,
        sequences: int,
        record: Record | None,
        following: mx.array,
        hidden: mx.array,
        numbers: mx.array,
    ) -> tuple[AttentionInputs, mx.array, mx.array]:
        """Run n pending rows of N sequences up to attention.

        following: int32 [n], the tokens after them.
        hidden: [n, H].
        numbers: int32 [n + N], their positions, and which of them is the newest of each sequence.
        Returns the newest row of each, their hidden states, and the context rows of all n.
        """
        positions, newest = numbers[: following.size], numbers[following.size :]
        embedded = self.embed(following)
        record_stages(record, ctx_combined=hidden, embedded=embedded, positions=positions)
        inputs = self.forward.pre_attention(embedded, hidden, positions, record)
        # A slice is a view; an index copies.
        part = slice(following.size - 1, None) if sequences == 1 else newest
        return inputs.select(part), hidden[part], inputs.context_rows

    def rewind(self, state: ChainState, position: int) -> int:
        """Forget rows from ``position`` on, and return the position where the next committed rows must begin.

        Where the hidden state of the row before ``position`` is no longer held, that is one row earlier: its
        successor may change, so the target has to run it again. Where the window before that row is not held
        either, the context begins again, a window earlier.
        """
        state.written = 0
        # An interrupted round may have moved rows to the context that are still pending.
        state.context.rewind(state.first)
        if position < state.position:
            keep = position - state.first
            if keep > 0:
                state.hidden, state.following = state.hidden[:keep], state.following[: keep - 1]
            else:
                state.context.rewind_or_restart(max(position - 1, 0))
                state.hidden, state.following, state.first = *self._nothing, state.context.cursor
        return state.position

    def _pre_attention(self, state: ChainState, following: mx.array) -> AttentionInputs:
        """Run the first pending rows up to attention, those whose next tokens are ``following`` [n] int32."""
        count = following.size
        positions = mx.arange(state.first, state.first + count, dtype=mx.int32)
        return self.forward.pre_attention(self.embed(following), state.hidden[:count], positions)

    def _complete(self, moved: Sequence[tuple[ChainState, mx.array, int]]) -> None:
        """Move the first pending rows of some states to their contexts, in one write.

        moved: a state, their context rows, and how many they are.
        """
        append_to([(state.context, state.first, rows) for state, rows, _ in moved])
        for state, _, count in moved:
            state.move(count)

    def _complete_all(self, state: ChainState) -> None:
        """Move all pending rows of a state but the newest to its context."""
        if count := state.following.size:
            self._complete([(state, self._pre_attention(state, state.following).context_rows, count)])

    def _attend(self, pool: mx.array, context: ContextPages, queries: mx.array, keys_values: mx.array) -> mx.array:
        """Attend from the rows of N chains to their contexts and to each other.

        queries: [N, R, heads, D].
        keys_values: [2, N, R, KV, D].
        Returns [N, R, heads, D].
        """
        keys, values = (side.squeeze(0).flatten(0, 1) for side in mx.split(keys_values, 2))
        cached = Cached(context.pages, context.lengths, queries.shape[1:2] * queries.shape[0])
        scale, window = self.forward.attention.scale, self.forward.attention.window
        attended = attention_rows(queries.flatten(0, 1), keys, values, pool, 0, cached, scale=scale, window=window)
        return attended.reshape(queries.shape)

    def _step(
        self,
        hidden: mx.array,
        rules: Sequence[DraftRule],
        noises: Sequence[mx.array | None],
        record: Record | None,
    ) -> "Step":
        """Draw the next token of each sequence.

        hidden: [N, H], what the output head reads.
        rules, noises: of the N sequences; the noise is that of this step.
        """
        scores = self.head.score(hidden)
        record_stages(record, hidden=hidden, logits=scores)
        values, ids, are_finite = topk_rows(scores, self.candidates)
        ids = ids if self.head.ids is None else self.head.ids[ids]
        drawn = [
            rule.draw(ids[n], values[n], noise) for n, (rule, noise) in enumerate(zip(rules, noises, strict=True))
        ]
        # The kernel's flag is for all rows; several sequences need one each.
        finite = are_finite[None] if len(rules) == 1 else mx.all(mx.isfinite(scores), axis=-1)
        tokens, ranks = mx.stack([each.token for each in drawn]), mx.stack([each.ranks for each in drawn])
        return Step(tokens, ids, ranks, [each.probabilities for each in drawn], finite)

    @property
    def candidates(self) -> int:
        """K, how many candidates there are for each drafted token."""
        return min(CANDIDATES, self.head.size)


class Step(NamedTuple):
    """One drafted token of each of N sequences.

    tokens: [N] int32.
    ids: [N, K] int32, the candidates.
    ranks: [N, K] float32, of the candidates, see ``Drawn``.
    probabilities: [K] float32 of each sequence, what its token was drawn from; None where it is not kept.
    finite: bool [N], whether all draft logits are finite.
    """

    tokens: mx.array
    ids: mx.array
    ranks: mx.array
    probabilities: list[mx.array | None]
    finite: mx.array


def draft_of(steps: Sequence[Step], n: int) -> Draft:
    """Return the draft of sequence number ``n``, a token of each step."""
    return Draft(
        mx.stack([step.tokens[n] for step in steps]),
        mx.stack([step.ids[n] for step in steps]),
        stacked([step.probabilities[n] for step in steps]),
        {"draft logits": mx.all(mx.stack([step.finite[n] for step in steps]))},
        mx.stack([step.ranks[n] for step in steps]),
    )
