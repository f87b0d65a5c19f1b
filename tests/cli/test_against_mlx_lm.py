"""The same command line in mlx_lm.generate and here: the same text, or a difference that the docs name."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.generate as _  # noqa: F401
import mlx_lm.sample_utils
import pytest
from tiny_folders import write_dflash2, write_model

from mlx_spec.cli.generate import main

MLX_LM: Any = sys.modules["mlx_lm.generate"]
Capture = pytest.CaptureFixture[str]
Run = Callable[..., str]
LENGTH = ["-m", "24"]

# Both take these. Where a token is drawn, one is left to draw: the noise of the two is of another kind.
SAME: list[list[str]] = [
    [],
    ["-p", "then the other"],
    ["--prompt", "two\\nlines\\tand a tab"],
    ["--prompt", "naïve Übergröße 日本 🙂"],
    ["--prompt", "a long one " * 30],
    ["--prompt", "a long one " * 30, "--prefill-step-size", "16"],
    ["--prompt", "a long one " * 30, "--prefill-step-size", "4096"],
    ["--system-prompt", "be kind"],
    ["--system-prompt", "two\\nlines"],
    ["--prefill-response", "Well"],
    ["--system-prompt", "be kind", "--prefill-response", "Well, ", "-p", "hi"],
    ["--chat-template-config", '{"opening": "Oh, "}'],
    ["--ignore-chat-template", "-p", "then the other"],
    ["--ignore-chat-template", "-p", "<|bos|>then the other"],
    ["--use-default-chat-template", "-p", "hi"],
    ["--max-tokens", "1"],
    ["--max-tokens", "100"],
    ["--temp", "0"],
    ["--temp", "0.7", "--top-k", "1"],
    ["--temp", "0.7", "--top-p", "0.000001"],
    ["--temp", "0.7", "--min-p", "1"],
    ["--temp", "0.7", "--top-k", "1", "--xtc-probability", "0.0", "--xtc-threshold", "0.2"],
    ["--temp", "1.5", "--min-p", "1", "--min-tokens-to-keep", "1", "--top-p", "0.9"],
    ["--seed", "7", "-p", "hi"],
    ["--max-kv-size", "500", "-p", "hi"],
    ["--trust-remote-code", "-p", "hi"],
    ["--verbose", "false", "-p", "hi"],
    ["--num-draft-tokens", "3", "-p", "hi", "-m", "40"],
]
# What mlx_lm's command has no flags for, and its functions do.
PROCESSED: list[tuple[list[str], dict[str, Any]]] = [
    (["--repetition-penalty", "1.3"], {"repetition_penalty": 1.3}),
    (["--presence-penalty", "0.8"], {"presence_penalty": 0.8}),
    (["--frequency-penalty", "0.6"], {"frequency_penalty": 0.6}),
    (["--logit-bias", '{"70": 4.5, "71": -3}'], {"logit_bias": {70: 4.5, 71: -3.0}}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model in float32, where no two tokens are equally likely."""
    folder = write_model(tmp_path_factory.mktemp("m") / "llama")
    weights = mx.load(str(folder / "model.safetensors"))
    exact = {name: weight.astype(mx.float32) for name, weight in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), exact, {"format": "mlx"})
    return str(folder)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_dflash2(tmp_path_factory.mktemp("d") / "dflash2"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path_factory.getbasetemp() / "against"))


@pytest.fixture
def theirs(model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what mlx_lm.generate prints for a command line."""
    generate = MLX_LM.generate

    def run(argv: list[str], stdin: str = "", **processors: Any) -> str:
        made = mlx_lm.sample_utils.make_logits_processors(**processors)
        monkeypatch.setattr(MLX_LM, "generate", lambda *a, **b: generate(*a, logits_processors=made, **b))
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setattr(sys, "argv", ["mlx_lm.generate", "--model", model, "--verbose", "F", *argv])
        MLX_LM.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def ours(model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what the command here prints for a command line."""

    def run(argv: list[str], stdin: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        assert main(["--model", model, "--verbose", "F", *argv]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("argv", SAME, ids=lambda argv: " ".join(argv)[:50])
def test_the_same_flags_give_the_same_text(argv: list[str], ours: Run, theirs: Run, drafter: str) -> None:
    text = theirs([*LENGTH, *argv])
    assert ours([*LENGTH, "--drafter", drafter, *argv]) == text
    assert len(text) > 1 and text.endswith("\n")


@pytest.mark.parametrize("stdin", ["then the other", "two\nlines\n", "a \\n that stays\n"])
def test_the_same_standard_input_gives_the_same_text(stdin: str, ours: Run, theirs: Run) -> None:
    argv = [*LENGTH, "--prompt", "-"]
    assert ours(argv, stdin) == theirs(argv, stdin)


@pytest.mark.parametrize(("argv", "processors"), PROCESSED, ids=lambda value: str(value)[:40])
def test_flags_that_only_mlx_lms_functions_have(
    argv: list[str], processors: dict[str, Any], ours: Run, theirs: Run, drafter: str
) -> None:
    text = ours([*LENGTH, "--drafter", drafter, *argv])
    assert text == theirs(LENGTH, **processors) != ours(LENGTH)


def test_the_same_end_tokens_end_the_text(ours: Run, theirs: Run) -> None:
    whole = theirs(LENGTH).rstrip("\n")
    for end in ([whole[5]], [whole[9], whole[5]], [str(70)]):
        argv = [*LENGTH, "--extra-eos-token", *end]
        assert ours(argv) == theirs(argv)
    assert len(ours([*LENGTH, "--extra-eos-token", whole[5]])) < len(whole)


def test_an_answer_does_not_begin_with_the_space_that_parts_it_from_the_template(
    model: str, ours: Run, theirs: Run
) -> None:
    """Of a raw continuation mlx_lm drops that space, too; here it stays."""
    vocabulary = json.loads((Path(model) / "tokenizer.json").read_text())["model"]["vocab"]
    # Only tokens that begin with a space, so that the first one does.
    biases = {vocabulary["Ġthe"]: 60.0, vocabulary["Ġa"]: 59.0}
    argv = [*LENGTH, "--logit-bias", json.dumps(biases)]
    answer = ours(argv)
    assert answer == theirs(LENGTH, logit_bias=biases)
    assert answer[0] != " " and answer.count(" ") == 23
    raw = [*LENGTH, "--ignore-chat-template"]
    assert ours([*argv, "--ignore-chat-template"]) == " " + theirs(raw, logit_bias=biases)
    begun = [*LENGTH, "--prefill-response", "Well"]
    assert ours([*argv, "--prefill-response", "Well"]) == " " + theirs(begun, logit_bias=biases)


def test_a_bound_of_the_cache_ends_the_text_here_and_forgets_its_beginning_there(ours: Run, theirs: Run) -> None:
    argv = ["-m", "60", "--max-kv-size", "32"]
    here, there = ours(argv).rstrip("\n"), theirs(argv).rstrip("\n")
    assert there.startswith(here)
    assert 20 < len(here) < 32 < len(there)
