"""Edges of rounds with trees: what is refused, what is chosen by costs, NaN beside the path, one wait a round."""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from branch_drafter import BranchDrafter, BranchState
from choosing import drawn_at
from ranked_drafter import RankedDrafter, Ranks
from scripted_drafters import plain, run
from started import started
from tiny_models import tiny_target

from mlx_spec.decoding import noise
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.drafters.base import Draft, DraftRule, stacked
from mlx_spec.drafters.siblings import with_siblings
from mlx_spec.engine import Engine, Request
from mlx_spec.engine.costs import Costs
from mlx_spec.errors import NonFiniteError, RequestError
from mlx_spec.target import Target

PROMPT = [int(t) for t in np.random.default_rng(24).integers(0, 90, 20)]
SAMPLERS = [Sampling(), Sampling(temp=0.8, seed=5), Sampling(temp=0.8, seed=9, top_k=1, accept="rejection")]


@cache
def target_of(family: str = "llama") -> Target:
    return tiny_target(family)


@cache
def text_of(sampling: Sampling) -> list[int]:
    return plain(target_of(), Request(PROMPT, 60, sampling=sampling)).text


def scripted(ranks: Ranks, sampling: Sampling = SAMPLERS[0], costs: Costs | None = None) -> Engine:
    return Engine(target_of(), RankedDrafter(target_of(), text_of(sampling), ranks, target_layer_ids=(1,)), costs)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "llama",
            {"num_draft_tokens": 3, "num_sibling_drafts": 13},
            "beside an anchor and 3 drafts a pass has 12 rows",
        ),
        (
            "llama",
            {"num_draft_tokens": 3, "num_sibling_drafts": -1},
            "num_sibling_drafts is -1, but beside an anchor",
        ),
        ("llama", {"num_sibling_drafts": 2}, "needs a number of num_draft_tokens too, not None"),
        ("llama", {"num_draft_tokens": "adaptive", "num_sibling_drafts": 2}, "too, not 'adaptive'"),
        (
            "qwen3_5",
            {"num_draft_tokens": 3, "num_sibling_drafts": 2},
            "has recurrent layers, which step through rows in one order: leave num_sibling_drafts out",
        ),
    ],
)
def test_siblings_that_cannot_be_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    target = target_of(family)
    engine = Engine(target, RankedDrafter(target, PROMPT, lambda *_: 0))
    with pytest.raises(RequestError, match=message):
        started(engine, Request(PROMPT, 10, **changes))
    assert target.pool.pages_in_use == 0


def test_no_siblings_and_plain_decoding_may_be_asked_for_anywhere() -> None:
    target = target_of("qwen3_5")
    text = plain(target, Request(PROMPT, 10, num_sibling_drafts=3)).text
    engine = Engine(target, RankedDrafter(target, text, lambda *_: 0), Costs({1: 1.0}, {1: 0.1}))
    for changes in ({"num_draft_tokens": 2, "num_sibling_drafts": 0}, {"num_sibling_drafts": 0}, {}):
        done = run(engine, Request(PROMPT, 10, **changes))
        assert done.text == text and done.statistics.sibling_drafts == 0


def test_a_fork_may_have_siblings_of_its_own() -> None:
    engine = scripted(lambda proposal, index, position: int(index == 1))
    first = started(engine, Request(PROMPT, 30, 3))
    second = engine.fork(first, num_sibling_drafts=3)
    lengths = [len(engine.step(generation).checked().tokens) for generation in (first, second)]
    assert lengths == [2, 3]
    assert [generation.statistics.sibling_drafts for generation in (first, second)] == [0, 3]
    for generation in (first, second):
        assert generation.tokens == text_of(SAMPLERS[0])[: len(generation.tokens)]
        engine.close(generation)


class Undecided(BranchDrafter):
    """Drafts from 16 candidates that are equally good, so that the noise of the rule alone orders them."""

    def draft(self, state: BranchState, anchor: int, count: int, rule: DraftRule) -> Draft:
        ids = [candidates_at(state.position + 1 + index) for index in range(count)]
        scores = mx.zeros((count, 16))
        drawn = [drawn_at(rule, state.position + 1 + i, mx.array(ids[i]), scores[i]) for i in range(count)]
        tokens, ranks = mx.stack([each.token for each in drawn]), mx.stack([each.ranks for each in drawn])
        return Draft(tokens, mx.array(ids), stacked([each.probabilities for each in drawn]), {}, ranks)


def candidates_at(position: int) -> list[int]:
    return [(5 * place + position) % 96 for place in range(16)]


@pytest.mark.parametrize(("accept", "purpose"), [("coupled", noise.TOKEN), ("rejection", noise.DRAFT)])
def test_siblings_come_next_in_the_order_in_which_the_draft_came_first(
    accept: str, purpose: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the noise of the position for which they are drafted, and no other."""
    target, passes = target_of(), list[list[int]]()
    engine, forward = Engine(target, Undecided(target)), target.forward
    sampling = Sampling(temp=0.8, seed=5, accept=accept)
    generation = started(engine, Request(PROMPT, 30, 2, sampling, num_sibling_drafts=5))

    def noted(batch: Any, *more: Any) -> Any:
        passes.append(batch[0][1].tolist())
        return forward(batch, *more)

    monkeypatch.setattr(target, "forward", noted)
    for rows in range(2):
        at = len(generation.tokens)
        engine.step(generation).checked()
        first, second = [], []
        for drafted, position in ((first, at), (second, at + 1)):
            ids = candidates_at(position)
            values = np.array(noise.gumbel(5, position, purpose, 96 if accept == "coupled" else 16))
            if accept == "coupled":
                values = values[ids]
            drafted += [ids[place] for place in np.argsort(-values)]
        assert passes[rows][1:] == [first[0], second[0], *first[1:4], *second[1:3]]
    engine.close(generation)


def test_siblings_of_equal_candidates_do_not_repeat_the_draft() -> None:
    """Equal values have no order of their own, and a drafter may have drawn any of them."""
    ids, scores = mx.array([[4, 5, 6, 7]] * 4, dtype=mx.int32), mx.zeros((4, 4))
    chain = Draft(mx.array([4, 5, 6, 7], dtype=mx.int32), ids, ranks=scores)
    tree = with_siblings(chain, (3, 3, 3, 3))
    tokens = tree.tokens.tolist()
    assert [sorted([token, *tokens[4 + 3 * i : 7 + 3 * i]]) for i, token in enumerate(tokens[:4])] == ids.tolist()
    # A tree of the drafter's own stays as it is.
    assert with_siblings(tree, (1, 1, 1, 1)) is tree


@pytest.mark.parametrize("sampling", SAMPLERS[:2], ids=["greedy", "coupled"])
@pytest.mark.parametrize(("last_row", "is_tree"), [(11.0, True), (200.0, False)])
def test_measured_costs_decide_between_a_tree_and_a_chain(
    last_row: float, is_tree: bool, sampling: Sampling
) -> None:
    """The next in line is right wherever the draft is not: siblings pay while rows cost nearly nothing."""
    engine = scripted(lambda proposal, index, position: position % 3 // 2, sampling)
    engine.costs = Costs({1: 10.0, 8: 10.5 if is_tree else 40.0, 16: last_row}, {1: 1.0, 7: 9.0})
    done = run(engine, Request(PROMPT, 40, sampling=sampling))
    assert done.text == text_of(sampling)[: len(PROMPT) + 40]
    assert (done.statistics.sibling_drafts > 0) == (done.statistics.accepted_sibling_drafts > 0) == is_tree
    assert ("a tree with" in done.statistics.depth_reason) == is_tree
    assert done.statistics.tokens == done.statistics.rounds + sum(done.statistics.accepted) + (
        done.statistics.accepted_sibling_drafts
    )


def nan_in_rows(monkeypatch: pytest.MonkeyPatch, rows: list[int]) -> None:
    logits = target_of().logits

    def broken(hidden: mx.array) -> mx.array:
        is_broken = mx.array([row in rows for row in range(hidden.shape[0])])[:, None]
        return mx.where(is_broken, mx.nan, logits(hidden))

    monkeypatch.setattr(target_of(), "logits", broken)


@pytest.mark.parametrize("sampling", SAMPLERS, ids=["greedy", "coupled", "rejection"])
@pytest.mark.parametrize("siblings", [0, 3])
def test_rejected_rows_may_hold_nan(sampling: Sampling, siblings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding never computes them. Drafts are right up to the second, whose place a sibling takes."""
    engine = scripted(lambda proposal, index, position: int(index == 1), sampling)
    path = [0, 1, 5] if siblings else [0, 1]
    others = [row for row in range(4 + siblings) if row not in path]
    generation = started(engine, Request(PROMPT, 30, 3, sampling, num_sibling_drafts=siblings))
    for row in path:
        with monkeypatch.context() as patch:
            nan_in_rows(patch, [*others, row])
            with pytest.raises(NonFiniteError, match="The target logits at position 19 hold NaN or infinity"):
                engine.step(generation).checked()
        assert generation.tokens == PROMPT
    nan_in_rows(monkeypatch, others)
    assert engine.step(generation).checked().tokens == text_of(sampling)[20 : 20 + len(path)]
    engine.close(generation)


def test_a_round_with_a_tree_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted(lambda proposal, index, position: (position * position) % 3 % 2, SAMPLERS[1])
    request = Request(PROMPT, 40, 3, SAMPLERS[1], num_sibling_drafts=5)
    # The constants of its shapes are made once.
    run(engine, request)
    generation = started(engine, request)
    engine.step(generation)  # the first round is timed, so it waits twice
    calls, evaluate = 0, mx.eval

    def counted(*arrays: Any) -> None:
        nonlocal calls
        calls += 1
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", counted)
    for rounds in range(1, 6):
        engine.step(generation).checked()
        assert calls == rounds
    monkeypatch.undo()
    assert generation.statistics.accepted_sibling_drafts > 0
    engine.close(generation)


def test_graphs_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each number of rows, however they branch; MLX's operations run in place of a device's."""
    target, made = tiny_target("llama"), []
    for module in ("target", "graphs"):
        monkeypatch.setattr(f"mlx_spec.target.{module}.is_traceable", lambda: True)

    def compiled(graph: Callable[..., Any]) -> Callable[..., Any]:
        made.append(graph)
        return graph

    monkeypatch.setattr(mx, "compile", compiled)
    sequence, tokens = target.open(), mx.array([1, 2, 3, 4], dtype=mx.int32)
    for paths in (None, [[0], [0, 1], [0, 2], [0, 3]], [[0], [0, 1], [0, 1, 2], [0, 3]], None):
        mx.eval(target.forward([(sequence, tokens)], paths=paths).kv)
    assert len(made) == 2
