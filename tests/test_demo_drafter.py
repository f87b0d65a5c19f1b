"""The drafters that ship with the demo model: lossless, and their drafts equal the official code's."""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from choosing import GREEDY
from mlx_lm.utils import load_model
from one_draft import block, extend, propose

from mlx_spec import Engine, load, stream_generate
from mlx_spec.checkpoints.tensors import read_tensors
from mlx_spec.cli import quantize_drafter
from mlx_spec.cli.generate import main
from mlx_spec.demo import DRAFTERS
from mlx_spec.drafters.base import Committed
from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.loading.load import fit_to_machine, resolve
from mlx_spec.target import Target

pytestmark = pytest.mark.real_model

PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Explain in two sentences why the sky is blue.",
    "List five fruits.",
    "Translate 'good morning' to Spanish.",
    "Who wrote Romeo and Juliet?",
    "Count from one to twenty.",
    "Write a haiku about the sea.",
    "What is 12 plus 30?",
    "Write a short letter to a friend who moved away.",
    "def fibonacci(n):",
    "Summarise: The cat sat on the mat. The dog barked. The cat ran away.",
    "Repeat the word 'echo' ten times.",
    "What is the difference between a virus and a bacterium?",
    "Give me a JSON object with a name and an age.",
    "Tell a joke about computers.",
    "Wie heißt die Hauptstadt von Deutschland?",
    "Write a table of three planets and their sizes in Markdown.",
    "Is it safe to eat raw eggs?",
    "Tell me a story about a 🐉 who is afraid of fire.",
]
SAMPLED: dict[str, Any] = {"temp": 0.8, "seed": 1}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
ROUNDING = 1e-3  # of float32, relative to the largest hidden state


@pytest.fixture(scope="module")
def demo() -> tuple[Engine, Any]:
    """The demo without measured costs: it always drafts as much as it can, and nothing is timed or cached."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_spec.loading.load.kept_costs", lambda *_: None)
        return load("demo", "dflash2")


def chat(tokenizer: Any, prompt: str) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)


def both_runs(demo: tuple[Engine, Any], prompt: str, **options: Any) -> tuple[list[Any], list[Any]]:
    """Return the responses of a speculative and of a plain run."""
    tokens = chat(demo[1], prompt)
    return (
        list(stream_generate(*demo, tokens, **options)),
        list(stream_generate(*demo, tokens, **{**options, "num_draft_tokens": 0})),
    )


def assert_same(demo: tuple[Engine, Any], prompt: str, **options: Any) -> None:
    """Compare ids, texts and finish reasons of both runs."""
    drafted, plain = both_runs(demo, prompt, **options)
    assert [r.token for r in drafted] == [r.token for r in plain]
    assert "".join(r.text for r in drafted) == "".join(r.text for r in plain)
    assert drafted[-1].finish_reason == plain[-1].finish_reason
    assert plain[-1].statistics.rounds == len(plain)


def test_the_drafter_is_small_and_fits(demo: tuple[Engine, Any]) -> None:
    engine = demo[0]
    assert engine.drafter is not None
    assert engine.drafter.max_draft == 7
    assert max(engine.drafter.target_layer_ids) < engine.target.num_layers
    assert sum(file.stat().st_size for file in DRAFTERS["dflash2"].iterdir()) < 16e6


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_the_text_is_that_of_plain_decoding(
    demo: tuple[Engine, Any], prompt: str, sampling: dict[str, Any]
) -> None:
    assert_same(demo, prompt, max_tokens=24, **sampling)


def test_it_drafts_well_enough_to_help(demo: tuple[Engine, Any]) -> None:
    """Untrained, or with wrong hidden states, it would have an accepted length of about 1.0."""
    responses = list(stream_generate(*demo, chat(demo[1], PROMPTS[6]), max_tokens=40))
    assert responses[-1].statistics.accepted_length > 2.0


def test_the_command_checks_rows(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["-p", PROMPTS[0], "-m", "8", "--num-draft-tokens", "7", "--check-rows", "--stats", "json"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    stats = json.loads(out.splitlines()[-1])
    rows = stats["rounds"] + sum(stats["drafted"])
    assert rows > stats["generation_tokens"] == 8
    assert err == f"Rows checked: {rows}, all equal to one-row passes bit for bit\n"


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_long_texts_are_those_of_plain_decoding(demo: tuple[Engine, Any], prompt: str) -> None:
    assert_same(demo, prompt, max_tokens=64)
    assert_same(demo, prompt, max_tokens=64, **SAMPLED, **PENALTIES)


@pytest.mark.parametrize("folder", [DRAFTERS["mtp"], DRAFTERS["eagle"]], ids=lambda folder: folder.name)
def test_the_heads_are_small_draft_well_and_change_no_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With wrong hidden states, or wired wrongly, a head would have an accepted length of hardly more than 1.0."""
    monkeypatch.setattr("mlx_spec.loading.load.kept_costs", lambda *_: None)
    monkeypatch.setattr(
        "mlx_spec.loading.load.check_wiring", lambda *_: pytest.fail("the wiring of a shipped drafter was checked")
    )
    demo = load("demo", folder.name)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8 * 2**20
    drafted, plain = both_runs(demo, PROMPTS[6], max_tokens=24, num_draft_tokens=3)
    assert [r.token for r in drafted] == [r.token for r in plain]
    assert drafted[-1].statistics.accepted_length > 2.0
    assert_same(demo, PROMPTS[1], max_tokens=10, **SAMPLED)


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drafter dequantised, in float32, over the whole vocabulary: what other programs load.

    PyPI's dflash does not read ``draft_token_ids``, and scores every token.
    """
    folder = tmp_path_factory.mktemp("drafter") / "plain"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["quantize_drafter", str(DRAFTERS["dflash2"]), str(folder), "--dequantize"])
        quantize_drafter.main()
    config = json.loads((folder / "config.json").read_text())
    assert "quantization" not in config
    del config["dflash_config"]["draft_token_ids"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = read_tensors(folder, "plain")
    mx.save_safetensors(
        str(folder / "model.safetensors"), {name: value.astype(mx.float32) for name, value in tensors.items()}
    )
    return folder


def test_the_dequantised_checkpoint_drafts_alike_in_the_official_code(
    plain_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds after a real prompt, in float32: hidden states to rounding, and the same paths."""
    official_code = pytest.importorskip("dflash.model_mlx", reason="needs `pip install --no-deps dflash==0.1.0`")
    monkeypatch.setattr(official_code, "snapshot_download", lambda path, **_: path)
    folder = resolve("demo")
    model = fit_to_machine(load_model(folder, lazy=True)[0])
    model.set_dtype(mx.float32)
    target = Target(model, json.loads((folder / "config.json").read_text()), "demo in float32")
    official = official_code.load_draft(str(plain_folder))
    official.bind(model)
    ours = load_dflash2(plain_folder, target, "plain")
    _, tokenizer = load("demo", None)
    text = tokenizer.encode(PROMPTS[4] + " Buenos días. Count: one, two, three, four, five, six, seven.")
    aux_hidden_states = target.forward([(target.open(), mx.array(text))], ours.target_layer_ids).aux_hidden_states
    state, cache, mask = ours.open(), official.make_cache(), ours.config.mask_token_id

    paths, start = [], 0
    for end in (12, 16, 17):
        features, anchor = aux_hidden_states[start:end], text[end]
        extend(ours, state, Committed(start, mx.array(text[start:end]), features))
        hidden = block(ours, state, anchor, ours.config.block_size)
        path = propose(ours, state, anchor, ours.max_draft, GREEDY).tokens.tolist()
        expected = official.hidden_states(mx.array([[anchor] + [mask] * ours.max_draft]), features[None], cache)
        logits = official.compute_logits(expected[:, 1:])
        selected = official.candidate_selector.select(expected[:, 1:], logits, mx.array([anchor]), 0)[0]
        scale = float(mx.abs(expected).max())
        assert float(mx.abs(hidden - expected[0]).max()) < ROUNDING * scale, end
        assert path == selected[0].tolist(), end
        paths.append(path)
        start = end
    assert len({tuple(path) for path in paths}) == 3
