"""The bench's sums, and what it prints."""

import json
from pathlib import Path

from mlx_spec.statistics import Statistics
from tools import bench


def statistics(drafted: list[int], accepted: list[int], tokens: int, rounds: int, seconds: float) -> Statistics:
    return Statistics(tokens=tokens, rounds=rounds, seconds=seconds, drafted=drafted, accepted=accepted)


def test_a_tally_adds_prompts_of_different_depth() -> None:
    tally = bench.Tally()
    tally.add(statistics([4, 4], [2, 1], 7, 4, 2.0), statistics([], [], 7, 7, 3.5))
    tally.add(statistics([2], [2], 4, 2, 1.0), statistics([], [], 4, 4, 2.0))
    row = tally.as_dict()
    assert row["accepted_length"] == round(11 / 6, 3)
    assert row["acceptance"] == [round(4 / 6, 3), 0.25]
    assert row["ratio"] == round((11 / 3) / (11 / 5.5), 3)


def test_without_the_plain_lane_there_is_no_ratio(capsys) -> None:
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
