"""``python -m mlx_spec.probe``: what it prints, its files and its exit status."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from trained_texts import TEXTS

import mlx_spec.cli.probe
import mlx_spec.diagnose.variants
from mlx_spec.cli.probe import STATUS, main
from mlx_spec.diagnose.probe import Probe

TESTS = Path(__file__).parent.parent
PAIR = ["--model", str(TESTS / "tiny_pair" / "target"), "--drafter", str(TESTS / "tiny_pair" / "head")]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))
    for module in (mlx_spec.diagnose.probe, mlx_spec.diagnose.variants):
        monkeypatch.setattr(module, "SAMPLED", 24)  # what contracts say is tested elsewhere


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    """The flag of a text that the tiny model knows."""
    (tmp_path / "text").write_text(TEXTS[0][:90])
    return ["--text", str(tmp_path / "text")]


def test_a_healthy_drafter_is_reported_in_full(text: list[str], tmp_path: Path, capsys: Capture) -> None:
    plot, dump = tmp_path / "plot.png", tmp_path / "dump"
    status = main([*PAIR, *text, "--json", "--plot", str(plot), "--dump", str(dump), "--logits", "1", "3"])
    found = json.loads(capsys.readouterr().out)
    assert STATUS[found["verdict"]["status"]] == status
    assert found["verdict"]["status"] in ("healthy", "weak drafter")
    assert found["anchors"] > 60 and len(found["positions"]) == 15
    first = found["positions"][0]
    assert 0.3 < first["accepted"] == first["conditional"] < 0.9
    assert first["in_first"] <= first["in_16"] <= 1 and first["rank"] == 0
    assert set(found["alignments"]) >= {"at the anchor's own position", "context capped before the anchor"}
    assert {each["stage"] for each in found["stages"]} >= {"ctx_combined", "q", "steps.0.gate", "steps.6.logits"}
    assert found["departures"] and all(each["units"] < 4 for each in found["departures"])
    assert len(found["contracts"]) >= 15 and all(each["fixes"] for each in found["contracts"])
    assert found["captured"] and not any(each["departs"] for each in found["captured"])
    for row, shown in zip((1, 3), found["logits"], strict=True):
        logprobs = [each["logprob"] for each in shown["top"]]
        assert shown["row"] == row and [each["rank"] for each in shown["top"]] == list(range(10))
        assert logprobs == sorted(logprobs, reverse=True) and sum(map(math.exp, logprobs)) < 1.0001
        right = shown["right"]
        assert right["rank"] >= 10 or right in shown["top"]
    assert [each["depth"] for each in found["speeds"]] == list(range(16))
    assert found["best_depth"] in range(8)
    assert plot.read_bytes().startswith(b"\x89PNG") and dump.stat().st_size > 1000


def test_ctrl_c_prints_what_is_known_so_far(
    text: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = mlx_spec.cli.probe.advance

    def stopped(bar: Any, what: str) -> None:
        if what == "contexts":
            raise KeyboardInterrupt
        advance(bar, what)

    monkeypatch.setattr(mlx_spec.cli.probe, "advance", stopped)
    assert main([*PAIR, *text]) == 130
    out = capsys.readouterr().out
    assert "draft  accepted" in out and "context capped before the anchor" in out
    assert out.strip().endswith("not enough evidence: not all parts of the probe were run")


def test_a_text_that_is_none_or_too_short_is_refused(tmp_path: Path, capsys: Capture) -> None:
    for content, word in ((b"\xff\xfe", "UTF-8"), (b"short", "tokens; at least 16")):
        (tmp_path / "text").write_bytes(content)
        assert main([*PAIR, "--text", str(tmp_path / "text")]) == 2
        assert word in capsys.readouterr().err
    assert main([*PAIR, "--text", str(tmp_path / "none")]) == 2
    assert main([*PAIR, "--logits", "16"]) == 2
    assert "rows 1 to 15; there is no row 16" in capsys.readouterr().err
    assert main([PAIR[0], PAIR[1]]) == 2
    assert "comes with no drafter" in capsys.readouterr().err


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main([*PAIR, "--plot", "x.png"]) == 2
    assert "mlx-spec[plots]" in capsys.readouterr().err


def test_every_verdict_has_a_status_of_its_own() -> None:
    assert len(set(STATUS.values())) == 4 and not set(STATUS.values()) & {2, 130, 143}
    assert Probe().of_kinds() == {}
