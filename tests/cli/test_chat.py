"""``python -m mlx_spec.chat``: replies on standard output, everything else on standard error."""

import argparse
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.chat import setup_arg_parser as mlx_lm_arg_parser
from tiny_folders import write_dflash2, write_model

from mlx_spec import GenerationResponse, load, stream_generate
from mlx_spec.cli.chat import COMMANDS, main, setup_arg_parser
from mlx_spec.cli.generate_flags import Refused
from mlx_spec.generate import chat_prompt

COMMAND = sys.modules["mlx_spec.cli.chat"]
CONTEXT = 200_000  # so that a reply without limit takes long enough to be stopped
TOKENS = 16
Capture = pytest.CaptureFixture[str]
Messages = list[dict[str, str]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("m")
    changes = {"max_position_embeddings": CONTEXT}
    return str(write_model(folder / "llama", **changes)), str(write_dflash2(folder / "dflash2", **changes))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(cache))


@pytest.fixture
def argv(folders: tuple[str, str]) -> list[str]:
    return ["--model", folders[0], "--drafter", folders[1], "-m", str(TOKENS)]


@pytest.fixture
def expected(folders: tuple[str, str]) -> Callable[..., list[str]]:
    """Return the replies to these messages in turn, each computed plainly from the whole chat."""
    loaded = load(folders[0], None)

    def replies(*asked: str, system: str | None = None) -> list[str]:
        messages: Messages = [] if system is None else [{"role": "system", "content": system}]
        for message in asked:
            messages.append({"role": "user", "content": message})
            found = stream_generate(*loaded, chat_prompt(loaded[1], messages), max_tokens=TOKENS)
            text = "".join(response.text for response in found).removeprefix(" ")
            messages.append({"role": "assistant", "content": text})
        return [message["content"] for message in messages if message["role"] == "assistant"]

    return replies


def piped(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))


def typed(monkeypatch: pytest.MonkeyPatch, lines: Sequence[str | type[BaseException]]) -> list[str]:
    """Let a terminal's user type lines, then Ctrl-D; return the prompts that are shown, as they come."""
    shown, left = list[str](), [*lines]

    def type_line(prompt: str = "") -> str:
        shown.append(prompt)
        line = left.pop(0) if left else EOFError
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", type_line)
    monkeypatch.setattr(sys, "stdin", argparse.Namespace(isatty=lambda: True))
    return shown


def stopped_after(count: int) -> Callable[..., Iterator[GenerationResponse]]:
    """Return a ``Conversation.stream`` of which Ctrl-C stops the first reply after so many tokens."""
    stream, turns = COMMAND.Conversation.stream, iter([count])

    def stopping(conversation: Any, messages: Any, **options: Any) -> Iterator[GenerationResponse]:
        stop = next(turns, None)
        for number, response in enumerate(stream(conversation, messages, **options), 1):
            yield response
            if number == stop:
                raise KeyboardInterrupt

    return stopping


def test_help_names_every_flag_and_says_what_it_does(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    for action in setup_arg_parser()._actions:
        assert action.help, action.option_strings
        for flag in action.option_strings:
            assert (flag in shown) == (action.help != argparse.SUPPRESS)


def test_every_flag_of_mlx_lm_is_taken_or_refused_with_a_reason(capsys: Capture) -> None:
    ours = {flag: action for action in setup_arg_parser()._actions for flag in action.option_strings}
    for action in mlx_lm_arg_parser()._actions:
        for flag in action.option_strings:
            assert flag in ours, flag
            if not isinstance(ours[flag], Refused):
                assert (ours[flag].nargs, ours[flag].type or str) == (action.nargs, action.type or str)
    for flag in ("--pipeline", "--draft-model"):
        with pytest.raises(SystemExit) as ended:
            main([flag])
        assert ended.value.code == 2
        assert f"{flag} does not exist here: " in capsys.readouterr().err


def test_a_program_chats_through_pipes(argv: list[str], expected: Callable[..., list[str]]) -> None:
    line = [sys.executable, "-W", "error", "-m", "mlx_spec.chat", *argv]
    done = subprocess.run(line, input="then\n\nan inn\n", capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "".join(f"{reply}\n" for reply in expected("then", "an inn"))


def test_commands_and_the_system_prompt(
    argv: list[str], expected: Callable[..., list[str]], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped(monkeypatch, "then\nr\nh\nnaïve\r\nq\nnever\n".encode())
    assert main([*argv, "--system-prompt", "be kind"]) == 0
    out, err = capsys.readouterr()
    (first,), (second,) = expected("then", system="be kind"), expected("naïve", system="be kind")
    assert out == f"{first}\n{second}\n"
    assert err == f"a new conversation\n{COMMANDS}\n"


def test_statistics_after_each_reply(
    argv: list[str], expected: Callable[..., list[str]], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("text", "json"):
        piped(monkeypatch, b"then the other man\nan inn\n")
        flags = ["--stats", "json"] if kind == "json" else ["--stats"]
        assert main([*argv, "--num-draft-tokens", "2", "--prefill-step-size", "4", *flags]) == 0
        out, err = capsys.readouterr()
        replies = expected("then the other man", "an inn")
        if kind == "text":
            assert out == "".join(f"{reply}\n" for reply in replies)
            first, second = err.splitlines()
            assert first.startswith(f"[{TOKENS} tokens, ") and " tokens/s, " in first and "acceptance " in first
            assert first.endswith(" 0 of them cached]") and not second.endswith(" 0 of them cached]")
        else:
            summaries = [json.loads(line) for line in out.splitlines()]
            assert [summary["text"] for summary in summaries] == replies
            assert [summary["finish_reason"] for summary in summaries] == ["length", "length"]
            assert [summary["depth_reason"] for summary in summaries] == ["fixed at 2"] * 2
            assert summaries[1]["cached_tokens"] > summaries[0]["cached_tokens"] == 0
            assert err == ""


def test_every_reply_matches_a_grammar(argv: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A space at its beginning belongs to it."""
    for flags, matches in (
        (["--json-schema", '{"enum": [{"a": 1}, {"a": 2}]}'], lambda reply: json.loads(reply)["a"] in (1, 2)),
        (["--regex", " (yes|no)"], lambda reply: reply in (" yes", " no")),
        (["--regex", "[0-9]{3}", "--grammar-after", "e", "--num-draft-tokens", "3"], lambda reply: True),
    ):
        piped(monkeypatch, b"then\nan inn\n")
        assert main([*argv, *flags, "--stats", "json", "-m", "60"]) == 0
        replies = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
        assert len(replies) == 2 and all(matches(reply) for reply in replies)
    with pytest.raises(SystemExit):
        main([*argv, "--regex", "a", "--grammar", "rules.lark"])
    assert main([*argv, "--grammar-after", "e"]) == 1
    assert "--grammar-after needs a grammar too" in capsys.readouterr().err


@pytest.mark.parametrize("is_shown", [True, False])
def test_the_prompt_is_shown_where_someone_types(
    is_shown: bool,
    argv: list[str],
    expected: Callable[..., list[str]],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = typed(monkeypatch, ["then", "  an inn "])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_shown, raising=False)
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert out == "".join(f"{reply}\n" for reply in expected("then", "an inn"))
    assert shown == ["> " if is_shown else ""] * 3
    assert err == f"{COMMANDS}\n\n" if is_shown else f"{COMMANDS}\n> > > \n"


def test_ctrl_c_stops_a_reply_and_the_chat_goes_on(
    argv: list[str], folders: tuple[str, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, ["then", "go on"])
    monkeypatch.setattr(COMMAND.Conversation, "stream", stopped_after(5))
    assert main(argv) == 0
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    assert "stopped\n" in err
    engine, tokenizer = load(folders[0], None)
    messages = [{"role": "user", "content": "then"}, {"role": "assistant", "content": first}]
    prompt = chat_prompt(tokenizer, [*messages, {"role": "user", "content": "go on"}])
    reply = "".join(r.text for r in stream_generate(engine, tokenizer, prompt, max_tokens=TOKENS))
    assert second == reply.removeprefix(" ")


def test_ctrl_c_before_the_first_token_leaves_no_trace(
    argv: list[str], expected: Callable[..., list[str]], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, asked = COMMAND.Conversation.stream, list[object]()

    def stopping(conversation: Any, messages: Any, **options: Any) -> Iterator[GenerationResponse]:
        asked.append(messages)
        if len(asked) == 1:
            raise KeyboardInterrupt
        yield from stream(conversation, messages, **options)

    monkeypatch.setattr(COMMAND.Conversation, "stream", stopping)
    typed(monkeypatch, ["never mind", "then"])
    assert main(argv) == 0
    assert capsys.readouterr().out == f"{expected('then')[0]}\n"


@pytest.mark.parametrize(("lines", "stops"), [([KeyboardInterrupt], 0), (["then", KeyboardInterrupt], 3)])
def test_ctrl_c_at_the_prompt_ends_with_130(
    lines: list[Any], stops: int, argv: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, lines)
    monkeypatch.setattr(COMMAND.Conversation, "stream", stopped_after(stops))
    assert main(argv) == 130
    assert capsys.readouterr().err.endswith("stopped\n")


def test_ctrl_c_twice_in_a_process_ends_with_130(folders: tuple[str, str]) -> None:
    line = [sys.executable, "-m", "mlx_spec.chat", "--model", folders[0], "--drafter", folders[1], "-m", "-1"]
    # A shell starts background jobs with SIGINT ignored, and children inherit that.
    process = subprocess.Popen(
        line,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        process.stdin.write(b"then\nan inn\nin\n")
        process.stdin.flush()
        process.stdout.read(30)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == b"stopped\n"
        while process.stdout.read(1) != b"\n":
            pass
        process.stdout.read(30)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, b"stopped\n")


def test_an_error_ends_a_pipe_and_not_a_terminal(
    argv: list[str], expected: Callable[..., list[str]], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, small = "then " * 40, [*argv, "--max-kv-size", "64"]
    piped(monkeypatch, f"{long}\nthen\n".encode())
    assert main(small) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: The prompt has ") and err.count("\n") == 1
    typed(monkeypatch, [long, "caf\udce9", "then"])
    assert main(small) == 0
    out, err = capsys.readouterr()
    assert out == f"{expected('then')[0]}\n"
    assert [line for line in err.replace("> ", "").splitlines() if line.startswith("error: ")] == [
        err.splitlines()[1].replace("> ", ""),
        "error: A message must be UTF-8 text; what comes after 'caf' is not.",
    ]


def test_standard_input_that_is_no_text_is_one_line(
    argv: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped(monkeypatch, b"q\ncaf\xe9\n"[2:])
    assert main(argv) == 1
    assert capsys.readouterr().err == "error: Standard input must be UTF-8 text; line 1 of it is not.\n"


@pytest.mark.parametrize("wrong", [["-m", "0"], ["--max-kv-size", "0"], ["--chat-template-config", "3"]])
def test_what_no_model_could_serve_is_refused_before_one_is_loaded(
    wrong: list[str], argv: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(COMMAND, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert main([*argv, *wrong]) == 1
    assert capsys.readouterr().err.startswith("error: ")
