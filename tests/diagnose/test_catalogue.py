"""Planted faults are told from weak and from healthy drafters, and named."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import planted_faults
import pytest
from planted_faults import FAULTS, FURTHER, NOTHING, SEEDS, WEAK, Fault, is_named, probed

from mlx_spec.diagnose import probe, variants
from mlx_spec.diagnose.text import Text


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 30
    assert {fault.of for fault in FAULTS} >= {"demo dflash2", "demo mtp", "demo eagle"}
    assert sum(len(fault.names) > 1 for fault in FAULTS) >= 4
    assert len(SEEDS) == 20 and len(FURTHER) == 10


@pytest.fixture
def few_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure after a third of the anchors, and fewer pairs of contracts, which is enough for gross faults."""
    for module in (probe, variants):
        monkeypatch.setattr(module, "SAMPLED", 24)
    monkeypatch.setattr(variants, "MOST_FIRST", 1)
    own = planted_faults.texts

    def short(*names: object) -> list[Text]:
        text = own(*names)[0]
        return [replace(text, tokens=text.tokens[:66], choices=text.choices[:66])]

    monkeypatch.setattr(planted_faults, "texts", short)


def test_a_planted_fault_is_named(few_anchors: None, tmp_path: Path) -> None:
    fault = next(fault for fault in FAULTS if (fault.of, fault.name) == ("tiny mtp", "norms without their one"))
    _, verdict = probed(fault, tmp_path)
    assert is_named(fault, verdict), verdict
    assert verdict.fixes


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize(
    "fault", [*NOTHING, *SEEDS, *WEAK, *FAULTS], ids=lambda fault: f"{fault.of}: {fault.name}"
)
def test_every_verdict_is_right(fault: Fault, tmp_path: Path) -> None:
    _, verdict = probed(fault, tmp_path)
    assert verdict.status in fault.expected, verdict


def test_a_healthy_drafter_is_no_broken_port(few_anchors: None, tmp_path: Path) -> None:
    _, verdict = probed(Fault("nothing", "tiny mtp", ()), tmp_path)
    assert verdict.status == "healthy", verdict


def test_a_head_of_random_weights_reads_nothing(few_anchors: None, tmp_path: Path) -> None:
    """As one that was trained with another target: no contract helps it, nor do the hidden states."""

    def plant(config: dict[str, object], tensors: dict[str, mx.array]) -> None:
        mx.random.seed(7)
        for name, value in tensors.items():
            if value.ndim > 1:
                tensors[name] = mx.random.normal(value.shape).astype(value.dtype) * value.std()

    _, verdict = probed(Fault("random weights", "tiny mtp", (), plant), tmp_path)
    assert verdict.status == "broken port" and "say nothing" in verdict.cause, verdict


def test_a_head_with_noise_in_its_weights_is_weak(few_anchors: None, tmp_path: Path) -> None:
    """As one that was trained little, or quantised to few bits: all is consistent, and acceptance is low."""

    def plant(config: dict[str, object], tensors: dict[str, mx.array]) -> None:
        mx.random.seed(7)
        for name, value in tensors.items():
            if value.ndim > 1:
                noise = mx.random.normal(value.shape) * value.astype(mx.float32).std()
                tensors[name] = (value + 0.8 * noise).astype(value.dtype)

    _, verdict = probed(Fault("noise", "tiny mtp", (), plant), tmp_path)
    assert verdict.status == "weak drafter", verdict
