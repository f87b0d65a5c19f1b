"""What an engine knows of its rows, and which operations its work runs by."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher
from started import started
from tiny_folders import write_dflash2, write_model
from tiny_models import CONFIGS, tiny_target

import mlx_spec.measure.exactness
from metal_kernels.launching.implementations import VARIABLE, implementation, using
from metal_kernels.launching.launch import Kernel, Launcher, launching
from mlx_spec import generate, load, stream_generate
from mlx_spec.cli.generate import main
from mlx_spec.engine import Engine, Request
from mlx_spec.engine.statistics import NOT_CHECKED, NOT_YET, Exactness
from mlx_spec.errors import ModelError
from mlx_spec.measure import store
from mlx_spec.measure.exactness import OFF, checked_exactness
from mlx_spec.target import Target

EMULATED = partial(launcher, check=False)
EXACT = Exactness(True, "passes of 2 and 8 rows equal one row at a time")
# Of what copies as well: a copy may fill a whole pass.
LOADED = Exactness(True, "passes of 2 and 16 rows equal one row at a time")
PROMPT = [int(t) for t in np.random.default_rng(9).integers(0, 90, 20)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache file, which does not exist yet."""
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "machine.json"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The counts of each check that is made."""
    made: list[list[int]] = []
    check = mlx_spec.measure.exactness.check

    def counting(target: Target, counts: list[int], progress: bool = False) -> Exactness:
        made.append(counts)
        return check(target, counts)

    monkeypatch.setattr(mlx_spec.measure.exactness, "check", counting)
    return made


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("m") / "llama"))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_dflash2(tmp_path_factory.mktemp("d") / "dflash2"))


@pytest.fixture
def uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the second row of every pass of 4 rows or more have another logit."""
    exact = Target.logits

    def logits(self: Target, hidden: mx.array) -> mx.array:
        found = exact(self, hidden)
        if hidden.ndim == 2 and hidden.shape[0] >= 4:
            found[1, 7] = found[1, 7] + 4
        return found

    monkeypatch.setattr(Target, "logits", logits)


def recording(launched: list[str]) -> Callable[[Kernel], Launcher]:
    def launch(kernel: Kernel) -> Launcher:
        launched.append(kernel.name)
        return EMULATED(kernel)

    return launch


# ---- the check


def test_a_model_is_checked_once(target: Target, cache: Path, checks: list[list[int]]) -> None:
    assert checked_exactness(target, 8) == checked_exactness(target, 8) == EXACT
    assert checks == [[2, 8]]
    assert list(json.loads(cache.read_text()).values()) == [{"exact": True, "reason": EXACT.reason}]
    assert checked_exactness(target, 16).reason == "passes of 2 and 16 rows equal one row at a time"
    assert checks == [[2, 8], [2, 16]]


def test_what_differs_is_named_and_kept(uneven: None, checks: list[list[int]]) -> None:
    found = checked_exactness(tiny_target("llama"), 8)
    assert not found.holds
    assert found.reason.startswith("position 29: row 2 of 8 differs by up to ")
    assert found == checked_exactness(tiny_target("llama"), 8)
    assert len(checks) == 1


def test_a_kernel_whose_rows_depend_on_each_other_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one row of a projection, in passes of 8 rows. The emulator is slow: one layer."""
    monkeypatch.setitem(CONFIGS, "llama", dict(CONFIGS["llama"], num_hidden_layers=1))

    def faulty(kernel: Kernel) -> Launcher:
        def launch(**settings: Any) -> list[mx.array]:
            outputs = EMULATED(kernel)(**settings)
            if kernel.name != "gemm_rows" or outputs[0].shape[0] < 8:
                return outputs
            bits = outputs[0].view(mx.uint16)
            bits[3] = bits[3] ^ 1
            return [bits.view(mx.bfloat16)]

        return launch

    target = tiny_target("llama")
    with launching(EMULATED):
        assert checked_exactness(target, 8) == EXACT
    with launching(faulty):
        found = mlx_spec.measure.exactness.check(target, [2, 8])
    assert not found.holds and found.reason.startswith("position 31: row 4 of 8 differs by up to ")


@pytest.mark.parametrize(
    "entry", [None, {"exact": True}, {"exact": "yes", "reason": ""}, {"exact": True, "reason": None}]
)
def test_a_damaged_entry_is_checked_again(
    target: Target, cache: Path, checks: list[list[int]], entry: object
) -> None:
    checked_exactness(target, 8)
    (key,) = json.loads(cache.read_text())
    cache.write_text(json.dumps({key: entry, "other": 1}))
    assert checked_exactness(target, 8) == EXACT
    assert len(checks) == 2
    assert json.loads(cache.read_text())["other"] == 1


def test_the_key_names_what_runs(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [store.key(target)]
    with using("reference"):
        keys.append(store.key(target))
    with launching(EMULATED):
        keys.append(store.key(target))
    keys.append(store.key(target, "more"))
    monkeypatch.setattr(mlx_spec.measure.store, "code_digest", lambda: "another")
    keys.append(store.key(target))
    assert len(set(keys)) == len(keys)


# ---- load and statistics


def test_loaded_models_are_exact_on_a_cpu(model: str, drafter: str, cache: Path) -> None:
    """After the first text, which waits for nothing; the next process reads what was found."""
    engine, tokenizer = load(model, drafter)
    assert engine.exactness == NOT_YET
    responses = stream_generate(engine, tokenizer, "hello", max_tokens=6)
    first = next(responses)
    assert first.statistics.exactness == NOT_YET and not cache.exists()
    assert list(responses)
    assert first.statistics.exactness == engine.exactness == LOADED
    assert [sorted(entry) for entry in json.loads(cache.read_text()).values()] == [["exact", "reason"]]
    assert load(model, drafter)[0].exactness == LOADED
    engine = load(model, None)[0]
    engine.settle()
    assert engine.exactness == EXACT


def test_a_failed_check_is_reported_and_generation_goes_on(model: str, drafter: str, uneven: None) -> None:
    engine, tokenizer = load(model, drafter)
    assert engine.kernels == "cpu"
    last = list(stream_generate(engine, tokenizer, "hello", max_tokens=6))[-1]
    assert last.generation_tokens == 6
    found = last.statistics.as_dict()
    assert found["exact"] is False
    assert found["exact_reason"].startswith("position 29: row 2 of 16 differs")
    assert f"Exact: no, {found['exact_reason']}" in str(last.statistics)


def test_exact_off_is_reported_and_checks_nothing(model: str, drafter: str, checks: list[list[int]]) -> None:
    engine, tokenizer = load(model, drafter, exact=False)
    assert (engine.exactness, engine.kernels, checks) == (OFF, "stock", [])
    assert generate(engine, tokenizer, "hello", max_tokens=6)


def test_exact_off_takes_stock_operations_where_kernels_run(model: str) -> None:
    launched: list[str] = []
    with launching(recording(launched)):
        engine, tokenizer = load(model, exact=False)
        generate(engine, tokenizer, "hello", max_tokens=3)
    assert launched == []


def test_an_unknown_implementation_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "metal")
    with pytest.raises(ModelError, match=f"{VARIABLE} is 'metal'; it takes native, stock, reference or cpu"):
        load("nowhere")


@pytest.mark.parametrize("exact", ["on", "off"])
def test_the_command_prints_it(model: str, exact: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", model, "-m", "4", "--exact", exact]
    assert main(argv) == 0
    reason = LOADED.reason if exact == "on" else OFF.reason
    assert f"Exact: {'yes' if exact == 'on' else 'no'}, {reason}\n" in capsys.readouterr().err
    assert main([*argv, "--stats", "json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["exact"], found["exact_reason"]) == (exact == "on", reason)
    assert main([*argv, "--verbose", "F"]) == 0
    assert capsys.readouterr().err == ""


def test_the_command_hides_no_failed_check(model: str, uneven: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", model, "-m", "4", "--verbose", "F"]) == 0
    assert capsys.readouterr().err.startswith("not exact: position 29: row 2 of 16 differs by up to ")


# ---- engines and implementations


def test_an_engine_made_by_hand_is_not_checked(target: Target) -> None:
    engine = Engine(target)
    assert started(engine, Request(PROMPT)).statistics.exactness == NOT_CHECKED


def test_an_engine_keeps_what_was_chosen_when_it_was_made(target: Target) -> None:
    seen: list[str] = []

    def note(*_: Any) -> None:
        seen.append(implementation())

    with using("reference"):
        engine = Engine(target)
    request = Request(PROMPT, 3, on_progress=note, on_verified=note)
    generation = started(engine, request)
    with using("stock"):
        engine.step(generation).checked()
        assert implementation() == "stock"
    engine.close(generation)
    assert set(seen) == {"reference"}
    assert implementation() == "cpu"


def test_engines_of_both_kinds_side_by_side(target: Target) -> None:
    """Round by round in turns, one inside a callback of the other: kernels run for the exact one alone."""
    launched: list[str] = []
    with launching(recording(launched)):
        exact, stock = Engine(target), Engine(target, kernels="stock")
        expected = {engine: text(engine) for engine in (exact, stock)}
        launched.clear()
        first, second = exact.start(Request(PROMPT, 6)), stock.start(Request(PROMPT, 6))
        while first.finish_reason is None:
            launched.clear()
            stock.step(second).checked()
            assert launched == []
            exact.step(first).checked()
            assert "gemm_rows" in launched
        assert (first.tokens, second.tokens) == (expected[exact], expected[stock])
        inside: list[list[int]] = []
        assert text(stock, lambda *_: inside.append(text(exact))) == expected[stock]
        assert inside == [expected[exact]] * 6
        for engine, generation in ((exact, first), (stock, second)):
            engine.close(generation)


def text(engine: Engine, on_verified: Callable[..., None] | None = None) -> list[int]:
    generation = started(engine, Request(PROMPT, 6, on_verified=on_verified))
    while generation.finish_reason is None:
        engine.step(generation).checked()
    engine.close(generation)
    return generation.tokens


def test_threads_do_not_choose_for_each_other() -> None:
    seen: list[str] = []
    with using("reference"):
        other = Thread(target=lambda: seen.append(implementation()))
        other.start()
        other.join()
        assert implementation() == "reference"
    assert seen == ["cpu"]
