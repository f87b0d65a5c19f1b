"""Grammars of calls in every format: what they take is read as a call by mlx-lm's parser, and nothing else is."""

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
from mlx_lm.utils import load_tokenizer
from served import PAIR, serve, write_pair

from mlx_spec.decoding.grammar import Grammar
from mlx_spec.errors import RequestError
from mlx_spec.server.call_rules import LAYOUTS, MISTRAL_LIST, TEXT, CallLayout, reply_rules, text_until
from mlx_spec.server.tools import ToolFormat

PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "mode": {"enum": ["w", "append"], "type": "string"},
    "count": {"type": "integer", "minimum": 0, "maximum": 99},
    "lines": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    "where": {"$ref": "#/$defs/place"},
    "all": {"type": "boolean"},
}
PLACE = {
    "type": "object",
    "properties": {"x": {"type": "number"}},
    "required": ["x"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["path", "count"],
    "additionalProperties": False,
    "$defs": {"place": PLACE},
}


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("write_file", **PARAMETERS), tool("look")]
FULL = {"path": "a b.txt", "mode": "append", "count": 3, "lines": ["x"], "where": {"x": 2.5}, "all": True}
VOCAB_SIZE = json.loads((PAIR / "target" / "config.json").read_text())["vocab_size"]
FORMS = [*LAYOUTS, "mistral list"]


@cache
def tokenizer() -> Any:
    return load_tokenizer(PAIR / "target")


def form_of(name: str) -> tuple[ToolFormat, CallLayout]:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name.split()[0]}")
    form = ToolFormat(module.tool_call_start, module.tool_call_end, module.parse_tool_call, name.split()[0])
    return form, LAYOUTS.get(name, MISTRAL_LIST)


class Templated:
    """The tiny pair's tokenizer, with another chat template."""

    def __init__(self, chat_template: str) -> None:
        self.chat_template = chat_template

    def __getattr__(self, name: str) -> Any:
        return getattr(tokenizer(), name)


def place_of(name: str, **options: Any) -> Any:
    form, layout = form_of(name)
    templated = Templated("[ARGS]" if layout is LAYOUTS["mistral"] else "")
    rules = reply_rules(templated, form, TOOLS, **{"is_forced": True, "several": False, **options})
    return Grammar.lark(rules).start(tokenizer(), VOCAB_SIZE)


def takes(place: Any, text: str) -> bool:
    after = place.after(tokenizer().encode(text, add_special_tokens=False))
    return after is not None and after.state.is_accepting()


@pytest.mark.parametrize("name", FORMS)
def test_calls_by_the_schema_are_taken_and_others_are_not(name: str) -> None:
    form, layout = form_of(name)
    place = place_of(name)

    def call(arguments: Any, called: str = "write_file") -> str:
        return f"{form.start}{layout.write(called, arguments)}{form.end}"

    short = {"path": "", "count": 0}
    for arguments in (FULL, short, {**short, "all": False}):
        assert takes(place, call(arguments)), arguments
        assert form.parse(layout.write("write_file", arguments), TOOLS) == [("write_file", arguments)]
    assert takes(place, call({}, "look"))
    for wrong in ({"path": "a"}, {**short, "count": 100}, {**short, "mode": "x"}, {**short, "where": {}}):
        assert not takes(place, call(wrong)), wrong
    for text in ("Let me see.", call({}, "other"), call(short) + " And more."):
        assert not takes(place, text), text


@pytest.mark.parametrize(
    ("name", "changed", "sentence"),
    [
        ("gemma4", {}, "in the format gemma4, which no grammar here describes"),
        ("pythonic", {"name": "write-file"}, "cannot be written in the format"),
        (
            "qwen3_coder",
            {"strict": True, "parameters": {"properties": {"a": {"type": "string", "pattern": "x"}}}},
            "'pattern' of 'a'",
        ),
        ("qwen3_coder", {"strict": True, "parameters": {"properties": {"a": {}}}}, "give it one type"),
    ],
)
def test_what_a_format_cannot_keep_is_refused(name: str, changed: Any, sentence: str) -> None:
    form, _ = form_of(name)
    given = {"type": "function", "function": {**TOOLS[1]["function"], **changed}}
    with pytest.raises(RequestError, match=sentence):
        reply_rules(tokenizer(), form, [given], is_forced=True, several=False)


def test_text_with_calls_in_it() -> None:
    """As ``strict`` asks for: anything, but what follows a mark is a call by the schema."""
    form, layout = form_of("qwen3_coder")
    place = place_of("qwen3_coder", is_forced=False, several=True)
    call = form.start + layout.write("write_file", {"path": "a", "count": 1}) + form.end
    assert all(takes(place, text) for text in ("Let me see.", f"First{call}then{call}.", call))
    assert not takes(place, call.replace("count", "size"))


def test_a_special_mark_ends_a_text() -> None:
    """Where the mark is a token of its own, which no text can hold."""
    mark = next(
        token.content for number, token in tokenizer().added_tokens_decoder.items() if number not in (0, 1)
    )
    rules = "\n".join(['start: value "."', TEXT, text_until(tokenizer(), "value", f"{mark}!")])
    place = Grammar.lark(rules).start(tokenizer(), VOCAB_SIZE)
    assert takes(place, f"a !{mark}!.") and not takes(place, f"a{mark}.") and not takes(place, f"a{mark}!")


def test_the_server_keeps_calls_of_a_format_that_is_not_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Required and named, drafted and not, whole and as a stream, with the same call."""
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path))
    folder = write_pair(tmp_path / "tiny")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] += "{# <tool_call>\n<function= #}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    properties = {
        "day": {"type": "string", "enum": ["Monday", "Friday"]},
        "hour": {"type": "integer", "maximum": 9, "minimum": 0},
    }
    asked: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "When?"}],
        "tools": [tool("plan", type="object", properties=properties, required=["day", "hour"])],
        "max_tokens": 200,
        "tool_choice": {"type": "function", "function": {"name": "plan"}},
    }
    with serve(folder) as served, openai.OpenAI(base_url=f"{served.url}/v1", api_key="any") as client:
        replies = [
            client.chat.completions.create(**asked, extra_body=each).choices[0] for each in ({}, {"draft": False})
        ]
        found = [(each.finish_reason, each.message.tool_calls[0].function.arguments) for each in replies]
        assert found[0] == found[1] and found[0][0] == "tool_calls"
        arguments = json.loads(found[0][1])
        assert arguments["day"] in ("Monday", "Friday") and 0 <= arguments["hour"] < 10
        pieces = [
            chunk.choices[0].delta.tool_calls or []
            for chunk in client.chat.completions.create(**asked, stream=True)
        ]
        assert "".join(call.function.arguments or "" for calls in pieces for call in calls) == found[0][1]
