"""The MTP drafter: a head of one decoder layer that is run as a chain, a token a step.

A row of the head needs a hidden state of the target and the token behind it, so the newest committed row waits for
its successor: it is pending. Only rows whose successor is committed too enter the cache; those of the chain ride
beside the cache and are forgotten when the round ends.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from metal_kernels import MAX_ROWS, Cached, attention_rows, topk_rows
from mlx_spec.drafters.base import Choose, Committed, Proposal, stack_drawn
from mlx_spec.drafters.context import PAGE_SLOTS, ContextKV
from mlx_spec.drafters.mtp.head import Entered, HeadRows
from mlx_spec.errors import PositionError, RequestError
from mlx_spec.target import Target

Held = tuple[mx.array, mx.array, mx.array]
"""What a cache holds: see ContextKV.pages."""

MOST_DRAFTS = 7
# Candidates of a drafted token; sampled drafts are drawn among these.
CANDIDATES = 16


@dataclass
class MTPState:
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

    def fork(self) -> "MTPState":
        """Return an independent copy."""
        return MTPState(self.context.fork(), self.hidden, self.following, self.first)


@dataclass(frozen=True)
class DraftHead:
    """What turns hidden states into draft logits: score maps [R, H] to [R, N]; ids: the N tokens, None for all."""

    score: Callable[[mx.array], mx.array]
    size: int
    ids: mx.array | None = None


class MTPDrafter:
    """Drafts a chain: each step reads the head's own output and the token that was just drafted."""

    name = "mtp"

    def __init__(
        self,
        rows: HeadRows,
        target: Target,
        head: DraftHead,
        embed: Callable[[mx.array], mx.array] | None = None,
    ) -> None:
        """Bind a head to its target, whose embedding it uses where ``embed`` is None."""
        self.rows = rows
        self.max_draft = MOST_DRAFTS
        self.taps: tuple[int, ...] = (target.num_layers if rows.contract.reads_normed else target.num_layers - 1,)
        self.head = head
        self._embed = embed or target.embed
        width = rows.norm_embedding.weight.size
        self._nothing = mx.zeros((0, width), dtype=target.dtype), mx.zeros((0,), dtype=mx.int32)
        shape = (1, PAGE_SLOTS, 1, 2, rows.attention.kv_heads, rows.attention.head_dim)
        empty = mx.zeros((1, 1), dtype=mx.int32), mx.zeros((1,), dtype=mx.int32)
        self._no_context = mx.zeros(shape, dtype=target.dtype), *empty

    def open(self) -> MTPState:
        """Return the state for an empty sequence."""
        return MTPState(ContextKV(None), *self._nothing)

    def extend(self, state: MTPState, rows: Committed) -> None:
        """Let committed rows wait for their successors. Raises PositionError for a gap or an overlap."""
        if rows.position != state.position:
            raise PositionError(f"Rows begin at position {rows.position}, the drafter's at {state.position}.")
        if state.hidden.shape[0] > MAX_ROWS:
            self._complete(state, self._enter(state, state.following), state.hidden.shape[0] - 1)
            mx.async_eval(state.context.rows)
        known = rows.tokens if state.hidden.shape[0] else rows.tokens[1:]
        hidden = mx.concatenate([state.hidden, rows.taps])
        if hidden.shape[0] > MAX_ROWS:
            # Otherwise the graph of a prompt's last layer would be held until the first draft.
            mx.async_eval(hidden)
        state.hidden, state.following = hidden, mx.concatenate([state.following, known.astype(mx.int32)])

    def propose(self, state: MTPState, anchor: int, count: int, choose: Choose) -> Proposal:
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
                row = self.rows.enter(self._embed(picked[-1].token[None]), hidden, at)
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

    def rewind(self, state: MTPState, position: int) -> int:
        """Forget rows from ``position`` on, and return where the next committed row must stand.

        That is one row earlier where the hidden state of the row before ``position`` is no longer held: its
        successor may change, so the target has to run it again.
        """
        # Rows that a round completed but, interrupted, left pending as well are pending.
        state.context.rewind(state.first)
        if position < state.position:
            keep = position - state.first
            if keep > 0:
                state.hidden, state.following = state.hidden[:keep], state.following[: keep - 1]
            else:
                state.context.rewind(max(position - 1, 0))
                state.hidden, state.following, state.first = *self._nothing, state.context.cursor
        return state.position

    def first_drafts(self, rows: HeadRows, hidden: mx.array, following: mx.array) -> mx.array:
        """Return the first greedy draft [n] of each row of a text, as ``rows`` wires the head.

        hidden: [n, H] of the text's first n rows. following: [n], the tokens behind them.
        """
        entered = rows.enter(self._embed(following), hidden, mx.arange(following.size, dtype=mx.int32))
        attended = self._attend(self._no_context, entered.queries, entered.keys_values)
        best = mx.argmax(self.head.score(rows.leave(entered, attended)[0]), axis=-1)
        return best if self.head.ids is None else self.head.ids[best]

    def _enter(self, state: MTPState, following: mx.array) -> Entered:
        """Run pending rows, those whose next token is in ``following``, up to attention."""
        count = following.size
        positions = mx.arange(state.first, state.first + count, dtype=mx.int32)
        return self.rows.enter(self._embed(following), state.hidden[:count], positions)

    def _complete(self, state: MTPState, entered: Entered, count: int) -> None:
        """Move the first ``count`` pending rows into the cache."""
        if count:
            rows = entered.rows(0, count).keys_values.transpose(1, 0, 2, 3)[:, None]
            state.context.append(state.first, rows)
            left = state.hidden[count:], state.following[count:], state.first + count
            state.hidden, state.following, state.first = left

    def _held(self, context: ContextKV) -> Held:
        return context.pages() if context.cursor else self._no_context

    def _attend(self, held: Held, queries: mx.array, keys_values: mx.array) -> mx.array:
        """Attend from rows behind the cache to the cache and to each other."""
        pool, pages, length = held
        keys, values = (side.squeeze(0) for side in mx.split(keys_values, 2))
        cached = Cached(pages, length, (queries.shape[0],))
        return attention_rows(
            queries, keys, values, pool, 0, cached, scale=self.rows.attention.scale, slot_major=True
        )

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
