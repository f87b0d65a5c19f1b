"""stream_generate and generate: what mlx_lm.generate offers, with the text that plain decoding gives."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import GenerationResponse as MlxLmResponse
from mlx_lm.sample_utils import make_logits_processors
from scripted_drafters import ScriptedDrafter, always_right, mixture
from tiny_folders import write_dflash2, write_model

from metal_kernels.launching.implementations import Implementation
from mlx_spec import Engine, GenerationResponse, Sampling, generate, load, stream_generate
from mlx_spec.engine import Request
from mlx_spec.errors import ContextFull, RequestError
from mlx_spec.generate import TextStream, text_request
from mlx_spec.generate import responses as responses_of
from mlx_spec.generate.options import NOT_HERE

mlx_lm_module = sys.modules["mlx_lm.generate"]
PROMPT = "then the other"
TOKENS = 48
# A few roundings of a bfloat16 logit of 4 to 8, where operations sum in one order, and in two.
NEAR_TIE, OTHER_SUMS = 0.05, 0.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_dflash2(tmp_path_factory.mktemp("drafters") / "dflash2"))


@pytest.fixture(scope="module")
def loaded(folder: Any, drafter_folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Any]:
    """A tiny target with a random DFlash 2 drafter; without measured costs the depth is the largest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_SPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        engine, tokenizer = load(str(folder), drafter_folder)
    return Engine(engine.target, engine.drafter), tokenizer


@pytest.fixture(scope="module")
def plain_text(loaded: tuple[Engine, Any]) -> str:
    return generate(*loaded, PROMPT, max_tokens=TOKENS, num_draft_tokens=0)


@pytest.fixture(scope="module")
def scripted(loaded: tuple[Engine, Any]) -> Callable[..., Engine]:
    """Make an engine whose drafter knows the greedy text of PROMPT and errs as a script says."""
    engine, tokenizer = loaded
    prompt = tokenizer.encode(PROMPT)
    tokens = [r.token for r in stream_generate(*loaded, PROMPT, max_tokens=TOKENS + 8, num_draft_tokens=0)]
    return lambda script: Engine(engine.target, ScriptedDrafter(engine.target, [*prompt, *tokens], script))


def test_fields_are_those_of_mlx_lm() -> None:
    ours = [f.name for f in fields(GenerationResponse)]
    theirs = [f.name for f in fields(MlxLmResponse)]
    assert ours == [*theirs, "statistics", "logprob", "top_logprobs", "index"]


def test_responses_count_and_measure(loaded: tuple[Engine, Any]) -> None:
    responses = list(stream_generate(*loaded, PROMPT, max_tokens=12))
    last = responses[-1]
    assert [r.generation_tokens for r in responses] == list(range(1, 13))
    assert {r.prompt_tokens for r in responses} == {len(loaded[1].encode(PROMPT))}
    assert all(r.generation_tps > 0 and r.prompt_tps > 0 and r.peak_memory > 0 for r in responses)
    assert last.statistics.tokens == 12
    assert last.statistics.prompt_tokens == last.prompt_tokens


def test_texts_joined_are_the_text_of_generate(loaded: tuple[Engine, Any], plain_text: str) -> None:
    responses = list(stream_generate(*loaded, PROMPT, max_tokens=TOKENS))
    joined = "".join(r.text for r in responses)
    assert joined == generate(*loaded, PROMPT, max_tokens=TOKENS) == plain_text
    assert joined == loaded[1].decode([r.token for r in responses])
    assert len(set(joined)) > 5


def test_a_prompt_may_be_text_list_or_array(loaded: tuple[Engine, Any], plain_text: str) -> None:
    tokens = loaded[1].encode(PROMPT)
    for prompt in (tokens, tuple(tokens), mx.array(tokens), mx.array([tokens])):
        assert generate(*loaded, prompt, max_tokens=TOKENS) == plain_text


def test_bos_is_added_once(loaded: tuple[Engine, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Spy:
        bos_token = "<|bos|>"
        eos_token_ids = frozenset[int]()
        detokenizer = loaded[1].detokenizer

        @staticmethod
        def encode(text: str, add_special_tokens: bool) -> list[int]:
            seen.append(add_special_tokens)
            return [0, 5, 6]

    generate(loaded[0], Spy, "hello", max_tokens=1)
    generate(loaded[0], Spy, "<|bos|>hello", max_tokens=1)
    assert seen == [True, False]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("prompt", [PROMPT, "a man in an inn"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_tokens_are_those_of_mlx_lm(family: str, prompt: str, exact: bool, tmp_path: Path) -> None:
    """With MLX's own operations on the CPU all are equal. Sums in another order may decide near ties."""
    folder = write_model(tmp_path / family, family)
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    engine, _ = load(str(folder), None, exact=exact)
    tokens = tokenizer.encode(prompt)
    ours = [r.token for r in stream_generate(engine, tokenizer, tokens, max_tokens=TOKENS)]
    theirs = list(mlx_lm.stream_generate(model, tokenizer, tokens, max_tokens=TOKENS))
    assert len(ours) == len(theirs) == TOKENS
    for token, response in zip(ours, theirs, strict=True):
        if token != response.token:
            second, first = sorted(mx.topk(response.logprobs, 2).tolist())
            assert first - second < OTHER_SUMS and (exact or mx.default_device() != mx.cpu)
            # From here on the texts differ.
            break
            break


@pytest.mark.parametrize("stop_from", [0, 7, 20])
@pytest.mark.parametrize("as_list", [False, True])
def test_stop_strings_cut_alike_with_and_without_a_drafter(
    loaded: tuple[Engine, Any], scripted: Callable[..., Engine], plain_text: str, stop_from: int, as_list: bool
) -> None:
    stop = plain_text[stop_from : stop_from + 3]
    expected = plain_text[: plain_text.index(stop)]
    options = dict(max_tokens=TOKENS, stop=["never there", stop] if as_list else stop)
    runs = {
        "plain": list(stream_generate(*loaded, PROMPT, num_draft_tokens=0, **options)),
        "dflash2": list(stream_generate(*loaded, PROMPT, **options)),
        # Everything is accepted, so that the stop string lies inside a block.
        "scripted": list(stream_generate(scripted(always_right), loaded[1], PROMPT, **options)),
    }
    tokens = [r.token for r in runs["plain"]]
    for name, responses in runs.items():
        assert "".join(r.text for r in responses) == expected, name
        assert [r.token for r in responses] == tokens, name
        assert responses[-1].finish_reason == "stop", name
    assert len(tokens) < TOKENS
    assert runs["scripted"][-1].statistics.rounds == -(-len(tokens) // 8)


def test_an_end_token_cuts_inside_a_block(loaded: tuple[Engine, Any], scripted: Callable[..., Engine]) -> None:
    engine, tokenizer = scripted(always_right), loaded[1]
    tokens = [r.token for r in stream_generate(engine, tokenizer, PROMPT, max_tokens=TOKENS)]
    end = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    before = tokens[: tokens.index(end)]
    eos_token_ids = set(tokenizer.eos_token_ids)
    tokenizer.eos_token_ids = {end}
    try:
        responses = list(stream_generate(engine, tokenizer, PROMPT, max_tokens=TOKENS))
    finally:
        tokenizer.eos_token_ids = eos_token_ids
    assert [r.token for r in responses] == [*before, end]
    assert "".join(r.text for r in responses) == tokenizer.decode(before)
    assert responses[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    "options, words",
    [
        ({"temprature": 1.0}, ["temprature", "temp,"]),
        ({"sampler": lambda x: x}, ["sampler=", "share its noise", "temp="]),
        ({"prompt_cache": []}, ["prompt_cache=", "engine.fork"]),
        ({"draft_model": "other"}, ["draft_model=", "second argument of load"]),
        ({"kv_bits": 4}, ["kv_bits=", "model's precision"]),
        ({"max_kv_size": 64}, ["max_kv_size=", "max_cached_tokens="]),
        ({"temp": "0.7"}, ["temp must be a number", "'0.7'"]),
        ({"temp": [0.7]}, ["temp must be a number"]),
        ({"top_k": "5"}, ["top_k must be a whole number", "'5'"]),
        ({"seed": 1.5}, ["seed must be a whole number, not 1.5"]),
        ({"seed": "7"}, ["seed must be a whole number, not '7'"]),
        ({"n": 1.5}, ["n must be a whole number, not 1.5"]),
        ({"n": "2"}, ["n must be a whole number, not '2'"]),
        ({"max_tokens": 4.5}, ["max_tokens must be a whole number, not 4.5"]),
        ({"max_tokens": float("inf")}, ["max_tokens must be a whole number, not inf"]),
        ({"prefill_step_size": "all"}, ["prefill_step_size must be a whole number, not 'all'"]),
        ({"top_logprobs": [1]}, ["top_logprobs must be a whole number"]),
        ({"num_draft_tokens": 2.5}, ["num_draft_tokens must be a whole number, not 2.5"]),
        ({"num_draft_tokens": "3"}, ["num_draft_tokens is '3'"]),
        ({"num_sibling_drafts": "1"}, ["num_sibling_drafts"]),
        ({"logits_processors": lambda tokens, scores: scores}, ["logits_processors takes a list of functions"]),
        ({"logits_processors": [5]}, ["logits_processors takes a list of functions"]),
        ({"prompt_progress_callback": 5}, ["on_progress takes a function"]),
        ({"on_verified": 5}, ["on_verified takes a function"]),
        ({"repetition_context_size": 2.5}, ["repetition_context_size must be a whole number"]),
        ({"logit_bias": {1.5: 5.0}}, ["logit_bias", "token ids to numbers"]),
        ({"logit_bias": {-1: 5.0}}, ["logit_bias names token -1"]),
        ({"xtc_special_tokens": 5}, ["xtc_special_tokens takes token ids, not 5"]),
        ({"stop": [5]}, ["stop", "string"]),
        ({"stop": 5}, ["stop", "string"]),
        ({"stop": b"x"}, ["stop", "string"]),
        ({"logit_bias": [[70, 5]]}, ["logit_bias", "token ids to numbers"]),
        ({"xtc_special_tokens": (5000,)}, ["xtc_special_tokens", "5000", "267"]),
        ({"max_tokens": 0}, ["max_tokens", "0"]),
        ({"temp": -1.0}, ["temp", "-1.0"]),
        ({"num_draft_tokens": 8}, ["num_draft_tokens is 8", "at most 7"]),
        ({"num_draft_tokens": -1}, ["num_draft_tokens is -1"]),
        ({"prefill_step_size": 0}, ["prefill_step_size"]),
        ({"logit_bias": {5000: 1.0}}, ["5000", "267"]),
    ],
)
def test_wrong_options_are_refused(loaded: tuple[Engine, Any], options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RequestError) as error:
        next(stream_generate(*loaded, PROMPT, **options))
    for word in words:
        assert word in str(error.value)
    assert loaded[0].target.pool.pages_in_use == 0


def test_every_argument_of_mlx_lm_is_taken_or_refused_by_name() -> None:
    theirs = {
        name
        for function in (
            mlx_lm_module.stream_generate,
            mlx_lm_module.generate_step,
            mlx_lm_module.speculative_generate_step,
        )
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    ours = (
        inspect.signature(stream_generate).parameters.keys()
        | Sampling.__dataclass_fields__.keys()
        | NOT_HERE.keys()
    )
    assert theirs - ours == {"model", "stream"}


OPTIONS = sorted(
    {
        name
        for name, given in inspect.signature(stream_generate).parameters.items()
        if given.default is not given.empty
    }
    | Sampling.__dataclass_fields__.keys()
)


@pytest.mark.parametrize("option", OPTIONS)
def test_none_is_the_default_of_every_option(loaded: tuple[Engine, Any], plain_text: str, option: str) -> None:
    given = {"max_tokens": TOKENS, option: None}
    assert next(iter(stream_generate(*loaded, PROMPT, **given))).text == plain_text[0]


def test_none_is_the_default(loaded: tuple[Engine, Any], plain_text: str) -> None:
    options = dict(
        temp=None, top_p=None, stop=None, kv_bits=None, prompt_progress_callback=None, logits_processors=None
    )
    assert generate(*loaded, PROMPT, max_tokens=TOKENS, **options) == plain_text


def test_numbers_may_be_numpys(loaded: tuple[Engine, Any]) -> None:
    texts = {
        generate(*loaded, PROMPT, max_tokens=8, temp=0.9, top_k=top_k, seed=seed)
        for top_k, seed in ((5, 7), (5.0, 7), (np.int64(5), np.int64(7)))
    }
    assert len(texts) == 1
    biased = {
        generate(*loaded, PROMPT, max_tokens=8, logit_bias={token: 5.0}) for token in (70, "70", np.int64(70))
    }
    assert len(biased) == 1
    counted = {
        generate(*loaded, PROMPT, max_tokens=eight, num_draft_tokens=two, prefill_step_size=two, temp=temp)
        for eight, two, temp in (
            (8, 2, 0.5),
            (8.0, 2.0, np.float32(0.5)),
            (np.int32(8), np.float64(2), mx.array(0.5)),
        )
    }
    assert len(counted) == 1


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (["a", "b"], "text or a list of token ids, not ['a', 'b']"),
        ([{"role": "user", "content": "hi"}], "apply_chat_template"),
        ({"input_ids": [70]}, 'give its "input_ids"'),
        ({"role": "user"}, "text or a list of token ids"),
        (b"hi", "text or a list of token ids, not b'hi'"),
        (None, "text or a list of token ids, not None"),
        (70, "text or a list of token ids, not 70"),
        ([1.5, 2.5], "text or a list of token ids"),
        ([[70, 71], [72]], "text or a list of token ids"),
        ([[70, 71], [72, 73]], "one list of token ids, not 2"),
        (mx.array([[70, 71], [72, 73]]), "one list of token ids, not 2"),
        ("caf\udce9", "must be UTF-8 text; what comes after 'caf'"),
    ],
)
def test_what_is_no_prompt_is_refused(loaded: tuple[Engine, Any], prompt: Any, words: str) -> None:
    with pytest.raises(RequestError) as error:
        generate(*loaded, prompt, max_tokens=2)
    assert words in str(error.value)
    assert loaded[0].target.pool.pages_in_use == 0


def test_a_tokenizer_of_transformers_is_taken_as_in_mlx_lm(loaded: tuple[Engine, Any], plain_text: str) -> None:
    engine, tokenizer = loaded
    assert generate(engine, tokenizer._tokenizer, PROMPT, max_tokens=TOKENS) == plain_text
    with pytest.raises(RequestError, match="A tokenizer of .* or transformers is needed, not 'x'"):
        generate(engine, "x", PROMPT)


@pytest.mark.parametrize("n", [None, 1, 3])
@pytest.mark.parametrize("depth", [0, None])
def test_a_full_cache_ends_a_text_by_length(
    folder: Any, drafter_folder: str, loaded: tuple[Engine, Any], n: int | None, depth: int | None
) -> None:
    """As a full context does; what was said until then is the text that a larger cache begins with."""
    small = load(str(folder), None if depth == 0 else drafter_folder, max_cached_tokens=64)[0]
    options: dict[str, Any] = dict(temp=0.8, num_draft_tokens=depth)
    whole = generate(*loaded, PROMPT, n=3, max_tokens=200, **options)
    said, last = [""] * 3, dict[int, GenerationResponse]()
    for response in stream_generate(small, loaded[1], PROMPT, n=n, max_tokens=-1, **options):
        said[response.index] += response.text
        last[response.index] = response
    assert {response.finish_reason for response in last.values()} == {"length"}
    assert len(last) == (n or 1)
    for index in last:
        assert said[index] and whole[index].startswith(said[index])
    if n != 3:
        assert last[0].prompt_tokens + last[0].generation_tokens == 65
    assert small.target.pool.pages_in_use == 0


def test_a_text_that_ends_in_a_round_without_tokens_has_a_last_response(
    folder: Any, drafter_folder: str, loaded: tuple[Engine, Any], plain_text: str
) -> None:
    """Another sequence takes the pages that it would need; what a stop string held back comes with the reason."""
    small, tokenizer = load(str(folder), drafter_folder, max_cached_tokens=96)[0], loaded[1]
    options: dict[str, Any] = dict(stop=plain_text[:-1] + "|", num_draft_tokens=0, max_tokens=TOKENS)
    stream, found = stream_generate(small, tokenizer, PROMPT, **options), list[GenerationResponse]()
    while len(tokenizer.encode(PROMPT)) + len(found) < 33:
        found.append(next(stream))
    other = small.start(Request([70] * 34, 5))
    small.read(other)
    *rest, last = stream
    found += rest
    assert {response.finish_reason for response in found} == {None} and "".join(r.text for r in found) == ""
    assert (last.token, last.finish_reason, last.logprob) == (None, "length", None) and not last.from_draft
    assert plain_text.startswith(last.text) and last.text
    assert last.generation_tokens == last.statistics.tokens == len(found) == found[-1].generation_tokens
    small.close(other)
    assert small.target.pool.pages_in_use == 0


def test_a_text_ends_once(loaded: tuple[Engine, Any]) -> None:
    """Whatever ended it, and however often its empty rounds are shown."""
    engine, tokenizer = loaded
    for end in (engine.cancel, lambda generation: setattr(generation, "finish_reason", "length")):
        text = TextStream(tokenizer)
        generation = engine.start(text_request(tokenizer, PROMPT, text, num_draft_tokens=3))
        engine.read(generation)
        found = list(responses_of(generation, engine.step(generation), text))
        end(generation)
        (last,) = responses_of(generation, engine.step(generation), text)
        assert found[-1].finish_reason is None and last.finish_reason == generation.finish_reason
        assert list(responses_of(generation, engine.step(generation), text)) == []
        engine.close(generation)


def test_a_prompt_that_does_not_fit_is_an_error(folder: Any, loaded: tuple[Engine, Any]) -> None:
    small = load(str(folder), None, max_cached_tokens=32)[0]
    for size, n in ((33, 1), (34, 1), (100, 1), (20, 3)):
        with pytest.raises(ContextFull):
            generate(small, loaded[1], [*range(20, 20 + size)], n=n)
    assert small.target.pool.pages_in_use == 0


@pytest.mark.parametrize("prompt", ["", [], mx.array([], dtype=mx.int32), [5000], [-1]])
def test_a_prompt_without_known_tokens_is_refused(loaded: tuple[Engine, Any], prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        generate(*loaded, prompt)


@pytest.mark.parametrize("after", [1, 2, 11])
def test_closing_in_mid_generation_frees_all_pages(loaded: tuple[Engine, Any], after: int) -> None:
    responses = stream_generate(*loaded, PROMPT * 4, max_tokens=400)
    for _ in range(after):
        last = next(responses)
    assert last.finish_reason is None
    assert loaded[0].target.pool.pages_in_use > 0
    responses.close()
    assert loaded[0].target.pool.pages_in_use == 0


def test_an_error_of_the_caller_in_prefill_frees_all_pages(loaded: tuple[Engine, Any]) -> None:
    def fail(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(*loaded, PROMPT * 4, prefill_step_size=8, prompt_progress_callback=fail)
    assert loaded[0].target.pool.pages_in_use == 0


@pytest.mark.parametrize("size", [1, 2, 17, 50])
def test_progress_is_reported_as_in_mlx_lm(size: int, folder: Any, loaded: tuple[Engine, Any]) -> None:
    ours, theirs, prompt = list[tuple[int, int]](), list[tuple[int, int]](), [*range(20, 20 + size)]
    options: dict[str, Any] = dict(max_tokens=1, prefill_step_size=16)
    generate(*loaded, prompt, prompt_progress_callback=lambda *at: ours.append(at), **options)
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    mlx_lm.generate(
        model, tokenizer, prompt, prompt_progress_callback=lambda *at: theirs.append(at), verbose=False, **options
    )
    assert ours == theirs
    assert ours[0] == (0, size) and ours[-1] == (size, size)


def test_progress_reaches_the_prompt(loaded: tuple[Engine, Any]) -> None:
    calls: list[tuple[int, int]] = []
    tokens = loaded[1].encode(PROMPT * 6)
    generate(
        *loaded,
        tokens,
        max_tokens=1,
        prefill_step_size=16,
        prompt_progress_callback=lambda *progress: calls.append(progress),
    )
    total = len(tokens)
    assert total > 32
    assert calls == [*((min(done, total - 1), total) for done in range(0, total + 15, 16)), (total, total)]


def test_from_draft_is_what_the_statistics_count(
    loaded: tuple[Engine, Any], scripted: Callable[..., Engine]
) -> None:
    responses = list(stream_generate(scripted(mixture(3)), loaded[1], PROMPT, max_tokens=TOKENS))
    statistics = responses[-1].statistics
    drafted = sum(r.from_draft for r in responses)
    assert drafted == sum(statistics.accepted) == TOKENS - statistics.rounds
    assert 5 < drafted < TOKENS - 8


def test_nothing_is_from_the_draft_in_plain_decoding(loaded: tuple[Engine, Any]) -> None:
    responses = list(stream_generate(*loaded, PROMPT, max_tokens=9, num_draft_tokens=0))
    assert [r.from_draft for r in responses] == [False] * 9
    assert responses[-1].statistics.rounds == 9


@pytest.mark.parametrize("count", [1, 8, 9, 17])
def test_only_the_last_response_has_a_finish_reason(
    loaded: tuple[Engine, Any], scripted: Callable[..., Engine], count: int
) -> None:
    responses = list(stream_generate(scripted(always_right), loaded[1], PROMPT, max_tokens=count))
    assert [r.finish_reason for r in responses] == [None] * (count - 1) + ["length"]


def test_on_verified_sees_every_row(loaded: tuple[Engine, Any]) -> None:
    rows: list[int] = []
    options = dict(max_tokens=12, on_verified=lambda sequence, tokens, logits: rows.append(logits.shape[0]))
    statistics = list(stream_generate(*loaded, PROMPT, **options))[-1].statistics
    assert len(rows) == statistics.rounds
    assert sum(rows) == statistics.rounds + sum(statistics.drafted)


def test_verbose_prints_text_and_summary(loaded: tuple[Engine, Any], capsys: pytest.CaptureFixture[str]) -> None:
    text = generate(*loaded, PROMPT, verbose=True, max_tokens=TOKENS)
    out, err = capsys.readouterr()
    answer, summary = out.split(f"\n{'=' * 10}\n")
    assert answer == text
    assert summary.splitlines()[0].startswith(f"Prompt: {len(loaded[1].encode(PROMPT))} tokens, ")
    assert f"Generation: {TOKENS} tokens" in summary
    assert summary.splitlines()[-1].startswith("Peak memory: ")
    assert err == ""


def test_not_verbose_prints_nothing(loaded: tuple[Engine, Any], capsys: pytest.CaptureFixture[str]) -> None:
    generate(*loaded, PROMPT, max_tokens=4)
    assert capsys.readouterr() == ("", "")


def test_the_seed_decides_a_sampled_text(loaded: tuple[Engine, Any]) -> None:
    def sampled(seed: int, **options: Any) -> str:
        return generate(*loaded, PROMPT, max_tokens=24, temp=0.9, top_k=20, seed=seed, **options)

    assert sampled(5) == sampled(5) == sampled(5, num_draft_tokens=0)
    assert len({sampled(seed) for seed in range(3)}) == 3


def test_responses_cannot_be_changed(loaded: tuple[Engine, Any]) -> None:
    response = next(iter(list(stream_generate(*loaded, PROMPT, max_tokens=1))))
    with pytest.raises(AttributeError):
        response.text = "other"  # type: ignore[misc]
    assert replace(response, text="other").token == response.token


def test_n_texts_are_those_of_their_seeds(loaded: tuple[Engine, Any]) -> None:
    options = dict(max_tokens=20, temp=0.9, top_p=0.95)
    alone = [generate(*loaded, PROMPT, seed=seed, num_draft_tokens=0, **options) for seed in (4, 5, 6)]
    assert generate(*loaded, PROMPT, n=3, seed=4, **options) == alone
    assert len(set(alone)) == 3
    assert generate(*loaded, PROMPT, n=1, seed=4, **options) == alone[:1]
    responses = list(stream_generate(*loaded, PROMPT, n=3, seed=4, **options))
    for index, text in enumerate(alone):
        own = [response for response in responses if response.index == index]
        assert "".join(response.text for response in own) == text
        assert [response.generation_tokens for response in own] == list(range(1, len(own) + 1))
        assert own[-1].finish_reason is not None
    assert loaded[0].target.pool.pages_in_use == 0


def test_n_texts_end_on_their_own(loaded: tuple[Engine, Any]) -> None:
    options = dict(max_tokens=20, temp=0.9, stop=[" "])
    alone = [generate(*loaded, PROMPT, seed=seed, **options) for seed in range(3)]
    assert generate(*loaded, PROMPT, n=3, **options) == alone
    with pytest.raises(RequestError, match="n must be at least 1, not 0"):
        generate(*loaded, PROMPT, n=0)


@pytest.mark.parametrize("kernels", ["stock", None])
@pytest.mark.parametrize("options", [{}, {"temp": 0.8, "seed": 3, "top_k": 9, "repetition_penalty": 1.2}])
def test_log_probabilities_are_those_of_plain_decoding_and_of_mlx_lm(
    loaded: tuple[Engine, Any], kernels: Implementation | None, options: dict[str, Any]
) -> None:
    """Bit for bit with drafts and without; equal to rounding to what mlx-lm reports for the same tokens."""
    engine, tokenizer = Engine(loaded[0].target, loaded[0].drafter, kernels=kernels), loaded[1]
    options = {**options, "max_tokens": 12, "top_logprobs": 4}
    drafted = list(stream_generate(engine, tokenizer, PROMPT, **options))
    plain = list(stream_generate(engine, tokenizer, PROMPT, num_draft_tokens=0, **options))
    assert [r.token for r in drafted] == [r.token for r in plain]
    for ours, alone in zip(drafted, plain, strict=True):
        assert (ours.logprob, ours.top_logprobs) == (alone.logprob, alone.top_logprobs)
        assert ours.logprobs is not None and mx.array_equal(ours.logprobs, alone.logprobs)
        assert ours.logprobs[ours.token].item() == ours.logprob
        best = np.argsort(-np.array(ours.logprobs), kind="stable")[:4].tolist()
        assert [token for token, _ in ours.top_logprobs] == best
        assert [ours.logprobs[token].item() for token in best] == [value for _, value in ours.top_logprobs]
    tokens = [r.token for r in drafted]
    follow = iter([*tokens, 0])
    penalty = {"repetition_penalty": 1.2} if options.get("repetition_penalty") else {}
    theirs = mlx_lm.stream_generate(
        engine.target.model,
        tokenizer,
        tokenizer.encode(PROMPT),
        max_tokens=12,
        sampler=lambda scores: mx.array([next(follow, 0)]),
        logits_processors=make_logits_processors(**penalty),
    )
    for ours, their in zip(drafted, theirs, strict=True):
        assert their.token == ours.token
        expected = np.array(their.logprobs.astype(mx.float32))
        close = NEAR_TIE if kernels == "stock" else OTHER_SUMS
        np.testing.assert_allclose(np.array(ours.logprobs), expected, atol=close)


def test_log_probabilities_are_left_out_where_nobody_asks(loaded: tuple[Engine, Any]) -> None:
    response = next(iter(stream_generate(*loaded, PROMPT, max_tokens=1)))
    assert (response.logprob, response.logprobs, response.top_logprobs) == (None, None, [])
    response = next(iter(stream_generate(*loaded, PROMPT, max_tokens=1, logprobs=True)))
    assert response.logprob is not None and response.logprob < 0 and response.top_logprobs == []
    with pytest.raises(RequestError, match="top_logprobs must lie between 0 and 16, not 17"):
        generate(*loaded, PROMPT, top_logprobs=17)
