"""Tools: how a model is told of them, and how its calls are read.

Calls are read by mlx-lm's parser of the model's format, which takes the whole text of one call. A model whose
template knows no tools is told of them in its system message, in the form of Hermes models, and answers in it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.tool_parsers import json_tools

TOLD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{functions}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML \
tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

Message = dict[str, Any]
Tool = Mapping[str, Any]


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls.

    start, end: around each call; without an end a call goes to the end of the text.
    parser: mlx-lm's, from the text of a call and the tools to a call or a list of calls.
    name: of the format, as mlx_lm.tool_parsers names it.
    is_told: the template knows no tools, so that a system message tells of them.
    """

    start: str
    end: str
    parser: Any
    name: str
    is_told: bool = False

    @property
    def is_json(self) -> bool:
        """Whether a call is ``{"name": ..., "arguments": {...}}``."""
        return self.name == "json_tools"

    @staticmethod
    def of(tokenizer: Any) -> "ToolFormat":
        """Return the format of a tokenizer's template."""
        if not tokenizer.has_tool_calling:
            start, end = json_tools.tool_call_start, json_tools.tool_call_end
            return ToolFormat(start, end, json_tools.parse_tool_call, "json_tools", True)
        parser = tokenizer.tool_parser
        name = parser.__module__.rsplit(".", 1)[-1]
        return ToolFormat(tokenizer.tool_call_start, tokenizer.tool_call_end, parser, name)

    def parse(self, text: str, tools: Sequence[Tool]) -> list[tuple[str, dict[str, Any]]]:
        """Return the calls, names with arguments, of the text between two marks. Raises ValueError for no call."""
        try:
            found = self.parser(text, [with_types(tool) for tool in tools])
        except Exception as error:  # each format's parser raises what it likes
            raise ValueError(str(error)) from error
        calls = found if isinstance(found, list) else [found]
        names = {tool["function"]["name"] for tool in tools}
        result = []
        for call in calls:
            name = call.get("name") if isinstance(call, dict) else None
            arguments = call.get("arguments", {}) if isinstance(call, dict) else None
            if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
                raise ValueError(f"This is no call of a tool: {text!r}")
            result.append((name, arguments))
        if not result:
            raise ValueError("There is no call.")
        return result


def told(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return messages for a template that knows no tools: of tools, calls and results they tell in their text."""
    functions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    result: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            result.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            written = [
                "<tool_call>\n" + json.dumps(call["function"], ensure_ascii=False) + "\n</tool_call>"
                for call in calls
            ]
            text = "\n".join([*([message["content"]] if message["content"] else []), *written])
            result.append({"role": "assistant", "content": text})
        else:
            result.append(dict(message))
    if tools:
        text = TOLD.format(functions=functions)
        if result and result[0]["role"] == "system":
            result[0]["content"] = f"{result[0]['content']}\n\n{text}"
        else:
            result.insert(0, {"role": "system", "content": text})
    return result


def parameters_of(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments."""
    return {"type": "object", **(tool["function"].get("parameters") or {})}


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema, or what it refers to in the definitions of the root. ``true`` is a schema of anything."""
    names = list[str]()
    while isinstance(schema, Mapping) and str(schema.get("$ref", "")).startswith("#/") and len(names) < 16:
        names.append(schema["$ref"])
        schema = root
        for part in names[-1][2:].split("/"):
            schema = schema.get(part, {}) if isinstance(schema, Mapping) else {}
    return dict(schema) if isinstance(schema, Mapping) else {}


def with_types(tool: Tool) -> dict[str, Any]:
    """Return a tool for a parser, which takes the type of an argument from its schema and follows no reference."""
    parameters = parameters_of(tool)
    properties = {key: resolved(each, parameters) for key, each in (parameters.get("properties") or {}).items()}
    return {**tool, "function": {**tool["function"], "parameters": {**parameters, "properties": properties}}}


def is_strict(tool: Tool) -> bool:
    """Whether the arguments of a tool have to match its schema."""
    return bool(tool["function"].get("strict"))
