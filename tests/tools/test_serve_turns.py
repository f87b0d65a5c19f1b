"""The conversation that servers are compared by."""

from pathlib import Path

import pytest
from served import serve, write_pair

from tools.serve_turns import ask, conversation, show


def test_turns_against_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each turn goes on from the one before, and the table counts what was read again."""
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path))
    messages = conversation(turns=3, tokens=600)
    with serve(write_pair(tmp_path / "tiny"), None) as served:
        turns = [ask(served.url, messages[: 2 + 2 * turn]) for turn in range(3)]
    assert all(0 < turn["first_token_s"] < 60 for turn in turns)
    assert [turn["cached_tokens"] for turn in turns] == [
        0,
        *((turn["prompt_tokens"] - 1) // 512 * 512 for turn in turns[:-1]),
    ]
    show({"here": turns})
    again = sum(turn["prompt_tokens"] - turn["cached_tokens"] for turn in turns)
    assert f"{again} were read" in capsys.readouterr().out
