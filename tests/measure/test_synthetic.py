"""Rounds of models with random weights: real passes, chosen acceptance, and the plain text."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from scripted_drafters import plain
from started import started
from tiny_models import tiny_target

from mlx_spec.cli import bench
from mlx_spec.engine import Engine, Request
from mlx_spec.measure import random_models
from mlx_spec.measure.random_models import random_drafter, random_model
from mlx_spec.measure.scripted import ScriptedAcceptance
from mlx_spec.measure.synthetic import Synthetic, compared, time_synthetic
from mlx_spec.measure.turns import Timed, first_difference, margin, summary
from mlx_spec.target import Target

SMALL = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=8, vocab_size=300, head_dim=16)
SIZES: dict[str, dict[str, int]] = {
    "Qwen3-8B": dict(num_attention_heads=4, num_key_value_heads=2),
    "Qwen3.5-35B-A3B": dict(
        num_attention_heads=4,
        num_key_value_heads=2,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape, sizes in SIZES.items():
        monkeypatch.setitem(random_models.CONFIGS, shape, random_models.CONFIGS[shape] | SMALL | sizes)
    monkeypatch.setitem(random_models.DFLASH2, "selector_rank", 64)


@pytest.mark.parametrize(
    ("shape", "kind"), [*(("Qwen3-8B", kind) for kind in bench.KINDS), ("Qwen3.5-35B-A3B", "mtp")]
)
def test_a_scripted_drafter_is_accepted_as_often_as_it_should_be(shape: str, kind: str) -> None:
    model, config = random_model(shape, 4, layers=8)
    target = Target(model, config, shape, 4096)
    prompt = list(range(5, 40))
    text = plain(target, Request(prompt, 150)).text
    real = random_drafter(kind, target, config, 4)
    accepted = {}
    for chance in (0.0, 0.7, 1.0):
        engine = Engine(target, ScriptedAcceptance(real, [text], chance))
        engine.states.drafts_ahead = kind != "mtp"
        generation = started(engine, Request(prompt, 150, 3))
        while generation.finish_reason is None:
            engine.step(generation)
        assert generation.tokens == text
        accepted[chance] = generation.statistics.accepted[0] / generation.statistics.drafted[0]
        engine.close(generation)
    # Greedy texts of random weights run in circles, so that a wrong draft may be right by chance.
    assert accepted[0.0] < 0.5 and accepted[1.0] == 1.0
    assert accepted[0.0] < accepted[0.7] < 1.0 and accepted[0.7] > 0.55
    assert real.pool.pages_in_use == 0 and target.pool.pages_in_use == 0


@pytest.mark.parametrize("streams", [1, 3])
def test_every_way_is_timed_and_drafting_changes_no_text(streams: int) -> None:
    arms = time_synthetic(Synthetic("Qwen3-8B", ("dflash2", "mtp"), 4, 0.9, 30, streams, 60, (2, 30)), turns=2)
    names = ["plain", "dflash2 2", "dflash2 15", "mtp 2", "mtp 15"]
    names = [name if name in arms else name.replace("15", "7") for name in names]
    assert list(arms) == (["mlx-lm", *names] if streams == 1 else names)
    for name in names:
        assert arms[name]["equal"] and arms[name]["ids"] == arms["plain"]["ids"]
        assert arms[name]["token_ms"] > 0
    assert arms["plain"]["tokens_a_round"] == streams
    assert arms["dflash2 2"]["tokens_a_round"] > 1.5 * streams


def test_texts_that_differ_say_where_and_how_narrowly() -> None:
    target, prompt = tiny_target("llama"), [3, 1, 4, 1, 5]
    text = plain(target, Request(prompt, 6)).text[len(prompt) :]
    other = [*text[:3], text[3] + 1, *text[4:]]
    assert compared(target, [prompt], [text], [Timed(texts=[text])]) == {"equal": True}
    found = compared(target, [prompt], [text], [Timed(texts=[text]), Timed(texts=[other])])
    assert (found["equal"], found["first_difference"]) == (False, 3)
    assert found["margin"] == pytest.approx(margin(target, [*prompt, *text[:3]]), abs=1e-4)


def test_a_summary_leaves_the_first_rounds_out() -> None:
    runs = [
        Timed([900.0, 9.0, 9.0, 2.0, 4.0], [1, 1, 1, 1, 3], [[5, 6]]),
        Timed([9.0] * 3 + [6.0], [1] * 4, [[5, 7]]),
    ]
    found = summary(runs)
    assert found["round_ms"] == 4.0 and found["token_ms"] == (1.5 + 6.0) / 2
    assert found["tokens_a_round"] == round(5 / 3, 3) and found["tokens_per_second"] == round(1e3 / 3.75, 1)
    assert found["ids"] != summary(runs[:1])["ids"]
    assert summary([Timed()])["token_ms"] == 0.0


def test_where_texts_differ_and_by_how_much() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3, 4]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    target, tokens = tiny_target("llama"), [3, 1, 4, 1, 5]
    logits = target.logits(target.forward([(target.open(), mx.array(tokens, dtype=mx.int32))]).hidden[-1:])
    best = np.sort(np.array(logits[0].astype(mx.float32)))
    assert margin(target, tokens) == pytest.approx(float(best[-1] - best[-2]))
    assert target.pool.pages_in_use == 0


def test_the_command_prints_a_table_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "rates.png"
    argv = [
        "--synthetic",
        "Qwen3-8B",
        "--context",
        "20",
        "--max-tokens",
        "12",
        "--turns",
        "1",
        "--plot",
        str(plot),
    ]
    assert bench.main(argv) == 0
    out = capsys.readouterr().out
    assert "dflash2 7" in out and '"arms": {"mlx-lm"' in out
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--context", "0"], "--context must be at least 1"),
        (["--streams", "17"], "--streams takes up to 16"),
        (["--synthetic-acceptance", "1.5"], "a chance from 0 to 1"),
        (["--depths", "0"], "--depths must be at least 1"),
    ],
)
def test_numbers_without_a_meaning_are_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--synthetic", "Qwen3-8B", *argv]) == 2
    assert message in capsys.readouterr().err
