"""Several processes of a training run take the steps that one would take on all their batches."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import two_trainers

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """Return a port that nothing listens on: other test runs on this machine have theirs."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_two_processes_take_the_steps_of_one() -> None:
    """Gradients are bfloat16 and added in another order: near the joint steps, far from one process's own."""
    launch = [Path(sys.executable).with_name("mlx.launch"), "-n", "2", "--starting-port", str(free_port())]
    ran = subprocess.run(
        [*launch, "--", sys.executable, two_trainers.__file__],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stderr
    told = sorted((json.loads(line) for line in ran.stdout.splitlines()), key=lambda process: process["rank"])
    assert [(process["rank"], process["first"]) for process in told] == [(0, True), (1, False)]
    assert told[0]["weights"] == told[1]["weights"]
    alone = two_trainers.train(two_trainers.inputs(0), two_trainers.inputs(1))
    one_sided = two_trainers.train(two_trainers.inputs(0))
    for name, weight in alone.items():
        apart = np.abs(np.subtract(told[0]["weights"][name], weight)).max()
        assert apart < 0.1 * np.abs(np.subtract(one_sided[name], weight)).max()
