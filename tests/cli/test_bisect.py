"""``python -m mlx_spec.bisect``: what it looks at, what it prints, and its exit status."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from planted_faults import FAULTS, patient_with
from trained_texts import TEXTS

from mlx_spec.cli import generate, probe
from mlx_spec.cli.bisect import main
from mlx_spec.diagnose import variants

TESTS = Path(__file__).parent.parent
MODEL = ["--model", str(TESTS / "tiny_pair" / "target")]
PAIR = [*MODEL, "--drafter", str(TESTS / "tiny_pair" / "head")]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(variants, "SAMPLED", 24)  # gross faults need no more


def test_nothing_is_wrong_with_a_healthy_pair(capsys: Capture) -> None:
    assert main([*PAIR, "--only", "stages", "--only", "target", "--max-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert "stages: all 43 agree" in out and "equals plain decoding, bit for bit" in out


def test_a_planted_contract_is_named_with_its_fix(tmp_path: Path, capsys: Capture) -> None:
    fault = next(fault for fault in FAULTS if (fault.of, fault.name) == ("tiny mtp", "norms without their one"))
    patient_with(fault, tmp_path / "port")
    (tmp_path / "text").write_text(TEXTS[0][:70])
    arguments = [
        *MODEL,
        "--drafter",
        str(tmp_path / "port"),
        "--only",
        "variants",
        "--text",
        str(tmp_path / "text"),
    ]
    assert main([*arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    best = found["variants"][0]
    assert found["wrong"] and "one larger" in best["name"] and "add 1" in best["fixes"][0]
    assert best["clearly_better"] and best["right"] > best["as_declared"] + 0.2


def test_a_recorded_run_is_replayed(tmp_path: Path, capsys: Capture) -> None:
    record = tmp_path / "run.jsonl"
    run = [
        *PAIR,
        "--prompt",
        "The drafter reads",
        "--max-tokens",
        "24",
        "--num-draft-tokens",
        "3",
        "--temp",
        "0.7",
    ]
    assert generate.main([*run, "--record", str(record), "--verbose", "F"]) == 0
    assert main([*PAIR, "--replay", str(record)]) == 0
    assert "rounds are what recomputation from scratch gives" in capsys.readouterr().out
    head, *rounds = record.read_text().splitlines()
    wrong = json.loads(rounds[1])
    wrong["drafts"][0] = (wrong["drafts"][0] + 1) % 90
    record.write_text("\n".join([head, rounds[0], json.dumps(wrong), *rounds[2:]]))
    assert main([*PAIR, "--replay", str(record), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["replay"]
    assert (found["round"], found["part"]) == (1, "drafter")


def test_two_machines_are_compared(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = tmp_path / "dump.safetensors"
    monkeypatch.setattr(probe, "probe", lambda *arguments: None)
    assert probe.main([*PAIR, "--dump", str(dump)]) == 5
    assert main([*PAIR, "--against", str(dump)]) == 0
    assert "agree up to rounding" in capsys.readouterr().out
    tensors, about = mx.load(str(dump), return_metadata=True)
    mx.save_safetensors(str(dump), {**tensors, "steps.1.q": tensors["steps.1.q"] * 2}, about)
    assert main([*PAIR, "--against", str(dump)]) == 1
    assert "against: steps.1.q departs" in capsys.readouterr().out


def test_wrong_files_are_refused(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "x").write_text("nothing")
    for flag, word in (("--replay", "no record"), ("--against", "no dump")):
        assert main([*PAIR, flag, str(tmp_path / "x")]) == 2
        assert word in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*PAIR, "--max-tokens", "0"])
