"""A chain drafter that is led along a known text or off it, and whether its state is that of a fresh one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from choosing import Choose, Choosing
from one_draft import extend, propose
from scripted_drafters import Script

from mlx_spec.decoding.accept import rule_for
from mlx_spec.drafters.base import Committed, Draft, DraftRequest
from mlx_spec.drafters.chain import ChainDrafter, ChainState
from mlx_spec.drafters.kv import ContextKV, packed, unpacked
from mlx_spec.engine import Engine, Generation
from mlx_spec.engine.draft_policy import FixedDepth
from mlx_spec.target import Target


class Steered:
    """A drafter whose chain is led along a known text where the script is true, and off it elsewhere."""

    name = "steered"

    def __init__(self, drafter: ChainDrafter, text: list[int], script: Script) -> None:
        self.drafter, self.text, self.script = drafter, text, script
        self.target_layer_ids, self.max_draft = drafter.target_layer_ids, drafter.max_draft
        self.open, self.extend, self.rewind = drafter.open, drafter.extend, drafter.rewind
        self.proposals = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return self.drafter.propose(
            [replace(request, rule=Choosing(self.led(request.state))) for request in requests]
        )

    def led(self, state: ChainState) -> Choose:
        """Draw what the script asks for."""
        self.proposals += 1

        def led(position: int, ids: mx.array, scores: mx.array) -> tuple[mx.array, None]:
            right = self.text[position] if position < len(self.text) else 0
            index = position - state.position - 1
            wrong = (right + 1 + position % 7) % 90
            return mx.array(right if self.script(self.proposals, index, position) else wrong), None

        return led


def fresh_state(drafter: ChainDrafter, target: Target, tokens: list[int]) -> ChainState:
    """The state of a drafter that saw all these tokens in one pass."""
    state, sequence = drafter.open(), target.open()
    rows = target.forward([(sequence, mx.array(tokens, dtype=mx.int32))], drafter.target_layer_ids)
    extend(drafter, state, Committed(0, mx.array(tokens, dtype=mx.int32), rows.aux_hidden_states))
    return state


def rows_of(context: ContextKV) -> mx.array:
    """Return what a context holds by position, from its base on: [n, layers, 2, KV, D]."""
    _, pages = unpacked(packed([context]), 1, 0)
    pool, table, length = context.pool.data, *pages
    return pool[table[0]].transpose(0, 3, 1, 2, 4, 5).flatten(0, 1)[: length.item()]


def assert_like_fresh(drafter: ChainDrafter, target: Target, state: ChainState, text: list[int]) -> None:
    """Check that a state holds each committed row of ``text`` once: it is, and drafts, as one that saw it at once.

    text: committed tokens and the anchor.
    """
    assert state.position == len(text) - 1
    fresh = fresh_state(drafter, target, text[:-1])
    states = [state.fork(), fresh]
    seen: list[list[mx.array]] = [[], []]
    for each, scores in zip(states, seen, strict=True):

        def choose(position: int, ids: mx.array, values: mx.array, into: list = scores) -> tuple[mx.array, None]:
            into.append(mx.concatenate([ids.astype(mx.float32), values]))
            return ids[0], None

        propose(drafter, each, text[-1], 4, choose)
    for mine, other in zip(*seen, strict=True):
        assert mx.array_equal(mine, other)
    ours, theirs = (each.context for each in states)
    assert ours.cursor == theirs.cursor == len(text) - 2
    if (first := max(ours.base, theirs.base)) < ours.cursor:
        assert mx.array_equal(*(rows_of(each)[first - each.base :] for each in (ours, theirs)))
    assert mx.array_equal(states[0].hidden, states[1].hidden)


def go_on(engine: Engine, old: Generation, prompt: list[int], keep: int, step: int) -> Generation:
    """Continue a conversation: keep the first ``keep`` positions of its caches and read the rest of ``prompt``."""
    drafter, sequence, drafting = engine.drafter, old.sequence, old.drafter_state
    keep = drafter.rewind(drafting, keep)
    sequence.rewind(keep)
    request = replace(old.request, prompt=prompt)

    def show(rows: Any, tokens: mx.array) -> None:
        extend(drafter, drafting, Committed(sequence.length - tokens.size, tokens, rows.aux_hidden_states))

    engine.target.prefill(sequence, prompt[keep:-1], drafter.target_layer_ids, step, on_rows=show)
    rule = rule_for(request.sampling, engine.target.vocab_size)
    policy = FixedDepth(request.num_draft_tokens or 0)
    return Generation(request, sequence, rule, policy, list(prompt), drafter_state=drafting, boundary=old.boundary)
