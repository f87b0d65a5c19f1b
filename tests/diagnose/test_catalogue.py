"""Planted faults are told from weak and from healthy drafters, and named."""

from pathlib import Path

import mlx.core as mx
import pytest
from planted_faults import FAULTS, Fault, is_named, probed

QUICK = [
    fault
    for fault in FAULTS
    if (fault.of, fault.name) in (("tiny mtp", "norms without their one"), ("tiny mtp", "concatenated as MiMo"))
]
HEALTHY = [Fault("nothing", of, ()) for of in ("tiny mtp", "tiny eagle 3")]
NAMES = [f"{fault.of}: {fault.name}" for fault in FAULTS]


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 30
    assert {fault.of for fault in FAULTS} >= {"demo dflash2", "demo mtp", "demo eagle"}
    assert sum(len(fault.names) > 1 for fault in FAULTS) >= 4


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named(fault: Fault, tmp_path: Path) -> None:
    _, verdict = probed(fault, tmp_path)
    assert is_named(fault, verdict), verdict
    assert verdict.fixes


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_every_planted_fault_is_a_broken_port(fault: Fault, tmp_path: Path) -> None:
    _, verdict = probed(fault, tmp_path)
    assert verdict.status == "broken port", verdict


@pytest.mark.parametrize("fault", HEALTHY[:1], ids=lambda fault: fault.of)
def test_a_healthy_drafter_is_no_broken_port(fault: Fault, tmp_path: Path) -> None:
    _, verdict = probed(fault, tmp_path)
    assert verdict.status == "healthy", verdict


def test_a_head_of_random_weights_reads_nothing(tmp_path: Path) -> None:
    """As one that was trained with another target: no contract helps it, nor do the hidden states."""

    def plant(config: dict[str, object], tensors: dict[str, mx.array]) -> None:
        mx.random.seed(7)
        for name, value in tensors.items():
            if value.ndim > 1:
                tensors[name] = mx.random.normal(value.shape).astype(value.dtype) * value.std()

    _, verdict = probed(Fault("random weights", "tiny mtp", (), plant), tmp_path)
    assert verdict.status == "broken port" and "say nothing" in verdict.cause, verdict


def test_a_head_with_noise_in_its_weights_is_weak(tmp_path: Path) -> None:
    """As one that was trained little, or quantised to few bits: all is consistent, and acceptance is low."""

    def plant(config: dict[str, object], tensors: dict[str, mx.array]) -> None:
        mx.random.seed(7)
        for name, value in tensors.items():
            if value.ndim > 1:
                noise = mx.random.normal(value.shape) * value.astype(mx.float32).std()
                tensors[name] = (value + 0.5 * noise).astype(value.dtype)

    _, verdict = probed(Fault("noise", "tiny mtp", (), plant), tmp_path)
    assert verdict.status == "weak drafter", verdict
