"""``python -m mlx_spec.generate``: answers on standard output, everything else on standard error."""

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.generate import setup_arg_parser as mlx_lm_arg_parser
from tiny_folders import TEMPLATE, write_dflash2, write_model

from mlx_spec import GenerationResponse, Grammar, ModelWarning, Sampling, generate, load, stream_generate
from mlx_spec.cli.generate import PrefillBar, main
from mlx_spec.cli.generate_flags import REFUSED, Refused, setup_arg_parser
from mlx_spec.cli.generate_options import generation_options

MODULES = ("generate", "chat", "check", "bench", "extract_mtp", "quantize_drafter")
COMMAND = sys.modules["mlx_spec.cli.generate"]
CONTEXT = 200_000  # so that a generation without limit takes long enough to be stopped
STATS = {
    "text",
    "prompt_tokens",
    "cached_tokens",
    "prompt_tps",
    "generation_tokens",
    "generation_tps",
    "seconds",
    "rounds",
    "undrafted_rounds",
    "sibling_drafts",
    "accepted_sibling_drafts",
    "accepted_length",
    "drafted",
    "drafted_by",
    "accepted",
    "acceptance",
    "time_shares",
    "timed_rounds",
    "draft_seconds",
    "verify_seconds",
    "depth_reason",
    "drafter_failure",
    "kernels",
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
    line = [sys.executable, "-m", "mlx_spec.generate", *argv]
    return subprocess.run(line, input=stdin, capture_output=True, text=True, timeout=120)


def test_help_names_every_flag_and_says_what_it_does() -> None:
    done = command("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for action in setup_arg_parser()._actions:
        assert action.help, action.option_strings
        for flag in action.option_strings:
            assert (flag in done.stdout) == (action.help != argparse.SUPPRESS)


@pytest.mark.parametrize("name", MODULES)
def test_every_command_runs_as_a_module_and_warns_of_nothing(name: str) -> None:
    line = [sys.executable, "-W", "error", "-m", f"mlx_spec.{name}", "--help"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: python -m mlx_spec.{name}")


def test_every_flag_of_mlx_lm_is_taken_or_refused_with_a_reason(capsys: Capture) -> None:
    ours = {flag: action for action in setup_arg_parser()._actions for flag in action.option_strings}
    refused = set()
    for action in mlx_lm_arg_parser()._actions:
        for flag in action.option_strings:
            assert flag in ours, flag
            if not isinstance(ours[flag], Refused):
                assert (ours[flag].nargs, ours[flag].type or str) == (
                    action.nargs,
                    action.type or str,
                ) or flag in (
                    "--num-draft-tokens",
                    "--verbose",
                )
                continue
            refused.add(action.option_strings[0])
            with pytest.raises(SystemExit) as ended:
                main([flag, "4"])
            assert ended.value.code == 2
            reason = REFUSED[action.option_strings[0]]
            last = capsys.readouterr().err.splitlines()[-1]
            assert last.endswith(f"{action.option_strings[0]} does not exist here: {reason}.")
    assert refused == REFUSED.keys()


def test_the_answer_goes_to_stdout_and_the_summary_to_stderr(model: str, drafter: str) -> None:
    done = command("--model", model, "--drafter", drafter, "-p", "hello", "-m", "24", "--num-draft-tokens", "5")
    engine, tokenizer = load(model, None)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)
    assert done.stdout == generate(engine, tokenizer, prompt, max_tokens=24) + "\n"
    assert "Generation: 24 tokens" in done.stderr
    assert "Draft depth: fixed at 5" in done.stderr
    assert "Peak memory:" in done.stderr
    assert done.returncode == 0


def test_stats_json_is_all_of_stdout(model: str, drafter: str, capsys: Capture) -> None:
    argv = ["--model", model, "--drafter", drafter, "-m", "24", "--num-draft-tokens", "5"]
    plain = answer(capsys, *argv, "--verbose", "F")
    assert main([*argv, "--stats", "json"]) == 0
    out, err = capsys.readouterr()
    stats = json.loads(out)
    assert err == ""
    assert stats.keys() == STATS
    assert stats["text"] + "\n" == plain
    assert (stats["generation_tokens"], stats["finish_reason"]) == (24, "length")
    assert stats["rounds"] == 24 - sum(stats["accepted"])
    assert stats["depth_reason"] == "fixed at 5"


def test_the_summary_begins_with_a_blank_line_and_gives_the_draft_depth(
    model: str, drafter: str, capsys: Capture
) -> None:
    argv = ["--model", model, "--drafter", drafter, "-m", "8", "--num-draft-tokens", "5"]
    assert main(argv) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["", "=" * 10]
    assert "Draft depth: fixed at 5" in lines


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


def test_num_draft_tokens_never_change_the_answer(model: str, drafter: str, capsys: Capture) -> None:
    argv = ["--model", model, "--drafter", drafter, "-m", "40", "--verbose", "F"]
    for sampling in ([], ["--temp", "0.8", "--top-k", "20", "--seed", "3", "--presence-penalty", "0.5"]):
        answers = {
            answer(capsys, *argv, *sampling, "--num-draft-tokens", k) for k in ("0", "auto", "adaptive", "1", "7")
        }
        assert len(answers) == 1


def test_copies_change_no_answer(model: str, drafter: str, tmp_path: Path, capsys: Capture) -> None:
    """Of a prompt that repeats itself, from further texts, and beside a drafter."""
    text = tmp_path / "text"
    argv = ["--model", model, "-m", "40", "-p", "one two three one two three one two", "--verbose", "F"]
    plain = answer(capsys, *argv, "--drafter", "none")
    text.write_text(plain, encoding="utf-8")
    for more in ([], ["--drafter", "lookup", "--lookup-text", str(text)], ["--drafter", drafter]):
        assert answer(capsys, *argv, *more) == plain
    assert answer(capsys, *argv, "--drafter", "lookup", "--num-draft-tokens", "4") == plain


def test_num_draft_tokens_0_loads_no_drafter(model: str, capsys: Capture) -> None:
    answer(capsys, "--model", model, "--drafter", "nowhere", "--num-draft-tokens", "0", "-m", "2")


def test_the_seed_decides_a_sampled_answer(model: str, capsys: Capture) -> None:
    argv = ["--model", model, "-m", "24", "--verbose", "F", "--temp", "1.0", "--top-k", "30", "--seed"]
    assert answer(capsys, *argv, "4") == answer(capsys, *argv, "4")
    assert len({answer(capsys, *argv, str(seed)) for seed in range(3)}) == 3


def test_rejection_runs(model: str, drafter: str, capsys: Capture) -> None:
    argv = ["--model", model, "--drafter", drafter, "--temp", "0.8", "--top-k", "20", "-m", "24"]
    argv += ["--accept", "rejection", "--num-draft-tokens", "4", "--stats", "json"]
    first = answer(capsys, *argv)
    stats = json.loads(first)
    assert stats["generation_tokens"] == 24
    assert stats["drafted"][0] > 0
    assert json.loads(answer(capsys, *argv))["text"] == stats["text"]


def test_xtc_changes_the_answer_and_drafts_do_not(model: str, drafter: str, capsys: Capture) -> None:
    argv = ["--model", model, "--drafter", drafter, "-m", "24", "--verbose", "F", "--temp", "0.7", "--seed", "2"]
    xtc = ["--xtc-probability", "0.9", "--xtc-threshold", "0.005", "--num-draft-tokens"]
    texts = {answer(capsys, *argv, *xtc, depth) for depth in ("0", "3", "7")}
    assert len(texts) == 1
    assert texts != {answer(capsys, *argv)}


def test_xtc_spares_newlines_and_end_tokens(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def spy(engine, tokenizer, prompt, **options):  # type: ignore[no-untyped-def]
        asked.append(options["xtc_special_tokens"])
        assert set(options["xtc_special_tokens"]) == {*tokenizer.encode("\n"), *tokenizer.eos_token_ids}
        yield from ()

    monkeypatch.setattr(COMMAND, "stream_generate", spy)
    assert main(["--model", model, "--temp", "1", "--xtc-probability", "0.5"]) == 0
    assert len(asked) == 1 and len(asked[0]) >= 2


def test_check_rows_reports(model: str, drafter: str, capsys: Capture) -> None:
    argv = ["--model", model, "--drafter", drafter, "-m", "24", "--num-draft-tokens", "5", "--stats", "json"]
    assert main([*argv, "--check-rows"]) == 0
    out, err = capsys.readouterr()
    stats = json.loads(out)
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
    argv += ' --num-draft-tokens adaptive --max-draft-tokens 3 --logit-bias {"198":-5}'
    argv += " --min-tokens-to-keep 2 --xtc-probability 0.4 --xtc-threshold 0.2 --regex [a-z]+ --grammar-after |"
    assert generation_options(setup_arg_parser().parse_args(argv.split())) == dict(
        max_tokens=7,
        stop=["x", "y"],
        prefill_step_size=9,
        temp=0.5,
        top_p=0.9,
        min_p=0.1,
        min_tokens_to_keep=2,
        xtc_probability=0.4,
        xtc_threshold=0.2,
        top_k=5,
        seed=8,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        accept="rejection",
        num_draft_tokens="adaptive",
        max_draft_tokens=3,
        logit_bias={198: -5.0},
        grammar=Grammar.regex("[a-z]+", after="|"),
    )


def test_a_schema_is_json_or_a_file_and_the_answer_matches(model: str, tmp_path: Path, capsys: Capture) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", 5]}}, "required": ["a"]}
    rules = 'start: " " ("yes" | "no")'
    (tmp_path / "schema.json").write_text(json.dumps({**schema, "additionalProperties": False}))
    (tmp_path / "rules.lark").write_text(rules)

    def answer(*argv: str) -> str:
        assert main(["--model", model, "--verbose", "F", "-m", "80", *argv]) == 0
        return capsys.readouterr().out

    assert json.loads(answer("--json-schema", str(tmp_path / "schema.json")))["a"] in ("x", 5)
    assert json.loads(answer("--json-schema", '{"enum": [[1, 2], {"b": null}]}')) in ([1, 2], {"b": None})
    assert answer("--grammar", str(tmp_path / "rules.lark")) in (" yes\n", " no\n")
    assert answer("--regex=-[0-9]{3}").strip("-\n").isdecimal()


def test_defaults_are_those_of_the_library() -> None:
    options = generation_options(setup_arg_parser().parse_args([]))
    fields = {name: getattr(Sampling(), name) for name in options.keys() & vars(Sampling()).keys()}
    assert fields.items() <= options.items() and len(fields) > 10


def test_flags_reach_load(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, object] = {}

    def spy(*names: object, **options: object) -> None:
        asked.update(options, names=names)
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMAND, "load", spy)
    argv = f"--model {model} --drafter eagle --adapter-path {tmp_path} --trust-remote-code --max-kv-size 96"
    text = tmp_path / "text"
    text.write_text("Twelve.")
    more = ["--lookup-text", str(text), "--lookup-text", str(text)]
    assert main([*argv.split(), *more, "--draft-vocab", "500", "--draft-bits", "4", "--exact", "off"]) == 130
    assert asked == dict(
        names=(model,),
        drafter="eagle",
        lookup_texts=["Twelve.", "Twelve."],
        adapter_path=str(tmp_path),
        trust_remote_code=True,
        max_cached_tokens=96,
        draft_vocab=500,
        draft_bits=4,
        exact=False,
        progress=False,
    )


@pytest.mark.parametrize("default", [None, TEMPLATE])
def test_the_default_chat_template_of_a_tokenizer(
    default: str | None, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "m")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    prompts: list[str] = []

    def load_with_default(*names: str, **options: object) -> object:
        engine, tokenizer = load(*names, **options)  # type: ignore[arg-type]
        tokenizer._tokenizer.default_chat_template = default
        return engine, tokenizer

    def spy(engine, tokenizer, prompt, **options):  # type: ignore[no-untyped-def]
        prompts.append(prompt if isinstance(prompt, str) else tokenizer.decode(prompt))
        yield from ()

    monkeypatch.setattr(COMMAND, "load", load_with_default)
    monkeypatch.setattr(COMMAND, "stream_generate", spy)
    argv = ["--model", str(folder), "-p", "hi"]
    assert main(argv) == 0
    assert main([*argv, "--use-default-chat-template"]) == (1 if default is None else 0)
    assert prompts == ["hi"] if default is None else ["hi", "u:hi|a:"]
    assert ("needs a chat template" in capsys.readouterr().err) == (default is None)


# Arguments, and words of the one line on standard error. {model}, {other}: a model, and a drafter of another.
ERRORS: list[tuple[list[str], list[str]]] = [
    (["--model", "{empty}"], ["{empty}", "no config.json"]),
    (["--model", "nowhere"], ["'nowhere'", "neither a folder nor a Hugging Face repo"]),
    (["--drafter", "{other}"], ["hidden size 128", "has 64"]),
    (["--drafter", "{model}"], ["{model}"]),
    (["--prompt", ""], ["prompt is empty"]),
    (["--prompt", " \\n"], ["prompt is empty"]),
    (["--prompt", "-"], ["prompt is empty"]),
    (["--drafter", "{drafter}", "--num-draft-tokens", "99"], ["99", "at most 7"]),
    (["--drafter", "none", "--num-draft-tokens", "3"], ["3", "no drafter"]),
    (["--num-draft-tokens", "x"], ["'x'", "auto, adaptive or a number"]),
    (["--num-draft-tokens", "-1"], ["'-1'", "auto, adaptive or a number"]),
    (["--logit-bias", "{"], ["--logit-bias", "JSON"]),
    (["--logit-bias", "[1]"], ["--logit-bias", "JSON"]),
    (["--logit-bias", '{"a": 1}'], ["--logit-bias", "JSON"]),
    (["--logit-bias", '{"5000": 1}'], ["5000", "267"]),
    (["--chat-template-config", "{"], ["--chat-template-config", "JSON"]),
    (["--chat-template-config", "[]"], ["--chat-template-config", "JSON"]),
    (["--chat-template-config", '{"messages": 1}'], ["chat template"]),
    (["--ignore-chat-template", "--system-prompt", "s"], ["--system-prompt", "--ignore-chat-template"]),
    (["--drafter", "none", "--draft-bits", "4"], ["draft_bits", "drafter"]),
    (["--adapter-path", "{empty}"], ["{empty}", "adapter_config.json"]),
    (["--temp", "-1"], ["temp", "-1.0"]),
    (["--xtc-probability", "2"], ["xtc_probability", "2.0"]),
    (["--xtc-threshold", "0.6"], ["xtc_threshold", "0.6"]),
    (["--min-tokens-to-keep", "0"], ["min_tokens_to_keep", "0"]),
    (["--temp", "nan"], ["temp", "nan"]),
    (["--top-p", "2"], ["top_p", "2.0"]),
    (["--extra-eos-token", "no such token"], ["'no such token'", "no token"]),
    (["--extra-eos-token", "5000"], ["'5000'", "no token"]),
    (["--max-tokens", "0"], ["max_tokens", "0"]),
    (["--prefill-step-size", "0"], ["prefill_step_size", "0"]),
    (["--max-kv-size", "32", "--prompt", "long " * 40], ["max_cached_tokens"]),
    (["--regex", "a", "--grammar-after", "much text"], ["one token", "'much text'"]),
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


@pytest.mark.parametrize(
    "argv",
    [
        ["--num-draft-tokens", "x"],
        ["--temp", "-1"],
        ["--prompt", ""],
        ["--max-tokens", "0"],
        ["--max-tokens", "-2"],
        ["--prefill-step-size", "0"],
        ["--max-kv-size", "0"],
        ["--max-draft-tokens", "0"],
        ["--max-draft-tokens", "4", "--num-draft-tokens", "3"],
        ["--logit-bias", '{"-1": 1}'],
        ["--logit-bias", '{"1": NaN}'],
        ["--draft-bits", "7"],
        ["--draft-vocab", "0"],
        ["--chat-template-config", "["],
        ["--ignore-chat-template", "--use-default-chat-template"],
        ["--json-schema", '{"type": "strin"}'],
        ["--json-schema", "no such file"],
        ["--regex", "("],
        ["--grammar", "no such file"],
        ["--grammar-after", "</think>"],
    ],
)
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


@pytest.mark.parametrize("first", ["import mlx_spec.generate", "import mlx_spec.generate.__main__", "pass"])
def test_the_function_generate_is_what_the_package_exports(first: str) -> None:
    """Though a package of that name holds it and the command."""
    code = f"{first}\nfrom mlx_spec import generate\nprint(type(generate).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("function\n", "")


def start(*argv: str) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "mlx_spec.generate", *argv]
    # A shell starts background jobs with SIGINT ignored, and children inherit that.
    return subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_ctrl_c_in_a_process_stops_cleanly(model: str, drafter: str) -> None:
    process = start("--model", model, "--drafter", drafter, "-m", "-1")
    assert process.stdout is not None
    try:
        begun = process.stdout.read(30)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert len(begun) == 30 and out.endswith(b"\n")
    assert err.startswith(b"stopped\n\n==========\nPrompt: ")


@pytest.mark.parametrize("where", ["in a round", "between rounds"])
@pytest.mark.parametrize("stats", ["text", "json"])
def test_ctrl_c_in_mid_generation_gives_the_whole_summary(
    model: str, drafter: str, stats: str, where: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopping(*args: Any, **options: Any) -> Iterator[GenerationResponse]:
        rounds = count(1)

        def stop(*_: object) -> None:
            if where == "in a round" and next(rounds) == 10:
                raise KeyboardInterrupt

        for response in stream_generate(*args, **{**options, "on_verified": stop}):
            yield response
            if where == "between rounds" and response.generation_tokens == 10:
                raise KeyboardInterrupt

    monkeypatch.setattr(COMMAND, "stream_generate", stopping)
    argv = ["--model", model, "--drafter", drafter, "-m", "-1", "--num-draft-tokens", "5", "--stats", stats]
    assert main(argv) == 130
    out, err = capsys.readouterr()
    if stats == "json":
        summary = json.loads(out)
        assert err == "stopped\n"
        assert summary["rounds"] == (9 if where == "in a round" else summary["rounds"])
        assert summary["generation_tokens"] >= 9 and len(summary["text"]) > 5
        assert (summary["finish_reason"], summary["depth_reason"]) == (None, "fixed at 5")
    else:
        lines = err.splitlines()
        assert out.endswith("\n") and len(out) > 5
        assert lines[:3] == ["stopped", "", "=" * 10]
        assert [line.split(":")[0] for line in lines[3:6]] == ["Prompt", "Generation", "Rounds"]
        assert "Draft depth: fixed at 5" in lines
        assert lines[-1].startswith("Peak memory: ")


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(model: str) -> None:
    line = [sys.executable, "-m", "mlx_spec.generate", "--model", model, "-m", "4"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("error: The answer cannot be written: ") and done.stderr.count("\n") == 1


def test_standard_input_that_is_no_text_is_one_line(
    model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    assert main(["--model", model, "-p", "-"]) == 1
    assert capsys.readouterr().err == "error: Standard input must be UTF-8 text; byte 3 of it is not.\n"


@pytest.mark.parametrize(
    "flag",
    ["--prompt", "--system-prompt", "--prefill-response", "--stop", "--extra-eos-token", "--chat-template-config"],
)
def test_an_argument_that_is_no_text_is_one_line(
    flag: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(COMMAND, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert main([flag, os.fsdecode(b"caf\xe9")]) == 1
    assert capsys.readouterr().err == f"error: {flag} must be UTF-8 text; what comes after 'caf' is not.\n"


def test_standard_input_is_utf8_in_every_locale(model: str, capsys: Capture) -> None:
    argv = ["--model", model, "-m", "8", "--verbose", "F"]
    line = [sys.executable, "-m", "mlx_spec.generate", *argv, "-p", "-"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(line, input="naïve 🙂".encode(), capture_output=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == answer(capsys, *argv, "-p", "naïve 🙂")


@pytest.mark.parametrize("stop", ["--", "-->", "---", "- "])
def test_a_stop_string_may_be_hyphens(stop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def spy(args: argparse.Namespace) -> int:
        asked.append((args.stop, args.prompt, args.max_tokens))
        return 0

    monkeypatch.setattr(COMMAND, "run", spy)
    assert main(["--stop", stop, "a", "-p", stop, "-m", "-1"]) == 0
    assert asked == [([stop, "a"], stop, -1)]


def test_a_full_cache_ends_the_answer_by_length(model: str, drafter: str, capsys: Capture) -> None:
    argv = ["--model", model, "--drafter", drafter, "-m", "100", "--max-kv-size", "32", "--stats", "json"]
    summary = json.loads(answer(capsys, *argv))
    assert summary["finish_reason"] == "length"
    assert summary["prompt_tokens"] + summary["generation_tokens"] == 33


# Flags, and what is said of those that change nothing.
WITHOUT_EFFECT = [
    (["--top-p", "0.9", "--seed", "4"], "--top-p and --seed: no effect, --temp 0 takes the most likely token."),
    (["--accept", "rejection"], "--accept: no effect, --temp 0 takes the most likely token."),
    (
        ["--temp", "1", "--xtc-threshold", "0.2"],
        "--xtc-threshold: no effect, it needs --xtc-probability.",
    ),
    (["--temp", "1", "--min-tokens-to-keep", "2"], "--min-tokens-to-keep: no effect, it is a bound of --min-p."),
    (
        ["--num-draft-tokens", "0", "--drafter", "nowhere", "--draft-bits", "4"],
        "--drafter and --draft-bits: no effect, --num-draft-tokens 0 decodes plainly.",
    ),
    (
        ["--num-draft-tokens", "0", "--lookup-text", "nowhere"],
        "--lookup-text: no effect, --num-draft-tokens 0 decodes plainly.",
    ),
]


@pytest.mark.parametrize(("argv", "sentence"), WITHOUT_EFFECT, ids=lambda value: str(value)[:30])
def test_flags_that_change_nothing_are_said(argv: list[str], sentence: str, model: str, capsys: Capture) -> None:
    assert main(["--model", model, "-m", "2", "--verbose", "F", *argv]) == 0
    assert capsys.readouterr().err == f"note: {sentence}\n"


def test_what_loading_warns_of_is_a_note(model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_and_warn(*names: Any, **options: Any) -> Any:
        for _ in range(2):
            warnings.warn("The head lies elsewhere.", ModelWarning, stacklevel=2)
        return load(*names, **options)

    monkeypatch.setattr(COMMAND, "load", load_and_warn)
    assert main(["--model", model, "-m", "2", "--verbose", "F"]) == 0
    assert capsys.readouterr().err == "note: The head lies elsewhere.\n" * 2


def test_sigterm_stops_as_ctrl_c_does(model: str, drafter: str) -> None:
    process = start("--model", model, "--drafter", drafter, "-m", "-1")
    assert process.stdout is not None
    try:
        begun = process.stdout.read(30)
        process.terminate()
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    assert len(begun) == 30 and out.endswith(b"\n")
    assert err.startswith(b"stopped\n\n==========\nPrompt: ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_demo_is_fetched_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """Neither a part of the download nor pip, which is a program here that never ends."""
    pip = tmp_path / "pip"
    pip.mkdir()
    (pip / "__init__.py").write_text("")
    code = f"import pathlib, os, time\npathlib.Path({str(tmp_path / 'id')!r}).write_text(str(os.getpid()))\n"
    code += "pathlib.Path(os.environ['TMPDIR'], 'part').write_text('x' * 100)\ntime.sleep(100)\n"
    (pip / "__main__.py").write_text(code)
    places = {"PYTHONPATH": str(tmp_path), "MLX_SPEC_CACHE": str(tmp_path / "cache")}
    environment = {**os.environ, **places, "MLX_SPEC_KERNELS": "stock"}  # nothing to compile first
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_spec.generate"],
        stderr=subprocess.PIPE,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        running = tmp_path / "id"
        for _ in range(600):
            if running.exists() and running.read_text():
                break
            time.sleep(0.1)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (128 + number, b"stopped\n")
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.name.startswith("demo")] == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(running.read_text()), 0)


def test_a_program_without_metadata_of_this_package_runs(model: str) -> None:
    """As in a folder that was copied, or a program that PyInstaller packed."""
    code = (
        "import importlib.metadata as metadata, runpy, sys\nreal = metadata.version\n"
        "def version(name):\n    if name == 'mlx-spec': raise metadata.PackageNotFoundError(name)\n"
        f"    return real(name)\nmetadata.version = version\nsys.argv = ['x', '--model', {model!r}, '-m', '2']\n"
        "runpy.run_module('mlx_spec.generate', run_name='__main__')"
    )
    line, environment = [sys.executable, "-c", code], {**os.environ, "MLX_SPEC_KERNELS": "stock"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0 and "Generation: 2 tokens" in done.stderr


@pytest.mark.parametrize("argv", [["--model", "~nouserx/m"], ["--drafter", "~nouserx/d"]])
def test_a_home_folder_that_is_not_known_is_one_line(argv: list[str], model: str, capsys: Capture) -> None:
    assert main(["--model", model, *argv]) == 1
    assert capsys.readouterr().err == (
        f"error: {argv[1]!r} begins with a home folder that is not known; give the full path.\n"
    )


def test_without_a_home_folder_nothing_is_kept(model: str) -> None:
    code = (
        "import os, pwd\nfor name in ('HOME', 'XDG_CACHE_HOME', 'MLX_SPEC_CACHE'): os.environ.pop(name, None)\n"
        "def unknown(uid): raise KeyError(uid)\npwd.getpwuid = unknown\n"
        "from mlx_spec.cache_folder import cache_folder\nfrom mlx_spec.cli.generate import main\n"
        f"status = main(['--model', {model!r}, '-m', '2', '--verbose', 'F'])\n"
        "print(status, cache_folder())"
    )
    line, environment = [sys.executable, "-c", code], {**os.environ, "MLX_SPEC_KERNELS": "stock"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    status, folder = done.stdout.splitlines()[-1].split()
    assert status == "0" and not Path(folder).exists()


def pretend_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


def test_a_long_prompt_shows_a_bar_on_a_terminal_that_goes_away(
    model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--model", model, "-m", "2", "--prefill-step-size", "8", "-p", "long " * 20]
    assert main(argv) == 0
    assert capsys.readouterr().err.startswith("\n=====")
    pretend_terminal(monkeypatch)
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "reading the prompt" in err
    bar, summary = err.rsplit("\r", 1)
    assert summary.startswith("\n=====")
    assert "reading" not in out


def test_a_short_prompt_shows_no_bar(model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_terminal(monkeypatch)
    assert main(["--model", model, "-m", "2", "-p", "long " * 20]) == 0
    assert "reading the prompt" not in capsys.readouterr().err


def test_the_bar_goes_away_when_reading_is_interrupted(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt), PrefillBar(8) as bar:
        bar.update(0, 100)
        bar.update(8, 100)
        raise KeyboardInterrupt
    err = capsys.readouterr().err
    assert "reading the prompt" in err
    assert err.rsplit("\r", 2)[-2].strip() == ""


def test_a_first_text_shows_on_a_terminal_what_is_checked_after_it(
    model: str, drafter: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--model", model, "--drafter", drafter, "-m", "2", "--verbose", "F"]
    for cache, terminal in (("a", False), ("b", True)):
        monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / cache))
        if terminal:
            pretend_terminal(monkeypatch)
        assert main(argv) == 0
        err = capsys.readouterr().err
        assert ("Checking rows, once" in err) == terminal
    assert err.rsplit("\r", 2)[-2].strip() == err.rsplit("\r", 2)[-1] == ""


def test_ctrl_c_while_a_bar_is_shown_takes_it_away(
    model: str, drafter: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path))
    pretend_terminal(monkeypatch)
    monkeypatch.setattr("mlx_spec.measure.exactness.check_tree", interrupt)
    assert main(["--model", model, "--drafter", drafter]) == 130
    err = capsys.readouterr().err
    assert "once" in err
    # The text is complete by then, and so is its summary.
    assert err.rsplit("\r", 2)[-2].strip() == "" and err.rsplit("\r", 1)[-1].startswith("stopped\n\n=====")


def test_ctrl_c_while_loading_ends_with_130(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMAND, "load", interrupt)
    assert main([]) == 130
    assert capsys.readouterr() == ("", "stopped\n")


def test_rows_are_checked_once(model: str, drafter: str, cache: Path, capsys: Capture) -> None:
    assert os.environ["MLX_SPEC_CACHE"] == str(cache)
    argv = ["--model", model, "--drafter", drafter, "-m", "2"]
    answer(capsys, *argv)
    before = (cache / "machine.json").read_bytes()
    answer(capsys, *argv)
    assert (cache / "machine.json").read_bytes() == before
