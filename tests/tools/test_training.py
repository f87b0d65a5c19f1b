"""The training loop: too few replies, and several processes that together take the steps of one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import two_trainers
from test_train_drafter import random_replies
from tiny_models import tiny_model

from tools import train_drafter, train_eagle, train_mtp

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """Return a port that nothing listens on, because other test runs may be active on this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_two_processes_take_the_steps_of_one() -> None:
    """Gradients are bfloat16 and added in another order, so weights are close to those of joint steps only."""
    launch = [Path(sys.executable).with_name("mlx.launch"), "-n", "2", "--starting-port", str(free_port())]
    ran = subprocess.run(
        [*launch, "--", sys.executable, two_trainers.__file__],
        capture_output=True,
        text=True,
        timeout=120,
        # The steps alone are compiled.
        env={**os.environ, "PYTHONPATH": str(ROOT), "MLX_DISABLE_COMPILE": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    found = sorted((json.loads(line) for line in ran.stdout.splitlines()), key=lambda process: process["rank"])
    assert [(process["rank"], process["first"]) for process in found] == [(0, True), (1, False)]
    assert found[0]["weights"] == found[1]["weights"]
    alone = two_trainers.train(two_trainers.inputs(0), two_trainers.inputs(1))
    one_sided = two_trainers.train(two_trainers.inputs(0))
    for name, weight in alone.items():
        apart = np.abs(np.subtract(found[0]["weights"][name], weight)).max()
        assert apart < 0.1 * np.abs(np.subtract(one_sided[name], weight)).max()


@pytest.mark.parametrize("trainer", [train_drafter, train_eagle, train_mtp], ids=lambda module: module.__name__)
def test_too_few_replies_are_named_in_one_line(
    trainer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = SimpleNamespace(eos_token_ids={2}, all_special_ids=[0, 1, 2], bos_token_id=1)
    monkeypatch.setattr(trainer, "load_target", lambda name, dtype: (tiny_model("llama"), tokenizer))
    path = tmp_path / "replies.npz"
    np.savez(path, **vars(random_replies(4)))
    files = ["--replies", str(path), "--heldout", str(path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [trainer.__name__, *files, "--draft-vocab", "32", "--max-length", "64"])
    assert trainer.main() == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("error: 4 usable replies are too few for a batch of 64: give more replies or a smaller")
    assert not (tmp_path / "out").exists()
