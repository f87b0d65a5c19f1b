"""The backend of docs/in-an-app.md: several chats in one worker thread, each with the text that it has alone."""

import queue
from pathlib import Path
from typing import Any

import pytest
from test_docs import ROOT, blocks
from tiny_folders import write_dflash2, write_model

from mlx_spec import load, stream_generate
from mlx_spec.errors import RequestError
from mlx_spec.generate import chat_prompt

TOKENS = 32
WAIT = 60  # seconds


def read(outbox: "queue.Queue[Any]") -> tuple[str, Any]:
    """Return the text of a reply, and why it ended."""
    texts = []
    while isinstance(item := outbox.get(timeout=WAIT), str):
        texts.append(item)
    return "".join(texts), item[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("m")
    return str(write_model(folder / "llama", max_position_embeddings=4096)), str(write_dflash2(folder / "dflash2"))


@pytest.fixture
def backend(folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path))
    (text,) = [text for _, text, _ in blocks(ROOT / "docs" / "in-an-app.md") if "class Backend:" in text]
    page: dict[str, Any] = {"load": load}
    exec(text, page)
    return page["Backend"](*folders)


def test_three_chats_of_three_turns(backend: Any, folders: tuple[str, str]) -> None:
    loaded = load(folders[0], None)
    chats = {name: [{"role": "user", "content": name}] for name in ("then the other", "an inn", "in")}
    for stop in ((), "e", ["a", "th"]):
        outboxes = {
            name: backend.send(name, messages, stop, max_tokens=TOKENS) for name, messages in chats.items()
        }
        for name, messages in chats.items():
            found = list(stream_generate(*loaded, chat_prompt(loaded[1], messages), max_tokens=TOKENS, stop=stop))
            reply = "".join(response.text for response in found)
            assert read(outboxes[name]) == (reply, found[-1].finish_reason)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "go on"}]


def test_a_cancelled_reply_ends_and_others_go_on(backend: Any) -> None:
    hello = [{"role": "user", "content": "then"}]
    long, other = backend.send("long", hello, max_tokens=3000), backend.send("other", hello, max_tokens=TOKENS)
    long.get(timeout=WAIT)
    backend.cancel("long")
    assert read(long)[1] == "cancelled"
    text, reason = read(other)
    assert reason == "length"
    # A next turn ends one that runs.
    first = backend.send("long", hello, max_tokens=3000)
    second = backend.send("long", hello, max_tokens=TOKENS)
    assert read(first)[1] == "cancelled" and read(second) == (text, "length")


def test_what_cannot_be_served_is_told_to_its_chat_alone(backend: Any) -> None:
    hello = [{"role": "user", "content": "then"}]
    wrong, right = backend.send("a", hello, max_tokens=0), backend.send("b", hello, max_tokens=TOKENS)
    assert isinstance(read(wrong)[1], RequestError) and read(right)[1] == "length"
    backend.cancel("a")
    assert read(backend.send("a", hello, max_tokens=TOKENS))[1] == "length"
