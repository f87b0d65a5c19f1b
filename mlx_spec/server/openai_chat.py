"""OpenAI's chat completions: what a body asks for, and how a reply is written, whole or as a stream."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from mlx_spec.generate import GenerationResponse
from mlx_spec.server.body import (
    Body,
    Count,
    Json,
    Penalty,
    Sampled,
    Share,
    Stop,
    Temperature,
    Texts,
    TopLogprobs,
    bias_of,
    choice_of_tools,
    data,
    function_tool,
    json_object,
    messages_of,
    only_false,
    require_keys,
    require_messages,
    stops,
    text_of,
    with_effort,
)
from mlx_spec.server.chat import ChatRequest
from mlx_spec.server.errors import bad_request
from mlx_spec.server.reply import Part
from mlx_spec.server.run import End, Piece, Run, speculation, text_tokens, usage
from mlx_spec.server.token_text import token_bytes
from mlx_spec.server.tools import Message, Tool

ROLES = {
    "system": {"role", "content", "name"},
    "developer": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {
        "role",
        "content",
        "name",
        "tool_calls",
        "refusal",
        "reasoning_content",
        "reasoning",
        "annotations",
    },
    "tool": {"role", "content", "name", "tool_call_id"},
}
EFFORTS = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Body):
    """What a stream brings besides the text. include_speculation: how many tokens of each chunk were drafted."""

    include_usage: bool = False
    include_obfuscation: bool = False
    include_speculation: bool = False


class ChatBody(Sampled):
    """The body of ``POST /v1/chat/completions``."""

    model: str | None = None
    messages: messages_of("system", "developer", "user", "assistant", "tool")  # type: ignore[valid-type]
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    n: Texts = 1
    stop: Stop | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    tools: list[Json] | None = None
    tool_choice: Literal["auto", "none", "required"] | Json | None = None
    parallel_tool_calls: bool = True
    response_format: Json | None = None
    reasoning_effort: EFFORTS | None = None
    chat_template_kwargs: Json | None = None
    modalities: list[Literal["text"]] | None = None
    # Accepted, because they cannot change the text.
    store: bool | None = None
    user: str | None = None
    metadata: Json | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Json | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    client_metadata: Json | None = None

    def asked(self) -> ChatRequest:
        """Return what is asked for. Raises ApiError."""
        only_false(self.store, "store", "nothing is kept after a reply")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream: true.", "stream_options")
        tools = [read_tool(tool, f"tools.{i}") for i, tool in enumerate(self.tools or ())]
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return ChatRequest(
            read_messages(self.messages),
            tools=tools,
            **read_choice(self.tool_choice, tools),
            several_calls=self.parallel_tool_calls,
            schema=read_format(self.response_format),
            template=with_effort(self.chat_template_kwargs, self.reasoning_effort),
            sampling={**self.sampling(), **bias_of(self.logit_bias)},
            n=self.n,
            max_tokens=limit,
            stop=stops(self.stop),
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs or 0,
            num_draft_tokens=self.drafts(),
        )


def read_messages(given: Sequence[Json]) -> list[Message]:
    """Return messages for the chat template. Raises ApiError."""
    return require_messages([read_message(each, f"messages.{i}") for i, each in enumerate(given)], "messages")


def read_message(given: Json, param: str) -> Message:
    """Return a message for the chat template: its content as text, arguments of calls as objects."""
    role = given.get("role")
    if role not in ROLES:
        raise bad_request(f"{param}.role must be one of {', '.join(ROLES)}, not {role!r}.", f"{param}.role")
    require_keys(given, ROLES[role], param)
    message: Message = {"role": "system" if role == "developer" else role}
    message["content"] = text_of(given.get("content"), f"{param}.content")
    if given.get("content") is None and role != "assistant":
        raise bad_request(f"{param}.content is missing.", f"{param}.content")
    for name in ("name", "tool_call_id"):
        if isinstance(given.get(name), str):
            message[name] = given[name]
    if reasoning := given.get("reasoning_content") or given.get("reasoning"):
        message["reasoning_content"] = text_of(reasoning, f"{param}.reasoning_content")
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list):
        raise bad_request(f"{param}.tool_calls must be a list.", f"{param}.tool_calls")
    if calls:
        message["tool_calls"] = [read_call(call, f"{param}.tool_calls.{i}") for i, call in enumerate(calls)]
    return message


def read_call(given: Any, param: str) -> Json:
    """Return a call of an earlier reply. Raises ApiError."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{param} must be a call of a function, with its name.", param)
    arguments = json_object(function.get("arguments") or {}, f"{param}.function.arguments")
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": given["id"], **call} if isinstance(given.get("id"), str) else call


def read_tool(given: Json, param: str) -> Tool:
    """Return a tool. Raises ApiError."""
    if given.get("type") != "function" or not isinstance(given.get("function"), dict):
        raise bad_request(f"{param} is of type {given.get('type')!r}; only functions are served here.", param)
    require_keys(given, {"type", "function", "cache_control"}, param)
    require_keys(given["function"], {"name", "description", "parameters", "strict"}, f"{param}.function")
    return function_tool(given["function"], f"{param}.function")


def read_choice(given: str | Json | None, tools: Sequence[Tool]) -> Json:
    """Return which tools are to be called. Raises ApiError."""
    if not isinstance(given, dict):
        return choice_of_tools(given or "auto", None, tools)
    function = given.get("function")
    if given.get("type") != "function" or not isinstance(function, dict):
        raise bad_request("tool_choice takes auto, none, required or a function.", "tool_choice")
    return choice_of_tools(None, function.get("name"), tools)


def read_format(given: Json | None) -> Json | None:
    """Return the schema that a reply must match, if any. Raises ApiError."""
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    described = given.get("json_schema")
    if kind != "json_schema" or not isinstance(described, dict):
        raise bad_request(
            "response_format takes type text, json_object, or json_schema with json_schema.", "response_format"
        )
    require_keys(described, {"name", "description", "schema", "strict"}, "response_format.json_schema")
    schema = described.get("schema")
    if not isinstance(schema, dict):
        raise bad_request("response_format.json_schema.schema must be a JSON schema.", "response_format")
    return schema


class ChatWriter:
    """Writes the replies of one request."""

    def __init__(self, body: ChatBody, run: Run, model_id: str) -> None:
        """body: the request's. model_id: that replies name."""
        self._body, self._run = body, run
        self._head = {"id": f"chatcmpl-{run.id}", "created": int(time.time()), "model": model_id}
        self._options = body.stream_options or StreamOptions()

    async def whole(self) -> Json:
        """Return the reply when it is complete."""
        choices = [Choice(index) for index in range(self._body.n)]
        async for event in self._run.events():
            if isinstance(event, Piece):
                choices[event.index].take(event)
                if self._body.logprobs:
                    choices[event.index].logprobs += self._logprobs(event.tokens)
            else:
                choices[event.index].reason = event.reason
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice.as_dict(self._body.logprobs) for choice in choices],
            "usage": usage([self._run]),
            "speculation": speculation([self._run]),
        }

    async def stream(self) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        for index in range(self._body.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        ended = 0
        async for event in self._run.events():
            if isinstance(event, End):
                ended += 1
                block = speculation([self._run]) if ended == self._body.n else None
                yield self._chunk(event.index, {}, reason=event.reason, block=block)
                continue
            deltas = [delta_of(part) for part in event.parts]
            if not deltas and event.tokens and (self._body.logprobs or self._options.include_speculation):
                deltas = [{"content": ""}]
            for number, delta in enumerate(deltas):
                tokens = event.tokens if number == 0 else []
                yield self._chunk(event.index, delta, tokens, event.from_draft)
        if self._options.include_usage:
            yield data({**self._chunk_head(), "choices": [], "usage": usage([self._run])})
        yield "data: [DONE]\n\n"

    def _chunk_head(self) -> Json:
        return {**self._head, "object": "chat.completion.chunk"}

    def _chunk(
        self,
        index: int,
        delta: Json,
        tokens: Sequence[GenerationResponse] = (),
        from_draft: bool = False,
        reason: str | None = None,
        block: Json | None = None,
    ) -> str:
        logprobs = {"content": self._logprobs(tokens)} if self._body.logprobs and tokens else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        more: Json = {"speculation": block} if block is not None else {}
        if self._options.include_usage:
            more["usage"] = None
        if self._options.include_speculation and tokens:
            more["speculation"] = {"from_draft": from_draft, "tokens": len(tokens)}
        return data({**self._chunk_head(), "choices": [choice], **more})

    def _logprobs(self, tokens: Sequence[GenerationResponse]) -> list[Json]:
        prepared = self._run.prepared
        return [token_logprob(prepared.tokenizer, *each) for each in text_tokens(prepared, tokens)]


class Choice:
    """One text of a reply that is written whole."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.reason = ""
        self.logprobs: list[Json] = []
        self._texts: dict[str, list[str]] = {"text": [], "reasoning": []}
        self._calls: list[Json] = []

    def take(self, piece: Piece) -> None:
        """Take in what came."""
        for part in piece.parts:
            if part.kind == "call":
                function = {"name": part.text, "arguments": ""}
                self._calls.append({"id": part.call_id, "type": "function", "function": function})
            elif part.kind == "arguments":
                self._calls[part.call]["function"]["arguments"] += part.text
            else:
                self._texts[part.kind].append(part.text)

    def as_dict(self, has_logprobs: bool) -> Json:
        """Return it as a reply has it."""
        text, reasoning = ("".join(self._texts[kind]) for kind in ("text", "reasoning"))
        message: Json = {
            "role": "assistant",
            "content": text if text or not self._calls else None,
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return {
            "index": self.index,
            "message": message,
            "logprobs": {"content": self.logprobs, "refusal": None} if has_logprobs else None,
            "finish_reason": self.reason,
        }


def delta_of(part: Part) -> Json:
    """Return what a chunk says of a part."""
    if part.kind == "text":
        return {"content": part.text}
    if part.kind == "reasoning":
        return {"reasoning_content": part.text}
    if part.kind == "call":
        function = {"name": part.text, "arguments": ""}
        return {"tool_calls": [{"index": part.call, "id": part.call_id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}


def token_logprob(tokenizer: Any, token: int, response: GenerationResponse) -> Json:
    """Return a token with its log-probability, and the likeliest ones."""

    def entry(token: int, logprob: float) -> Json:
        raw = token_bytes(tokenizer, token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(raw)}

    top = [entry(*each) for each in response.top_logprobs]
    return {**entry(token, response.logprob or 0.0), "top_logprobs": top}
