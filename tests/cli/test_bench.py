"""The bench's sums, and what it prints."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_spec.cli import bench
from mlx_spec.engine.statistics import SourceCounts, Statistics
from mlx_spec.loading.load import load
from mlx_spec.measure.exactness import OFF
from mlx_spec.measure.workloads import Task, reply_to


def statistics(drafted: list[int], accepted: list[int], tokens: int, rounds: int, seconds: float) -> Statistics:
    by = {"eagle": SourceCounts(rounds, sum(drafted), sum(accepted))} if drafted else {}
    return Statistics(
        tokens=tokens, rounds=rounds, seconds=seconds, drafted=drafted, accepted=accepted, drafted_by=by
    )


def test_a_tally_adds_prompts_of_different_depth() -> None:
    tally = bench.Tally()
    tally.add(statistics([4, 4], [2, 1], 7, 4, 2.0), statistics([], [], 7, 7, 3.5))
    tally.add(statistics([2], [2], 4, 2, 1.0), statistics([], [], 4, 4, 2.0))
    row = tally.as_dict()
    assert row["accepted_length"] == round(11 / 6, 3)
    assert row["acceptance"] == [round(4 / 6, 3), 0.25]
    assert row["ratio"] == round((11 / 3) / (11 / 5.5), 3)
    assert bench.accepted_by_source(row) == "eagle 5 of 10"
    assert (row["sibling_drafts"], row["accepted_sibling_drafts"]) == (0, 0)


def test_sibling_drafts_are_counted_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    tally = bench.Tally()
    for siblings, accepted in ((6, 2), (3, 0)):
        counted = statistics([1], [1], 2, 1, 1.0)
        tally.add(replace(counted, sibling_drafts=siblings, accepted_sibling_drafts=accepted), None)
    bench.print_table({"kinds": {"all": tally.as_dict()}, "equal_replies": 0, "compared_replies": 0})
    assert "sibling drafts accepted: 2 of 9" in capsys.readouterr().out


def test_without_plain_decoding_there_is_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    tally = bench.Tally()
    tally.add(statistics([1], [1], 2, 1, 1.0), None)
    bench.print_table({"kinds": {"all": tally.as_dict()}, "equal_replies": 0, "compared_replies": 0})
    out = capsys.readouterr().out
    assert "position 1: 1.000" in out
    assert "equal" not in out


def test_limits_are_spread_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": str(i)}) for i in range(10)) + "\n")
    assert [item["prompt"] for item in bench.read_prompts(path, 3)] == ["0", "3", "6"]
    assert len(bench.read_prompts(path, None)) == 10


def test_the_held_out_prompts_are_forty() -> None:
    items = bench.read_prompts(bench.HELD_OUT, None)
    assert len(items) == len({item["prompt"] for item in items}) == 40


@pytest.mark.parametrize(
    "argv, status",
    [
        ([], 1),
        (["--temp", "0.8"], 1),
        (["--exact", "off"], 0),
        (["--temp", "0.8", "--accept", "rejection"], 0),
        (["--accept", "rejection"], 1),
    ],
)
def test_a_reply_may_differ_only_where_equality_is_not_promised(
    argv: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def load(model: str, drafter: str, exact: bool, progress: bool) -> tuple[SimpleNamespace, None]:
        asked.append(exact)
        return SimpleNamespace(target=SimpleNamespace(dtype=mx.bfloat16), costs=None, exactness=OFF), None

    monkeypatch.setattr(bench, "load", load)
    result = {"kinds": {}, "equal_replies": 1, "compared_replies": 2}
    monkeypatch.setattr(bench, "measure", lambda *_: result)
    monkeypatch.setattr(sys, "argv", ["bench", *argv])
    assert bench.main() == status
    assert asked == [argv[:2] != ["--exact", "off"]]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == f"exact: no, {OFF.reason}"
    assert json.loads(lines[-1])["exact"] is False


def test_kinds_of_work_are_compared_in_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reply that is given is said, whatever the model would say, and its copies are found."""
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))
    text = "one two three four five six seven eight nine ten eleven twelve"
    tasks = [
        {"kind": "edit", "prompt": f"Give this again: {text}", "reply": text.replace("six", "seven")},
        {"kind": "chat", "prompt": "Hello."},
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, tasks)))
    tests = Path(__file__).parent.parent
    pair = ["--model", str(tests / "tiny_pair/target"), "--drafter", str(tests / "tiny_pair/head")]
    assert bench.main([*pair, "--workloads", str(path), "--turns", "2", "--max-tokens", "60"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found["different_replies"] == 0 and list(found["kinds"]) == ["edit", "chat"]
    ways = found["kinds"]["edit"]
    assert list(ways) == ["plain", "lookup", "mtp", "both"] and ways["plain"]["ratio"] == 1.0
    assert {row["tokens"] for row in ways.values()} == {ways["plain"]["tokens"]}
    assert ways["plain"]["tokens_a_round"] == 1.0 and ways["plain"]["drafted_by"] == {}
    assert lines[0].split()[:2] == ["kind", "way"] and len(lines) == 1 + 8 + 3


def test_a_reply_that_is_given_is_the_one_that_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))
    folder = Path(__file__).parent.parent / "tiny_pair/target"
    engine, _ = load(str(folder), "lookup")
    prompt, reply = [5, 6, 7, 8, 9, 10, 11, 12], [20, 6, 7, 8, 9, 10, 11, 3]
    for drafts in (0, 4):
        said, statistics = reply_to(engine, Task("edit", prompt, reply), drafts, 30, frozenset({3}))
        assert said == reply
    assert statistics.drafted_by["lookup"].accepted >= 3
    shortened, _ = reply_to(engine, Task("edit", prompt, reply), 4, 5, frozenset({3}))
    assert shortened == reply[:5]


def test_the_kinds_of_work_that_come_along() -> None:
    items = bench.read_prompts(bench.WORKLOADS, None)
    kinds = {item["kind"] for item in items}
    assert kinds == {"edit", "quote", "summary", "chat", "code", "prose"}
    assert all(("reply" in item) == (item["kind"] in ("edit", "quote")) for item in items)
