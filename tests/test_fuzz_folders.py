"""Random edits of checkpoints run right or are refused; ``fuzz_folders`` runs as many as one likes."""

from pathlib import Path

import pytest
from fuzz_folders import fuzz


def test_edited_folders_run_right_or_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))
    faults: list[str] = []
    found = fuzz(80, 0, tmp_path, faults.append)
    assert faults == []
    assert found["refused"] > 20 and found["ran"] > 20
