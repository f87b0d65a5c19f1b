"""Grammars in rounds: drafted texts and log-probabilities are those of plain decoding, whatever is drafted."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from random_schemas import check, random_schema
from ranked_drafter import RankedDrafter
from scripted_drafters import (
    Script,
    ScriptedDrafter,
    always_right,
    always_wrong,
    mixture,
    right_then_wrong,
    wrong_at,
)

from mlx_spec import Grammar, Sampling, generate, load, stream_generate
from mlx_spec.decoding.grammar import Place, Run
from mlx_spec.drafters.base import Draft
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.engine import Engine, Generation, Request
from mlx_spec.engine.costs import Costs
from mlx_spec.errors import NonFiniteError, RequestError

TESTS = Path(__file__).parent.parent
PAIRS = {"dense": ("tiny_pair/target", "tiny_pair/head"), "hybrid": ("tiny_hybrid", "auto")}
SAMPLINGS = {
    "greedy": Sampling(),
    "coupled": Sampling(temp=0.9, seed=5, top_p=0.95, repetition_penalty=1.2),
    # One token is left to draw, so that rejection gives the text of plain decoding too.
    "rejection": Sampling(temp=0.9, seed=5, top_k=1, accept="rejection"),
}
SCRIPTS: dict[str, Script] = {
    "always right": always_right,
    "always wrong": always_wrong,
    "right then wrong": right_then_wrong(2),
    "mixture": mixture(3),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},
}
GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    # A text that may end after each letter.
    "regex": Grammar.regex("[a-z ]{4,30}"),
    # The mark comes soon; what is before it is free.
    "after": Grammar.json_schema(SCHEMA, after="e"),
}
Emitted = list[tuple[int, float, list[tuple[int, float]]]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@cache
def trained(pair: str = "dense") -> tuple[Engine, Any]:
    """A target whose head drafts right about half of the time, and its tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_spec.loading.load.kept_costs", lambda *_: None)
        patch.setattr("mlx_spec.loading.load.check_wiring", lambda *_: None)
        target, head = PAIRS[pair]
        return load(str(TESTS / target), drafter=head if head == "auto" else str(TESTS / head))


def request_of(grammar: Grammar | None, sampling: Sampling = SAMPLINGS["greedy"], **options: Any) -> Request:
    engine, tokenizer = trained()
    return Request(
        tokenizer.encode("Return the name and the size of each"),
        **{"max_tokens": 60, "logprobs": True, "top_logprobs": 4, **options},
        sampling=sampling,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        grammar=None if grammar is None else grammar.start(tokenizer, engine.target.vocab_size),
    )


def emitted_by(
    engine: Engine, request: Request, step: Callable[[Engine, Generation], Any] = Engine.step
) -> tuple[Emitted, str | None]:
    """Return each token of a request's text with its log-probabilities, and why the text ends."""
    generation, found = engine.start(request), list[Any]()
    while generation.finish_reason is None:
        done = step(engine, generation).checked()
        found += [(token, p.logprob, p.top) for token, p in zip(done.tokens, done.logprobs, strict=True)]
    engine.close(generation)
    assert engine.target.pool.pages_in_use == 0
    return found, generation.finish_reason


def plainly(request: Request, pair: str = "dense") -> tuple[Emitted, str | None]:
    return emitted_by(trained(pair)[0], replace(request, num_draft_tokens=0, num_sibling_drafts=None))


def text_of(found: Emitted) -> str:
    tokenizer = trained()[1]
    return tokenizer.decode([token for token, _, _ in found if token not in tokenizer.eos_token_ids])


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_trained_head_gives_the_numbers_of_plain_decoding(pair: str, sampling: Sampling, name: str) -> None:
    request = request_of(GRAMMARS[name], sampling)
    expected, reason = plainly(request, pair)
    for depth, siblings in ((1, None), (4, None), *([(3, 6)] if pair == "dense" else [])):
        drafting = replace(request, num_draft_tokens=depth, num_sibling_drafts=siblings)
        assert emitted_by(trained(pair)[0], drafting) == (expected, reason)
    if name == "schema":
        check(text_of(expected), reason, SCHEMA)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_scripted_drafts_change_nothing(sampling: Sampling, script: Script) -> None:
    """The text ends inside a block; the drafts after its end are not of the grammar."""
    target = trained()[0].target
    for grammar in GRAMMARS.values():
        request = request_of(grammar, sampling, num_draft_tokens=7)
        expected, reason = plainly(request)
        text = [*request.prompt, *(token for token, _, _ in expected)]
        engine = Engine(target, ScriptedDrafter(target, text, script))
        assert emitted_by(engine, request) == (expected, reason)
        assert emitted_by(engine, replace(request, max_tokens=9)) == (expected[:9], "length")


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_siblings_are_masked_by_their_own_paths(sampling: Sampling) -> None:
    """The right token is the draft, a sibling of it, or none of them."""
    target, request = trained()[0].target, request_of(GRAMMARS["schema"], sampling)
    expected = plainly(request)
    text = [*request.prompt, *(token for token, _, _ in expected[0])]
    drafter = RankedDrafter(target, text, lambda proposal, index, at: [0, 1, 0, None, 2][at % 5])
    drafting = replace(request, num_draft_tokens=3, num_sibling_drafts=8)
    assert emitted_by(Engine(target, drafter), drafting) == expected


def test_what_is_accepted_under_a_grammar_counts_as_ever() -> None:
    """Drafts that are always right are all accepted, the end token too."""
    target, request = trained()[0].target, request_of(GRAMMARS["schema"], num_draft_tokens=7)
    expected, reason = plainly(request)
    text = [*request.prompt, *(token for token, _, _ in expected)]
    engine = Engine(target, ScriptedDrafter(target, text, always_right))
    generation = engine.start(request)
    while generation.finish_reason is None:
        engine.step(generation).checked()
    engine.close(generation)
    assert reason == "stop" and generation.statistics.rounds == -(-len(expected) // 8)


FORCED = Grammar.regex("(the name is|the size is)( of the| in the)[a-z]{0,9}[0-9]{2}")


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_forced_tokens_are_drafted_without_a_drafter(sampling: Sampling) -> None:
    """And in front of a drafter's; plain decoding stays plain."""
    target = trained()[0].target
    request = request_of(FORCED, sampling)
    expected = plainly(request)
    text = [*request.prompt, *(token for token, _, _ in expected[0])]
    for engine, depth in (
        (Engine(target), None),
        (trained()[0], 3),
        (trained()[0], "adaptive"),
        (Engine(target, ScriptedDrafter(target, text, always_wrong)), 7),
    ):
        generation, found = engine.start(replace(request, num_draft_tokens=depth)), list[Any]()
        while generation.finish_reason is None:
            policy, drafted = str(vars(generation.policy)), sum(generation.statistics.drafted)
            forced = generation.place.forced() if generation.is_read else []
            done = engine.step(generation).checked()
            found += [(token, p.logprob, p.top) for token, p in zip(done.tokens, done.logprobs, strict=True)]
            if forced:
                # A policy learns nothing from what its drafter did not draft.
                assert sum(generation.statistics.drafted) > drafted and str(vars(generation.policy)) == policy
        engine.close(generation)
        assert (found, generation.finish_reason) == expected
        assert generation.statistics.rounds < len(found) and sum(generation.statistics.accepted) > 3
        assert len(generation.statistics.drafted) <= (depth if isinstance(depth, int) else 15)
    plain = trained()[0].start(replace(request, num_draft_tokens=0))
    assert len(trained()[0].step(plain).tokens) == 1 and plain.statistics.drafted == []
    trained()[0].close(plain)


def test_more_forced_tokens_than_the_drafter_drafts() -> None:
    """The automatic depth of a drafter knows nothing of drafts so deep, and leaves them without siblings."""
    target, drafter = trained()[0].target, trained()[0].drafter
    request = request_of(Grammar.regex("a name of more than seven letters[a-z]{2}"))
    assert isinstance(drafter, ChainDrafter)
    engine = Engine(target, drafter.changed(max_draft=7), Costs({1: 10.0, 16: 11.0}, {1: 0.1, 7: 0.2}))
    assert emitted_by(engine, request) == plainly(request)


def test_forced_tokens_of_several_sequences_and_at_the_end_of_the_room() -> None:
    engine = Engine(trained()[0].target)
    requests = [request_of(FORCED, max_tokens=most) for most in (2, 5, 60)]
    running = [engine.start(request) for request in requests]
    while any(generation.finish_reason is None for generation in running):
        for done in engine.step(running):
            done.checked()
    for generation in running:
        engine.close(generation)
    for request, generation in zip(requests, running, strict=True):
        expected, reason = plainly(request)
        assert generation.tokens[len(request.prompt) :] == [token for token, _, _ in expected]
        assert generation.finish_reason == reason
        alone, _ = emitted_by(engine, request)
        assert alone == expected


class BrokenDrafter(ScriptedDrafter):
    """Drafts what is no token, and says that its numbers were not finite."""

    def draft(self, *args: Any) -> Draft:
        draft = super().draft(*args)
        return replace(draft, tokens=mx.full(draft.tokens.shape, -1), finite={"script": mx.array(False)})


def test_a_drafter_that_fails_under_a_grammar_leaves_plain_decoding() -> None:
    target, request = trained()[0].target, request_of(GRAMMARS["schema"], num_draft_tokens=3)
    expected = plainly(request)
    text = [*request.prompt, *(token for token, _, _ in expected[0])]
    assert emitted_by(Engine(target, BrokenDrafter(target, text, always_right)), request) == expected


def test_answer_steps_are_masked_too() -> None:
    request = request_of(GRAMMARS["schema"], num_draft_tokens=4)
    assert emitted_by(trained()[0], request, Engine.answer_step) == plainly(request)


def test_rejection_draws_texts_of_the_grammar() -> None:
    for seed in range(6):
        sampling = Sampling(temp=1.0, seed=seed, accept="rejection")
        for siblings in (None, 5):
            request = request_of(
                GRAMMARS["schema"], sampling, num_draft_tokens=3, num_sibling_drafts=siblings, max_tokens=120
            )
            found, reason = emitted_by(trained()[0], request)
            check(text_of(found), reason, SCHEMA)


def test_sequences_of_one_pass_have_grammars_of_their_own_or_none() -> None:
    engine, _ = trained()
    requests = [
        request_of(grammar, sampling, num_draft_tokens=3, max_tokens=30)
        for grammar, sampling in zip([*GRAMMARS.values(), None], [*SAMPLINGS.values(), Sampling()], strict=True)
    ]
    running = [engine.start(request) for request in requests]
    found: list[Emitted] = [[] for _ in requests]
    while any(generation.finish_reason is None for generation in running):
        for emitted, done in zip(found, engine.step(running), strict=True):
            assert done.error is None
            emitted += [(token, p.logprob, p.top) for token, p in zip(done.tokens, done.logprobs, strict=True)]
    reasons = [generation.finish_reason for generation in running]
    for generation in running:
        engine.close(generation)
    assert list(zip(found, reasons, strict=True)) == [plainly(request) for request in requests]


def continued(engine: Engine, generation: Generation) -> list[int]:
    while generation.finish_reason is None:
        engine.step(generation).checked()
    engine.close(generation)
    return generation.tokens


def test_forks_go_on_from_the_same_place_each_on_its_own() -> None:
    engine, tokenizer = trained()
    request = request_of(GRAMMARS["schema"], SAMPLINGS["coupled"], num_draft_tokens=3, max_tokens=90)
    generation = engine.start(request)
    for _ in range(4):
        engine.step(generation).checked()
    plain = [continued(engine, engine.fork(generation, seed=seed, num_draft_tokens=0)) for seed in (5, 6, 7)]
    forks = [engine.fork(generation, seed=seed) for seed in (5, 6, 7)]
    place = generation.place
    assert [continued(engine, fork) for fork in forks] == plain
    assert generation.place is place and len({tuple(text) for text in plain}) == 3
    for text in plain:
        json.loads(tokenizer.decode(text[len(request.prompt) : -1]))
    # Another grammar begins where the fork begins.
    digits = Grammar.regex("[0-9]{3}").start(tokenizer, engine.target.vocab_size)
    number, free = engine.fork(generation, grammar=digits), engine.fork(generation, grammar=None)
    begin = len(generation.tokens)
    assert tokenizer.decode(continued(engine, number)[begin:-1]).isdecimal() and free.place is None
    engine.close(free)
    assert continued(engine, generation) == plain[0]
    assert engine.target.pool.pages_in_use == 0


def test_a_turn_that_goes_on_has_a_grammar_of_its_own() -> None:
    engine, tokenizer = trained()
    first = engine.start(request_of(GRAMMARS["schema"], num_draft_tokens=3))
    while first.finish_reason is None:
        engine.step(first).checked()
    prompt = [*first.tokens, *tokenizer.encode(" and a number:", add_special_tokens=False)]
    request = replace(request_of(Grammar.regex("[0-9]{2,9}"), num_draft_tokens=3), prompt=prompt)
    second = engine.start(request, after=first)
    engine.close(first)
    text = continued(engine, second)[len(prompt) :]
    assert text == [token for token, _, _ in plainly(request)[0]]
    assert tokenizer.decode(text[:-1]).isdecimal() and second.finish_reason == "stop"


def test_each_round_may_be_run_by_another_thread() -> None:
    engine, _ = trained()
    request = request_of(GRAMMARS["schema"], num_draft_tokens=3)
    with ThreadPoolExecutor(1) as pool:
        generation = pool.submit(engine.start, request).result()
    while generation.finish_reason is None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(engine.step, generation).result()
    engine.close(generation)
    assert generation.tokens[len(request.prompt) :] == [token for token, _, _ in plainly(request)[0]]


def test_a_fork_of_a_complete_text_has_end_tokens_alone() -> None:
    engine, tokenizer = trained()
    generation = engine.start(request_of(Grammar.regex("yes|no"), num_draft_tokens=3))
    while generation.finish_reason is None:
        engine.step(generation).checked()
    fork = engine.fork(generation, eos_token_ids=generation.request.eos_token_ids)
    assert engine.step(fork).tokens == sorted(tokenizer.eos_token_ids) and fork.finish_reason == "stop"
    engine.close(fork)
    engine.close(generation)


def test_several_texts_are_those_of_single_calls() -> None:
    engine, tokenizer = trained()
    options: dict[str, Any] = dict(grammar=GRAMMARS["schema"], max_tokens=60, temp=0.9)
    texts = generate(engine, tokenizer, "Return the", n=3, seed=4, num_draft_tokens=3, **options)
    alone = [
        generate(engine, tokenizer, "Return the", seed=seed, num_draft_tokens=0, **options) for seed in (4, 5, 6)
    ]
    assert texts == alone and len(set(texts)) == 3


def interrupted_at_the_second_call(function: Callable[..., Any]) -> Callable[..., Any]:
    calls = count(1)

    def interrupted(*args: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return function(*args)

    return interrupted


def test_a_round_that_breaks_off_leaves_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it does: while drafts are shown to the drafter, and when tokens were appended already."""
    engine, _ = trained()
    request = request_of(GRAMMARS["schema"], num_draft_tokens=3)
    expected, _ = plainly(request)
    generation, other = engine.start(request), engine.start(request)
    engine.step([generation, other])
    for module, name in (("round", "place_after"), ("round", "emit"), ("engine", "learn")):
        places, tokens = [generation.place, other.place], list(generation.tokens)
        original = getattr(import_module(f"mlx_spec.engine.{module}"), name)
        with monkeypatch.context() as patch:
            patch.setattr(f"mlx_spec.engine.{module}.{name}", interrupted_at_the_second_call(original))
            with pytest.raises(KeyboardInterrupt):
                engine.step([generation, other])
        assert generation.place is places[0] and other.place is places[1] and generation.tokens == tokens
        engine.step([generation, other])
        assert generation.place is not places[0]
    for each in (generation, other):
        assert continued(engine, each)[len(request.prompt) :] == [token for token, _, _ in expected]


def test_the_host_waits_for_drafts_while_the_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are queued before a grammar reads the drafts; without a grammar nothing is queued or read."""
    engine, _ = trained()
    events = list[str]()
    queue, runs = mx.async_eval, Place.runs

    def queued(*arrays: Any) -> None:
        if any(isinstance(each, mx.array) and each.shape[-1:] == (engine.target.vocab_size,) for each in arrays):
            events.append("logits")
        queue(*arrays)

    def seen(*args: Any) -> list[Run]:
        events.append("mask")
        return runs(*args)

    monkeypatch.setattr("mlx_spec.engine.round.mx.async_eval", queued)
    monkeypatch.setattr("mlx_spec.decoding.grammar.Place.runs", seen)
    for grammar, expected in ((GRAMMARS["schema"], ["logits", "mask"]), (None, [])):
        generation = engine.start(request_of(grammar, num_draft_tokens=3, logprobs=False, top_logprobs=0))
        engine.read(generation)
        events.clear()
        engine.step(generation).checked()
        assert events == expected
        engine.close(generation)


def test_the_mark_may_lie_inside_a_block_of_drafts() -> None:
    target, request = trained()[0].target, request_of(GRAMMARS["after"], num_draft_tokens=7)
    expected, reason = plainly(request)
    text = [token for token, _, _ in expected]
    mark = text.index(trained()[1].encode("e", add_special_tokens=False)[0])
    assert 0 < mark < 40 and text_of(expected[mark + 1 :]).lstrip().startswith("{")
    for wrong in range(mark - 1, mark + 3):
        script = wrong_at(len(request.prompt) + wrong)
        engine = Engine(target, ScriptedDrafter(target, [*request.prompt, *text], script))
        assert emitted_by(engine, request) == (expected, reason)


def test_a_bias_that_forbids_what_the_grammar_needs_is_named() -> None:
    engine, tokenizer = trained()
    ids = [token for text in ("y", "n") for token in tokenizer.encode(text, add_special_tokens=False)]
    request = request_of(Grammar.regex("[yn]"), Sampling(logit_bias={token: -float("inf") for token in ids}))
    for depth in (0, 3):
        failing, other = engine.start(replace(request, num_draft_tokens=depth)), engine.start(request_of(None))
        first, second = engine.step([failing, other])
        assert isinstance(first.error, NonFiniteError) and second.error is None
        assert "Grammar, bias, penalties and logits processors leave no token" in str(first.error)
        assert failing.place is request.grammar
        engine.close(failing)
        engine.close(other)


def test_requests_that_do_not_fit_their_grammar_are_refused() -> None:
    engine, tokenizer = trained()
    request, grammar = request_of(None), GRAMMARS["regex"]
    with pytest.raises(
        RequestError, match=r"Texts of the grammar end with tokens \[1\], but eos_token_ids is \[\]"
    ):
        place = grammar.start(tokenizer, engine.target.vocab_size)
        engine.start(replace(request, grammar=place, eos_token_ids=frozenset()))
    with pytest.raises(RequestError, match="was started for 300 tokens, but the vocabulary has 267"):
        engine.start(replace(request, grammar=grammar.start(tokenizer, 300)))
    with pytest.raises(RequestError, match=r"takes what Grammar\.start returns, not Grammar\("):
        replace(request, grammar=grammar)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"takes a mlx_spec\.Grammar, such as Grammar\.json_schema"):
        generate(engine, tokenizer, "a", grammar=SCHEMA)


@pytest.mark.parametrize("seed", range(20))
def test_texts_of_random_schemas_are_valid(seed: int) -> None:
    engine, tokenizer = trained()
    judge_schema(engine, tokenizer, "Return the settings", seed, max_tokens=120)


@pytest.mark.slow
@pytest.mark.real_model
def test_texts_of_200_random_schemas_of_the_demo_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_SPEC_CACHE")
    engine, tokenizer = load("demo")
    reasons, lengths = [], []
    for seed in range(200):
        prompt = f"Answer in JSON of this schema: {json.dumps(random_schema(seed))}"
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        reason, length = judge_schema(engine, tokenizer, ids, seed, max_tokens=80)
        reasons.append(reason)
        lengths.append(length)
    print(f"stop: {reasons.count('stop')}, tokens a round: {sum(lengths) / len(lengths):.2f}")
    assert reasons.count("stop") > 100


def judge_schema(
    engine: Engine, tokenizer: Any, prompt: str | Sequence[int], seed: int, max_tokens: int
) -> tuple[str | None, float]:
    """Judge the drafted text of a schema; it is that of plain decoding. Return why it ends, and tokens a round."""
    schema = random_schema(seed)
    options: dict[str, Any] = dict(
        grammar=Grammar.json_schema(schema),
        max_tokens=max_tokens,
        logprobs=True,
        temp=(0.0, 0.8)[seed % 2],
        seed=seed,
    )
    found = [
        list(stream_generate(engine, tokenizer, prompt, num_draft_tokens=depth, **options)) for depth in (0, 4)
    ]
    plain, drafted = ([(each.token, each.logprob, each.text) for each in text] for text in found)
    assert drafted == plain
    last = found[1][-1]
    check("".join(text for _, _, text in drafted), last.finish_reason, schema)
    return last.finish_reason, last.statistics.accepted_length
