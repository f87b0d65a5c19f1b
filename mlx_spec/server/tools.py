"""Tools: how a model is told of them, how its calls are read, and the grammar of calls that are required.

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
    is_json: a call is ``{"name": ..., "arguments": {...}}``.
    is_told: the template knows no tools, so that a system message tells of them.
    """

    start: str
    end: str
    parser: Any
    is_json: bool
    is_told: bool = False

    @staticmethod
    def of(tokenizer: Any) -> "ToolFormat":
        """Return the format of a tokenizer's template."""
        if not tokenizer.has_tool_calling:
            return ToolFormat(
                json_tools.tool_call_start, json_tools.tool_call_end, json_tools.parse_tool_call, True, True
            )
        parser = tokenizer.tool_parser
        is_json = parser is json_tools.parse_tool_call
        return ToolFormat(tokenizer.tool_call_start, tokenizer.tool_call_end, parser, is_json)

    def parse(self, text: str, tools: Sequence[Tool]) -> list[tuple[str, dict[str, Any]]]:
        """Return the calls, names with arguments, of the text between two marks. Raises ValueError for no call."""
        try:
            found = self.parser(text, list(tools))
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


def calls_rules(form: ToolFormat, tools: Sequence[Tool], mark: Any) -> str:
    """Return Lark rules of one ``call`` of one of the tools, ``body`` being what follows its first mark.

    mark: from the text of a mark to how Lark rules write it.
    """
    names = " | ".join(f"tool_{number}" for number in range(len(tools)))
    schemas = [f"tool_{number}: %json {json.dumps(call_schema(tool))}" for number, tool in enumerate(tools)]
    head = [f"call: {mark(form.start)} body", f'body: "\\n" tool "\\n" {mark(form.end)}', f"tool: {names}"]
    return "\n".join([*head, *schemas])


def call_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a call of a tool, spaced as templates write calls."""
    function = tool["function"]
    parameters = dict(function.get("parameters") or {"type": "object"})
    # References in the parameters are from the root of a schema.
    definitions = {name: parameters.pop(name) for name in ("$defs", "definitions") if name in parameters}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "},
        **definitions,
    }


def is_strict(tool: Tool) -> bool:
    """Whether the arguments of a tool have to match its schema."""
    return bool(tool["function"].get("strict"))
