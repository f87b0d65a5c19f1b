"""Messages, driven by Anthropic's own client."""

from typing import Any

import anthropic
import openai
import pytest
from served import CONTEXT

HELLO: list[Any] = [{"role": "user", "content": "The target "}]
FIELDS: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 24}
TOOL: Any = {
    "name": "read",
    "description": "Read a file.",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"enum": ["a.txt", "b.txt"]}},
        "required": ["path"],
        "additionalProperties": False,
    },
}
ANY: Any = {"type": "any", "disable_parallel_tool_use": True}


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_the_reply_is_that_of_chat_completions(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    message = claude.messages.create(**FIELDS)
    reply = client.chat.completions.create(**FIELDS)
    assert reply.usage is not None
    assert text_of(message) == reply.choices[0].message.content
    assert message.stop_reason == "max_tokens"
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == reply.usage.prompt_tokens
    assert message.usage.output_tokens == reply.usage.completion_tokens
    assert message.model_extra["speculation"]["rounds"] > 0  # type: ignore[index]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop_sequences": ["e", "qqqq"]},
        {"extra_body": {"temperature": 0.8, "top_p": 0.9, "seed": 7, "top_k": 40}},
        {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
        {"tools": [TOOL], "tool_choice": ANY, "max_tokens": 100},
        {"output_config": {"format": {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}}},
    ],
    ids=lambda options: ",".join(options),
)
def test_the_same_with_and_without_drafts_and_as_a_stream(
    claude: anthropic.Anthropic, options: dict[str, Any]
) -> None:
    more = options.get("extra_body", {})
    options = {**FIELDS, **options}
    plain = claude.messages.create(**{**options, "extra_body": {**more, "draft": False}})
    drafted = claude.messages.create(**{**options, "extra_body": {**more, "num_draft_tokens": 3}})
    with claude.messages.stream(**{**options, "extra_body": more}) as stream:
        streamed = stream.get_final_message()
    for other in (drafted, streamed):
        assert [without_id(block) for block in other.content] == [without_id(block) for block in plain.content]
        assert (other.stop_reason, other.stop_sequence) == (plain.stop_reason, plain.stop_sequence)
        assert other.usage.output_tokens == plain.usage.output_tokens
        assert prompt_tokens(other) == prompt_tokens(plain)


def prompt_tokens(message: anthropic.types.Message) -> int:
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def without_id(block: Any) -> dict[str, Any]:
    return {key: value for key, value in block.to_dict().items() if key != "id"}


def test_a_stop_sequence_is_named(claude: anthropic.Anthropic) -> None:
    whole = text_of(claude.messages.create(**FIELDS))
    letter = next(character for character in whole if character.isalpha())
    message = claude.messages.create(**FIELDS, stop_sequences=["\x00never", letter])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", letter)
    assert (
        text_of(message) == whole[: whole.index(letter)].rstrip()
        or text_of(message) == whole[: whole.index(letter)]
    )


def test_a_tool_round_trip(claude: anthropic.Anthropic) -> None:
    """The model must call, gets the result, and goes on."""
    message = claude.messages.create(
        **{**FIELDS, "max_tokens": 100}, tools=[TOOL], tool_choice={"type": "tool", "name": "read"}
    )
    (call,) = message.content
    assert call.type == "tool_use" and call.input["path"] in ("a.txt", "b.txt")  # type: ignore[index]
    assert message.stop_reason == "tool_use" and call.id.startswith("toolu_")
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "red"}]}
    history = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(**{**FIELDS, "messages": history}, tools=[TOOL]).stop_reason == "max_tokens"


def test_count_tokens_is_what_a_reply_counts(claude: anthropic.Anthropic) -> None:
    asked: Any = {"messages": HELLO, "system": "Be brief.", "tools": [TOOL]}
    counted = claude.messages.count_tokens(model="tiny", **asked).input_tokens
    used = claude.messages.create(model="tiny", max_tokens=1, **asked).usage
    assert counted == used.input_tokens + (used.cache_read_input_tokens or 0)
    assert counted > claude.messages.count_tokens(model="tiny", messages=HELLO).input_tokens


def test_what_claude_code_sends(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(
        **{**FIELDS, "max_tokens": 32000},
        thinking={"type": "adaptive"},
        metadata={"user_id": "u"},
        stop_sequences=["e"],
        extra_headers={"anthropic-beta": "claude-code-20250219,anything-else"},
        extra_query={"beta": "true"},
        extra_body={
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
        },
    )
    block: Any = message.model_extra["speculation"]  # type: ignore[index]
    assert block["clamped_max_tokens"]["asked"] == 32000
    assert any("reasoning_effort" in note for note in block["notes"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temperature": 3}}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tool_choice": {"type": "tool", "name": "none"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses"}]}}}, "context_management"),
        ({"extra_body": {"mcp_servers": []}}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": "x" * 2 * CONTEXT}]}, f"tokens > {CONTEXT} maximum"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_named(claude: anthropic.Anthropic, options: dict[str, Any], named: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(**{**FIELDS, **options})
    body: Any = caught.value.body
    assert named in body["error"]["message"] and body["error"]["type"] == "invalid_request_error"
    assert body["type"] == "error" and body["request_id"] == caught.value.request_id


def test_another_model_is_not_found(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**{**FIELDS, "model": "claude-opus-5"})
