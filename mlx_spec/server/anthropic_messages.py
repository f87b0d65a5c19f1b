"""Anthropic's messages: what a body asks for, and how a reply is written, whole or as a stream."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from mlx_spec.server.body import (
    Body,
    Count,
    Json,
    Sampled,
    Share,
    choice_of_tools,
    function_tool,
    json_object,
    messages_of,
    require_keys,
    require_messages,
    stops,
    text_of,
)
from mlx_spec.server.chat import ChatRequest
from mlx_spec.server.errors import bad_request
from mlx_spec.server.reply import Part
from mlx_spec.server.run import Piece, Run, speculation
from mlx_spec.server.tools import Message, Tool

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PING = 'event: ping\ndata: {"type": "ping"}\n\n'
TOOL_KEYS = {"type", "name", "description", "input_schema", "cache_control", "strict", "eager_input_streaming"}
KEEPS_ALL = "clear_thinking_20251015"


class Thinking(Body):
    """Whether the model reasons. budget_tokens is a wish, which no open model knows of."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: str | None = None


class OutputConfig(Body):
    """How much effort, and what the text must match."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Json | None = None


class ToolChoice(Body):
    """Which tools are to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class CountBody(Sampled):
    """The body of ``POST /v1/messages/count_tokens``."""

    model: str | None = None
    messages: messages_of("user", "assistant")  # type: ignore[valid-type]
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Json | None = None
    context_management: Json | None = None
    chat_template_kwargs: Json | None = None
    # Accepted, because they cannot change the text.
    cache_control: Json | None = None
    metadata: Json | None = None
    service_tier: str | None = None
    speed: str | None = None
    inference_geo: str | None = None
    diagnostics: Json | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    def asked(self) -> ChatRequest:
        """Return what is asked for. Raises ApiError."""
        self._require_nothing_cleared()
        tools = [read_tool(tool, f"tools.{i}") for i, tool in enumerate(self.tools or ())]
        choice = self.tool_choice or ToolChoice(type="auto")
        words = {"auto": "auto", "none": "none", "any": "required"}
        budget = self.thinking is not None and self.thinking.budget_tokens is not None
        return ChatRequest(
            read_messages(self.messages, self.system),
            tools=tools,
            **choice_of_tools(words.get(choice.type), choice.name, tools),
            several_calls=not choice.disable_parallel_tool_use,
            schema=self._schema(),
            template=self._template(),
            sampling=self.sampling(),
            num_draft_tokens=self.drafts(),
            schema_field="output_config.format",
            too_long="prompt is too long: {found} tokens > {most} maximum",
            notes=["thinking.budget_tokens has no effect: reasoning ends where the model ends it."]
            if budget
            else [],
        )

    def _template(self) -> Json:
        """Return arguments of the chat template; without a word on it there is no reasoning, as at Anthropic's."""
        effort = None if self.output_config is None else self.output_config.effort
        found: Json = {"enable_thinking": self.thinking is not None and self.thinking.type != "disabled"}
        if effort is not None:
            found["reasoning_effort"] = effort
        return {**found, **(self.chat_template_kwargs or {})}

    def _schema(self) -> Json | None:
        config = None if self.output_config is None else self.output_config.format
        given = config or self.output_format
        if given is None:
            return None
        if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
            raise bad_request("output_config.format takes type json_schema with a schema.", "output_config.format")
        schema: Json = given["schema"]
        return schema

    def _require_nothing_cleared(self) -> None:
        """Raise ApiError for edits of the context, but for the one that keeps everything."""
        for edit in (self.context_management or {}).get("edits", []):
            if edit.get("type") != KEEPS_ALL or edit.get("keep", "all") != "all":
                raise bad_request(
                    f"context_management cannot do {edit.get('type')!r}: send what is to be kept.",
                    "context_management",
                )


class MessagesBody(CountBody):
    """The body of ``POST /v1/messages``."""

    max_tokens: Count
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    stop_sequences: list[str] | None = None

    def asked(self) -> ChatRequest:
        """Return what is asked for. Raises ApiError."""
        asked = super().asked()
        limits: Json = {"max_tokens": self.max_tokens, "stop": stops(self.stop_sequences, "stop_sequences")}
        return ChatRequest(**{**vars(asked), **limits})


def read_messages(given: Sequence[Json], system: str | list[Json] | None) -> list[Message]:
    """Return messages for the chat template. Raises ApiError."""
    messages: list[Message] = []
    if system:
        blocks = system if isinstance(system, list) else [system]
        texts = [text_of([block], f"system.{i}") for i, block in enumerate(blocks)]
        messages.append({"role": "system", "content": "\n\n".join(texts)})
    for index, message in enumerate(given):
        messages += read_message(message, f"messages.{index}")
    require_messages(given, "messages")
    return messages


def read_message(given: Json, param: str) -> list[Message]:
    """Return one message as those for the chat template: results of tools are messages of their own there."""
    role, content = given.get("role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{param}.role must be user or assistant, not {role!r}.", f"{param}.role")
    require_keys(given, {"role", "content"}, param)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise bad_request(f"{param}.content takes text or a list of blocks.", f"{param}.content")
    if role == "assistant":
        return [read_reply(content, f"{param}.content")]
    messages: list[Message] = []
    texts: list[str] = []
    for index, block in enumerate(content):
        place = f"{param}.content.{index}"
        if isinstance(block, dict) and block.get("type") == "tool_result":
            result = text_of(block.get("content"), f"{place}.content")
            text = f"Error: {result}" if block.get("is_error") and not result.startswith("Error") else result
            messages.append({"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id", ""))})
        else:
            texts.append(text_of([block], place))
    if texts or not messages:
        messages.append({"role": role, "content": "\n".join(texts)})
    return messages


def read_reply(blocks: Sequence[Any], param: str) -> Message:
    """Return an earlier reply as a message for the chat template. Raises ApiError."""
    message: Message = {"role": "assistant", "content": ""}
    for index, block in enumerate(blocks):
        place = f"{param}.{index}"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + str(block.get("thinking", ""))
        elif kind == "tool_use":
            if not isinstance(block.get("name"), str):
                raise bad_request(f"{place}.name must be a string.", f"{place}.name")
            function = {
                "name": block["name"],
                "arguments": json_object(block.get("input") or {}, f"{place}.input"),
            }
            call = {"id": str(block.get("id", "")), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        else:
            message["content"] += text_of([block], place)
    return message


def read_tool(given: Mapping[str, Any], param: str) -> Tool:
    """Return a tool. Raises ApiError for those that Anthropic's servers run."""
    if given.get("type", "custom") != "custom":
        raise bad_request(f"{param} is of type {given['type']!r}; only tools of the client are served.", param)
    named = {**given, "defer_loading": given.get("defer_loading") or None}
    require_keys(named, TOOL_KEYS, param)
    schema = given.get("input_schema")
    if not isinstance(schema, dict):
        raise bad_request(f"{param}.input_schema must be a JSON schema.", f"{param}.input_schema")
    return function_tool({**given, "parameters": schema}, param)


class MessageWriter:
    """Writes the reply of one request as a row of content blocks."""

    def __init__(self, run: Run, model_id: str) -> None:
        """model_id: that replies name."""
        self._run = run
        self._head: Json = {"id": f"msg_{run.id}", "type": "message", "role": "assistant", "model": model_id}
        self._blocks: list[Json] = []
        self._arguments = ""
        self._end: Json = {"stop_reason": None, "stop_sequence": None}

    async def whole(self) -> Json:
        """Return the reply when it is complete."""
        async for _ in self._events():
            pass
        return {
            **self._head,
            "content": self._blocks,
            **self._end,
            "usage": self._usage(),
            "speculation": speculation([self._run]),
        }

    async def stream(self) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        message = {**self._head, "content": [], **self._end, "usage": self._usage()}
        yield event({"type": "message_start", "message": message})
        async for value in self._events():
            yield event(value)
        block = speculation([self._run])
        yield event({"type": "message_delta", "delta": self._end, "usage": self._usage(), "speculation": block})
        yield event({"type": "message_stop"})

    async def _events(self) -> AsyncIterator[Json]:
        """Yield what happens to the blocks, and keep them."""
        async for each in self._run.events():
            if isinstance(each, Piece):
                for part in each.parts:
                    for value in self._take(part):
                        yield value
            else:
                stop = each.stop_string
                reason = "stop_sequence" if stop is not None and each.reason == "stop" else REASONS[each.reason]
                self._end = {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}
        for value in self._close():
            yield value

    def _take(self, part: Part) -> Iterator[Json]:
        kind = {"text": "text", "reasoning": "thinking"}.get(part.kind, "tool_use")
        if part.kind == "call" or not self._blocks or self._blocks[-1]["type"] != kind:
            yield from self._close()
            yield self._open(kind, part)
        index, block = len(self._blocks) - 1, self._blocks[-1]
        delta: Json | None = None
        if part.kind == "text":
            block["text"] += part.text
            delta = {"type": "text_delta", "text": part.text}
        elif part.kind == "reasoning":
            block["thinking"] += part.text
            delta = {"type": "thinking_delta", "thinking": part.text}
        elif part.kind == "arguments":
            self._arguments += part.text
            delta = {"type": "input_json_delta", "partial_json": part.text}
        if delta is not None:
            yield {"type": "content_block_delta", "index": index, "delta": delta}

    def _open(self, kind: str, part: Part) -> Json:
        """Begin a block, and say so."""
        block: Json = {"type": kind}
        if kind == "tool_use":
            block |= {"id": part.call_id.replace("call_", "toolu_"), "name": part.text, "input": {}}
            self._arguments = ""
        else:
            block[kind] = ""
            if kind == "thinking":
                block["signature"] = ""
        self._blocks.append(block)
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _close(self) -> Iterator[Json]:
        """End the last block, if there is one, and say so."""
        if not self._blocks:
            return
        index, block = len(self._blocks) - 1, self._blocks[-1]
        if block["type"] == "thinking":
            delta = {"type": "signature_delta", "signature": ""}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        elif block["type"] == "tool_use":
            block["input"] = read_arguments(self._arguments)
        yield {"type": "content_block_stop", "index": index}

    def _usage(self) -> Json:
        cached = self._run.cached_tokens
        return {
            "input_tokens": self._run.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._run.generated_tokens,
        }


def read_arguments(text: str) -> Json:
    """Return the arguments of a call; of one that was cut, none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def event(value: Json) -> str:
    """Return an event of a stream."""
    return f"event: {value['type']}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n"
