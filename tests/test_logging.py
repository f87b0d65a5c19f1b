"""What the package tells the standard library's logging, and that it is silent where nobody listens."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_drafters import ScriptedDrafter, always_right
from tiny_folders import write_dflash2, write_model
from tiny_models import tiny_target

from mlx_spec import Engine, load
from mlx_spec.engine import Request
from mlx_spec.engine.costs import Costs
from mlx_spec.engine.draft_policy import CostAware


def messages(caplog: pytest.LogCaptureFixture, module: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == f"mlx_spec.{module}"]


def test_a_load_says_what_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))
    model, drafter = str(write_model(tmp_path / "llama")), str(write_dflash2(tmp_path / "dflash2"))
    caplog.set_level(logging.INFO, "mlx_spec")
    load(model, drafter)
    load(model, drafter)
    load(model, None)
    assert messages(caplog, "measure.kept_costs") == [f"Costs of {model} with {drafter} are guessed."] * 2
    with_drafter, _, without = messages(caplog, "loading.load")
    assert with_drafter.startswith(f"Loaded {model} (") and f"with the drafter {drafter}, up to 7" in with_drafter
    assert without.endswith("with no drafter.")


def test_pausing_and_resuming_are_told_once_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlx_spec")
    policy = CostAware(Costs({1: 10.0, 8: 24.0}, {1: 1.0, 7: 2.0}), 7)
    for accepts in (False, True):
        for _ in range(400):
            drafted = policy.depth()
            policy.update(drafted, drafted if accepts else 0, None)
    told = messages(caplog, "engine.draft_policy")
    assert [message.split(":")[0] for message in told] == ["Drafting is paused", "Drafting is resumed"]
    assert all("is expected to cost" in message for message in told)


def test_a_state_that_the_drafter_forgets_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlx_spec")
    target = tiny_target("llama")
    prompt = [5, 6, 7]
    engine = Engine(target, ScriptedDrafter(target, prompt, always_right), max_drafter_states=16)
    started = [engine.start(Request(prompt)) for _ in range(17)]
    for generation in started:
        engine.close(generation)
    assert messages(caplog, "engine.drafter_states") == [
        "The drafter forgets a generation of 3 tokens: it remembers at most 16."
    ]


def test_nothing_is_printed_where_nobody_listens() -> None:
    code = (
        "from mlx_spec.engine.costs import Costs; from mlx_spec.engine.draft_policy import CostAware;"
        "print(CostAware(Costs({1: 10.0, 8: 80.0}, {1: 1.0, 7: 2.0}), 7).depth())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("0\n", "")
