"""The command: what it refuses, how it starts, ends, and comes back after being killed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from served import write_pair

from mlx_spec.cli.serve import main, server_settings, setup_arg_parser, size

WAIT = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("serve") / "tiny")


@contextmanager
def command(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the server at any port, and give its process and address once it is ready."""
    words = [
        sys.executable,
        "-m",
        "mlx_spec.serve",
        "--model",
        str(folder),
        "--drafter",
        "none",
        "--port",
        "0",
        *flags,
    ]
    environment = {**os.environ, "MLX_SPEC_CACHE": str(folder.parent)}
    process = subprocess.Popen(
        words,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # A shell's background commands ignore Ctrl-C, and what they start inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"at (http://\S+):", line):
                yield process, found[1]
                break
        else:
            raise AssertionError("".join(lines))
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=WAIT) as answer:
        return json.load(answer)


def stream(url: str) -> Iterator[Any]:
    """Return the rest of a long reply that has begun."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "The "}]
    chunks = iter(client.chat.completions.create(model="tiny", messages=messages, max_tokens=8000, stream=True))
    next(chunks), next(chunks)
    return chunks


def read_all(chunks: Iterator[Any]) -> None:
    for _ in chunks:
        pass


def test_killed_in_the_middle_of_a_reply_it_starts_again_and_ctrl_c_ends_it(folder: Path) -> None:
    """At the same port; clients are told of the end, which takes less than two seconds."""
    with command(folder) as (process, url):
        assert get(f"{url}/health") == {"status": "ready", "model": "tiny", "is_loaded": True}
        chunks = stream(url)
        process.kill()
        with pytest.raises((openai.APIError, httpx2.TransportError)):
            read_all(chunks)
        port = url.rsplit(":", 1)[1]
    with command(folder, "--port", port) as (process, again):
        assert again == url
        chunks = stream(again)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            read_all(chunks)
        assert process.wait(WAIT) == 130
        assert time.monotonic() - started < 2


def test_a_port_that_is_taken_is_said_in_a_sentence(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--model", str(folder), "--port", str(port)]) == 1
    assert capsys.readouterr().err == (
        f"error: Port {port} of 127.0.0.1 is taken, perhaps by another server: stop that, or give another "
        "--port.\n"
    )


def test_a_model_that_cannot_be_loaded_ends_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--model", str(tmp_path), "--port", "0"]) == 1
    assert "error: " in capsys.readouterr().err


def test_a_cache_that_does_not_fit_is_refused(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(folder.parent))
    flags = ["--model", str(folder), "--drafter", "none", "--exact", "off", "--port", "0"]
    assert main([*flags, "--max-kv-size", str(10**12)]) == 1
    assert re.search(
        r"A cache of 1000000000000 positions takes .* give --max-kv-size \d+ or less", capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--temp", "-1"], "temp must lie between"),
        (["--max-tokens", "0"], "--max-tokens must be positive"),
        (["--idle-unload", "0"], "--idle-unload must be positive"),
        (["--port", "99999"], "--port must lie between"),
        (["--chat-template-args", "[]"], "--chat-template-config takes a JSON object"),
        (["--host", "no.such.host.invalid"], "The server cannot listen at no.such.host.invalid"),
        (["--num-draft-tokens", "x"], "--num-draft-tokens takes auto"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_flags_without_a_meaning(flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "0", *flags]) == 1
    assert sentence in capsys.readouterr().err


def test_flags_of_mlx_lm_server_that_do_not_exist_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--draft-model", "x"])
    assert ended.value.code == 2 and "does not exist here" in capsys.readouterr().err


def test_a_path_is_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients see the last part of it; they may also give the whole, or mlx_lm's name for the default."""
    monkeypatch.setenv("MLX_SPEC_API_KEY", "from the environment")
    settings = server_settings(setup_arg_parser().parse_args(["--model", "/Users/x/models/Qwen3-8B-4bit"]))
    assert settings.model_id == "Qwen3-8B-4bit" and settings.api_key == "from the environment"
    assert all(map(settings.knows, ("Qwen3-8B-4bit", "/Users/x/models/Qwen3-8B-4bit", "default_model", None)))


@pytest.mark.parametrize(("text", "found"), [("1000", 1000), ("2K", 2048), ("1.5g", 3 * 2**29), ("512MiB", 2**29)])
def test_sizes(text: str, found: int) -> None:
    assert size(text) == found
