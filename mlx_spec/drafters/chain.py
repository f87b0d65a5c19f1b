"""The chain drafter: a head of one decoder layer, MTP or EAGLE, that drafts one token a step.

A row of the head reads a hidden state of the target and the token after it. So a committed row is pending until
its successor is committed, too; then its keys and values enter the context. The rows of a chain, which read the
head's own output, are kept beside the context and forgotten when the round ends.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import mlx.core as mx

from metal_kernels import MAX_VERIFY_ROWS, Cached, attention_rows, topk_rows
from mlx_spec.drafters.base import Committed, Draft, DraftRequest, nothing_drafted, stack_drawn
from mlx_spec.drafters.draft_head import DraftHead
from mlx_spec.drafters.kv import ContextKV, context_pool, pages_of
from mlx_spec.drafters.stages import Record, record_stages, within
from mlx_spec.errors import PositionError, RequestError
from mlx_spec.target import Target
from mlx_spec.target.layers import Attention

MAX_DRAFTS = 7
# Candidates of a drafted token; sampled drafts are drawn among these.
CANDIDATES = 16


@dataclass(frozen=True)
class AttentionInputs:
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
    """

    context: ContextKV
    hidden: mx.array
    following: mx.array
    first: int = 0

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
        self._nothing = mx.zeros((0, forward.width), dtype=target.dtype), mx.zeros((0,), dtype=mx.int32)
        like = mx.zeros((1, forward.width), dtype=target.dtype), mx.zeros((1,), dtype=mx.int32)
        self.pool = context_pool(forward.pre_attention(self.embed(like[1]), *like).context_rows)

    def changed(self, **changes: Any) -> "ChainDrafter":
        """Return the same drafter but for some attributes: forward, target_layer_ids, head or embed."""
        other = copy.copy(self)
        vars(other).update(changes)
        return other

    @property
    def draft_ids(self) -> mx.array | None:
        """The tokens [N] int32 that draft logits are of; None for all, in order."""
        return self.head.ids

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
        if state.hidden.shape[0] > MAX_VERIFY_ROWS:
            self._complete(state, self._pre_attention(state, state.following), state.hidden.shape[0] - 1)
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
        return self._propose(requests, record)

    def _propose(self, requests: Sequence[DraftRequest], record: Record | None) -> list[Draft]:
        for request in requests:
            if not 1 <= request.count <= self.max_draft:
                raise RequestError(
                    f"This drafter drafts 1 to {self.max_draft} tokens a round, not {request.count}."
                )
        ready = [request for request in requests if request.state.hidden.shape[0]]
        drafts = iter(self._chains(ready, record) if ready else [])
        return [next(drafts) if request.state.hidden.shape[0] else nothing_drafted() for request in requests]

    def _chains(self, requests: Sequence[DraftRequest], record: Record | None) -> list[Draft]:
        inputs, hidden = self._begin(requests, record)
        pages = pages_of([request.state.context for request in requests])
        queries, keys_values, steps = list[mx.array](), list[mx.array](), list[Step]()
        for index in range(max(request.count for request in requests)):
            step = within(f"steps.{index}", record)
            if index:
                positions = mx.array([request.state.position - 1 + index for request in requests], dtype=mx.int32)
                embedded = self.embed(steps[-1].tokens)
                record_stages(step, recycled=hidden, embedded=embedded, positions=positions)
                inputs = self.forward.pre_attention(embedded, hidden, positions, step)
            queries.append(inputs.queries[:, None])
            keys_values.append(inputs.keys_values[:, :, None])
            attended = self._attend(pages, mx.concatenate(queries, axis=1), mx.concatenate(keys_values, axis=2))
            record_stages(step, attended=attended[:, -1])
            scored, hidden = self.forward.post_attention(inputs, attended[:, -1], step)
            record_stages(step, hidden=scored)
            steps.append(self._step(scored, requests, steps, step))
        return [draft_of(steps[: request.count], n) for n, request in enumerate(requests)]

    def _begin(self, requests: Sequence[DraftRequest], record: Record | None) -> tuple[AttentionInputs, mx.array]:
        """Run the pending rows of N sequences up to attention, and move all but the newest of each to the context.

        Returns the newest row of each, and the target's hidden states of these rows [N, H].
        """
        states = [request.state for request in requests]
        counts = [state.hidden.shape[0] for state in states]
        anchors = mx.array([request.anchor for request in requests], dtype=mx.int32)
        following = [part for n, state in enumerate(states) for part in (state.following, anchors[n : n + 1])]
        positions = [state.first + i for state, count in zip(states, counts, strict=True) for i in range(count)]
        hidden = mx.concatenate([state.hidden for state in states])
        embedded = self.embed(mx.concatenate(following))
        at = mx.array(positions, dtype=mx.int32)
        record_stages(record, ctx_combined=hidden, embedded=embedded, positions=at)
        inputs = self.forward.pre_attention(embedded, hidden, at, record)
        newest = [end - 1 for end in accumulate(counts)]
        for state, count, last in zip(states, counts, newest, strict=True):
            if count > 1:
                self._complete(state, inputs.select(slice(last + 1 - count, last)), count - 1)
        # A slice is a view; an index copies.
        part = slice(newest[0], None) if len(requests) == 1 else mx.array(newest)
        return inputs.select(part), hidden[part]

    def rewind(self, state: ChainState, position: int) -> int:
        """Forget rows from ``position`` on, and return the position where the next committed rows must begin.

        Where the hidden state of the row before ``position`` is no longer held, that is one row earlier: its
        successor may change, so the target has to run it again. Where the window before that row is not held
        either, the context begins again, a window earlier.
        """
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

    def _complete(self, state: ChainState, inputs: AttentionInputs, count: int) -> None:
        """Move the first ``count`` pending rows to the context."""
        if count:
            state.context.append(state.first, inputs.context_rows[:count])
            # One statement, so that an interruption finds the three at the same position.
            pending = state.hidden[count:], state.following[count:], state.first + count
            state.hidden, state.following, state.first = pending

    def _attend(
        self, pages: tuple[mx.array, mx.array, mx.array], queries: mx.array, keys_values: mx.array
    ) -> mx.array:
        """Attend from the rows of N chains to their contexts and to each other.

        pages: of the contexts, see ``pages_of``.
        queries: [N, R, heads, D].
        keys_values: [2, N, R, KV, D].
        Returns [N, R, heads, D].
        """
        pool, table, lengths = pages
        keys, values = (side.squeeze(0).flatten(0, 1) for side in mx.split(keys_values, 2))
        cached = Cached(table, lengths, queries.shape[1:2] * queries.shape[0])
        scale, window = self.forward.attention.scale, self.forward.attention.window
        attended = attention_rows(queries.flatten(0, 1), keys, values, pool, 0, cached, scale=scale, window=window)
        return attended.reshape(queries.shape)

    def _step(
        self,
        hidden: mx.array,
        requests: Sequence[DraftRequest],
        before: Sequence["Step"],
        record: Record | None,
    ) -> "Step":
        """Draw the next token of each sequence.

        hidden: [N, H], what the output head reads.
        requests: of the N sequences.
        before: the steps before this one.
        record: gets the draft logits [N, size of the head].
        """
        scores = self.head.score(hidden)
        record_stages(record, logits=scores)
        values, ids, are_finite = topk_rows(scores, min(CANDIDATES, self.head.size))
        ids = ids if self.head.ids is None else self.head.ids[ids]
        values = values.astype(mx.float32)
        picked: list[tuple[mx.array, mx.array | None]] = []
        for n, request in enumerate(requests):
            if len(before) < request.count:
                picked.append(request.sample_draft(request.state.position + 1 + len(before), ids[n], values[n]))
            else:
                # Its chain is complete; its row is computed with the others and not used.
                picked.append((before[-1].tokens[n], None))
        # The kernel's flag is for all rows; several sequences need one each.
        finite = are_finite[None] if len(requests) == 1 else mx.all(mx.isfinite(scores), axis=-1)
        tokens = mx.stack([token for token, _ in picked]).astype(mx.int32)
        return Step(tokens, ids, values, [probabilities for _, probabilities in picked], finite)


@dataclass(frozen=True)
class Step:
    """One drafted token of each of N sequences.

    tokens: [N] int32.
    ids: [N, K] int32, the candidates.
    scores: [N, K] float32, of the candidates.
    probabilities: [K] float32 of each sequence, what its token was drawn from; None where it was not drawn.
    finite: bool [N], whether all draft logits are finite.
    """

    tokens: mx.array
    ids: mx.array
    scores: mx.array
    probabilities: list[mx.array | None]
    finite: mx.array


def draft_of(steps: Sequence[Step], n: int) -> Draft:
    """Return the draft of sequence number ``n``, a token of each step."""
    return Draft(
        mx.stack([step.tokens[n] for step in steps]),
        mx.stack([step.ids[n] for step in steps]),
        stack_drawn([step.probabilities[n] for step in steps]),
        {"draft logits": mx.all(mx.stack([step.finite[n] for step in steps]))},
        mx.stack([step.scores[n] for step in steps]),
    )
