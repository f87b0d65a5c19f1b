"""The MTP drafter: a head of one decoder layer that is run as a chain, a token a step.

A row of the head needs a hidden state of the target and the token behind it, so the newest committed row waits for
its successor: it is pending. Only rows whose successor is committed too enter the head's cache; the chain's own rows,
which begin with the anchor, ride beside the cache and are forgotten when the round ends.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from metal_kernels import MAX_ROWS, Cached, attention_rows, topk_rows
from mlx_spec.drafters.base import Choose, Committed, Proposal
from mlx_spec.drafters.dflash2.context import PAGE_SLOTS, ContextKV
from mlx_spec.drafters.mtp.head import Entered, HeadRows
from mlx_spec.errors import PositionError, RequestError
from mlx_spec.target import Target

MOST_DRAFTS = 7
# Candidates of a drafted token; sampled drafts are drawn among these.
CANDIDATES = 16


@dataclass
class MTPState:
    """What the head remembers of a sequence.

    context: keys and values of the rows that are complete. hidden: [m, H], the target's hidden states of the m
    pending rows behind them. following: [m - 1] int32, the tokens behind all but the newest of these.
    """

    context: ContextKV
    hidden: mx.array
    following: mx.array

    @property
    def position(self) -> int:
        """Where the next committed row stands."""
        return self.context.cursor + self.hidden.shape[0]

    def fork(self) -> "MTPState":
        """Return an independent copy."""
        return MTPState(self.context.fork(), self.hidden, self.following)


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
        head: DraftHead | None = None,
        embed: Callable[[mx.array], mx.array] | None = None,
    ) -> None:
        """Bind a head to its target, whose output head and embedding it uses where it has none of its own."""
        self.rows = rows
        self.max_draft = MOST_DRAFTS
        self.taps = (target.num_layers if rows.contract.reads_normed else target.num_layers - 1,)
        self.head = head or DraftHead(target.logits, target.vocab_size)
        self._embed = embed or target.embed
        layer = rows.layer
        dim = rows.norm_embedding.weight.size
        self._nothing = mx.zeros((0, dim), dtype=target.dtype), mx.zeros((0,), dtype=mx.int32)
        head_dim = sum(part.size for part in layer.qkv) // (layer.heads + 2 * layer.kv_heads)
        shape = (1, PAGE_SLOTS, 1, 2, layer.kv_heads, head_dim)
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
        chain, position = entered.rows(pending - 1, pending), state.position
        tokens, candidates, drawn, finite = [], [], [], []
        while True:
            scored, hidden = self.rows.leave(chain.fused[-1:], self._attend(state, chain)[-1:])
            values, ids, are_finite = topk_rows(self.head.score(scored), min(CANDIDATES, self.head.size))
            ids = ids[0] if self.head.ids is None else self.head.ids[ids[0]]
            token, probabilities = choose(position + 1 + len(tokens), ids, values[0].astype(mx.float32))
            tokens.append(token.astype(mx.int32))
            candidates.append(ids)
            drawn.append(probabilities)
            finite.append(are_finite)
            if len(tokens) == count:
                break
            at = mx.array([position - 1 + len(tokens)], dtype=mx.int32)
            chain = chain.followed_by(self.rows.enter(self._embed(tokens[-1][None]), hidden, at))
        return Proposal(
            mx.stack(tokens),
            mx.stack(candidates),
            None if any(p is None for p in drawn) else mx.stack(drawn),
            {"draft logits": mx.all(mx.stack(finite))},
        )

    def rewind(self, state: MTPState, position: int) -> int:
        """Forget rows from ``position`` on, and return where the next committed row must stand.

        That is one row earlier where the hidden state of the row before ``position`` is no longer held: its
        successor may change, so the target has to run it again.
        """
        if position < state.position:
            keep = position - state.context.cursor
            if keep > 0:
                state.hidden, state.following = state.hidden[:keep], state.following[: keep - 1]
            else:
                state.context.rewind(max(position - 1, 0))
                state.hidden, state.following = self._nothing
        return state.position

    def _enter(self, state: MTPState, following: mx.array) -> Entered:
        """Run pending rows, those whose next token is in ``following``, up to attention."""
        count, first = following.size, state.context.cursor
        positions = mx.arange(first, first + count, dtype=mx.int32)
        return self.rows.enter(self._embed(following), state.hidden[:count], positions)

    def _complete(self, state: MTPState, entered: Entered, count: int) -> None:
        """Move the first ``count`` pending rows into the cache."""
        if count:
            rows = entered.rows(0, count).keys_values.transpose(1, 0, 2, 3)[:, None]
            state.context.append(state.context.cursor, rows)
            state.hidden, state.following = state.hidden[count:], state.following[count:]

    def _attend(self, state: MTPState, chain: Entered) -> mx.array:
        pool, pages, length = state.context.pages() if state.context.cursor else self._no_context
        keys, values = (side.squeeze(0) for side in mx.split(chain.keys_values, 2))
        cached = Cached(pages, length, (chain.fused.shape[0],))
        return attention_rows(
            chain.queries, keys, values, pool, 0, cached, scale=self.rows.layer.scale, slot_major=True
        )
