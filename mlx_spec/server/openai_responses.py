"""OpenAI's responses, without memory: what a body asks for, and how a reply is written, whole or as a stream."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from mlx_spec.server.body import (
    Body,
    Json,
    Sampled,
    Share,
    Temperature,
    TopLogprobs,
    choice_of_tools,
    function_tool,
    json_object,
    only_false,
    require_keys,
    require_messages,
    text_of,
    with_effort,
)
from mlx_spec.server.chat import ChatRequest
from mlx_spec.server.errors import ApiError, bad_request, openai_error
from mlx_spec.server.openai_chat import EFFORTS, token_logprob
from mlx_spec.server.reply import Part
from mlx_spec.server.run import Piece, Run, speculation, text_tokens, usage
from mlx_spec.server.tools import Message, Tool

# Between the name of a namespace and that of a function in it.
DOT = "."
TEXTS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"
INCLUDES = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]


class Reasoning(Body):
    """How much the model reasons. Summaries are not made; the reasoning itself is given."""

    effort: EFFORTS | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class Text(Body):
    """What the text must match."""

    format: Json | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(Body):
    """Nothing of it changes a stream."""

    include_obfuscation: bool = False


class ResponsesBody(Sampled):
    """The body of ``POST /v1/responses``."""

    model: str | None = None
    input: str | Annotated[list[Json], Field(min_length=1)]
    instructions: str | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[INCLUDES] | None = None
    tools: list[Json] | None = None
    tool_choice: Literal["auto", "none", "required"] | Json | None = None
    parallel_tool_calls: bool = True
    text: Text | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: Json | None = None
    truncation: Literal["disabled"] | None = None
    background: bool = False
    store: bool = False
    # Accepted, because they cannot change the text.
    metadata: Json | None = None
    client_metadata: Json | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Json | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the reply brings log-probabilities."""
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())

    def asked(self) -> ChatRequest:
        """Return what is asked for. Raises ApiError."""
        only_false(self.store, "store", "nothing is kept after a reply; send the whole conversation each time")
        only_false(self.background, "background", "a reply ends with its connection")
        tools, notes = read_tools(self.tools or ())
        effort = None if self.reasoning is None else self.reasoning.effort
        if self.reasoning is not None and self.reasoning.summary not in (None, "none"):
            notes.append("reasoning.summary has no effect: the reasoning itself is given.")
        return ChatRequest(
            read_input(self.input, self.instructions),
            tools=tools,
            **read_choice(self.tool_choice, tools),
            several_calls=self.parallel_tool_calls,
            schema=read_format(None if self.text is None else self.text.format),
            template=with_effort(self.chat_template_kwargs, effort),
            sampling=self.sampling(),
            max_tokens=self.max_output_tokens,
            logprobs=self.has_logprobs,
            top_logprobs=self.top_logprobs or 0,
            num_draft_tokens=self.drafts(),
            prompt_field="input",
            schema_field="text.format",
            notes=notes,
        )


def read_input(given: str | Sequence[Json], instructions: str | None) -> list[Message]:
    """Return messages for the chat template. Raises ApiError."""
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    require_messages(given, "input")
    reasoning = ""
    for index, item in enumerate(given):
        param, kind = f"input.{index}", item.get("type", "message")
        last = messages[-1] if messages else {}
        if kind == "reasoning":
            reasoning += "".join(str(part.get("text", "")) for part in item.get("content") or ())
        elif kind == "function_call":
            if last.get("role") != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(read_call(item, param))
        elif kind == "function_call_output":
            text = text_of(item.get("output"), f"{param}.output", TEXTS)
            messages.append({"role": "tool", "content": text, "tool_call_id": str(item.get("call_id", ""))})
        elif kind == "message":
            messages.append(read_message(item, param))
        else:
            raise bad_request(f"{param} is of type {kind!r}, which is not served here.", param)
        if reasoning and messages and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], reasoning = reasoning, ""
    return messages


def read_message(item: Json, param: str) -> Message:
    """Return a message for the chat template. Raises ApiError."""
    role = item.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        raise bad_request(
            f"{param}.role must be system, developer, user or assistant, not {role!r}.", f"{param}.role"
        )
    require_keys(item, {"type", "role", "content", "id", "status", "phase"}, param)
    content = item.get("content")
    parts = content if not isinstance(content, list) else [bare(part) for part in content]
    text = text_of(parts, f"{param}.content", TEXTS)
    return {"role": "system" if role == "developer" else role, "content": text}


def bare(part: Any) -> Any:
    """Return a part of an earlier reply without its log-probabilities."""
    return {key: value for key, value in part.items() if key != "logprobs"} if isinstance(part, dict) else part


def read_call(item: Json, param: str) -> Json:
    """Return a call of an earlier reply. Raises ApiError."""
    if not isinstance(item.get("name"), str):
        raise bad_request(f"{param}.name must be a string.", f"{param}.name")
    arguments = json_object(item.get("arguments") or {}, f"{param}.arguments")
    name = f"{item['namespace']}{DOT}{item['name']}" if item.get("namespace") else item["name"]
    function = {"name": name, "arguments": arguments}
    return {"id": str(item.get("call_id", "")), "type": "function", "function": function}


def read_tools(given: Sequence[Json]) -> tuple[list[Tool], list[str]]:
    """Return the functions, those of namespaces by both names, and notes of what the model is not told of.

    Codex offers web search to every server. Raises ApiError for other tools that OpenAI's servers run.
    """
    tools, notes = list[Tool](), list[str]()
    for index, tool in enumerate(given):
        param = f"tools.{index}"
        if tool.get("type") == "web_search":
            notes.append(f"{param} has no effect: there is no web search here, and the model is not told of one.")
        elif tool.get("type") == "namespace" and isinstance(tool.get("name"), str):
            require_keys(tool, {"type", "name", "description", "tools"}, param)
            for number, each in enumerate(tool.get("tools") or ()):
                inner = read_tool(each, f"{param}.tools.{number}")
                name = f"{tool['name']}{DOT}{inner['function']['name']}"
                tools.append({**inner, "function": {**inner["function"], "name": name}})
        else:
            tools.append(read_tool(tool, param))
    return tools, notes


def read_tool(given: Any, param: str) -> Tool:
    """Return a tool. Raises ApiError for those that OpenAI's servers run."""
    if not isinstance(given, dict):
        raise bad_request(f"{param} must be an object.", param)
    if given.get("type") != "function":
        raise bad_request(f"{param} is of type {given.get('type')!r}; only functions are served here.", param)
    require_keys(given, {"type", "name", "description", "parameters", "strict"}, param)
    return function_tool(given, param)


def read_choice(given: str | Json | None, tools: Sequence[Tool]) -> Json:
    """Return which tools are to be called. Raises ApiError."""
    if not isinstance(given, dict):
        return choice_of_tools(given or "auto", None, tools)
    if given.get("type") != "function":
        raise bad_request("tool_choice takes auto, none, required or a function.", "tool_choice")
    return choice_of_tools(None, given.get("name"), tools)


def read_format(given: Json | None) -> Json | None:
    """Return the schema that a reply must match, if any. Raises ApiError."""
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema" or not isinstance(given.get("schema"), dict):
        raise bad_request("text.format takes type text, json_object, or json_schema with a schema.", "text.format")
    schema: Json = given["schema"]
    return schema


class ResponseWriter:
    """Writes the reply of one request as a row of items."""

    def __init__(self, body: ResponsesBody, run: Run, model_id: str) -> None:
        """body: the request's. model_id: that replies name."""
        self._body, self._run, self._model = body, run, model_id
        self._created = int(time.time())
        self._items: list[Json] = []
        self._logprobs: list[Json] = []
        self._is_cut = False
        self._number = 0
        spaces = [tool["name"] + DOT for tool in body.tools or () if tool.get("type") == "namespace"]
        names = [tool["function"]["name"] for tool in run.prepared.tools]
        self._spaced = {name for name in names if name.startswith(tuple(spaces))}

    async def whole(self) -> Json:
        """Return the reply when it is complete."""
        async for _ in self._events():
            pass
        return self._finished()

    async def stream(self) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))
        async for kind, value in self._events():
            yield self._event(kind, **value)
        response = self._finished()
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> str:
        """Return the event of a reply that went wrong."""
        body = openai_error(error)["error"]
        response = {**self._response("failed"), "error": {"code": "server_error", "message": body["message"]}}
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **value: Any) -> str:
        text = json.dumps({"type": kind, "sequence_number": self._number, **value}, ensure_ascii=False)
        self._number += 1
        return f"event: {kind}\ndata: {text}\n\n"

    async def _events(self) -> AsyncIterator[tuple[str, Json]]:
        """Yield what happens to the items, and keep them."""
        async for each in self._run.events():
            if not isinstance(each, Piece):
                self._is_cut = each.reason == "length"
                continue
            if self._body.has_logprobs:
                prepared = self._run.prepared
                found = text_tokens(prepared, each.tokens)
                self._logprobs += [token_logprob(prepared.tokenizer, *token) for token in found]
            for part in each.parts:
                for event in self._take(part):
                    yield event
        for event in self._close():
            yield event

    def _take(self, part: Part) -> Iterator[tuple[str, Json]]:
        kind = {"text": "message", "reasoning": "reasoning"}.get(part.kind, "function_call")
        if part.kind == "call" or not self._items or self._items[-1]["type"] != kind:
            yield from self._close()
            yield from self._open(kind, part)
        item, place = self._items[-1], self._place()
        # Those of tokens whose text is held back come with the next piece.
        logprobs, self._logprobs = self._logprobs, []
        if part.kind == "text":
            item["content"][0]["text"] += part.text
            item["content"][0]["logprobs"] += logprobs
            yield (
                "response.output_text.delta",
                {**place, "content_index": 0, "delta": part.text, "logprobs": logprobs},
            )
        elif part.kind == "reasoning":
            item["content"][0]["text"] += part.text
            yield "response.reasoning_text.delta", {**place, "content_index": 0, "delta": part.text}
        elif part.kind == "arguments":
            item["arguments"] += part.text
            yield "response.function_call_arguments.delta", {**place, "delta": part.text}

    def _place(self) -> Json:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _open(self, kind: str, part: Part) -> Iterator[tuple[str, Json]]:
        """Begin an item, and say so."""
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: Json = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        content: Json | None = None
        if kind == "message":
            item |= {"role": "assistant", "content": []}
            content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
            content = {"type": "reasoning_text", "text": ""}
        else:
            *space, name = part.text.rsplit(DOT, 1) if part.text in self._spaced else [part.text]
            item |= {"call_id": part.call_id, "name": name, "arguments": ""}
            if space:
                item["namespace"] = space[0]
        self._items.append(item)
        yield "response.output_item.added", {"output_index": len(self._items) - 1, "item": json_copy(item)}
        if content is not None:
            yield "response.content_part.added", {**self._place(), "content_index": 0, "part": json_copy(content)}
            item["content"].append(content)

    def _close(self) -> Iterator[tuple[str, Json]]:
        """End the last item, if there is one, and say so."""
        if not self._items:
            return
        item, place = self._items[-1], self._place()
        item["status"] = "incomplete" if self._is_cut else "completed"
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", {**place, **done}
        else:
            part = item["content"][0]
            if item["type"] == "message":
                part["logprobs"] += self._logprobs
            name = "output_text" if item["type"] == "message" else "reasoning_text"
            more = {"logprobs": part["logprobs"]} if name == "output_text" else {}
            yield f"response.{name}.done", {**place, "content_index": 0, "text": part["text"], **more}
            yield "response.content_part.done", {**place, "content_index": 0, "part": part}
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}

    def _finished(self) -> Json:
        """Return the whole response with its counts."""
        counts = usage([self._run])
        response = self._response("incomplete" if self._is_cut else "completed")
        response["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self._run.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._run.reasoning_tokens},
            "total_tokens": counts["total_tokens"],
        }
        response["speculation"] = speculation([self._run])
        return response

    def _response(self, status: str) -> Json:
        body, sampling = self._body, self._run.prepared.request.sampling
        reasoning = body.reasoning or Reasoning()
        return {
            "id": f"resp_{self._run.id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "store": False,
            "temperature": sampling.temp,
            "text": {"format": (None if body.text is None else body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": sampling.top_p or 1.0,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }


def json_copy(value: Json) -> Json:
    """Return a copy that later changes leave as it is."""
    copy: Json = json.loads(json.dumps(value))
    return copy
