"""The chain drafter: a head of one decoder layer, MTP or EAGLE, that is run a token a step.

A row of the head needs a hidden state of the target and the token behind it, so the newest committed row waits for
its successor: it is pending. Only rows whose successor is committed too enter the cache; those of the chain, which
read the head's own output, ride beside the cache and are forgotten when the round ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import mlx.core as mx

from metal_kernels import MAX_ROWS, Cached, attention_rows, topk_rows
from mlx_spec.drafters.base import Ask, Committed, Proposal, stack_drawn
from mlx_spec.drafters.kv import ContextKV, context_pool, pages_of
from mlx_spec.drafters.draft_head import DraftHead
from mlx_spec.errors import PositionError, RequestError
from mlx_spec.target import Target
from mlx_spec.target.layers import Attention

Held = tuple[mx.array, mx.array, mx.array]
"""What contexts hold: see ``pages_of``."""

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

    def rows(self, part: slice | mx.array) -> "Entered":
        """Return some of the rows."""
        return Entered(self.residual[part], self.projected[part], self.queries[part], self.keys_values[:, part])

    @property
    def context_rows(self) -> mx.array:
        """Keys and values as a context of one layer holds them: [R, 1, 2, KV, D]."""
        return self.keys_values.transpose(1, 0, 2, 3)[:, None]


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

    def free(self) -> None:
        """Give the pages of the context back."""
        self.context.free()


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
        like = mx.zeros((1, rows.width), dtype=target.dtype), mx.zeros((1,), dtype=mx.int32)
        self.pool = context_pool(rows.enter(self.embed(like[1]), *like).context_rows)

    def open(self, position: int = 0) -> ChainState:
        """Return the state for a sequence whose rows begin at ``position``."""
        return ChainState(ContextKV(self.pool, self.rows.attention.window, position), *self._nothing, position)

    def extend(self, updates: Sequence[tuple[ChainState, Committed]]) -> None:
        """Let committed rows wait for their successors. Raises PositionError for a gap or an overlap."""
        for state, rows in updates:
            self._extend(state, rows)

    def _extend(self, state: ChainState, rows: Committed) -> None:
        if rows.position != state.position:
            raise PositionError(f"Rows begin at position {rows.position}, the drafter's at {state.position}.")
        if state.hidden.shape[0] > MAX_ROWS:
            self._complete(state, self._enter(state, state.following), state.hidden.shape[0] - 1)
            mx.async_eval(self.pool.data)
        known = rows.tokens if state.hidden.shape[0] else rows.tokens[1:]
        hidden = mx.concatenate([state.hidden, self.rows.features(rows.taps)])
        if hidden.shape[0] > MAX_ROWS:
            # Otherwise the graph of a prompt's last layer would be held until the first draft.
            mx.async_eval(hidden)
        state.hidden, state.following = hidden, mx.concatenate([state.following, known.astype(mx.int32)])

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """Draft behind all anchors, a step of all chains at once; none before any row of a sequence is committed.

        Raises RequestError for a count outside 1 to ``max_draft``.
        """
        for ask in asks:
            if not 1 <= ask.count <= self.max_draft:
                raise RequestError(f"This drafter drafts 1 to {self.max_draft} tokens a round, not {ask.count}.")
        begun = [ask for ask in asks if ask.state.hidden.shape[0]]
        drafted = iter(self._chains(begun) if begun else [])
        return [next(drafted) if ask.state.hidden.shape[0] else nothing_drafted() for ask in asks]

    def _chains(self, asks: Sequence[Ask]) -> list[Proposal]:
        row, hidden = self._begin(asks)
        held = pages_of([ask.state.context for ask in asks])
        queries, keys_values, steps = list[mx.array](), list[mx.array](), list[Step]()
        for index in range(max(ask.count for ask in asks)):
            if index:
                at = mx.array([ask.state.position - 1 + index for ask in asks], dtype=mx.int32)
                row = self.rows.enter(self.embed(steps[-1].tokens), hidden, at)
            queries.append(row.queries[:, None])
            keys_values.append(row.keys_values[:, :, None])
            attended = self._attend(held, mx.concatenate(queries, axis=1), mx.concatenate(keys_values, axis=2))
            scored, hidden = self.rows.leave(row, attended[:, -1])
            steps.append(self._step(scored, asks, steps))
        return [proposal_of(steps[: ask.count], n) for n, ask in enumerate(asks)]

    def _begin(self, asks: Sequence[Ask]) -> tuple[Entered, mx.array]:
        """Run the pending rows of all sequences, and complete all but the newest of each.

        Returns the newest ones, N of N sequences, and the target's hidden states of these [N, H].
        """
        states, counts = [ask.state for ask in asks], [ask.state.hidden.shape[0] for ask in asks]
        anchors = mx.array([ask.anchor for ask in asks], dtype=mx.int32)
        following = [part for n, state in enumerate(states) for part in (state.following, anchors[n : n + 1])]
        positions = [state.first + i for state, count in zip(states, counts, strict=True) for i in range(count)]
        hidden = mx.concatenate([state.hidden for state in states])
        embedded = self.embed(mx.concatenate(following))
        entered = self.rows.enter(embedded, hidden, mx.array(positions, dtype=mx.int32))
        newest = [end - 1 for end in accumulate(counts)]
        for state, count, last in zip(states, counts, newest, strict=True):
            if count > 1:
                self._complete(state, entered.rows(slice(last + 1 - count, last)), count - 1)
        # A slice is a view; an index copies.
        part = slice(newest[0], None) if len(asks) == 1 else mx.array(newest)
        return entered.rows(part), hidden[part]

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
            state.context.append(state.first, entered.context_rows[:count])
            left = state.hidden[count:], state.following[count:], state.first + count
            state.hidden, state.following, state.first = left

    def _attend(self, held: Held, queries: mx.array, keys_values: mx.array) -> mx.array:
        """Attend from rows [N, R, H, D] behind the contexts of N sequences to these and to each other."""
        pool, pages, lengths = held
        keys, values = (side.squeeze(0).flatten(0, 1) for side in mx.split(keys_values, 2))
        cached = Cached(pages, lengths, queries.shape[1:2] * queries.shape[0])
        scale, window = self.rows.attention.scale, self.rows.attention.window
        attended = attention_rows(queries.flatten(0, 1), keys, values, pool, 0, cached, scale=scale, window=window)
        return attended.reshape(queries.shape)

    def _step(self, hidden: mx.array, asks: Sequence[Ask], before: Sequence["Step"]) -> "Step":
        """Let each sequence draw its next token from the best of the draft logits of its row [N, H]."""
        scores = self.head.score(hidden)
        values, ids, are_finite = topk_rows(scores, min(CANDIDATES, self.head.size))
        ids = ids if self.head.ids is None else self.head.ids[ids]
        values = values.astype(mx.float32)
        picked: list[tuple[mx.array, mx.array | None]] = []
        for n, ask in enumerate(asks):
            if len(before) < ask.count:
                picked.append(ask.choose(ask.state.position + 1 + len(before), ids[n], values[n]))
            else:
                # Its chain is complete, and runs along with the others.
                picked.append((before[-1].tokens[n], None))
        # Of several sequences each has its own flag.
        finite = are_finite[None] if len(asks) == 1 else mx.all(mx.isfinite(scores), axis=-1)
        tokens = mx.stack([token for token, _ in picked]).astype(mx.int32)
        return Step(tokens, ids, values, [probabilities for _, probabilities in picked], finite)


@dataclass(frozen=True)
class Step:
    """One drafted token of each of N sequences: tokens [N] int32, and the candidates ids [N, K] they are of.

    scores: [N, K] float32, of the candidates. probabilities: [K] of each sequence, None where it was not drawn.
    finite: bool [N], whether all draft logits were.
    """

    tokens: mx.array
    ids: mx.array
    scores: mx.array
    probabilities: list[mx.array | None]
    finite: mx.array


def proposal_of(steps: Sequence[Step], n: int) -> Proposal:
    """Return what sequence number ``n`` drafted in these steps."""
    return Proposal(
        mx.stack([step.tokens[n] for step in steps]),
        mx.stack([step.ids[n] for step in steps]),
        stack_drawn([step.probabilities[n] for step in steps]),
        {"draft logits": mx.all(mx.stack([step.finite[n] for step in steps]))},
        mx.stack([step.scores[n] for step in steps]),
    )


def nothing_drafted() -> Proposal:
    """Return a proposal without drafts."""
    return Proposal(mx.zeros((0,), dtype=mx.int32), mx.zeros((0, 0), dtype=mx.int32))
