"""The chain drafter: a head of one decoder layer, MTP or EAGLE, that is run a token a step.

A row of the head needs a hidden state of the target and the token behind it, so the newest committed row waits for
its successor: it is pending. Only rows whose successor is committed too enter the cache; those of the chain, which
read the head's own output, ride beside the cache and are forgotten when the round ends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from metal_kernels import MAX_ROWS, Cached, attention_rows, topk_rows
from mlx_spec.drafters.base import Choose, Committed, Proposal, stack_drawn
from mlx_spec.drafters.context import PAGE_SLOTS, ContextKV
from mlx_spec.drafters.draft_head import DraftHead
from mlx_spec.errors import PositionError, RequestError
from mlx_spec.target import Target
from mlx_spec.target.layers import Attention

Held = tuple[mx.array, mx.array, mx.array]
"""What a cache holds: see ContextKV.pages."""

MOST_DRAFTS = 7
# Candidates of a drafted token; sampled drafts are drawn among these.
CANDIDATES = 16


@dataclass(frozen=True)
class Entered:
    """Rows before attention: residual [R, H], what attention's output is added to; the joined projection [R, N];
    queries [R, H, D], and keys and values [2, R, KV, D], positions encoded."""

    residual: mx.array
    projected: mx.array
    queries: mx.array
    keys_values: mx.array

    def rows(self, start: int, stop: int) -> "Entered":
        """Return the rows from ``start`` to before ``stop``."""
        part = slice(start, stop)
        return Entered(self.residual[part], self.projected[part], self.queries[part], self.keys_values[:, part])


class HeadRows(Protocol):
    """The forward of a head over rows. width: H of the hidden states that it reads and hands on."""

    @property
    def attention(self) -> Attention:
        """Attention of its layer."""
        ...

    @property
    def width(self) -> int:
        """H, the size of hidden states."""
        ...

    def features(self, taps: mx.array) -> mx.array:
        """Turn taps of the target [R, T * H] into hidden states [R, H]."""
        ...

    def enter(self, embedded: mx.array, hidden: mx.array, positions: mx.array) -> Entered:
        """Run rows up to attention: embeddings and hidden states [R, H], positions [R] int32."""
        ...

    def leave(self, row: Entered, attended: mx.array) -> tuple[mx.array, mx.array]:
        """Finish rows behind attention, whose output is [R, H, D].

        Returns what the output head reads and the hidden state for the next row of a chain, both [R, H].
        """
        ...


@dataclass
class ChainState:
    """What the head remembers of a sequence.

    context: keys and values of the rows that are complete. hidden: [m, H], the target's hidden states of the m
    pending rows behind them. following: [m - 1] int32, the tokens behind all but the newest of these. first: where
    the pending rows begin, which is where the context ends.
    """

    context: ContextKV
    hidden: mx.array
    following: mx.array
    first: int = 0

    @property
    def position(self) -> int:
        """Where the next committed row stands."""
        return self.first + self.hidden.shape[0]

    def fork(self) -> "ChainState":
        """Return an independent copy."""
        return ChainState(self.context.fork(), self.hidden, self.following, self.first)


class ChainDrafter:
    """Drafts a chain: each step reads the head's own output and the token that was just drafted."""

    def __init__(
        self,
        name: str,
        rows: HeadRows,
        taps: tuple[int, ...],
        target: Target,
        head: DraftHead,
        embed: Callable[[mx.array], mx.array] | None = None,
    ) -> None:
        """Bind a head to its target, whose embedding it uses where ``embed`` is None.

        name: of the family. taps: the hidden states of the target that ``rows.features`` takes side by side.
        """
        self.name = name
        self.rows = rows
        self.taps = taps
        self.max_draft = MOST_DRAFTS
        self.head = head
        self.embed = embed or target.embed
        self._nothing = mx.zeros((0, rows.width), dtype=target.dtype), mx.zeros((0,), dtype=mx.int32)
        shape = (1, PAGE_SLOTS, 1, 2, rows.attention.kv_heads, rows.attention.head_dim)
        empty = mx.zeros((1, 1), dtype=mx.int32), mx.zeros((1,), dtype=mx.int32)
        self._no_context = mx.zeros(shape, dtype=target.dtype), *empty

    def open(self) -> ChainState:
        """Return the state for an empty sequence."""
        return ChainState(ContextKV(self.rows.attention.window), *self._nothing)

    def extend(self, state: ChainState, rows: Committed) -> None:
        """Let committed rows wait for their successors. Raises PositionError for a gap or an overlap."""
        if rows.position != state.position:
            raise PositionError(f"Rows begin at position {rows.position}, the drafter's at {state.position}.")
        if state.hidden.shape[0] > MAX_ROWS:
            self._complete(state, self._enter(state, state.following), state.hidden.shape[0] - 1)
            mx.async_eval(state.context.rows)
        known = rows.tokens if state.hidden.shape[0] else rows.tokens[1:]
        hidden = mx.concatenate([state.hidden, self.rows.features(rows.taps)])
        if hidden.shape[0] > MAX_ROWS:
            # Otherwise the graph of a prompt's last layer would be held until the first draft.
            mx.async_eval(hidden)
        state.hidden, state.following = hidden, mx.concatenate([state.following, known.astype(mx.int32)])

    def propose(self, state: ChainState, anchor: int, count: int, choose: Choose) -> Proposal:
        """Draft the ``count`` tokens behind the anchor; none before any row is committed."""
        if not 1 <= count <= self.max_draft:
            raise RequestError(f"This drafter drafts 1 to {self.max_draft} tokens a round, not {count}.")
        pending = state.hidden.shape[0]
        if not pending:
            return Proposal(mx.zeros((0,), dtype=mx.int32), mx.zeros((0, 0), dtype=mx.int32))
        following = mx.concatenate([state.following, mx.array([anchor], dtype=mx.int32)])
        entered = self._enter(state, following)
        self._complete(state, entered, pending - 1)
        row, hidden = entered.rows(pending - 1, pending), state.hidden[-1:]
        queries, keys_values, picked = [row.queries], [row.keys_values], list[Picked]()
        held = self._held(state.context)
        for index in range(count):
            if index:
                at = mx.array([state.position - 1 + index], dtype=mx.int32)
                row = self.rows.enter(self.embed(picked[-1].token[None]), hidden, at)
                queries.append(row.queries)
                keys_values.append(row.keys_values)
            attended = self._attend(held, mx.concatenate(queries), mx.concatenate(keys_values, axis=1))
            scored, hidden = self.rows.leave(row, attended[-1:])
            picked.append(self._pick(scored, state.position + 1 + index, choose))
        return Proposal(
            mx.stack([p.token for p in picked]),
            mx.stack([p.ids for p in picked]),
            stack_drawn([p.probabilities for p in picked]),
            {"draft logits": mx.all(mx.stack([p.finite for p in picked]))},
        )

    def rewind(self, state: ChainState, position: int) -> int:
        """Forget rows from ``position`` on, and return where the next committed row must stand.

        That is one row earlier where the hidden state of the row before ``position`` is no longer held: its
        successor may change, so the target has to run it again. Where the context has lost the window before that
        row, it begins again, a window earlier.
        """
        # Rows that a round completed but, interrupted, left pending as well are pending.
        state.context.rewind(state.first)
        if position < state.position:
            keep = position - state.first
            if keep > 0:
                state.hidden, state.following = state.hidden[:keep], state.following[: keep - 1]
            else:
                state.context.rewind_or_restart(max(position - 1, 0))
                state.hidden, state.following, state.first = *self._nothing, state.context.cursor
        return state.position

    def _enter(self, state: ChainState, following: mx.array) -> Entered:
        """Run pending rows, those whose next token is in ``following``, up to attention."""
        count = following.size
        positions = mx.arange(state.first, state.first + count, dtype=mx.int32)
        return self.rows.enter(self.embed(following), state.hidden[:count], positions)

    def _complete(self, state: ChainState, entered: Entered, count: int) -> None:
        """Move the first ``count`` pending rows into the cache."""
        if count:
            rows = entered.rows(0, count).keys_values.transpose(1, 0, 2, 3)[:, None]
            state.context.append(state.first, rows)
            left = state.hidden[count:], state.following[count:], state.first + count
            state.hidden, state.following, state.first = left

    def _held(self, context: ContextKV) -> Held:
        return context.pages() if context.cursor > context.base else self._no_context

    def _attend(self, held: Held, queries: mx.array, keys_values: mx.array) -> mx.array:
        """Attend from rows behind the cache to the cache and to each other."""
        pool, pages, length = held
        keys, values = (side.squeeze(0) for side in mx.split(keys_values, 2))
        cached = Cached(pages, length, (queries.shape[0],))
        scale, window = self.rows.attention.scale, self.rows.attention.window
        return attention_rows(queries, keys, values, pool, 0, cached, scale=scale, window=window, slot_major=True)

    def _pick(self, hidden: mx.array, position: int, choose: Choose) -> "Picked":
        """Let ``choose`` draw the token for ``position`` from the best of the draft logits of one row [1, H]."""
        values, ids, finite = topk_rows(self.head.score(hidden), min(CANDIDATES, self.head.size))
        ids = ids[0] if self.head.ids is None else self.head.ids[ids[0]]
        token, probabilities = choose(position, ids, values[0].astype(mx.float32))
        return Picked(token.astype(mx.int32), ids, probabilities, finite)


@dataclass(frozen=True)
class Picked:
    """A drafted token and the candidates ids [K] it was chosen from.

    probabilities: [K], None where it was not drawn. finite: whether all draft logits were.
    """

    token: mx.array
    ids: mx.array
    probabilities: mx.array | None
    finite: mx.array
