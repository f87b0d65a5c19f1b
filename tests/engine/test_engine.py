"""Edges of a round: where texts end, what is refused, what holds after an exception, one wait a round.

bfloat16 targets, see test_lossless.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scripted_drafters import Finished, ScriptedDrafter, always_right, mixture, plain, right_then_wrong, run
from started import started
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_models import CONFIGS, tiny_model, tiny_target

import mlx_spec.engine.round
from metal_kernels.launching.cpu_library import missing
from mlx_spec.decoding.accept import Greedy
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.drafters.base import Draft, DraftRequest, DraftRule
from mlx_spec.drafters.dflash2.drafter import DFlash2Drafter
from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.engine import Engine, Generation, Request
from mlx_spec.engine.round import TIMED_EVERY
from mlx_spec.engine.verify import Verified
from mlx_spec.errors import ContextFull, NonFiniteError, RequestError
from mlx_spec.target import Target
from mlx_spec.target.layers import Norm

PROMPT = [int(t) for t in np.random.default_rng(24).integers(0, 90, 20)]
BLOCK = 8


@cache
def target(family: str = "llama") -> Target:
    return tiny_target(family)


def short_target(context: int) -> Target:
    """A target that ends at a position of our choice."""
    return Target(tiny_model("llama"), dict(CONFIGS["llama"], max_position_embeddings=context), "short")


@cache
def long_text() -> Finished:
    return plain(target(), Request(PROMPT, 60))


def scripted(on: Target | None = None, **options: Any) -> Engine:
    """An engine whose drafter is always right, so that every round emits a whole block."""
    on = on or target()
    return Engine(on, ScriptedDrafter(on, long_text().text, options.pop("script", always_right), **options))


@pytest.fixture(autouse=True)
def fresh_target_after_a_failure() -> Iterator[None]:
    """A failed test may hold pages; the next one shall not fail because of them."""
    yield
    if target().pool.pages_in_use:
        target.cache_clear()


def new_tokens(done: Finished) -> list[int]:
    return done.text[len(PROMPT) :]


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = dflash2_config()
    return write_drafter(tmp_path_factory.mktemp("drafter"), config, random_tensors(config, dtype=mx.bfloat16))


@pytest.mark.parametrize("place", range(2 * BLOCK))
def test_an_eos_token_inside_a_block_ends_the_text_where_plain_decoding_ends_it(place: int) -> None:
    eos = new_tokens(long_text())[place]
    request = Request(PROMPT, 60, eos_token_ids=frozenset({eos}))
    expected = plain(target(), request)
    done = run(scripted(), request)
    assert done.text == expected.text
    assert done.finish_reason == expected.finish_reason == "stop"
    assert new_tokens(done) == new_tokens(long_text())[: new_tokens(long_text()).index(eos) + 1]
    assert done.statistics.tokens == len(new_tokens(done))


def test_eos_is_met_at_every_place_of_a_block() -> None:
    """The test above would miss places if early tokens came again later."""
    tokens = new_tokens(long_text())
    assert {tokens.index(t) % BLOCK for t in tokens[: 2 * BLOCK]} == set(range(BLOCK))


@pytest.mark.parametrize("count", range(1, BLOCK + 2))
def test_is_end_sees_each_token_once_and_in_order_and_ends_the_text(count: int) -> None:
    seen: list[int] = []

    def is_end(token: int) -> bool:
        seen.append(token)
        return len(seen) == count

    done = run(scripted(), Request(PROMPT, 60, is_end=is_end))
    assert seen == new_tokens(done) == new_tokens(long_text())[:count]
    assert done.finish_reason == "stop"


@pytest.mark.parametrize("broken", [1, 2, 4])
def test_is_end_sees_no_token_twice_where_a_round_is_run_again(broken: int) -> None:
    """As a text stream must not: the round broke off after its tokens were judged."""
    engine, seen = scripted(), list[int]()
    generation = started(engine, Request(PROMPT, 30, is_end=lambda token: bool(seen.append(token))))
    extend, rounds = engine.states.extend, count(1)

    def interrupted(*committed: Any) -> None:
        extend(*committed)
        if next(rounds) == broken:
            raise KeyboardInterrupt

    engine.states.extend = interrupted  # type: ignore[method-assign]
    while generation.finish_reason is None:
        with suppress(KeyboardInterrupt):
            engine.step(generation).checked()
    assert next(rounds) > broken + 1
    assert seen == generation.tokens[len(PROMPT) :] == new_tokens(long_text())[:30]


@pytest.mark.parametrize("most", range(1, 2 * BLOCK + 2))
def test_max_tokens_is_never_overshot(most: int) -> None:
    done = run(scripted(), Request(PROMPT, most))
    assert new_tokens(done) == new_tokens(long_text())[:most]
    assert done.finish_reason == "length"
    # The last round drafts no more than it may emit.
    assert sum(done.statistics.drafted) + len(done.rounds) == most


def test_an_end_token_at_max_tokens_is_a_stop() -> None:
    eos = new_tokens(long_text())[0]
    assert run(scripted(), Request(PROMPT, 1, eos_token_ids=frozenset({eos}))).finish_reason == "stop"


@pytest.mark.parametrize(
    ("left", "depth"), [*((left, 7) for left in range(1, BLOCK + 3)), *((left, 3) for left in (3, 4, 5, 9))]
)
def test_without_max_tokens_the_text_ends_with_the_context(left: int, depth: int) -> None:
    """``left`` positions are free after the prompt's last token; every one of them gets cached but the last."""
    on = short_target(len(PROMPT) - 1 + left)
    expected = plain(on, Request(PROMPT, -1))
    done = run(scripted(on), Request(PROMPT, -1, num_draft_tokens=depth))
    assert done.text == expected.text
    assert done.finish_reason == expected.finish_reason == "length"
    assert len(new_tokens(done)) == left


def test_one_token_is_a_prompt() -> None:
    request = Request(PROMPT[:1], 20)
    expected = plain(target(), request)
    drafter = ScriptedDrafter(target(), expected.text, right_then_wrong(2))
    assert run(Engine(target(), drafter), request).text == expected.text
    assert expected.statistics.prompt_tokens == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prompt": []}, RequestError, "The prompt is empty: at least one token is needed"),
        ({"prompt": [1, 96, 2]}, RequestError, r"The prompt holds tokens \[96\]; the vocabulary has 96"),
        ({"prompt": [-1]}, RequestError, r"The prompt holds tokens \[-1\]; the vocabulary has 96"),
        ({"prompt": [1] * 513}, ContextFull, "The prompt has 513 tokens, tiny llama has 512 positions"),
        ({"max_tokens": 0}, RequestError, "max_tokens must be positive, or -1 for no limit, not 0"),
        ({"max_tokens": -2}, RequestError, "max_tokens must be positive, or -1 for no limit, not -2"),
        ({"num_draft_tokens": 8}, RequestError, "num_draft_tokens is 8, but this drafter drafts at most 7 tokens"),
        (
            {"num_draft_tokens": "most"},
            RequestError,
            "num_draft_tokens is 'most'; it takes a number, 'auto', 'adap",
        ),
        ({"max_draft_tokens": 0}, RequestError, "max_draft_tokens must be at least 1, not 0"),
        ({"max_draft_tokens": 2, "num_draft_tokens": 3}, RequestError, "is 2, but num_draft_tokens is 3 already"),
        ({"num_draft_tokens": -1}, RequestError, "num_draft_tokens is -1, but this drafter drafts at most 7"),
        ({"prefill_step_size": 0}, RequestError, "prefill_step_size must be at least 1, not 0"),
        ({"sampling": Sampling(logit_bias={99: 1.0})}, RequestError, r"logit_bias names tokens \[99\]"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        scripted().start(replace(Request(PROMPT, 10), **change))
    assert target().pool.pages_in_use == 0


def test_without_a_drafter_nothing_can_be_drafted() -> None:
    with pytest.raises(RequestError, match="num_draft_tokens is 3, but there is no drafter"):
        Engine(target()).start(Request(PROMPT, 10, num_draft_tokens=3))
    assert run(Engine(target()), Request(PROMPT, 10)).text == long_text().text[: len(PROMPT) + 10]


def test_a_prompt_that_fills_the_context_gets_one_token() -> None:
    done = run(scripted(short_target(len(PROMPT))), Request(PROMPT, 10))
    assert len(new_tokens(done)) == 1
    assert done.finish_reason == "length"


@pytest.mark.parametrize("depth", [0, 3, 7])
def test_a_full_pool_ends_every_depth_at_the_same_token(depth: int) -> None:
    """One page of 32: the anchor at position 32 cannot be cached, so 13 tokens follow a prompt of 20."""
    on = tiny_target("llama", max_cached_tokens=32)
    engine = scripted(on)
    generation = started(engine, Request(PROMPT, 60, num_draft_tokens=depth))
    with pytest.raises(ContextFull, match="need 1 KV pages, 0 of 1 are free; .* larger max_cached_tokens"):
        for _ in range(60):
            engine.step(generation).checked()
    assert generation.tokens == long_text().text[: len(PROMPT) + 13]
    assert generation.finish_reason is None
    assert on.pool.pages_in_use == 1
    engine.close(generation)
    assert on.pool.pages_in_use == 0


@pytest.mark.parametrize("forks", [0, 1])
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 64, 65, 95, 96])
def test_the_room_of_a_sequence_is_what_can_be_appended(length: int, forks: int) -> None:
    """A fork shares the last page, so going on in it takes a page for the copy."""
    on = tiny_target("llama", max_cached_tokens=96)

    def rows(count: int) -> mx.array:
        return mx.zeros((count, *on.pool.data.shape[1:3], *on.pool.data.shape[4:]), dtype=on.pool.data.dtype)

    sequence = on.open()
    if length:
        sequence.append(rows(length))
    others = [sequence.fork() for _ in range(forks)]
    room = sequence.free_positions
    with pytest.raises(ContextFull):
        sequence.append(rows(room + 1))
    if room:
        sequence.append(rows(room))
    assert sequence.free_positions == 0
    assert sequence.length == length + room
    assert len(others) == forks


def test_a_drafter_that_drafts_more_than_there_is_room_for_is_refused() -> None:
    """Five positions are free, so four drafts fit beside the anchor."""

    class TooMany(ScriptedDrafter):
        def draft(self, state: Any, anchor: int, count: int, rule: DraftRule) -> Draft:
            counts.append(count)
            return super().draft(state, anchor, 7, rule)

    on, counts = tiny_target("llama", max_cached_tokens=32), list[int]()
    text = long_text().text
    engine = Engine(on, TooMany(on, text, always_right))
    generation = started(engine, Request(text[:28], 20))
    with pytest.raises(RequestError, match="proposed 7 tokens, but beside the anchor this pass has 4 rows"):
        engine.step(generation).checked()
    assert counts == [4] and generation.tokens == text[:28]
    engine.close(generation)


def test_a_prompt_beyond_the_pool_keeps_no_page() -> None:
    on = tiny_target("llama", max_cached_tokens=64)
    with pytest.raises(ContextFull, match="KV pages"):
        Engine(on).start(Request([1] * 100, 5, prefill_step_size=30))
    assert on.pool.pages_in_use == 0


def test_an_exception_while_prefilling_keeps_no_page() -> None:
    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        started(scripted(), Request(PROMPT, 5, prefill_step_size=8, on_progress=stop))
    assert target().pool.pages_in_use == 0


def snapshot(generation: Generation) -> tuple[Any, ...]:
    """All that a failed round must not change."""
    return (
        list(generation.tokens),
        generation.sequence.length,
        list(generation.sequence.pages),
        generation.finish_reason,
        generation.drafter_state.tokens[:] if generation.drafter_state else None,
        vars(generation.statistics).copy() | {"drafted": list(generation.statistics.drafted)},
    )


class Failing:
    """Raises once, when armed; does nothing otherwise."""

    def __init__(self) -> None:
        self.armed = False

    def __call__(self, *arguments: Any) -> None:
        if self.armed:
            self.armed = False
            raise OSError("on purpose")


def fail_in_processor(fail: Failing, monkeypatch: pytest.MonkeyPatch) -> Request:
    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        fail()
        return logits

    return Request(PROMPT, 30, sampling=Sampling(temp=0.8, seed=2, logits_processors=(processor,)))


def fail_in_on_verified(fail: Failing, monkeypatch: pytest.MonkeyPatch) -> Request:
    return Request(PROMPT, 30, on_verified=fail)


def fail_in_is_end(fail: Failing, monkeypatch: pytest.MonkeyPatch) -> Request:
    return Request(PROMPT, 30, is_end=lambda token: bool(fail()))


def fail_after(owner: Any, name: str) -> Callable[[Failing, pytest.MonkeyPatch], Request]:
    """Fail after a step of the round, when what it does is done."""

    def arm(fail: Failing, monkeypatch: pytest.MonkeyPatch) -> Request:
        def step(*arguments: Any) -> Any:
            result = original(*arguments)
            fail()
            return result

        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, step)
        return Request(PROMPT, 30)

    return arm


STEPS = [
    (ScriptedDrafter, "propose"),
    (Target, "forward"),
    (Target, "logits"),
    (Sampling, "processed"),
    (Sampling, "filtered"),
    (Greedy, "accept"),
    (mlx_spec.engine.round, "wait"),
    (mlx_spec.engine.round, "read_outcome"),
    (Generation, "cut"),
    (Target, "commit_all"),
    (ScriptedDrafter, "extend"),
]
FAILURES = {
    "in a logits processor": fail_in_processor,
    "in on_verified": fail_in_on_verified,
    "in is_end": fail_in_is_end,
    **{f"after {name}": fail_after(owner, name) for owner, name in STEPS},
}


@pytest.mark.parametrize(("family", "rounds"), [("llama", 0), ("qwen3_5", 2)])
@pytest.mark.parametrize("failure", FAILURES)
def test_an_exception_in_mid_round_changes_nothing_and_the_next_round_goes_on(
    failure: str, rounds: int, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages, recurrent states and the drafter's state are as the last committed token left them."""
    fail, on = Failing(), target(family)
    request = FAILURES[failure](fail, monkeypatch)
    expected = plain(on, request)
    engine = Engine(on, ScriptedDrafter(on, expected.text, mixture(1), target_layer_ids=(1,)))
    generation = started(engine, request)
    for _ in range(rounds):
        engine.step(generation).checked()
    before = snapshot(generation)
    fail.armed = True
    with pytest.raises(OSError, match="on purpose"):
        engine.step(generation).checked()
    assert not fail.armed
    assert snapshot(generation) == before
    while generation.finish_reason is None:
        engine.step(generation).checked()
    assert generation.tokens == expected.text
    engine.close(generation)
    assert on.pool.pages_in_use == 0


def break_block(drafter: DFlash2Drafter) -> None:
    drafter.forward = replace(drafter.forward, norm=Norm(drafter.forward.norm.weight * mx.nan, 1e-6))


def break_head(drafter: DFlash2Drafter) -> None:
    head = drafter._head
    drafter._head = lambda hidden: mx.where(mx.arange(96) == 60, mx.inf, head(hidden))


def break_selector(drafter: DFlash2Drafter) -> None:
    projection = drafter.model.candidate_selector.hidden_projection
    projection.weight = projection.weight * mx.nan


@pytest.mark.parametrize(
    ("corrupt", "stage"),
    [(break_block, "block forward"), (break_head, "draft logits"), (break_selector, "candidate selector")],
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temp=0.8), Sampling(temp=0.8, accept="rejection")])
def test_a_drafter_that_computes_nan_is_named_and_decoding_goes_on_without_it(
    corrupt: Callable[[DFlash2Drafter], None], stage: str, sampling: Sampling, drafter_folder: Path
) -> None:
    """From the round of the failure on, tokens are those of a request that never drafted from there."""
    drafter = load_dflash2(drafter_folder, target(), "tiny drafter")
    engine = Engine(target(), drafter)
    generation = started(engine, Request(PROMPT, 20, sampling=sampling))
    engine.step(generation).checked()
    length = generation.sequence.length
    undrafted = engine.fork(generation, num_draft_tokens=0)
    corrupt(drafter)
    assert engine.step(generation).num_from_draft == 0
    for each in (generation, undrafted):
        while each.finish_reason is None:
            engine.step(each).checked()
    assert generation.tokens == undrafted.tokens
    reason = f"the drafter's {stage} at position {length} holds NaN or infinity"
    assert generation.statistics.drafter_failure == reason
    assert f"Drafting stopped: {reason}" in str(generation.statistics)
    assert generation.drafter_state is None and not undrafted.statistics.drafter_failure
    engine.close(generation)
    engine.close(undrafted)
    assert target().pool.pages_in_use == 0


@pytest.mark.parametrize(
    ("sampling", "siblings", "answering"),
    [
        (Sampling(), 0, True),
        (Sampling(), 4, False),
        (Sampling(), 4, True),
        (Sampling(temp=0.8, seed=3), 4, False),
        (Sampling(temp=0.8, seed=3, top_k=1, accept="rejection"), 4, False),
    ],
)
def test_trees_and_answers_of_a_drafter_that_computes_nan_go_on_without_it_in_forks_too(
    sampling: Sampling, siblings: int, answering: bool, drafter_folder: Path
) -> None:
    """One token is left to draw by rejection, so every text is that of plain decoding."""
    request = Request(PROMPT, 20, 3, sampling, logprobs=not answering, num_sibling_drafts=siblings)
    expected = plain(target(), request).text
    drafter = load_dflash2(drafter_folder, target(), "tiny drafter")
    engine = Engine(target(), drafter)
    step = engine.answer_step if answering else engine.step
    generation = started(engine, request)
    step(generation)
    drafted = list(generation.statistics.drafted)
    break_head(drafter)
    done = step(generation)
    assert (len(done.tokens), done.num_from_draft, len(done.logprobs)) == (1, 0, 1)
    reason = generation.statistics.drafter_failure
    assert reason.startswith("the drafter's draft logits at position ")
    step(generation)
    # New depths are of no use: what failed is not asked again.
    forks = [engine.fork(generation), engine.fork(generation, num_draft_tokens=2, num_sibling_drafts=None, seed=3)]
    drafter.propose = lambda requests: pytest.fail("a drafter that failed is asked again")
    for each in (generation, *forks):
        while each.finish_reason is None:
            assert step(each).num_from_draft == 0
        assert each.tokens == expected and each.drafter_state is None
        assert each.statistics.drafted == drafted
        assert each.statistics.as_dict()["drafter_failure"] == reason
        engine.close(each)
        assert f"Drafting stopped: {reason}" in str(each.statistics).splitlines()
    assert drafter.pool.pages_in_use == target().pool.pages_in_use == 0


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temp=0.8, seed=3), Sampling(temp=0.8, seed=3, top_k=1, accept="rejection")],
    ids=["greedy", "coupled", "rejection"],
)
def test_a_drafter_that_fails_one_of_several_sequences_goes_on_for_the_others(
    sampling: Sampling, drafter_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = load_dflash2(drafter_folder, target(), "tiny drafter")
    engine, proposed = Engine(target(), drafter), drafter.propose

    def first_is_broken(requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = proposed(requests)
        broken = replace(drafts[0], finite={**drafts[0].finite, "draft logits": mx.array(False)})
        return [broken, *drafts[1:]]

    generations = [started(engine, Request([token, *PROMPT], 12, sampling=sampling)) for token in (1, 2, 3)]
    engine.step(generations)
    monkeypatch.setattr(drafter, "propose", first_is_broken)
    rounds = engine.step(generations)
    monkeypatch.undo()
    assert all(done.error is None and done.tokens for done in rounds)
    assert len(rounds[0].tokens) == 1
    while any(generation.finish_reason is None for generation in generations):
        engine.step(generations)
    assert [bool(g.statistics.drafter_failure) for g in generations] == [True, False, False]
    for generation in generations:
        assert generation.tokens == plain(target(), generation.request).text
        engine.close(generation)


@pytest.mark.parametrize("value", [mx.nan, mx.inf])
@pytest.mark.parametrize("depth", [0, 5])
def test_a_target_that_computes_nan_is_named_and_nothing_is_emitted(value: float, depth: int) -> None:
    on = tiny_target("llama")
    engine = scripted(on)
    generation = started(engine, Request(PROMPT, 20, num_draft_tokens=depth))
    engine.step(generation).checked()
    tokens, length = list(generation.tokens), generation.sequence.length
    on.model.lm_head.weight = mx.where(mx.arange(96)[:, None] == 70, value, on.model.lm_head.weight)
    with pytest.raises(NonFiniteError, match=f"The target logits at position {length} hold NaN or infinity"):
        engine.step(generation).checked()
    assert (generation.tokens, generation.sequence.length) == (tokens, length)
    engine.close(generation)


def test_nan_in_the_last_verified_row_alone_is_noticed() -> None:
    """Its logits may not matter to this round, but what is emitted next would come from a broken model."""
    on = tiny_target("llama")
    engine = scripted(on)
    generation = started(engine, Request(PROMPT, 20))
    logits = on.logits
    on.logits = lambda hidden: mx.where(mx.arange(hidden.shape[0])[:, None] == 7, mx.nan, logits(hidden))
    with pytest.raises(NonFiniteError, match="target logits"):
        engine.step(generation).checked()
    engine.close(generation)


def count_waits(monkeypatch: pytest.MonkeyPatch, engine: Engine, request: Request) -> list[tuple[int, int]]:
    """For each round: how often it called the engine's wait, and mx.eval."""
    # Constants of its shapes are evaluated when they are first made, once in a process.
    run(engine, request)
    calls = {"wait": 0, "eval": 0}
    wait, evaluate = mlx_spec.engine.round.wait, mx.eval

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        return call

    generation = started(engine, request)
    monkeypatch.setattr(mlx_spec.engine.round, "wait", counted("wait", wait))
    monkeypatch.setattr(mx, "eval", counted("eval", evaluate))
    counts = []
    while generation.finish_reason is None:
        before = dict(calls)
        engine.step(generation).checked()
        counts.append((calls["wait"] - before["wait"], calls["eval"] - before["eval"]))
    monkeypatch.undo()
    engine.close(generation)
    return counts


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temp=0.8, top_p=0.9, repetition_penalty=1.1)])
def test_one_host_synchronisation_a_round(
    sampling: Sampling, drafter_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two in the rounds that are timed; never more in plain decoding."""
    engine = Engine(target(), load_dflash2(drafter_folder, target(), "tiny drafter"))
    counts = count_waits(monkeypatch, engine, Request(PROMPT, 25, sampling=sampling))
    assert len(counts) > TIMED_EVERY + 1
    # The last round may draft nothing.
    assert counts[:-1] == [(2, 2) if i % TIMED_EVERY == 0 else (1, 1) for i in range(len(counts) - 1)]
    without = count_waits(monkeypatch, engine, Request(PROMPT, 12, num_draft_tokens=0, sampling=sampling))
    assert without == [(1, 1)] * 12


def test_timed_rounds_say_where_the_time_went() -> None:
    statistics = run(scripted(script=right_then_wrong(0)), Request(PROMPT, 20, num_draft_tokens=2)).statistics
    # Rounds 0 and 16; the last round may not draft, but is none of these.
    assert statistics.timed_rounds == 2
    assert sum(statistics.shares.values()) == pytest.approx(1.0)
    assert all(share > 0 for share in statistics.shares.values())
    assert statistics.seconds > 0


def test_a_round_says_which_of_its_tokens_were_drafted() -> None:
    engine = scripted(script=right_then_wrong(3))
    generation = started(engine, Request(PROMPT, 6))
    first, second = engine.step(generation), engine.step(generation)
    assert (len(first.tokens), first.num_from_draft) == (4, 3)
    assert (len(second.tokens), second.num_from_draft) == (2, 1)
    engine.close(generation)


def test_a_round_cut_inside_its_drafts_counts_no_token_that_was_not_emitted() -> None:
    eos = new_tokens(long_text())[2]
    engine = scripted()
    generation = started(engine, Request(PROMPT, 60, eos_token_ids=frozenset({eos})))
    cut = engine.step(generation)
    assert cut.tokens == new_tokens(long_text())[:3]
    assert cut.num_from_draft == 3
    assert generation.sequence.length == len(PROMPT) + 2
    engine.close(generation)


def test_generations_side_by_side_do_not_disturb_each_other() -> None:
    engine, other = scripted(script=mixture(3)), Engine(target())
    first, second = started(engine, Request(PROMPT, 40)), other.start(Request(PROMPT[::-1], 40))
    alone = plain(target(), Request(PROMPT[::-1], 40)).text
    while first.finish_reason is None or second.finish_reason is None:
        for running, generation in ((engine, first), (other, second)):
            if generation.finish_reason is None:
                running.step(generation).checked()
    assert first.tokens == long_text().text[: len(PROMPT) + 40]
    assert second.tokens == alone
    engine.close(first)
    assert target().pool.pages_in_use == len(second.sequence.pages) > 0
    other.close(second)
    assert target().pool.pages_in_use == 0


def test_on_verified_sees_the_rows_before_they_are_committed() -> None:
    """Anchor and drafts, with the target's raw logits whatever penalties there are."""
    seen = []

    def note(sequence: Any, tokens: mx.array, logits: mx.array) -> None:
        seen.append((sequence.length, tokens.tolist(), mx.argmax(logits, axis=-1).tolist()))

    run(scripted(), Request(PROMPT, 9, on_verified=note, sampling=Sampling(logit_bias={0: -100.0})))
    text = long_text().text
    at = len(PROMPT) - 1
    assert seen[0] == (at, text[at : at + BLOCK], text[at + 1 : at + BLOCK + 1])
    assert seen[1][0] == at + BLOCK


def test_a_drafter_draws_with_the_rule_of_the_request() -> None:
    """Greedy and coupled drafts carry no distribution, rejection's carry the one they were drawn from."""
    drawn = []

    class Watched(ScriptedDrafter):
        def draft(self, state: Any, anchor: int, count: int, rule: DraftRule) -> Draft:
            drawn.append(super().draft(state, anchor, count, rule).probabilities)
            return super().draft(state, anchor, count, rule)

    for sampling in (Sampling(), Sampling(temp=0.5), Sampling(temp=0.5, top_k=1, accept="rejection")):
        request = Request(PROMPT, 5, sampling=sampling)
        run(Engine(target(), Watched(target(), plain(target(), request).text, always_right)), request)
    assert [p is None for p in drawn] == [True, True, False]
    assert drawn[-1].shape == (4, 4)


@pytest.mark.parametrize(
    ("script", "sampling"),
    [
        (always_right, Sampling()),
        (right_then_wrong(2), Sampling()),
        (mixture(5), Sampling(repetition_penalty=1.5, logit_bias={3: 4.0, 50: 6.0})),
    ],
)
def test_answers_and_their_log_probabilities_are_those_of_plain_decoding(script: Any, sampling: Sampling) -> None:
    text = plain(target(), Request(PROMPT, 60, sampling=sampling)).text

    def answer(engine: Engine, depth: int) -> list[tuple[int, float, list[tuple[int, float]]]]:
        generation, found = started(engine, Request(PROMPT, 20, depth, sampling, top_logprobs=3)), []
        while generation.finish_reason is None:
            done = engine.answer_step(generation).checked()
            assert len(done.tokens) == len(done.logprobs)
            found += [(token, p.logprob, p.top) for token, p in zip(done.tokens, done.logprobs, strict=True)]
        engine.close(generation)
        return found

    drafted = answer(Engine(target(), ScriptedDrafter(target(), text, script)), 7)
    assert drafted == answer(Engine(target()), 0)
    assert [token for token, _, _ in drafted] == text[len(PROMPT) : len(PROMPT) + 20]


@pytest.mark.parametrize("row", [0, 2, 7])
def test_an_answer_is_cut_after_the_row_whose_full_logits_differ(
    row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong choice of a fused path is replaced by that of the full logits; what was built on it is dropped."""
    engine = scripted()
    generation = started(engine, Request(PROMPT, 20))
    unpack = mlx_spec.engine.round.read_outcome

    def wrong(*arguments: Any) -> tuple[list[int], tuple[int, ...]]:
        emitted, path = unpack(*arguments)
        emitted[row] = (emitted[row] + 1) % 96
        return emitted, path

    monkeypatch.setattr(mlx_spec.engine.round, "read_outcome", wrong)
    done = engine.answer_step(generation)
    monkeypatch.undo()
    assert (done.tokens, done.num_from_draft) == (new_tokens(long_text())[: row + 1], row)
    while generation.finish_reason is None:
        engine.answer_step(generation).checked()
    assert generation.tokens == long_text().text[: len(PROMPT) + 20]
    engine.close(generation)


def test_answers_of_several_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pass; the choices of a fused path that are wrong in one are replaced there alone."""
    engine, unpack, lengths = scripted(), mlx_spec.engine.round.read_outcome, (12, 9, 20)
    generations = [started(engine, Request(PROMPT, length, 3, top_logprobs=2)) for length in lengths]

    def wrong(part: Verified) -> tuple[list[int], tuple[int, ...]]:
        emitted, path = unpack(part)
        return [token + (part.generation is generations[1]) for token in emitted], path

    monkeypatch.setattr(mlx_spec.engine.round, "read_outcome", wrong)
    while any(generation.finish_reason is None for generation in generations):
        for done in engine.answer_step(generations):
            assert len(done.checked().tokens) == len(done.logprobs)
    assert [each.tokens for each in generations] == [long_text().text[: len(PROMPT) + n] for n in lengths]
    assert generations[0].statistics.rounds < 9 == generations[1].statistics.rounds
    for generation in generations:
        engine.close(generation)


def test_an_answer_is_not_drawn() -> None:
    engine = scripted()
    generation = started(engine, Request(PROMPT, 20, sampling=Sampling(temp=0.5)))
    other = started(engine, Request(PROMPT, 20))
    for asked in (generation, [other, generation]):
        with pytest.raises(RequestError, match="takes the most likely tokens; this request draws, with temp 0.5"):
            engine.answer_step(asked)
    assert engine.answer_step([]) == [] and other.statistics.rounds == 0
    engine.close(generation)
    engine.close(other)


@pytest.mark.parametrize("step", [Engine.step, Engine.answer_step])
def test_one_and_several_report_errors_alike(step: Any) -> None:
    """Nothing is raised: a full pool is the error of the round, which the caller may raise."""
    on = tiny_target("llama", max_cached_tokens=64)
    engine = Engine(on)
    first, second = started(engine, Request(PROMPT, 60)), started(engine, Request(PROMPT, 60))
    while step(engine, first).error is None:
        step(engine, [second])
    for done in (step(engine, first), *step(engine, [first]), *step(engine, [first, second])):
        assert isinstance(done.error, ContextFull) and done.tokens == [] and done.finish_reason is None
        with pytest.raises(ContextFull):
            done.checked()
    engine.close(second)
    done = step(engine, first)
    assert done.checked() is done and len(done.tokens) == 1
    engine.close(first)


@pytest.mark.parametrize("count", ["auto", "adaptive", None])
def test_a_limit_bounds_what_is_chosen_by_itself(count: Any) -> None:
    """Drafts are always right, so that an adaptive depth would grow."""
    done = run(scripted(), Request(PROMPT, 40, count, max_draft_tokens=2))
    assert done.text == long_text().text[: len(PROMPT) + 40]
    assert len(done.statistics.drafted) == 2
    # One beyond the drafter's most changes nothing.
    assert len(run(scripted(), Request(PROMPT, 40, count, max_draft_tokens=99)).statistics.drafted) == 7
    engine = scripted()
    generation = started(engine, Request(PROMPT, 40, 0))
    fork = engine.fork(generation, num_draft_tokens=count, max_draft_tokens=3)
    assert fork.policy.offer().chances[3:] == () != fork.policy.offer().chances
    engine.close(generation)
    engine.close(fork)


def test_time_is_counted_where_it_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU library computes while the host calls its operations: that is no time of the host."""
    if reason := missing():
        pytest.skip(reason)
    on = target()
    forward, propose = on.forward, ScriptedDrafter.propose

    def slow(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            time.sleep(seconds)
            return function(*arguments)

        return call

    monkeypatch.setattr(on, "forward", slow(0.2, forward))
    monkeypatch.setattr(ScriptedDrafter, "propose", slow(0.1, propose))
    for kernels, draft, verify in (("cpu", 0.1, 0.2), ("stock", 0.0, 0.0)):
        engine = Engine(on, scripted().drafter, kernels=kernels)
        generation = started(engine, Request(PROMPT[:2], 8))
        engine.step(generation).checked()
        statistics = generation.statistics
        engine.close(generation)
        assert statistics.timed_rounds == 1
        assert draft <= statistics.draft_seconds < draft + 0.1
        assert verify <= statistics.verify_seconds < verify + 0.2
