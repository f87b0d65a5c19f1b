"""The branch table on a tiny model: every run is timed, texts are compared, and results are printed."""

import json
import sys
from pathlib import Path

import pytest
from tiny_folders import write_dflash2, write_model

from tools import branch_table


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = write_model(tmp_path_factory.mktemp("models") / "llama")
    drafter = write_dflash2(tmp_path_factory.mktemp("drafters") / "dflash2")
    return ["--model", str(model), "--drafter", str(drafter)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path))


def run(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> int:
    monkeypatch.setattr(sys, "argv", ["branch_table", *argv, "--tokens", "9", "--repeats", "1", "--prefix", "70"])
    return branch_table.main()


def test_every_run_is_timed_and_every_text_compared(
    folders: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, [*folders, "--branches", "1", "3", "--num-draft-tokens", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["prefix"] <= 70
    assert result["equal_texts"] == {"plain": 3, "drafted": 3}
    assert result["texts"] == 3
    for count in ("1", "3"):
        assert all(result["rows"][count][name]["tokens_per_second"] > 0 for name in branch_table.RUNS)
    pages = [result["rows"][count]["plain"]["pages"] for count in ("1", "3")]
    assert result["added_pages"] == (pages[1] - pages[0]) / 2 <= 2
    assert set(result["added_mb"]) == set(branch_table.RUNS)


def test_the_table_as_text(
    folders: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, ["--model", "no folder"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: 'no folder' is neither a folder nor")
    assert run(monkeypatch, [*folders[:2], "--drafter", "none", "--branches", "2"]) == 0
    assert "drafted branches" not in capsys.readouterr().out
    assert run(monkeypatch, [*folders, "--branches", "1", "2", "--temp", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tokens/s of all branches together" in lines
    assert [line.split()[0] for line in lines if line[:1].isdigit()] == ["1", "2"]
    assert lines[-1] == "drafted branches equal to the same branch alone, without drafts: 2 of 2"


def test_a_text_that_differs_is_a_failure(
    folders: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(branch_table, "alone_text", lambda engine, request, seed: [seed])
    assert run(monkeypatch, [*folders, "--branches", "1"]) == 1
    assert "equal to the same branch alone, without drafts: 0 of 1" in capsys.readouterr().out
