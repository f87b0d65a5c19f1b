"""``python -m mlx_spec.generate``: answers on standard output, everything else on standard error."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_folders import write_dflash2, write_model

import mlx_spec
from mlx_spec import generate, load
from mlx_spec.cli.generate import PrefillBar, generation_options, main, setup_arg_parser

COMMAND = sys.modules["mlx_spec.cli.generate"]
CONTEXT = 200_000  # so that a generation without limit takes long enough to be stopped
STATS = {
    "prompt_tokens",
    "prompt_tps",
    "generation_tokens",
    "generation_tps",
    "seconds",
    "rounds",
    "undrafted_rounds",
    "siblings",
    "accepted_siblings",
    "accepted_length",
    "drafted",
    "accepted",
    "acceptance",
    "time_shares",
    "timed_rounds",
    "draft_seconds",
    "verify_seconds",
    "depth_reason",
    "exact",
    "exact_reason",
    "finish_reason",
    "peak_memory",
}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(cache))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("m") / "llama", max_position_embeddings=CONTEXT))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_dflash2(tmp_path_factory.mktemp("d") / "dflash2", max_position_embeddings=CONTEXT))


def answer(capsys: Capture, *argv: str) -> str:
    """Run the command here and return what it prints on standard output."""
    assert main(argv) == 0
    return capsys.readouterr().out


def command(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    line = [sys.executable, "-m", "mlx_spec.cli.generate", *argv]
    return subprocess.run(line, input=stdin, capture_output=True, text=True, timeout=120)


def test_help_names_every_flag_and_says_what_it_does() -> None:
    done = command("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for action in setup_arg_parser()._actions:
        assert action.help, action.option_strings
        for flag in action.option_strings:
            assert flag in done.stdout


def test_the_answer_goes_to_stdout_and_the_summary_to_stderr(model: str, drafter: str) -> None:
    done = command("--model", model, "--drafter", drafter, "-p", "hello", "-m", "24", "--draft-tokens", "5")
    engine, tokenizer = load(model, None)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)
    assert done.stdout == generate(engine, tokenizer, prompt, max_tokens=24) + "\n"
    assert "Generation: 24 tokens" in done.stderr
    assert "Draft depth: fixed at 5" in done.stderr
    assert "Peak memory:" in done.stderr
    assert done.returncode == 0


def test_stats_json_is_the_last_line_of_stdout(model: str, drafter: str, capsys: Capture) -> None:
    argv = ["--model", model, "--drafter", drafter, "-m", "24", "--draft-tokens", "5"]
    plain = answer(capsys, *argv, "--verbose", "F")
    assert main([*argv, "--stats", "json"]) == 0
    out, err = capsys.readouterr()
    text, summary = out.removesuffix("\n").rsplit("\n", 1)
    stats = json.loads(summary)
    assert text + "\n" == plain
    assert err == ""
    assert stats.keys() == STATS
    assert (stats["generation_tokens"], stats["finish_reason"]) == (24, "length")
    assert stats["rounds"] == 24 - sum(stats["accepted"])


@pytest.mark.parametrize("flag", ["F", "false", "False"])
def test_not_verbose_prints_the_answer_only(model: str, capsys: Capture, flag: str) -> None:
    assert main(["--model", model, "-m", "8", "--verbose", flag]) == 0
    out, err = capsys.readouterr()
    assert len(out) > 8 and out.count("\n") == 1
    assert err == ""


def test_the_prompt_may_come_from_standard_input(model: str, capsys: Capture) -> None:
    argv = ["--model", model, "-m", "16", "--verbose", "F"]
    done = command(*argv, "--prompt", "-", stdin="two\nlines")
    assert done.stdout == answer(capsys, *argv, "--prompt", "two\\nlines")
    assert done.stdout != answer(capsys, *argv, "--prompt", "two lines")


def test_draft_tokens_never_change_the_answer(model: str, drafter: str, capsys: Capture) -> None:
    argv = ["--model", model, "--drafter", drafter, "-m", "40", "--verbose", "F"]
    for sampling in ([], ["--temp", "0.8", "--top-k", "20", "--seed", "3", "--presence-penalty", "0.5"]):
        answers = {
            answer(capsys, *argv, *sampling, "--draft-tokens", k) for k in ("0", "auto", "adaptive", "1", "7")
        }
        assert len(answers) == 1


def test_draft_tokens_0_loads_no_drafter(model: str, capsys: Capture) -> None:
    answer(capsys, "--model", model, "--drafter", "nowhere", "--draft-tokens", "0", "-m", "2")


def test_the_seed_decides_a_sampled_answer(model: str, capsys: Capture) -> None:
    argv = ["--model", model, "-m", "24", "--verbose", "F", "--temp", "1.0", "--top-k", "30", "--seed"]
    assert answer(capsys, *argv, "4") == answer(capsys, *argv, "4")
    assert len({answer(capsys, *argv, str(seed)) for seed in range(3)}) == 3


def test_rejection_runs(model: str, drafter: str, capsys: Capture) -> None:
    argv = ["--model", model, "--drafter", drafter, "--temp", "0.8", "--top-k", "20", "-m", "24"]
    argv += ["--accept", "rejection", "--draft-tokens", "4", "--stats", "json"]
    first = answer(capsys, *argv)
    stats = json.loads(first.splitlines()[-1])
    assert stats["generation_tokens"] == 24
    assert stats["drafted"][0] > 0
    assert answer(capsys, *argv).rsplit("\n", 2)[0] == first.rsplit("\n", 2)[0]


def test_check_rows_reports(model: str, drafter: str, capsys: Capture) -> None:
    argv = ["--model", model, "--drafter", drafter, "-m", "24", "--draft-tokens", "5", "--stats", "json"]
    assert main([*argv, "--check-rows"]) == 0
    out, err = capsys.readouterr()
    stats = json.loads(out.splitlines()[-1])
    assert f"Rows checked: {stats['rounds'] + sum(stats['drafted'])}, " in err
    assert main(argv) == 0
    assert "Rows checked" not in capsys.readouterr().err


def test_stop_strings_and_end_tokens(model: str, capsys: Capture) -> None:
    argv = ["--model", model, "-m", "24", "--verbose", "F"]
    whole = answer(capsys, *argv)
    assert answer(capsys, *argv, "--stop", "never there", whole[6:8]) == whole[: whole.index(whole[6:8])] + "\n"
    assert answer(capsys, *argv, "--extra-eos-token", whole[5]) == whole[: whole.index(whole[5])] + "\n"


def test_the_chat_template_gets_what_the_flags_say(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []

    def spy(engine, tokenizer, prompt, **options):  # type: ignore[no-untyped-def]
        prompts.append(prompt if isinstance(prompt, str) else tokenizer.decode(prompt))
        yield from ()

    monkeypatch.setattr(COMMAND, "stream_generate", spy)
    for argv in (
        ["-p", "hi"],
        ["-p", "hi", "--system-prompt", "be kind"],
        ["-p", "hi", "--prefill-response", "Well"],
        ["-p", "hi", "--chat-template-config", '{"opening": "Oh, "}'],
        ["-p", "hi", "--ignore-chat-template"],
    ):
        assert main(["--model", model, *argv]) == 0
    assert prompts == ["u:hi|a:", "s:be kind|u:hi|a:", "u:hi|a:Well", "u:hi|a:Oh, ", "hi"]


def test_flags_reach_the_generation() -> None:
    argv = "-m 7 --stop x y --prefill-step-size 9 --temp 0.5 --top-p 0.9 --min-p 0.1 --top-k 5 --seed 8"
    argv += " --repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --accept rejection"
    argv += ' --draft-tokens 3 --logit-bias {"198":-5}'
    assert generation_options(setup_arg_parser().parse_args(argv.split())) == dict(
        max_tokens=7,
        stop=["x", "y"],
        prefill_step_size=9,
        temp=0.5,
        top_p=0.9,
        min_p=0.1,
        top_k=5,
        seed=8,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        accept="rejection",
        num_draft_tokens=3,
        logit_bias={198: -5.0},
    )


# Arguments, and words of the one line on standard error. {model}, {other}: a model, and a drafter of another.
ERRORS: list[tuple[list[str], list[str]]] = [
    (["--model", "{empty}"], ["{empty}", "no config.json"]),
    (["--model", "nowhere"], ["'nowhere'", "neither a folder nor a Hugging Face repo"]),
    (["--drafter", "{other}"], ["hidden size 128", "has 64"]),
    (["--drafter", "{model}"], ["{model}"]),
    (["--prompt", ""], ["prompt is empty"]),
    (["--prompt", " \\n"], ["prompt is empty"]),
    (["--prompt", "-"], ["prompt is empty"]),
    (["--drafter", "{drafter}", "--draft-tokens", "99"], ["99", "at most 7"]),
    (["--draft-tokens", "3"], ["3", "no drafter"]),
    (["--draft-tokens", "x"], ["'x'", "auto, adaptive or a number"]),
    (["--draft-tokens", "-1"], ["'-1'", "auto, adaptive or a number"]),
    (["--logit-bias", "{"], ["--logit-bias", "JSON"]),
    (["--logit-bias", "[1]"], ["--logit-bias", "JSON"]),
    (["--logit-bias", '{"a": 1}'], ["--logit-bias", "JSON"]),
    (["--logit-bias", '{"5000": 1}'], ["5000", "267"]),
    (["--chat-template-config", "{"], ["--chat-template-config", "JSON"]),
    (["--chat-template-config", "[]"], ["--chat-template-config", "JSON"]),
    (["--chat-template-config", '{"messages": 1}'], ["chat template"]),
    (["--temp", "-1"], ["temp", "-1.0"]),
    (["--temp", "nan"], ["temp", "nan"]),
    (["--top-p", "2"], ["top_p", "2.0"]),
    (["--extra-eos-token", "no such token"], ["'no such token'", "no token"]),
    (["--extra-eos-token", "5000"], ["'5000'", "no token"]),
    (["--max-tokens", "0"], ["max_tokens", "0"]),
    (["--prefill-step-size", "0"], ["prefill_step_size", "0"]),
    (["--max-kv-size", "32", "--prompt", "long " * 40], ["max_cached_tokens"]),
]


@pytest.fixture(scope="module")
def places(model: str, drafter: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    other = write_dflash2(tmp_path_factory.mktemp("o") / "other", hidden_size=128)
    empty = tmp_path_factory.mktemp("empty")
    return {"model": model, "drafter": drafter, "other": str(other), "empty": str(empty)}


def filled(texts: list[str], places: dict[str, str]) -> list[str]:
    return [places.get(t[1:-1], t) if t.startswith("{") else t for t in texts]


@pytest.mark.parametrize("argv, words", ERRORS, ids=lambda value: " ".join(value)[:40])
def test_errors_are_one_line(
    argv: list[str], words: list[str], places: dict[str, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["--model", places["model"], "-m", "4", *filled(argv, places)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and len(err) < 600
    for word in filled(words, places):
        assert word in err


def test_an_unknown_token_is_no_end_token_where_the_tokenizer_has_an_unknown_token(
    tmp_path: Path, capsys: Capture
) -> None:
    folder = write_model(tmp_path / "m")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "unk_token": "<|pad|>"}))
    assert main(["--model", str(folder), "--extra-eos-token", "no such token"]) == 1
    assert "'no such token' is no token of this model" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--draft-tokens", "x"], ["--temp", "-1"], ["--prompt", ""]])
def test_what_can_be_checked_is_checked_before_a_model_is_loaded(
    argv: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(COMMAND, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert main(argv) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("argv", [["--accept", "always"], ["--max-tokens", "many"], ["--no-such-flag"]])
def test_wrong_usage_ends_with_2(argv: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "usage: python -m mlx_spec.generate" in capsys.readouterr().err


def test_an_error_in_a_process_ends_with_1_and_no_traceback(model: str, tmp_path: Path) -> None:
    done = command("--model", str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"error: {tmp_path} is no model: it has no config.json.\n"


def test_importing_the_command_leaves_the_function_of_its_name_callable(model: str) -> None:
    assert sys.modules["mlx_spec.cli.generate"] is COMMAND
    engine, tokenizer = load(model)
    assert mlx_spec.cli.generate(engine, tokenizer, "hello", max_tokens=4) == generate(
        engine, tokenizer, "hello", max_tokens=4
    )


def start(*argv: str) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "mlx_spec.cli.generate", *argv]
    # A shell starts background jobs with SIGINT ignored, and children inherit that.
    return subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize("stats", ["text", "json"])
def test_ctrl_c_in_mid_generation_stops_cleanly(model: str, drafter: str, stats: str) -> None:
    process = start("--model", model, "--drafter", drafter, "-m", "-1", "--stats", stats)
    assert process.stdout is not None
    try:
        begun = process.stdout.read(30)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert len(begun) == 30
    assert b"stopped" in err
    assert b"Traceback" not in err
    if stats == "json":
        summary = json.loads(out.splitlines()[-1])
        assert summary["generation_tokens"] > 20
        assert summary["finish_reason"] is None
    else:
        assert b"Generation: " in err


def test_a_reader_that_goes_away_is_no_error(model: str) -> None:
    process = start("--model", model, "-m", "-1")
    assert process.stdout is not None and process.stderr is not None
    try:
        process.stdout.read(30)
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=60)
    finally:
        process.kill()
        process.stderr.close()
    assert b"Traceback" not in err and b"Exception" not in err


def test_a_long_prompt_shows_a_bar_that_goes_away(model: str, capsys: Capture) -> None:
    assert main(["--model", model, "-m", "2", "--prefill-step-size", "8", "-p", "long " * 20]) == 0
    out, err = capsys.readouterr()
    assert "reading the prompt" in err
    bar, summary = err.rsplit("\r", 1)
    assert summary.startswith("=====")
    assert "reading" not in out


def test_a_short_prompt_shows_no_bar(model: str, capsys: Capture) -> None:
    assert main(["--model", model, "-m", "2", "-p", "long " * 20]) == 0
    assert "reading the prompt" not in capsys.readouterr().err


def test_the_bar_goes_away_when_reading_is_interrupted(capsys: Capture) -> None:
    with pytest.raises(KeyboardInterrupt), PrefillBar(8) as bar:
        bar.update(0, 100)
        bar.update(8, 100)
        raise KeyboardInterrupt
    err = capsys.readouterr().err
    assert "reading the prompt" in err
    assert err.rsplit("\r", 2)[-2].strip() == ""


def test_ctrl_c_while_loading_ends_with_130(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMAND, "load", interrupt)
    assert main([]) == 130
    assert capsys.readouterr() == ("", "stopped\n")


def test_costs_are_measured_once(model: str, drafter: str, cache: Path, capsys: Capture) -> None:
    assert os.environ["MLX_SPEC_CACHE"] == str(cache)
    argv = ["--model", model, "--drafter", drafter, "-m", "2"]
    answer(capsys, *argv)
    before = (cache / "machine.json").read_bytes()
    answer(capsys, *argv)
    assert (cache / "machine.json").read_bytes() == before
