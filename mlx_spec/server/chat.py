"""The one chat core: a request in plain data, made ready for the worker. All interfaces translate to it."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_spec.decoding.grammar import Grammar, Place
from mlx_spec.engine import Engine, Request
from mlx_spec.errors import RequestError
from mlx_spec.generate import TextStream, chat_prompt, text_request
from mlx_spec.generate.options import begin, encode
from mlx_spec.server.call_rules import reply_rules
from mlx_spec.server.errors import ApiError, bad_request
from mlx_spec.server.reply import ReplyParser
from mlx_spec.server.settings import Settings
from mlx_spec.server.tools import Message, Tool, ToolFormat, is_strict, told
from mlx_spec.server.worker import context_of


@dataclass(frozen=True)
class ChatRequest:
    """What a client asks for, whichever interface it speaks.

    messages: for the chat template, each with text as its content; or a prompt, as text or token ids.
    tools: as OpenAI has them, ``{"type": "function", "function": {...}}``.
    tool_choice: "auto", "none" or "required".
    only_tool: the one tool that may be called.
    several_calls: whether a reply may have more than one.
    schema: that the reply's text must match.
    template: further arguments of the chat template.
    sampling: settings by the names of Sampling; what is missing, the server's own.
    max_tokens: None for what the server says.
    prompt_field, schema_field: what the client calls these.
    too_long: the sentence for a prompt that is longer than the context; agents look for it.
    notes: see Prepared.
    """

    messages: Sequence[Message] | str | Sequence[int]
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"
    only_tool: str | None = None
    several_calls: bool = True
    schema: Mapping[str, Any] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    num_draft_tokens: int | Literal["adaptive"] | None = None
    prompt_field: str = "messages"
    too_long: str = (
        "This model's maximum context length is {most} tokens. However, your {field} resulted in {found} tokens. "
        "Please reduce the length of the {field}."
    )
    notes: Sequence[str] = ()
    schema_field: str = "response_format"


@dataclass(frozen=True)
class Prepared:
    """A request that can be given to the worker.

    request, texts: see Job.
    stop: its stop strings.
    thinking, form, tools, in_reasoning: see ReplyParser.
    notes: wishes of the client that this model cannot know of.
    clamped: the client's token limit, where it was larger than the room that was left.
    """

    request: Request
    texts: list[TextStream]
    tokenizer: Any
    stop: Sequence[str]
    thinking: tuple[str, str] | None
    form: ToolFormat | None
    tools: Sequence[Tool]
    in_reasoning: bool
    notes: Sequence[str]
    clamped: int | None

    def parser(self) -> ReplyParser:
        """Return what takes in one of its texts."""
        return ReplyParser(self.thinking, self.form, self.tools, self.in_reasoning)


def prepare(engine: Engine, tokenizer: Any, settings: Settings, asked: ChatRequest) -> Prepared:
    """Tokenise and check a request, before anything of its answer is sent. Raises ApiError."""
    prompt = prompt_ids(tokenizer, settings, asked)
    in_reasoning = is_chat(asked) and ends_in_reasoning(tokenizer, prompt)
    room = require_room(engine, settings, asked, prompt)
    wanted = asked.max_tokens if asked.max_tokens is not None else settings.max_tokens
    form = ToolFormat.of(tokenizer) if asked.tools and asked.tool_choice != "none" else None
    sampling = {"seed": random.getrandbits(31), **settings.sampling, **asked.sampling}
    stop = [*asked.stop, *([form.end] if form is not None and form.end and not asked.several_calls else [])]
    texts = [TextStream(tokenizer, stop) for _ in range(asked.n)]
    place = grammar_of(tokenizer, asked, form, in_reasoning, engine.target.vocab_size)
    try:
        request = text_request(
            tokenizer,
            prompt,
            texts[0],
            max_tokens=room if wanted is None else min(wanted, room),
            num_draft_tokens=asked.num_draft_tokens,
            logprobs=asked.logprobs,
            top_logprobs=asked.top_logprobs,
            prefill_step_size=settings.prefill_step_size,
            grammar=place,
            **sampling,
        )
        request.check(engine.target, engine.max_draft)
    except RequestError as error:
        raise bad_request(shown(str(error), settings), named_field(str(error))) from error
    if form is not None and not asked.several_calls and not form.end and place is None:
        raise bad_request(
            "parallel_tool_calls cannot be false with this model: its calls have no end mark.",
            "parallel_tool_calls",
        )
    clamped = asked.max_tokens if asked.max_tokens is not None and asked.max_tokens > room else None
    has_marks = is_chat(asked) and tokenizer.has_thinking
    thinking = (tokenizer.think_start, tokenizer.think_end) if has_marks else None
    notes = [*asked.notes, *unknown_to(tokenizer, asked.template)]
    return Prepared(
        request, texts, tokenizer, asked.stop, thinking, form, asked.tools, in_reasoning, notes, clamped
    )


def unknown_to(tokenizer: Any, template: Mapping[str, Any]) -> list[str]:
    """Return a note for what was asked of a template that does not know it."""
    text = tokenizer.chat_template
    wishes = [name for name, value in template.items() if value is not False]
    unknown = [name for name in wishes if isinstance(text, str) and name not in text]
    return [f"{name} has no effect: the model's chat template does not know it." for name in unknown]


def is_chat(asked: ChatRequest) -> bool:
    """Whether a request has messages, not a prompt."""
    return not isinstance(asked.messages, str) and bool(asked.messages) and isinstance(asked.messages[0], dict)


def prompt_ids(tokenizer: Any, settings: Settings, asked: ChatRequest) -> list[int]:
    """Return the token ids of a request's prompt. Raises ApiError."""
    try:
        if not is_chat(asked):
            return encode(tokenizer, asked.messages)  # type: ignore[arg-type]
        messages = merged(asked.messages)  # type: ignore[arg-type]
        offered = list(asked.tools) if asked.tool_choice != "none" else []
        template = {**settings.template, **asked.template}
        if not tokenizer.has_tool_calling:
            return chat_prompt(tokenizer, told(messages, offered), **template)
        return chat_prompt(tokenizer, messages, **template, **({"tools": offered} if offered else {}))
    except RequestError as error:
        raise bad_request(str(error), asked.prompt_field) from error


def merged(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose leading system messages are one: many templates take one only."""
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return list(messages)
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]


def ends_in_reasoning(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Whether a prompt has opened the reasoning, so that the reply begins inside."""
    if not tokenizer.has_thinking:
        return False
    return bool(tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt))


def require_room(engine: Engine, settings: Settings, asked: ChatRequest, prompt: Sequence[int]) -> int:
    """Return how many tokens fit after a prompt. Raises ApiError."""
    context = context_of(engine)
    if len(prompt) > context:
        field = asked.prompt_field
        sentence = asked.too_long.format(most=context, found=len(prompt), field=field)
        raise bad_request(sentence, field, "context_length_exceeded")
    # The last position needs no cache of its own.
    return context - len(prompt) + 1


def grammar_of(
    tokenizer: Any, asked: ChatRequest, form: ToolFormat | None, in_reasoning: bool, vocab_size: int
) -> Place | None:
    """Return the place before the text of a request that has to match something. Raises ApiError."""
    is_forced = form is not None and asked.tool_choice != "auto"
    has_strict = any(map(is_strict, asked.tools)) and form is not None
    if not is_forced and not has_strict and asked.schema is None:
        return None
    param = "tool_choice" if is_forced else "tools" if asked.schema is None else asked.schema_field
    after = tokenizer.think_end if in_reasoning else None
    try:
        if form is None:
            assert asked.schema is not None
            return begin(Grammar.json_schema(asked.schema, after), tokenizer, vocab_size)
        rules = reply_rules(
            tokenizer,
            form,
            [tool for tool in asked.tools if asked.only_tool in (None, tool["function"]["name"])],
            is_forced=is_forced,
            several=asked.several_calls and asked.only_tool is None,
            schema=asked.schema,
        )
        return begin(Grammar.lark(rules, after), tokenizer, vocab_size)
    except RequestError as error:
        raise bad_request(str(error), param) from error


def named_field(sentence: str) -> str | None:
    """Return the client's name of the field that an error of the engine begins with."""
    names = {"temp": "temperature"}
    first = sentence.split(" ", 1)[0]
    return names.get(first, first) if first.isidentifier() and first.islower() else None


def shown(sentence: str, settings: Settings) -> str:
    """Return a sentence without the path that the model may have been loaded from."""
    return sentence.replace(settings.loaded_from, settings.model_id) if settings.loaded_from else sentence


def as_api_error(error: Exception, settings: Settings) -> ApiError:
    """Return what to tell a client of an error of the worker."""
    if isinstance(error, RequestError):
        return bad_request(shown(str(error), settings))
    return ApiError(500, "The model failed on this request; the server's log says why.")
