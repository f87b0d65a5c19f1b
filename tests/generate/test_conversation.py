"""Conversations: each reply is the one that stream_generate gives for the whole chat so far."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_folders import write_dflash2, write_model

from mlx_spec import Conversation, Engine, load, stream_generate
from mlx_spec.errors import ContextFull, RequestError
from mlx_spec.generate import TextStream, chat_prompt, responses, text_request

HELLO = [{"role": "user", "content": "then the other"}]
TOKENS = 24
Loaded = tuple[Engine, Any]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A tiny target with a random DFlash 2 drafter."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_SPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        return load(str(write_model(folder / "llama")), str(write_dflash2(folder / "dflash2")))


@pytest.fixture(autouse=True)
def pages_come_back(loaded: Loaded) -> Iterator[None]:
    before = loaded[0].target.pool.pages_in_use
    yield
    gc.collect()
    assert loaded[0].target.pool.pages_in_use == before


def text_of(found: Any) -> str:
    return "".join(response.text for response in found)


def cold(loaded: Loaded, messages: list[dict[str, str]], **options: Any) -> str:
    """Return the reply to a whole chat, computed from its start."""
    prompt = chat_prompt(loaded[1], messages)
    return text_of(stream_generate(*loaded, prompt, **{"max_tokens": TOKENS, **options}))


def answered(messages: list[dict[str, str]], reply: str, next_message: str) -> list[dict[str, str]]:
    return [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": next_message}]


@pytest.mark.parametrize(
    "options", [{}, {"temp": 0.9, "seed": 3}, {"num_draft_tokens": 0}, {"stop": ["e", "the"]}]
)
def test_every_reply_is_the_one_of_the_whole_chat(loaded: Loaded, options: dict[str, Any]) -> None:
    messages = HELLO
    with Conversation(*loaded) as conversation:
        for turn in range(4):
            reply = text_of(conversation.stream(messages, max_tokens=TOKENS, **options))
            assert reply == cold(loaded, messages, **options), turn
            messages = answered(messages, reply, f"an in {turn}")


def test_a_turn_reads_only_what_is_new(loaded: Loaded) -> None:
    """Whole chunks of the prompt before; the answer and what follows are read again."""
    messages, cached = HELLO * 3, []
    with Conversation(*loaded) as conversation:
        for _ in range(3):
            found = list(conversation.stream(messages, max_tokens=TOKENS, prefill_step_size=8))
            cached.append(found[-1].statistics.cached_tokens)
            assert text_of(found) == cold(loaded, messages, prefill_step_size=8)
            before = len(chat_prompt(loaded[1], messages)) - 1
            messages = answered(messages, text_of(found), "an inn")
        assert cached[0] == 0 and 0 < cached[1] < cached[2] <= before // 8 * 8
    assert all(count % 8 == 0 for count in cached)


def test_without_exactness_replies_are_shared_too(loaded: Loaded, tmp_path: Path) -> None:
    engine, tokenizer = load(str(write_model(tmp_path / "llama")), None, exact=False)
    with Conversation(engine, tokenizer) as conversation:
        reply = list(conversation.stream(HELLO, max_tokens=TOKENS))
        told = [*chat_prompt(tokenizer, HELLO), *(response.token for response in reply)]
        second = list(conversation.stream([*told, *tokenizer.encode("an inn")], max_tokens=TOKENS))
    assert second[-1].statistics.cached_tokens == len(told) - 1


def test_log_probabilities_and_counts_are_those_of_stream_generate(loaded: Loaded) -> None:
    options: dict[str, Any] = {"max_tokens": TOKENS, "top_logprobs": 2, "logprobs": True}
    with Conversation(*loaded) as conversation:
        ours = list(conversation.stream(HELLO, **options))
    theirs = list(stream_generate(*loaded, chat_prompt(loaded[1], HELLO), **options))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token, one.text, one.logprob) == (other.token, other.text, other.logprob)
        assert (one.top_logprobs, one.finish_reason) == (other.top_logprobs, other.finish_reason)
    assert ours[-1].prompt_tokens == theirs[-1].prompt_tokens


def test_earlier_messages_may_be_changed_dropped_or_rendered_otherwise(loaded: Loaded) -> None:
    first = text_of(stream_generate(*loaded, chat_prompt(loaded[1], HELLO), max_tokens=TOKENS))
    chat = answered(HELLO, first, "and an inn")
    changed = answered([{"role": "user", "content": "then another"}], first, "and an inn")
    with Conversation(*loaded) as conversation:
        for messages in (HELLO, chat, changed, HELLO, answered(HELLO, first.upper(), "in")):
            assert text_of(conversation.stream(messages, max_tokens=TOKENS)) == cold(loaded, messages)


def test_a_turn_may_be_text_or_token_ids(loaded: Loaded) -> None:
    with Conversation(*loaded) as conversation:
        for prompt in ("then the other", loaded[1].encode("then the other man")):
            expected = text_of(stream_generate(*loaded, prompt, max_tokens=TOKENS))
            assert text_of(conversation.stream(prompt, max_tokens=TOKENS)) == expected


@pytest.mark.parametrize("how", ["close", "collect", "keep"])
def test_a_reply_that_is_left_is_cut_and_the_chat_goes_on(loaded: Loaded, how: str) -> None:
    with Conversation(*loaded) as conversation:
        reading = conversation.stream(HELLO, max_tokens=TOKENS)
        begun = next(reading).text + next(reading).text
        if how == "close":
            reading.close()
        elif how == "collect":
            del reading
            gc.collect()
        messages = answered(HELLO, begun, "go on")
        assert text_of(conversation.stream(messages, max_tokens=TOKENS)) == cold(loaded, messages)
        if how == "keep":
            assert all(response.finish_reason is None for response in reading)


def test_an_interruption_leaves_the_conversation_usable(loaded: Loaded) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with Conversation(*loaded) as conversation:
        with pytest.raises(KeyboardInterrupt):
            list(conversation.stream(HELLO, max_tokens=TOKENS, on_verified=interrupt))
        with pytest.raises(KeyboardInterrupt):
            list(conversation.stream(HELLO, max_tokens=TOKENS, prompt_progress_callback=interrupt))
        assert text_of(conversation.stream(HELLO, max_tokens=TOKENS)) == cold(loaded, HELLO)


def test_one_generation_is_kept_and_given_back(loaded: Loaded) -> None:
    pool = loaded[0].target.pool
    before = pool.pages_in_use
    conversation = Conversation(*loaded)
    for _ in range(3):
        list(conversation.stream(HELLO, max_tokens=TOKENS))
    kept = pool.pages_in_use
    assert kept > before
    list(conversation.stream(HELLO, max_tokens=TOKENS))
    assert pool.pages_in_use == kept
    conversation.close()
    conversation.close()
    assert pool.pages_in_use == before
    assert text_of(conversation.stream(HELLO, max_tokens=TOKENS)) == cold(loaded, HELLO)
    conversation.close()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens must be positive"),
    ({"num_draft_tokens": 99}, "drafts at most"),
    ({"stop": 3}, "stop takes a string"),
    ({"tmp": 1.0}, "There is no option tmp="),
    ({"temp": -1.0}, "temp"),
    ({"logit_bias": {1 << 20: 1.0}}, "logit_bias"),
    ({"prompt_cache": []}, "use a Conversation"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[next(iter(options)) for options, _ in WRONG])
def test_wrong_options_are_refused_at_the_call(loaded: Loaded, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        stream_generate(*loaded, "then", **options)
    with pytest.raises(RequestError, match=message):
        Conversation(*loaded).stream("then", **options)


def test_what_no_turn_can_take_is_refused_at_the_call(loaded: Loaded) -> None:
    conversation = Conversation(*loaded)
    with pytest.raises(RequestError, match="one reply a turn"):
        conversation.stream(HELLO, n=2)
    with pytest.raises(RequestError, match="empty"):
        conversation.stream([])
    with pytest.raises(ContextFull, match="Shorten the prompt"):
        conversation.stream([5] * 100_000)
    with pytest.raises(RequestError, match="half|UTF-8"):
        conversation.stream([{"role": "user", "content": "\ud800"}])
    with pytest.raises(RequestError, match="template refuses the messages"):
        conversation.stream([{"content": "no role"}])
    with pytest.raises(RequestError, match="tokenizer"):
        Conversation(loaded[0], 3)


def test_a_conversation_hands_arguments_to_the_template(loaded: Loaded) -> None:
    opened = chat_prompt(loaded[1], HELLO, opening="Oh, ")
    with Conversation(*loaded, opening="Oh, ") as conversation:
        expected = text_of(stream_generate(*loaded, opened, max_tokens=TOKENS))
        assert text_of(conversation.stream(HELLO, max_tokens=TOKENS)) == expected


def test_messages_need_a_template(loaded: Loaded, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain")
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"chat_template"', '"no_template"'))
    engine, tokenizer = load(str(folder), None, exact=False)
    with pytest.raises(RequestError, match="needs a model with a chat template"):
        Conversation(engine, tokenizer).stream(HELLO)
    assert chat_prompt(tokenizer, HELLO, chat_template=loaded[1].chat_template) == chat_prompt(loaded[1], HELLO)


@pytest.mark.parametrize("stop", [(), "e", ["he", "n"]])
def test_a_backend_gets_the_same_text_from_rounds(loaded: Loaded, stop: Any) -> None:
    """What turns the rounds of an engine into text is public."""
    engine, tokenizer = loaded
    prompts = [chat_prompt(tokenizer, [{"role": "user", "content": text}]) for text in ("then", "an inn", "other")]
    texts = [TextStream(tokenizer, stop) for _ in prompts]
    requests = [text_request(tokenizer, *pair, max_tokens=TOKENS) for pair in zip(prompts, texts, strict=True)]
    running = [engine.start(request) for request in requests]
    found = ["" for _ in running]
    while any(generation.finish_reason is None for generation in running):
        for index, done in enumerate(engine.step(running)):
            found[index] += text_of(responses(running[index], done, texts[index]))
    for generation in running:
        engine.close(generation)
    assert found == [text_of(stream_generate(*loaded, p, max_tokens=TOKENS, stop=stop)) for p in prompts]
