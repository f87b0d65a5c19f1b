"""The command that lists published drafters."""

import json
from pathlib import Path

import pytest

from mlx_spec.cli.drafters import main
from mlx_spec.loading.published_drafters import PUBLISHED

SHAPE = {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936}


def test_all_drafters_are_listed_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["target", "kind", "drafter"] and len(lines) == len(PUBLISHED) + 1
    assert all(line.endswith(drafter.repo) for line, drafter in zip(lines[1:], PUBLISHED, strict=True))


def test_drafters_for_a_model_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    assert main(["--model", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {drafter["target"] for drafter in found} == {"Qwen/Qwen3-8B"}
    assert found[0].keys() >= {"repo", "kind", "model_type", "hidden_size"}


def test_models_without_one_and_what_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path)]) == 1
    assert f"error: {tmp_path} is no model: it has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "hidden_size": 7}))
    assert main(["--model", str(tmp_path)]) == 1
    assert f"No published drafter is known for a model of the shape of {tmp_path}" in capsys.readouterr().err
    assert main(["--model", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == []
