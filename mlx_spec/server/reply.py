"""From a reply's text to its parts: reasoning, text, and calls of tools, as they come."""

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlx_lm.generate import TextStateMachine

from mlx_spec.server.tools import Tool, ToolFormat

HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


@dataclass(frozen=True)
class Part:
    """A piece of a reply.

    kind: "text", "reasoning", "call" for the begin of a call, "arguments" for a piece of its arguments' JSON.
    text: the piece; of a call the name.
    call: which call it belongs to, from 0 on.
    call_id: of a call.
    """

    kind: Literal["text", "reasoning", "call", "arguments"]
    text: str
    call: int = -1
    call_id: str = ""


class ReplyParser:
    """Takes in the text of one reply and gives its parts.

    A call that cannot be read is text, with its marks.
    """

    def __init__(
        self,
        thinking: tuple[str, str] | None,
        form: ToolFormat | None = None,
        tools: Sequence[Tool] = (),
        in_reasoning: bool = False,
    ) -> None:
        """Begin a reply.

        thinking: the marks of reasoning; None where a text is to be left as it is.
        form: of calls; None where no tools are offered, so that nothing is one.
        in_reasoning: the prompt has opened the reasoning already.
        """
        states: dict[str, list[tuple[str, str]]] = {"normal": []}
        if thinking is not None:
            states["normal"].append((thinking[0], "reasoning"))
            states["reasoning"] = [(thinking[1], "normal")]
        if form is not None:
            states["normal"].append((form.start, "tool"))
            states["tool"] = [(form.end, "normal")] if form.end else []
        self._form, self._tools = form, tools
        self._state = TextStateMachine(states).make_state("reasoning" if in_reasoning else "normal")
        self._now = "reasoning" if in_reasoning else "normal"
        self._call: CallText | None = None
        self.calls = 0
        # White space after a mark belongs to neither side; before a call it is nothing either.
        self._space, self._is_fresh = "", in_reasoning

    @property
    def is_reasoning(self) -> bool:
        """Whether the text is inside its reasoning."""
        return self._now == "reasoning"

    def add(self, text: str) -> list[Part]:
        """Take in more text."""
        self._state, segments = TextStateMachine.split(self._state, text)
        parts: list[Part] = []
        for number, (state, piece) in enumerate(segments):
            self._enter(state, parts)
            parts += self._piece(state, piece)
            if number + 1 < len(segments):
                self._leave(state, parts, is_complete=True)
        return parts

    def finish(self) -> list[Part]:
        """Give what is left at the end."""
        self._state, rest, state = TextStateMachine.flush(self._state)
        parts: list[Part] = []
        self._enter(state, parts)
        parts += self._piece(state, rest)
        self._leave(state, parts, is_complete=False)
        return parts

    def _enter(self, state: str, parts: list[Part]) -> None:
        if state != self._now:
            self._now = state
            self._is_fresh = True
            self._space = ""

    def _piece(self, state: str, text: str) -> list[Part]:
        if state == "tool":
            assert self._form is not None
            self._call = self._call or CallText(self._form, self._tools, self.calls)
            parts = self._call.add(text)
            self.calls = self._call.number
            return parts
        text = self._space + text
        if self._is_fresh:
            text = text.lstrip()
        kept = text.rstrip()
        self._space, text = text[len(kept) :], kept
        if not text:
            return []
        self._is_fresh = False
        return [Part("reasoning" if state == "reasoning" else "text", text)]

    def _leave(self, state: str, parts: list[Part], is_complete: bool) -> None:
        if state == "tool" and self._call is not None:
            parts += self._call.finish(is_complete)
            self.calls, self._call = self._call.number, None
        elif state == "normal" and not is_complete and self._space and not self.calls and not self._is_fresh:
            parts.append(Part("text", self._space))
        self._space = ""


class CallText:
    """The text between the marks of a call.

    Where it is JSON in the usual order, the arguments are given as they come; otherwise when the text is whole.
    """

    def __init__(self, form: ToolFormat, tools: Sequence[Tool], number: int) -> None:
        """Begin the text of call ``number``."""
        self.number = number
        self._form, self._tools = form, tools
        self._text = ""
        self._sent: int | None = None
        self._scanner = ObjectEnd()

    def add(self, text: str) -> list[Part]:
        """Take in more text."""
        self._text += text
        parts: list[Part] = []
        if self._sent is None and self._form.is_json and (header := HEADER.match(self._text)):
            name = json.loads(header[1])
            if name in {tool["function"]["name"] for tool in self._tools}:
                self._sent = header.end()
                parts.append(Part("call", name, self.number, new_call_id()))
        if self._sent is not None:
            length = self._scanner.feed(self._text[self._sent :])
            if length:
                parts.append(Part("arguments", self._text[self._sent : self._sent + length], self.number))
                self._sent += length
        return parts

    def finish(self, is_complete: bool) -> list[Part]:
        """Read the whole text; one that cannot be read is text with its marks."""
        if self._sent is not None:
            self.number += 1
            return []
        parts = []
        try:
            for name, arguments in self._form.parse(self._text, self._tools):
                parts.append(Part("call", name, self.number, new_call_id()))
                parts.append(Part("arguments", json_text(arguments), self.number))
                self.number += 1
        except ValueError:
            end = self._form.end if is_complete else ""
            return [Part("text", f"{self._form.start}{self._text}{end}")]
        return parts


def json_text(value: Any) -> str:
    """Return JSON. Python literals may hold halves of characters, which no reply can be encoded with."""
    text = json.dumps(value, ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class ObjectEnd:
    """Finds where a JSON object ends whose text comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped, self.is_over = 0, False, False, False

    def feed(self, text: str) -> int:
        """Return how many of the next characters belong to the object."""
        if self.is_over:
            return 0
        for index, character in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if self._depth == 0:
                    self.is_over = True
                    return index + 1
        return len(text)


def joined(parts: Sequence[Part]) -> list[Part]:
    """Return parts with pieces of the same kind as one."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if last is not None and part.kind != "call" and (last.kind, last.call) == (part.kind, part.call):
            result[-1] = Part(part.kind, last.text + part.text, part.call)
        else:
            result.append(part)
    return result


def new_call_id() -> str:
    """Return an id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"
