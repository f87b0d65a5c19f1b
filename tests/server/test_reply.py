"""Replies in parts: every format of calls, cut at every place, gives what mlx-lm's parser reads of the whole."""

import importlib
import json
from typing import Any

import pytest

from mlx_spec.server.reply import Part, ReplyParser, joined
from mlx_spec.server.tools import ToolFormat, told

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "lines": {"type": "array"},
                    "count": {"type": "integer"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "list_files", "parameters": {"type": "object", "properties": {}}}},
]
ARGUMENTS = {"path": 'a "b" {c}.txt', "lines": ["x", "</y>", "é\n"], "count": 3}
WRITTEN = json.dumps(ARGUMENTS)
XML = "".join(
    f"\n<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>"
    for key, value in ARGUMENTS.items()
)
# Of each format the text of a call between its marks, as models write it.
CALLS = {
    "json_tools": f'\n{{"name": "write", "arguments": {WRITTEN}}}\n',
    "qwen3_coder": f"\n<function=write>{XML}\n</function>\n",
    "mistral": f"write[ARGS]{WRITTEN}",
    "pythonic": f"[write({', '.join(f'{key}={value!r}' for key, value in ARGUMENTS.items())})]",
}


def format_of(name: str) -> ToolFormat:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return ToolFormat(module.tool_call_start, module.tool_call_end, module.parse_tool_call, name)


def parts_of(parser: ReplyParser, text: str, size: int) -> list[Part]:
    parts = [part for at in range(0, len(text), size) for part in parser.add(text[at : at + size])]
    return joined(parts + parser.finish())


def shown(parts: list[Part]) -> list[tuple[str, str]]:
    return [(part.kind, part.text) for part in parts]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_what_the_parser_reads(name: str, size: int) -> None:
    form = format_of(name)
    text = f"Let me see.\n{form.start}{CALLS[name]}{form.end}"
    before, call, arguments = parts_of(ReplyParser(None, form, TOOLS), text, size)
    assert (before.kind, before.text) == ("text", "Let me see.")
    assert (call.kind, call.text) == ("call", "write") and call.call_id
    assert json.loads(arguments.text) == ARGUMENTS == form.parse(CALLS[name], TOOLS)[0][1]


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_several_calls(size: int) -> None:
    form = format_of("json_tools")
    one = f'{form.start}\n{{"name": "list_files", "arguments": {{}}}}\n{form.end}'
    two = f"{form.start}{CALLS['json_tools']}{form.end}"
    parts = parts_of(ReplyParser(None, form, TOOLS), f"{one}\n{two}", size)
    assert shown(parts) == [("call", "list_files"), ("arguments", "{}"), ("call", "write"), ("arguments", WRITTEN)]
    assert [part.call for part in parts] == [0, 0, 1, 1]


@pytest.mark.parametrize("body", ['\n{"name": "other", "arguments": {}}\n', "\nnothing\n", '{"name": "write"'])
def test_what_is_no_call_is_text(body: str) -> None:
    form = format_of("json_tools")
    text = f"{form.start}{body}{form.end}"
    parser = ReplyParser(None, form, TOOLS)
    assert shown(parts_of(parser, text, 3)) == [("text", text)]
    assert parser.calls == 0


def test_a_call_in_an_argument_is_none() -> None:
    form = format_of("json_tools")
    inner = json.dumps({"path": '{"name": "list_files", "arguments": {}}'})
    text = f'{form.start}{{"name": "write", "arguments": {inner}}}{form.end}'
    assert shown(parts_of(ReplyParser(None, form, TOOLS), text, 2)) == [("call", "write"), ("arguments", inner)]


def test_a_cut_call_keeps_what_came() -> None:
    form = format_of("json_tools")
    parts = parts_of(
        ReplyParser(None, form, TOOLS), f'{form.start}{{"name": "write", "arguments": {{"path": "a', 4
    )
    assert shown(parts) == [("call", "write"), ("arguments", '{"path": "a')]


def test_without_tools_marks_are_text() -> None:
    text = "<tool_call>\n{}\n</tool_call> "
    assert shown(parts_of(ReplyParser(None), text, 4)) == [("text", text)]


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning(is_open: bool, size: int) -> None:
    """Opened by the reply or by the prompt; the white space around its marks belongs to neither side."""
    text = ("" if is_open else "<think>") + "\nLet me\nsee.\n</think>\n\nAn answer.\n"
    parser = ReplyParser(("<think>", "</think>"), in_reasoning=is_open)
    assert shown(parts_of(parser, text, size)) == [("reasoning", "Let me\nsee."), ("text", "An answer.\n")]


def test_templates_without_tools_are_told_of_them() -> None:
    call: Any = {"id": "1", "type": "function", "function": {"name": "list_files", "arguments": {}}}
    messages = [
        {"role": "user", "content": "What is there?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "a.txt", "tool_call_id": "1"},
    ]
    system, asked, called, result = told(messages, TOOLS)
    assert system["role"] == "system" and all(json.dumps(tool) in system["content"] for tool in TOOLS)
    assert asked == messages[0]
    assert called["content"] == '<tool_call>\n{"name": "list_files", "arguments": {}}\n</tool_call>'
    assert result == {"role": "user", "content": "<tool_response>\na.txt\n</tool_response>"}
    assert told(messages[:1], []) == messages[:1]
