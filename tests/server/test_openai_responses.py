"""Responses, driven by OpenAI's own client."""

import json
from typing import Any

import openai
import pytest
from served import CONTEXT

FIELDS: dict[str, Any] = {"model": "tiny", "input": "The target ", "max_output_tokens": 24}
TOOL: Any = {
    "type": "function",
    "name": "read",
    "description": "Read a file.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"enum": ["a.txt", "b.txt"]}},
        "required": ["path"],
        "additionalProperties": False,
    },
    "strict": False,
}
SEARCH: Any = {"type": "web_search", "external_web_access": True}


def items(response: Any) -> list[dict[str, Any]]:
    """Return what came out, without ids."""
    return [
        {key: value for key, value in item.to_dict().items() if key not in ("id", "call_id")}
        for item in response.output
    ]


def test_the_reply_is_that_of_chat_completions(client: openai.OpenAI) -> None:
    response = client.responses.create(**FIELDS)
    messages: Any = [{"role": "user", "content": "The target "}]
    reply = client.chat.completions.create(model="tiny", messages=messages, max_tokens=24)
    assert response.output_text == reply.choices[0].message.content
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None and reply.usage is not None
    assert response.usage.input_tokens == reply.usage.prompt_tokens
    assert response.usage.output_tokens == reply.usage.completion_tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "top_p": 0.9, "extra_body": {"seed": 7}},
        {
            "instructions": "Be brief.",
            "input": [{"role": "developer", "content": "Now."}, {"role": "user", "content": "A"}],
        },
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 60},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"enum": ["yes", "no"]}}}},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ],
    ids=lambda options: ",".join(options),
)
def test_the_same_with_and_without_drafts_and_as_a_stream(client: openai.OpenAI, options: dict[str, Any]) -> None:
    more = options.get("extra_body", {})
    options = {**FIELDS, **options}
    plain = client.responses.create(**{**options, "extra_body": {**more, "draft": False}})
    drafted = client.responses.create(**{**options, "extra_body": {**more, "num_draft_tokens": 3}})
    events: Any = list(client.responses.create(**{**options, "extra_body": more}, stream=True))
    streamed = events[-1].response
    for other in (drafted, streamed):
        assert items(other) == items(plain)
        assert other.status == plain.status and other.usage is not None and plain.usage is not None
        assert other.usage.output_tokens == plain.usage.output_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events][:3] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]


def test_a_tool_round_trip(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "name": "read"}
    response = client.responses.create(**{**FIELDS, "max_output_tokens": 100}, tools=[TOOL], tool_choice=choice)
    (call,) = response.output
    assert call.type == "function_call" and json.loads(call.arguments)["path"] in ("a.txt", "b.txt")
    history = [
        {"role": "user", "content": "Read a.txt."},
        call.to_dict(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "red"},
    ]
    assert client.responses.create(**{**FIELDS, "input": history}, tools=[TOOL]).output_text


def test_what_codex_sends(client: openai.OpenAI) -> None:
    response = client.responses.create(
        **FIELDS,
        instructions="You are an agent.",
        tools=[TOOL, {"type": "namespace", "name": "agents", "description": "x", "tools": [TOOL]}, SEARCH],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        extra_body={"client_metadata": {"a": "b"}},
    )
    assert response.output_text
    notes = " ".join(response.model_extra["speculation"]["notes"])  # type: ignore[index]
    assert "reasoning.summary" in notes and "tools.2" in notes


def test_a_function_in_a_namespace(client: openai.OpenAI) -> None:
    """It is called by both names, there and back."""
    space: Any = {"type": "namespace", "name": "files", "description": "Of files.", "tools": [TOOL]}
    response = client.responses.create(
        **{**FIELDS, "max_output_tokens": 100}, tools=[space], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = response.output
    assert call.type == "function_call" and (call.namespace, call.name) == ("files", "read")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "red"}
    history = [{"role": "user", "content": "Read a.txt."}, call.to_dict(), result]
    assert client.responses.create(**{**FIELDS, "input": history}, tools=[space]).output_text


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "file_search"}]}, "tools.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": []}, "input"),
        ({"input": "x" * 2 * CONTEXT}, "input"),
        ({"include": ["file_search_call.results"]}, "include.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_named(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{**FIELDS, **options})
    assert caught.value.param == param
