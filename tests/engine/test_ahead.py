"""Drafting before the host has read the round before: the same drafts, the same text, nothing left over.

It runs on devices only; here it is switched on, with operations of the CPU in their place.
"""

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scripted_drafters import plain
from started import started
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_models import tiny_target

from mlx_spec.decoding.sampling import Sampling
from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.engine import Engine, Generation, Request
from mlx_spec.engine.draft_policy import FixedDepth
from mlx_spec.loading.load import load
from mlx_spec.target import Target

TESTS = Path(__file__).parent.parent
TOKENS = [int(t) for t in np.random.default_rng(4).integers(5, 90, 60)]
# Trained drafters, whose drafts are accepted in part, and a random one with a window of 24.
PAIRS = {
    "mtp": ("tiny_pair/target", "tiny_pair/head"),
    "mtp, hybrid": ("tiny_hybrid", "auto"),
    "eagle1": ("tiny_eagles/target", "tiny_eagles/eagle1"),
    "eagle3": ("tiny_eagles/target", "tiny_eagles/eagle3"),
    "dflash2": (None, None),
}
SAMPLINGS = {
    "greedy": Sampling(),
    "penalties": Sampling(repetition_penalty=1.3, frequency_penalty=0.4),
    "coupled": Sampling(temp=0.8, seed=3, top_p=0.95),
    "rejection": Sampling(temp=0.7, seed=3, accept="rejection"),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def of(name: str) -> tuple[Target, Drafter]:
        model, drafter = PAIRS[name]
        if model is None:
            target, config = tiny_target("llama"), dflash2_config()
            folder = write_drafter(tmp_path_factory.mktemp("d"), config, random_tensors(config, dtype=mx.bfloat16))
            return target, load_dflash2(folder, target, "tiny")
        place = drafter if drafter == "auto" else str(TESTS / drafter)
        engine, _ = load(str(TESTS / model), place)
        assert engine.drafter is not None
        return engine.target, engine.drafter

    return of


def engines(pair: tuple[Target, Drafter]) -> tuple[Engine, Engine]:
    """One that drafts ahead, and one that does not."""
    ahead, late = Engine(*pair), Engine(*pair)
    ahead.states.drafts_ahead, late.states.drafts_ahead = True, False
    return ahead, late


def rounds(engine: Engine, generation: Generation) -> list[tuple[list[int], list[int]]]:
    """Run a generation to its end, and return the drafts of each round and what it emitted."""
    found = []
    while generation.finish_reason is None:
        drafted = list(generation.statistics.drafted)
        emitted = engine.step(generation).tokens
        now = generation.statistics.drafted
        found.append(([sum(now) - sum(drafted)], emitted))
    engine.close(generation)
    return found


@pytest.mark.parametrize(
    ("sampling", "siblings"),
    [("greedy", 4), ("penalties", 0), ("coupled", 0), ("rejection", 0), ("rejection", 4)],
)
@pytest.mark.parametrize("name", PAIRS)
def test_rounds_are_those_of_drafting_after_the_host_has_read(
    pair: Any, name: str, sampling: str, siblings: int
) -> None:
    """Rejection's text depends on what was drafted, so it shows that drafts are the same, too."""
    made = pair(name)
    if siblings and not made[0].takes_trees:
        siblings = 0
    ahead, late = engines(made)
    request = Request(TOKENS[:37], 30, 4, SAMPLINGS[sampling], num_sibling_drafts=siblings)
    first, second = (started(engine, request) for engine in (ahead, late))
    assert rounds(ahead, first) == rounds(late, second)
    assert first.statistics.accepted == second.statistics.accepted
    assert first.tokens == second.tokens
    if sampling != "rejection":
        assert first.tokens == plain(made[0], request).text


@pytest.mark.parametrize("name", PAIRS)
def test_most_rounds_begin_with_a_draft_that_is_there(
    pair: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first, and those that are timed: one of 16."""
    engine, _ = engines(pair(name))
    asked, propose = [], engine.drafter.propose
    monkeypatch.setattr(engine.drafter, "propose", lambda requests: asked.append(1) or propose(requests))
    generation = started(engine, Request(TOKENS[:20], 60, 3))
    while generation.finish_reason is None:
        engine.step(generation)
    count = generation.statistics.rounds
    assert count > 10 and len(asked) == 1 + (count - 1) // 16
    engine.close(generation)


def state_of(generation: Generation) -> list[list[float]]:
    """Return what a drafter remembers, as numbers: all that the next draft reads."""
    state = generation.drafter_state.fork()
    arrays = [state.hidden, state.following] if hasattr(state, "hidden") else list(state.waiting)
    return [np.array(each.astype(mx.float32)).tolist() for each in arrays]


@pytest.mark.parametrize("name", PAIRS)
def test_forks_turns_and_company_find_what_they_would_without_it(pair: Any, name: str) -> None:
    target, _ = pair(name)
    ahead, _ = engines(pair(name))
    request = Request(TOKENS[:40], 40, 4)
    expected = plain(target, request).text
    first = started(ahead, request)
    for _ in range(4):
        ahead.step(first)
    forks = [ahead.fork(first), ahead.fork(first)]
    ahead.step(first)
    ahead.step([first, forks[0]])
    ahead.step(forks[0])
    for generation in (forks[1], first, forks[0]):
        while generation.finish_reason is None:
            ahead.step(generation)
        assert generation.tokens == expected
    longer = Request(expected, 20, 4)
    turn = ahead.start(longer, after=first)
    assert turn.statistics.cached_tokens >= 0
    while turn.finish_reason is None:
        ahead.step(turn)
    assert turn.tokens == plain(target, longer).text
    for generation in (turn, *forks, first):
        ahead.close(generation)
    assert target.pool.pages_in_use == 0 and ahead.drafter.pool.pages_in_use == 0


@pytest.mark.parametrize("name", PAIRS)
def test_a_round_that_breaks_off_leaves_the_generation_as_it_was(
    pair: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = pair(name)
    engine, _ = engines(pair(name))
    request = Request(TOKENS[:40], 40, 4)
    generation, expected = started(engine, request), plain(target, request).text
    for number in range(30):
        if generation.finish_reason is not None:
            break
        if number % 3 == 2:
            # After the drafter was shown the rows, and before that.
            place = ("mlx_spec.engine.round.emit", "mlx_spec.engine.round.accept")[number // 3 % 2]
            with monkeypatch.context() as patched:
                patched.setattr(place, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    engine.step(generation)
            assert generation.ahead is None and generation.planned is None
        engine.step(generation)
    while generation.finish_reason is None:
        engine.step(generation)
    assert generation.tokens == expected
    engine.close(generation)
    assert engine.drafter.pool.pages_in_use == 0


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_the_depth_of_a_round_is_chosen_before_the_one_before_it_is_read(pair: Any) -> None:
    """What a policy learns from a round counts in the next but one."""
    engine, _ = engines(pair("eagle3"))
    generation = started(engine, Request(TOKENS[:20], 30, 1))
    engine.step(generation)
    generation.policy = FixedDepth(5)
    depths = []
    for _ in range(3):
        before = list(generation.statistics.drafted)
        engine.step(generation)
        depths.append(len(generation.statistics.drafted) - len(before) + (1 if not depths else 0))
    assert generation.statistics.drafted[0] == 4
    assert depths[0] == 1 and len(generation.statistics.drafted) == 5
    engine.close(generation)


def test_a_device_that_fails_in_a_draft_made_ahead_ends_drafting_only(pair: Any) -> None:
    target, drafter = pair("eagle3")
    engine, _ = engines((target, drafter))
    request = Request(TOKENS[:20], 30, 4)
    generation, expected = started(engine, request), plain(target, request).text
    engine.step(generation)
    engine.step(generation)
    assert generation.ahead is not None
    finite = {name: mx.array(False) for name in generation.ahead.draft.finite}
    generation.ahead = type(generation.ahead)(
        type(generation.ahead.draft)(**{**vars(generation.ahead.draft), "finite": finite}), generation.ahead.rows
    )
    while generation.finish_reason is None:
        engine.step(generation)
    assert generation.tokens == expected
    assert "NaN or infinity" in generation.statistics.drafter_failure
    engine.close(generation)
