"""Copies in rounds: the text is that of plain decoding, alone and beside a drafter, whatever is copied."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scripted_drafters import Finished, ScriptedDrafter, always_wrong, mixture, plain, run
from started import started
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_models import tiny_target

from mlx_spec import Grammar, load
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.drafters.lookup.lookup import Lookup
from mlx_spec.engine import Engine, Generation, Request
from mlx_spec.engine.costs import Costs
from mlx_spec.errors import RequestError
from mlx_spec.target import Target

TESTS = Path(__file__).parent.parent
PROMPT = [int(token) for token in np.random.default_rng(7).integers(5, 90, 40)]
# A reply that repeats the prompt with changes: other tokens, one left out, one added; then itself, and new ones.
REPLY = [
    *PROMPT[2:14],
    91,
    *PROMPT[15:30],
    *PROMPT[31:40],
    92,
    93,
    *PROMPT[10:25],
    94,
    *([41, 42, 43] * 8),
    1,
    2,
    3,
    4,
]
SCRIPT = [*PROMPT, *REPLY]
LEAD = 1000.0
CHEAP = Costs({1: 10.0, 16: 11.0}, {1: 0.5, 7: 1.0}, {1: 0.1, 7: 0.1})


def scripted(lead: float) -> Callable[[mx.array, mx.array], mx.array]:
    """A processor that makes a target follow the script, by so much."""

    def follow(tokens: mx.array, logits: mx.array) -> mx.array:
        right = SCRIPT[tokens.size] if tokens.size < len(SCRIPT) else 0
        return logits + lead * (mx.arange(logits.shape[-1]) == right)

    return follow


SAMPLINGS = {
    "greedy": Sampling(logits_processors=(scripted(LEAD),)),
    # Some tokens are drawn off the script, after which it goes on.
    "coupled": Sampling(temp=1.0, seed=4, logits_processors=(scripted(12.0),)),
    "coupled, penalties": Sampling(temp=0.8, seed=5, repetition_penalty=1.1, logits_processors=(scripted(12.0),)),
    # One token is left to draw, so that rejection gives the text of plain decoding too.
    "rejection": Sampling(temp=0.8, seed=9, top_k=1, accept="rejection", logits_processors=(scripted(LEAD),)),
}


@cache
def target_of(family: str) -> Target:
    return tiny_target(family, bits=4 if family == "qwen3_next" else None, max_cached_tokens=2048)


def request_of(sampling: str = "greedy", **options: Any) -> Request:
    return Request(PROMPT, **{"max_tokens": len(REPLY), **options}, sampling=SAMPLINGS[sampling])


@cache
def plain_text(family: str, sampling: str = "greedy") -> list[int]:
    return plain(target_of(family), request_of(sampling)).text


def accepted(done: Finished | Generation) -> int:
    return done.statistics.drafted_by["lookup"].accepted


def finish(engine: Engine, generations: list[Generation]) -> None:
    while any(generation.finish_reason is None for generation in generations):
        for each in engine.step(generations):
            each.checked()


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", ["llama_sliding", "qwen3_next"])
def test_copies_alone_change_no_token(family: str, sampling: str) -> None:
    target = target_of(family)
    for costs, depth in ((CHEAP, None), (None, 3)):
        done = run(Engine(target, costs=costs, lookup=Lookup()), request_of(sampling, num_draft_tokens=depth))
        assert done.text == plain_text(family, sampling)
        assert accepted(done) > 30 and len(done.rounds) < len(REPLY) - 30
        assert done.statistics.drafted_by.keys() == {"lookup"}
        assert len(done.statistics.drafted) == (depth or 15)


def test_where_nothing_stood_before_rounds_are_plain() -> None:
    """The first tokens are new; then drafting is what it was."""
    target = target_of("llama")
    request = replace(request_of(), prompt=SCRIPT[:1], max_tokens=len(PROMPT) - 1)
    done = run(Engine(target, costs=CHEAP, lookup=Lookup()), request)
    assert done.text == SCRIPT[: len(PROMPT)]
    assert done.statistics.undrafted_rounds == done.statistics.rounds == len(PROMPT) - 1
    assert done.statistics.drafted_by == {} and "copies" in done.statistics.depth_reason


def test_copies_stop_where_rows_cost_more_than_they_bring() -> None:
    target = target_of("llama")
    dear = Costs({1: 10.0, 2: 20.0, 16: 160.0}, {})
    done = run(Engine(target, costs=dear, lookup=Lookup()), request_of())
    assert done.text == plain_text("llama") and done.statistics.drafted == []


def test_copies_that_are_wrong_become_rare() -> None:
    """The target goes on otherwise after every match; a few rounds find out."""
    target, text = target_of("llama"), [5, 6] * 60
    odd = [*text[:20], *(each for step in range(60) for each in (5, 6, 10 + step))]

    def follow(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits + LEAD * (mx.arange(logits.shape[-1]) == odd[min(tokens.size, len(odd) - 1)])

    request = Request(odd[:20], 120, sampling=Sampling(logits_processors=(follow,)))
    costs = Costs({1: 10.0, 2: 13.0, 16: 55.0}, {})
    done = run(Engine(target, costs=costs, lookup=Lookup()), request)
    assert done.text == plain(target, request).text
    counts = done.statistics.drafted_by["lookup"]
    assert counts.rounds < 30 and done.statistics.undrafted_rounds > 60


@cache
def pair(name: str, folder: Path) -> tuple[Target, Drafter]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_spec.loading.load.kept_costs", lambda *_: None)
        patch.setattr("mlx_spec.loading.load.check_wiring", lambda *_: None)
        if name == "dflash2":
            target, config = target_of("llama"), dflash2_config()
            written = write_drafter(folder, config, random_tensors(config, dtype=mx.bfloat16))
            return target, load_dflash2(written, target, "tiny")
        model, drafter = {
            "mtp": ("tiny_pair/target", str(TESTS / "tiny_pair/head")),
            "mtp, hybrid": ("tiny_hybrid", "auto"),
            "eagle": ("tiny_eagles/target", str(TESTS / "tiny_eagles/eagle3")),
        }[name]
        engine, _ = load(str(TESTS / model), drafter)
    assert engine.drafter is not None and engine.lookup is not None
    return engine.target, engine.drafter


@pytest.mark.parametrize(
    ("sampling", "ahead"), [("greedy", False), ("greedy", True), ("coupled", True), ("rejection", True)]
)
@pytest.mark.parametrize("name", ["dflash2", "mtp", "mtp, hybrid", "eagle"])
def test_beside_a_drafter_each_round_takes_one_of_them(
    name: str, sampling: str, ahead: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The script is nothing that the head knows, so that it drafts the new parts only, and badly."""
    target, drafter = pair(name, tmp_path_factory.getbasetemp())
    engine = Engine(target, drafter, CHEAP, lookup=Lookup())
    engine.states.drafts_ahead = ahead
    done = run(engine, request_of(sampling))
    assert done.text == plain(target, request_of(sampling)).text
    by = done.statistics.drafted_by
    assert by.keys() == {drafter.name, "lookup"}
    assert by["lookup"].accepted > (0 if sampling == "coupled" else 40)
    assert (
        by["lookup"].rounds + by[drafter.name].rounds + done.statistics.undrafted_rounds == done.statistics.rounds
    )
    assert drafter.pool.pages_in_use == 0


def test_a_drafter_that_is_right_is_preferred_where_its_passes_are_cheap() -> None:
    """A scripted drafter knows all; copies of short matches are not better."""
    target = target_of("llama")
    for script, winner in ((mixture(1, share=0.98), "scripted"), (always_wrong, "lookup")):
        engine = Engine(target, ScriptedDrafter(target, SCRIPT, script), CHEAP, lookup=Lookup())
        done = run(engine, request_of())
        assert done.text == SCRIPT
        by = done.statistics.drafted_by
        assert by[winner].accepted == max(counts.accepted for counts in by.values())


@pytest.mark.parametrize("depth", [4, "adaptive"])
def test_a_chosen_depth_is_the_drafters_alone(depth: Any) -> None:
    target = target_of("llama")
    engine = Engine(target, ScriptedDrafter(target, SCRIPT, always_wrong), CHEAP, lookup=Lookup())
    done = run(engine, request_of(num_draft_tokens=depth))
    assert done.text == SCRIPT and done.statistics.drafted_by.keys() == {"scripted"}


def test_the_depth_that_a_request_allows_bounds_copies() -> None:
    engine = Engine(target_of("llama"), costs=CHEAP, lookup=Lookup())
    done = run(engine, request_of(max_draft_tokens=4))
    assert done.text == SCRIPT and len(done.statistics.drafted) == 4
    with pytest.raises(RequestError, match="at most 15 tokens"):
        engine.start(request_of(num_draft_tokens=16))
    with pytest.raises(RequestError, match="there is no drafter"):
        Engine(target_of("llama")).start(request_of(num_draft_tokens=1))


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_sequences_together_forks_in_a_copy_and_turns(family: str) -> None:
    target = target_of(family)
    engine = Engine(target, costs=CHEAP, lookup=Lookup())
    first = started(engine, request_of("coupled"))
    while "lookup" not in first.statistics.drafted_by or first.statistics.drafted_by["lookup"].rounds < 2:
        engine.step(first).checked()
    forks = [engine.fork(first), engine.fork(first, seed=11)]
    others = [started(engine, request_of("greedy")), started(engine, request_of("rejection"))]
    finish(engine, [first, *forks, *others])
    assert first.tokens == forks[0].tokens == plain_text(family, "coupled")
    assert first.tokens != forks[1].tokens
    assert others[0].tokens == others[1].tokens == plain_text(family)
    assert all(accepted(each) > 20 for each in (first, *forks, *others))
    turn = Request([*PROMPT, *REPLY, *PROMPT[:3]], 30)
    second = engine.start(turn, after=others[0])
    finish(engine, [second])
    assert second.tokens == plain(target, turn).text
    for generation in (first, *forks, *others, second):
        engine.close(generation)
    assert target.pool.pages_in_use == 0


def test_rounds_that_break_off_leave_copies_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """They copy what they would have copied, and learn from what stays only."""
    target = target_of("llama")
    engine = Engine(target, costs=CHEAP, lookup=Lookup())
    generation, undisturbed = started(engine, request_of()), run(engine, request_of())
    while generation.finish_reason is None:
        for place in ("emit", "accept"):
            with monkeypatch.context() as patched:
                patched.setattr(f"mlx_spec.engine.round.{place}", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    engine.step(generation)
        engine.step(generation).checked()
    assert generation.tokens == undisturbed.text
    assert generation.statistics.drafted_by == undisturbed.statistics.drafted_by
    engine.close(generation)


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_copies_share_a_pass_with_what_a_drafter_drafts() -> None:
    """One sequence copies, the other is drafted for, in the same passes."""
    target = target_of("llama")
    drafter = ScriptedDrafter(target, SCRIPT, mixture(2, share=0.5))
    engine = Engine(target, drafter, CHEAP, lookup=Lookup())
    new = replace(request_of(), prompt=SCRIPT[:3], max_tokens=len(PROMPT) - 3)
    running = [started(engine, request_of()), started(engine, new)]
    finish(engine, running)
    assert running[0].tokens == SCRIPT and running[1].tokens == SCRIPT[: len(PROMPT)]
    assert running[0].statistics.drafted_by["lookup"].accepted > 20
    assert running[1].statistics.drafted_by.keys() == {"scripted"}
    for generation in running:
        engine.close(generation)


def test_a_copy_that_a_grammar_forbids_is_cut() -> None:
    engine, tokenizer = tiny_trained()
    prompt = tokenizer.encode("abcabd abcabd abcabd ab")
    request = Request(
        prompt,
        24,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        grammar=Grammar.regex("[abc]{6,}").start(tokenizer, engine.target.vocab_size),
    )
    done = run(Engine(engine.target, costs=CHEAP, lookup=Lookup()), request)
    assert done.text == plain(engine.target, request).text
    forbidden = set(tokenizer.encode("d ")) - set(tokenizer.encode("abc"))
    copied = Engine(engine.target, costs=CHEAP, lookup=Lookup())
    generation = started(copied, request)
    shares, _ = copied._scheduler.shares([generation])
    assert shares[0].copied is not None and not forbidden & set(shares[0].copied.tokens)
    copied.close(generation)


@cache
def tiny_trained() -> tuple[Engine, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_spec.loading.load.kept_costs", lambda *_: None)
        return load(str(TESTS / "tiny_pair/target"), "lookup")


def test_rejection_takes_a_copy_with_the_targets_own_probability() -> None:
    """A copy is drawn with probability 1, so the first token keeps the distribution of plain sampling."""
    target = target_of("llama")
    tail = Sampling(temp=1.0, accept="rejection", top_k=4)
    prompt = [*PROMPT, *PROMPT[:6]]
    plainly, copied = ([0] * 96 for _ in range(2))
    engine = Engine(target, lookup=Lookup())
    generation = started(engine, Request(prompt, 60, sampling=tail))
    for seed in range(150):
        for depth, counts in ((0, plainly), (None, copied)):
            fork = engine.fork(generation, seed=seed + (1000 if depth is None else 0), num_draft_tokens=depth)
            counts[engine.step(fork).checked().tokens[0]] += 1
            assert depth == 0 or fork.statistics.drafted_by["lookup"].rounds == 1
            engine.close(fork)
    engine.close(generation)
    assert sum(abs(a - b) for a, b in zip(plainly, copied, strict=True)) < 2 * 150 * 0.2
