"""Measured costs: what is measured, and the file that keeps them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from one_draft import written_rows
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_models import tiny_target

import mlx_spec.measure.costs
from mlx_spec.drafters.dflash2.drafter import DFlash2Drafter
from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.engine.costs import Costs
from mlx_spec.measure import store
from mlx_spec.measure.costs import RUNS, as_json, cost_key, fastest, measure, measured_costs
from mlx_spec.target import Target

FAKE = Costs({1: 1.5, 8: 2.5}, {1: 0.5, 7: 0.75}, {1: 0.0, 7: 0.25})


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


@pytest.fixture(scope="module")
def drafter(target: Target, tmp_path_factory: pytest.TempPathFactory) -> DFlash2Drafter:
    config = dflash2_config()
    folder = write_drafter(tmp_path_factory.mktemp("drafter"), config, random_tensors(config, dtype=mx.bfloat16))
    return load_dflash2(folder, target, "tiny drafter")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache file, which does not exist yet."""
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "not yet"))
    return tmp_path / "not yet" / "machine.json"


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Takes the place of measuring; one entry for each measurement."""
    calls: list[Any] = []

    def measure_instead(target: Target, drafter: DFlash2Drafter, progress: bool) -> Costs:
        calls.append((target, drafter))
        return FAKE

    monkeypatch.setattr(mlx_spec.measure.costs, "measure", measure_instead)
    return calls


def test_measuring_covers_one_row_and_the_whole_block(target: Target, drafter: DFlash2Drafter) -> None:
    costs = measure(target, drafter)
    assert {1, 8, 16} <= costs.verify.keys() <= {*range(1, 9), 16}
    assert set(costs.draft) == set(costs.draft_more) == {1, 7}
    assert all(ms >= 0 for ms in costs.draft_more.values())
    assert all(ms > 0 for ms in (*costs.verify.values(), *costs.draft.values()))
    assert target.pool.pages_in_use == 0


def test_without_a_drafter_verify_passes_alone_are_measured_and_kept(target: Target, cache: Path) -> None:
    costs = measured_costs(target, None, "lookup")
    assert costs.verify.keys() == {1, 2, 4, 8, 16} and not costs.draft and not costs.draft_more
    assert all(ms > 0 for ms in costs.verify.values()) and target.pool.pages_in_use == 0
    again = measured_costs(target, None, "lookup")
    assert again.verify == {count: round(ms, 3) for count, ms in costs.verify.items()} and not again.draft


def test_a_draft_comes_with_the_rows_that_a_round_commits(
    target: Target, drafter: DFlash2Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = written_rows(drafter, monkeypatch)
    measure(target, drafter)
    assert written == [23, *[1, 4, 4, 16] * RUNS]


def test_a_moment_in_which_the_machine_is_busy_spoils_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turn = [0.0], [0]

    def passing(ms: float) -> list[mx.array]:
        turn[0] += 1
        # Busy from the third to the fifth of nine runs.
        clock[0] += (ms + (100.0 if 3 <= turn[0] <= 5 else 0.0)) / 1e3
        return []

    monkeypatch.setattr(mlx_spec.measure.costs.time, "perf_counter", lambda: clock[0])
    found = fastest({ms: lambda ms=ms: passing(ms) for ms in (1.0, 2.0, 3.0)})
    assert found == {ms: pytest.approx(ms) for ms in (1.0, 2.0, 3.0)}


def test_a_pool_of_one_page_is_enough(drafter: DFlash2Drafter) -> None:
    target = tiny_target("llama", max_cached_tokens=32)
    assert 8 in measure(target, drafter).verify
    assert target.pool.pages_in_use == 0


def test_pages_come_back_when_measuring_fails(
    target: Target, drafter: DFlash2Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(passes: Mapping[Any, Callable[[], list[mx.array]]], progress: bool) -> dict[Any, float]:
        raise KeyboardInterrupt

    monkeypatch.setattr(mlx_spec.measure.costs, "fastest", fail)
    with pytest.raises(KeyboardInterrupt):
        measure(target, drafter)
    assert target.pool.pages_in_use == 0


def test_the_second_call_reads_what_the_first_measured(
    target: Target, drafter: DFlash2Drafter, cache: Path, measurements: list[Any]
) -> None:
    first = measured_costs(target, drafter, "some/drafter")
    assert cache.exists()
    assert [path.name for path in cache.parent.iterdir()] == ["machine.json"]
    second = measured_costs(target, drafter, "some/drafter")
    assert len(measurements) == 1
    assert first == second == FAKE


def with_times(value: Any, curve: str = "verify") -> dict[str, Any]:
    return {**as_json(FAKE), curve: {"1": value, "8": 2.5}}


DAMAGED: list[Any] = [
    *(with_times(value) for value in (float("nan"), float("inf"), -5.0, 0.0, None, "fast", [1], 10**400)),
    *(with_times(value, "draft") for value in (float("nan"), -1, 0)),
    *(with_times(value, "draft_more") for value in (float("nan"), -1)),
    {**as_json(FAKE), "verify": {}},
    {**as_json(FAKE), "verify": {"0": 1.0}},
    {**as_json(FAKE), "verify": {"x": 1.0}},
    {"verify": {"1": 1.0}},
    [],
    None,
    5,
]


@pytest.mark.parametrize("entry", DAMAGED, ids=lambda entry: str(entry)[:60])
def test_costs_that_no_pass_can_have_are_measured_again(
    entry: Any, target: Target, drafter: DFlash2Drafter, cache: Path, measurements: list[Any]
) -> None:
    store.write(cost_key(target, drafter, "some/drafter"), entry)
    assert measured_costs(target, drafter, "some/drafter") == FAKE
    assert len(measurements) == 1
    assert measured_costs(target, drafter, "some/drafter") == FAKE
    assert len(measurements) == 1


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_damaged_file_is_written_anew(
    content: bytes, target: Target, drafter: DFlash2Drafter, cache: Path, measurements: list[Any]
) -> None:
    cache.parent.mkdir()
    cache.write_bytes(content)
    for _ in range(2):
        assert measured_costs(target, drafter, "some/drafter") == FAKE
    assert len(measurements) == 1


def test_another_drafter_is_measured_beside_the_first(
    target: Target, drafter: DFlash2Drafter, cache: Path, measurements: list[Any]
) -> None:
    for name in ("some/drafter", "other/drafter", "some/drafter", "other/drafter"):
        measured_costs(target, drafter, name)
    assert len(measurements) == 2
    assert len(json.loads(cache.read_text())) == 2


def test_the_key_names_drafter_depth_target_and_quantisation(target: Target, drafter: DFlash2Drafter) -> None:
    class Shallow:
        max_draft = 3

    keys = [
        cost_key(target, drafter, "some/drafter"),
        cost_key(target, drafter, "other/drafter"),
        cost_key(target, Shallow(), "some/drafter"),
        cost_key(tiny_target("qwen2"), drafter, "some/drafter"),
        cost_key(tiny_target("llama", bits=4), drafter, "some/drafter"),
        cost_key(tiny_target("llama", dtype=mx.float16), drafter, "some/drafter"),
    ]
    assert len(set(keys)) == len(keys)
    assert cost_key(tiny_target("llama"), drafter, "some/drafter") == keys[0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text, key: "",
        lambda text, key: text[: len(text) // 2],
        lambda text, key: "[1, 2]",
        lambda text, key: "\x00\xff",
        lambda text, key: json.dumps({key: 5}),
        lambda text, key: json.dumps({key: {"verify": {"1": 2.0}}}),
        lambda text, key: json.dumps({key: {"verify": {}, "draft": {}, "draft_more": {}}}),
        lambda text, key: json.dumps(
            {key: {"verify": {"one": 2.0}, "draft": {"1": 1.0}, "draft_more": {"1": 0.0}}}
        ),
        lambda text, key: json.dumps(
            {key: {"verify": {"1": None}, "draft": {"1": 1.0}, "draft_more": {"1": 0.0}}}
        ),
    ],
    ids=[
        "empty",
        "cut off",
        "no table",
        "binary",
        "no curves",
        "half",
        "no points",
        "no number of rows",
        "no milliseconds",
    ],
)
def test_a_damaged_file_is_measured_again_and_mended(
    damage: Callable[[str, str], str],
    target: Target,
    drafter: DFlash2Drafter,
    cache: Path,
    measurements: list[Any],
) -> None:
    measured_costs(target, drafter, "some/drafter")
    cache.write_text(damage(cache.read_text(), cost_key(target, drafter, "some/drafter")), encoding="latin-1")
    assert measured_costs(target, drafter, "some/drafter") == FAKE
    assert measured_costs(target, drafter, "some/drafter") == FAKE
    assert len(measurements) == 2


def test_a_folder_that_cannot_be_written_costs_only_measuring_again(
    target: Target,
    drafter: DFlash2Drafter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    measurements: list[Any],
) -> None:
    (tmp_path / "file").write_text("in the way of the folder")
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        assert measured_costs(target, drafter, "some/drafter") == FAKE
    assert len(measurements) == 2
