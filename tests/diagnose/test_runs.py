"""Faults of a target are told apart: rows that depend on their neighbours, a cache of rejected rows, ties."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scripted_drafters import ScriptedDrafter, ScriptedState, right_then_wrong
from tiny_models import tiny_target

from mlx_spec.diagnose.runs import (
    Departure,
    Finding,
    Inspector,
    RowFault,
    classified,
    gap_of,
    generated,
    inspect_target,
)
from mlx_spec.drafters.base import Committed, Draft, DraftRule
from mlx_spec.engine import Engine
from mlx_spec.target import Target

PROMPT = [5, 9, 2, 40, 11, 7]
COUNT = 24


class Careless(ScriptedDrafter):
    """A scripted drafter that takes any rows: those of a faulty target are not the text."""

    def take(self, state: ScriptedState, rows: Committed) -> None:
        state.tokens += [int(token) for token in np.array(rows.tokens)]

    def draft(self, state: ScriptedState, anchor: int, count: int, rule: DraftRule) -> Draft:
        self.text[len(state.tokens)] = anchor
        return super().draft(state, anchor, count, rule)


def engine_of(target: Target) -> Engine:
    """An engine whose drafts are half right, so that rows are accepted and rejected."""
    plain = generated(Engine(tiny_target()), PROMPT, COUNT, 0)
    return Engine(target, Careless(target, [*PROMPT, *plain], right_then_wrong(2)))


def found_in(target: Target) -> Finding | None:
    return inspect_target(engine_of(target), [PROMPT], COUNT, (1, 4))


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    for family in ("llama", "qwen3"):
        target = tiny_target(family)
        assert inspect_target(Engine(target), [PROMPT], 4, (0,)) is None
    assert found_in(tiny_target()) is None


def noisy(compute: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A function of rows whose results depend on how many there are, as those of kernels of another size do."""

    def rows(x: mx.array, *rest: Any) -> mx.array:
        y = compute(x, *rest)
        return y if x.shape[0] == 1 or x.shape[0] > 16 else y * (1 + 2**-7)

    return rows


@pytest.mark.parametrize(("part", "operation"), [("feed_forward", "feed-forward"), ("input_norm", "input norm")])
def test_a_row_that_depends_on_the_others_is_numerics(part: str, operation: str) -> None:
    target = tiny_target()
    layer = target.layers[2]
    target.layers[2] = replace(layer, **{part: noisy(getattr(layer, part))})
    found = found_in(target)
    assert found is not None and found.kind in ("numerics", "tie")
    assert f"layer 2, {operation}" in found.where


def test_a_cache_that_keeps_other_rows_is_corrupted_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a round with a rejected draft the last row that is committed is the rejected one's."""
    target = tiny_target()
    commit = target.commit_all

    def commit_wrongly(batch: Any) -> None:
        commit(
            [
                (sequence, replace(part, kv=part.kv * 1.5) if len(part.kv) == 3 else part)
                for sequence, part in batch
            ]
        )

    monkeypatch.setattr(target, "commit_all", commit_wrongly)
    found = found_in(target)
    assert found is not None and found.kind == "corrupted state"
    # The first round accepts two drafts, so its three rows are cached wrongly.
    assert f"round 1: the cache of attention layer 0 differs at position {len(PROMPT) - 1}" in found.where


def departures(*indices: int) -> list[Departure]:
    return [Departure(0, depth, index, 1, 2) for depth, index in zip((1, 4, 7), indices, strict=False)]


def inspector(gap: float) -> Iterator[Inspector]:
    fault = RowFault(10, 2, 3, "attention", gap)
    yield Inspector(tiny_target(), PROMPT, row_fault=fault)


def test_kinds_of_difference() -> None:
    assert classified([], []) is None
    close, clear = (list(inspector(gap)) for gap in (1.0, 500.0))
    kinds = [found.kind for found in (classified(departures(5, 5), rows) for rows in (close, clear)) if found]
    assert kinds == ["tie", "numerics"]
    earlier, same = classified(departures(9, 4, 2), []), classified(departures(6, 6, 6), [])
    assert earlier is not None and same is not None
    assert "earlier with depth" in earlier.where and "right draft was rejected" in same.where
    assert "token 9 at depth 1" in str(earlier)


def test_the_gap_is_in_units_in_the_last_place() -> None:
    assert gap_of(mx.array([1.0, 1.0 + 2**-7, 0.0], dtype=mx.bfloat16)) == 1.0
    assert gap_of(mx.array([16.0, 24.0, 0.0], dtype=mx.bfloat16)) == 64.0
