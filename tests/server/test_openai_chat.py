"""Chat completions, driven by OpenAI's own client."""

import json
import threading
import time
from typing import Any

import openai
import pytest
from served import CONTEXT, Served

from mlx_spec import stream_generate
from mlx_spec.generate import chat_prompt

HELLO: list[Any] = [{"role": "user", "content": "The target "}]
FIELDS: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 24}


def text_of(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_a_reply_is_what_the_library_generates(client: openai.OpenAI, served: Served) -> None:
    reply = client.chat.completions.create(**FIELDS)
    served.wait_until_idle()
    prompt = chat_prompt(served.tokenizer, HELLO)
    found = list(stream_generate(served.engine, served.tokenizer, prompt, max_tokens=24))
    assert reply.choices[0].message.content == "".join(response.text for response in found)
    assert reply.choices[0].finish_reason == found[-1].finish_reason
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), len(found))


def test_a_stream_is_the_whole_reply_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**FIELDS)
    chunks = list(client.chat.completions.create(**FIELDS, stream=True, stream_options={"include_usage": True}))
    first, *middle, last, used = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.role is None for chunk in (*middle, last))
    assert all(chunk.choices[0].finish_reason is None and chunk.usage is None for chunk in (first, *middle))
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert text_of(chunks) == whole.choices[0].message.content
    assert used.object == "chat.completion.chunk" and used.choices == []
    assert used.usage == whole.usage


@pytest.mark.parametrize(
    "options",
    [
        {"stop": ["e"]},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0.9, "seed": 5, "n": 3, "top_p": 0.9},
        {"temperature": 1.5, "seed": 2**62, "extra_body": {"top_k": 20, "min_p": 0.01}},
        {"logprobs": True, "top_logprobs": 3},
        {"logit_bias": {"100": 5, "101": -100}, "presence_penalty": 1.0, "frequency_penalty": -0.5},
        {"extra_body": {"repetition_penalty": 1.3, "repetition_context_size": 8}},
        {"extra_body": {"xtc_probability": 0.5, "xtc_threshold": 0.1}, "temperature": 1, "seed": 1},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"chat_template_kwargs": {"opening": "The "}}},
    ],
    ids=lambda options: ",".join(options),
)
def test_the_same_with_and_without_drafts(client: openai.OpenAI, options: dict[str, Any]) -> None:
    """The reply, its log-probabilities and its end do not depend on drafting, nor on being streamed."""
    more = options.get("extra_body", {})
    options = {**FIELDS, **options}
    plain = client.chat.completions.create(**{**options, "extra_body": {**more, "draft": False}})
    drafted = client.chat.completions.create(**{**options, "extra_body": {**more, "num_draft_tokens": 3}})
    assert drafted.choices == plain.choices
    assert drafted.usage == plain.usage
    block: Any = drafted.model_extra["speculation"]  # type: ignore[index]
    assert block["drafted"] > 0 and plain.model_extra["speculation"]["drafted"] == 0  # type: ignore[index]
    assert sum(source["drafted"] for source in block["drafted_by"].values()) == block["drafted"]
    texts = [""] * options.get("n", 1)
    for chunk in client.chat.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in plain.choices]


def test_drafts_are_accepted_and_counted(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**FIELDS, extra_body={"num_draft_tokens": 3})
    block: Any = reply.model_extra["speculation"]  # type: ignore[index]
    assert block["tokens"] == 24 and block["rounds"] < 24
    assert block["accepted"] == sum(block["accepted_by_position"]) > 0
    assert block["drafted"] == sum(block["drafted_by_position"])
    assert sum(block["rounds_by_depth"].values()) == block["rounds"]
    assert block["exact"] in (True, False) and block["exact_reason"]


def test_log_probabilities(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**FIELDS, logprobs=True, top_logprobs=2)
    assert reply.choices[0].logprobs is not None and reply.choices[0].logprobs.content is not None
    content = reply.choices[0].logprobs.content
    text = b"".join(bytes(entry.bytes or []) for entry in content).decode()
    assert text == reply.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob >= entry.top_logprobs[1].logprob


def test_a_schema_is_kept(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"day": {"enum": ["Monday", "Friday"]}, "hour": {"type": "integer", "maximum": 23}},
        "required": ["day", "hour"],
        "additionalProperties": False,
    }
    described: Any = {"type": "json_schema", "json_schema": {"name": "time", "schema": schema, "strict": True}}
    reply = client.chat.completions.create(**{**FIELDS, "max_tokens": 200}, response_format=described)
    assert reply.choices[0].finish_reason == "stop"
    assert json.loads(reply.choices[0].message.content or "")["day"] in ("Monday", "Friday")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 17}, "top_logprobs"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1e39}}, "logit_bias"),
        ({"extra_body": {"repetition_penalty": 1e-300}}, "repetition_penalty"),
        ({"n": 17}, "n"),
        ({"store": True}, "store"),
        ({"stop": [""]}, "stop"),
        ({"modalities": ["audio"]}, "modalities.0"),
        ({"audio": {"voice": "ash", "format": "wav"}}, "audio"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
            "response_format",
        ),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages.0.colour"),
        ({"extra_body": {"num_draft_tokens": 99}}, "num_draft_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_named(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**FIELDS, **options})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_a_prompt_that_is_too_long(client: openai.OpenAI) -> None:
    """In the sentence by which agents know that they have to compact."""
    long = {**FIELDS, "messages": [{"role": "user", "content": "x" * 2 * CONTEXT}]}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**long)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    assert f"maximum context length is {CONTEXT} tokens. However, your messages resulted in" in str(caught.value)


def test_a_limit_beyond_the_room_is_clamped_and_said(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**{**FIELDS, "max_tokens": 10**6}, stop=" ")
    block: Any = reply.model_extra["speculation"]  # type: ignore[index]
    assert block["clamped_max_tokens"]["asked"] == 10**6
    assert block["clamped_max_tokens"]["used"] <= CONTEXT


def test_null_is_absent_and_hints_are_taken(client: openai.OpenAI) -> None:
    nulls = dict.fromkeys(
        ("temperature", "top_p", "seed", "stop", "tools", "tool_choice", "response_format", "audio")
    )
    hints: dict[str, Any] = {"user": "u", "metadata": {"a": "b"}, "store": False, "prompt_cache_key": "k"}
    plain = client.chat.completions.create(**FIELDS)
    assert client.chat.completions.create(**FIELDS, extra_body={**nulls, **hints}).choices == plain.choices


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**{**FIELDS, "model": "gpt-5"})
    assert caught.value.code == "model_not_found"


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.model_extra) == ("tiny", {"context_length": CONTEXT, "max_model_len": CONTEXT})
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("mlx-community/Qwen3-8B-4bit")


def test_a_client_that_leaves_stops_its_reply(client: openai.OpenAI, served: Served) -> None:
    before = served.worker.counts.generated_tokens
    stream = client.chat.completions.create(**{**FIELDS, "max_tokens": 5000}, stream=True)
    next(iter(stream))
    stream.close()
    served.wait_until_idle()
    assert served.worker.counts.generated_tokens - before < 1000


def test_a_client_that_leaves_a_whole_reply_stops_it_too(client: openai.OpenAI, served: Served) -> None:
    before = served.worker.counts.generated_tokens
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(**{**FIELDS, "max_tokens": 8000})
    served.wait_until_idle()
    assert served.worker.counts.generated_tokens - before < 4000


def test_several_at_once_have_the_text_that_each_has_alone(client: openai.OpenAI) -> None:
    questions = [
        {**FIELDS, "messages": [{"role": "user", "content": f"{word} "}]} for word in ("The", "A", "This")
    ]
    alone = [client.chat.completions.create(**each).choices for each in questions]
    together: list[Any] = [None] * len(questions)

    def ask(index: int) -> None:
        together[index] = client.chat.completions.create(**questions[index]).choices

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_pages_come_back(client: openai.OpenAI, served: Served) -> None:
    for _ in range(3):
        client.chat.completions.create(**FIELDS)
    served.wait_until_idle()
    time.sleep(0.05)
    store = served.worker._store
    assert store is not None
    assert served.engine.target.pool.pages_in_use == store.pages
