"""Grammars of replies with calls: each call is of a tool that is offered, with arguments that match its schema.

What a model writes around names, keys and values is data, one entry for each format of mlx-lm's parsers.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_spec.errors import RequestError
from mlx_spec.server.tools import Tool, ToolFormat, is_strict, parameters_of, resolved

TEXT = r"TEXT: /(.|\n)*/"
# What a plain text, up to a mark, cannot be held to.
TEXT_RULES = ("pattern", "format", "minLength", "maxLength")
# One value of each type, to see whether a parser reads it as it was meant.
SAMPLES = {"string": "a", "integer": 3, "number": 2.5, "boolean": True, "null": None, "array": [], "object": {}}
SPACING = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}


@dataclass(frozen=True)
class CallLayout:
    """How a call is written between its marks.

    head: before the arguments, with ``{name}``.
    tail: after them.
    key: before a value, with ``{key}``; None where all arguments are one JSON object.
    end: after a value.
    between: between two arguments.
    has_text: strings are written as they are, up to ``end``; other values are JSON in every layout.
    """

    head: str
    tail: str
    key: str | None = None
    end: str = ""
    between: str = ""
    has_text: bool = False

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write a call."""
        head = self.head.replace("{name}", name)
        if self.key is None:
            return f"{head}{json.dumps(arguments)}{self.tail}"
        pieces = [
            self.key.replace("{key}", key)
            + (value if self.has_text and isinstance(value, str) else json.dumps(value))
            + self.end
            for key, value in arguments.items()
        ]
        return head + self.between.join(pieces) + self.tail


# By the names of mlx_lm.tool_parsers. Of the others, gemma4, function_gemma, kimi_k3, longcat and muse_spark write
# values that are neither JSON nor text, or have no call without arguments.
LAYOUTS = {
    "json_tools": CallLayout('\n{"name": "{name}", "arguments": ', "}\n"),
    "mistral": CallLayout("{name}[ARGS]", ""),
    "kimi_k2": CallLayout(
        "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>", "<|tool_call_end|>"
    ),
    "pythonic": CallLayout("[{name}(", ")]", key="{key}=", between=", "),
    "qwen3_coder": CallLayout(
        "\n<function={name}>\n", "</function>\n", "<parameter={key}>\n", "\n</parameter>\n", has_text=True
    ),
    "glm47": CallLayout("{name}", "", "<arg_key>{key}</arg_key><arg_value>", "</arg_value>", has_text=True),
    "minimax_m2": CallLayout(
        '\n<invoke name="{name}">\n', "</invoke>\n", '<parameter name="{key}">', "</parameter>\n", has_text=True
    ),
    "minicpm5": CallLayout('"{name}">', "", '<param name="{key}">', "</param>", has_text=True),
}
# Models of Mistral before its third tool format write a list.
MISTRAL_LIST = CallLayout('[{"name": "{name}", "arguments": ', "}]")


def reply_rules(
    tokenizer: Any,
    form: ToolFormat,
    tools: Sequence[Tool],
    *,
    is_forced: bool,
    several: bool,
    schema: Mapping[str, Any] | None = None,
) -> str:
    """Return Lark rules of a reply: calls alone, a text by a schema or calls, or text with calls in it.

    tools: that may be called.
    is_forced: there have to be calls.
    several: there may be more than one; a format without an end mark has one.
    schema: of the text, where there is no call.
    Raises RequestError, with the reason, where the format of the model allows no such rules.
    """
    layout = layout_of(tokenizer, form)
    rules = [TEXT] if layout.has_text or (schema is None and not is_forced) else []
    names = []
    for number, tool in enumerate(tools):
        require_readable(form, layout, tool)
        names.append(f"tool_{number}")
        rules += tool_rules(tokenizer, layout, tool, names[-1])
    start, end = marked(tokenizer, form.start), marked(tokenizer, form.end)
    rules.append(f"body: ({' | '.join(names)}) {end}")
    rules.append(f"call: {start} body")
    rules.append(r"calls: /\s*/ call" + (' ("\\n" call)*' if several and form.end else ""))
    if is_forced:
        return "\n".join(["start: calls", *rules])
    if schema is not None:
        return "\n".join(["start: answer | calls", *rules, f"answer: %json {json.dumps(schema)}"])
    after = "(begun body)* TEXT" if form.end else "TEXT | begun body"
    return "\n".join([f"start: {after}", *rules, text_until(tokenizer, "begun", form.start)])


def layout_of(tokenizer: Any, form: ToolFormat) -> CallLayout:
    """Return how a model writes calls. Raises RequestError where no rules describe it."""
    if form.name == "mistral" and "[ARGS]" not in str(tokenizer.chat_template):
        return MISTRAL_LIST
    if form.name not in LAYOUTS:
        raise RequestError(
            f"This model writes calls in the format {form.name}, which no grammar here describes: leave out "
            "tool_choice, strict and a schema beside tools."
        )
    return LAYOUTS[form.name]


def require_readable(form: ToolFormat, layout: CallLayout, tool: Tool) -> None:
    """Raise RequestError for a tool whose calls would not be read as they are meant.

    Names and keys have to come back for every tool, and values where ``strict`` promises their schema.
    """
    name, parameters = tool["function"]["name"], parameters_of(tool)
    properties = {key: resolved(each, parameters) for key, each in (parameters.get("properties") or {}).items()}
    for keys in ({}, dict.fromkeys(properties)):
        if [(called, found.keys()) for called, found in read_back(form, layout, tool, keys)] != [
            (name, keys.keys())
        ]:
            raise RequestError(
                f"Calls of the tool {name!r} cannot be written in the format of this model's calls."
            )
    if not is_strict(tool):
        return
    for key, schema in properties.items():
        types = types_of(schema)
        if layout.has_text and "string" in types and (rules := schema.keys() & TEXT_RULES):
            raise RequestError(
                f"This model writes strings as plain text, which {min(rules)!r} of {key!r} of the tool {name!r} "
                "cannot be kept in: leave it or strict out."
            )
        for each in types:
            if read_back(form, layout, tool, {key: SAMPLES[each]}) != [(name, {key: SAMPLES[each]})]:
                raise RequestError(
                    f"{key!r} of the tool {name!r} may be of type {each}, which this model's calls do not tell "
                    "from others: give it one type, or leave strict out."
                )


def read_back(
    form: ToolFormat, layout: CallLayout, tool: Tool, arguments: Mapping[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """Return what is read of a call that was written; nothing where it is none."""
    try:
        return form.parse(layout.write(tool["function"]["name"], arguments), [tool])
    except ValueError:
        return []


def tool_rules(tokenizer: Any, layout: CallLayout, tool: Tool, label: str) -> Iterator[str]:
    """Yield rules of the call of one tool, the one called ``label`` first."""
    parameters = parameters_of(tool)
    head = marked(tokenizer, layout.head.replace("{name}", tool["function"]["name"]))
    tail = marked(tokenizer, layout.tail)
    if layout.key is None:
        yield f"{label}: {head} {label}_arguments {tail}"
        yield f"{label}_arguments: %json {json.dumps({**parameters, 'x-guidance': SPACING})}"
        return
    properties = list((parameters.get("properties") or {}).items())
    required = parameters.get("required") or ()
    between = marked(tokenizer, layout.between)
    yield f"{label}: {head} {label}_first_0 {tail}"
    for number, (key, schema) in enumerate(properties):
        value = f"{label}_value_{number}"
        written = f"{marked(tokenizer, layout.key.replace('{key}', key))} {value} {label}_more_{number + 1}"
        for place, before in (("first", ""), ("more", between)):
            skip = "" if key in required else f" | {label}_{place}_{number + 1}"
            yield f"{label}_{place}_{number}: {before} {written}{skip}"
        yield from value_rules(tokenizer, layout, resolved(schema, parameters), parameters, value)
    yield from (f'{label}_{place}_{len(properties)}: ""' for place in ("first", "more"))


def value_rules(
    tokenizer: Any, layout: CallLayout, schema: Mapping[str, Any], root: Mapping[str, Any], label: str
) -> Iterator[str]:
    """Yield rules of a value with what follows it: a text, one of some texts, or JSON."""
    fixed = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if layout.has_text and fixed and all(isinstance(each, str) for each in fixed):
        yield f"{label}: ({' | '.join(marked(tokenizer, each) for each in fixed)}) {marked(tokenizer, layout.end)}"
    elif layout.has_text and not fixed and "string" in types_of(schema):
        yield text_until(tokenizer, label, layout.end)
    else:
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        yield f"{label}: {label}_json {marked(tokenizer, layout.end)}"
        yield f"{label}_json: %json {json.dumps({**schema, **definitions, 'x-guidance': SPACING})}"


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a value of a schema may have; all of them where it says none."""
    found = schema.get("type")
    if isinstance(found, str):
        return [found] if found in SAMPLES else []
    if isinstance(found, list):
        return [each for each in found if each in SAMPLES]
    parts = [part for name in ("anyOf", "oneOf") for part in schema.get(name, ()) if isinstance(part, Mapping)]
    return list(dict.fromkeys(each for part in parts for each in types_of(part))) if parts else list(SAMPLES)


def text_until(tokenizer: Any, label: str, mark: str) -> str:
    """Return a rule of any text with the mark that ends it."""
    first, *rest = pieces(tokenizer, mark)
    # A special token cannot be part of a text, so that the text ends before it by itself.
    if first.startswith("<["):
        return " ".join([f"{label}: TEXT", first, *rest])
    if not rest:
        return f"{label}[lazy]: TEXT {first}"
    return "\n".join([" ".join([f"{label}: {label}_text", *rest]), f"{label}_text[lazy]: TEXT {first}"])


def marked(tokenizer: Any, text: str) -> str:
    """Return how Lark rules write a text: special tokens as such, and what is between them as text."""
    return " ".join(pieces(tokenizer, text)) or '""'


def pieces(tokenizer: Any, text: str) -> list[str]:
    """Return the parts of ``marked``."""
    special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    longest_first = sorted(special, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if special else [text]
    return [f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part]
