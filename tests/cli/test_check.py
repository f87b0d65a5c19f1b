"""``python -m mlx_spec.check``: what it prints, and its exit status."""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from emulator import launcher
from tiny_folders import write_model

import mlx_spec.cli.check
from metal_kernels.checks.cases import CASES, Case, argmax, qmm
from metal_kernels.launching import cpu_library
from metal_kernels.launching.implementations import VARIABLE
from metal_kernels.launching.launch import Kernel, Launcher, launching
from mlx_spec.cli.check import TIMED_ROWS, kernels_in_words, main
from mlx_spec.target import Target

EMULATED = partial(launcher, check=False)
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases of the table, and two small ones to be timed."""
    chosen = [case for case in CASES if case.name in ("qmm_rows, 4 bits", "argmax_rows")]
    monkeypatch.setattr(mlx_spec.cli.check, "CASES", chosen)
    timed = (
        Case("small product", partial(qmm, outputs=8, depth=64)),
        Case("small argmax", partial(argmax, vocabulary=64)),
    )
    monkeypatch.setattr(mlx_spec.cli.check, "TIMED", timed)


@pytest.fixture
def emulated(few_cases: None) -> Iterator[None]:
    with launching(EMULATED):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("m") / "llama"))


def report(capsys: Capture, *argv: str, status: int = 0) -> dict[str, Any]:
    assert main([*argv, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_the_command_on_a_cpu() -> None:
    line = [sys.executable, "-m", "mlx_spec.cli.check"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "The CPU library runs here, in " in done.stdout
    assert all(case.name in done.stdout for case in CASES)
    assert "native  " not in done.stdout and "ms a call" not in done.stdout
    assert done.stdout.endswith("Each of 16 rows equals the row alone, bit for bit, in every operation.\n")


def test_the_command_on_a_cpu_without_a_compiler(few_cases: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    cpu_library._loaded.cache_clear()
    try:
        with pytest.warns(UserWarning, match="MLX's own operations run in its place"):
            words = kernels_in_words()
    finally:
        cpu_library._loaded.cache_clear()
    assert words.startswith(
        "Native kernels do not run on Device(cpu, 0), they need an Apple or NVIDIA GPU: MLX's own "
    )
    assert words.endswith("a C compiler is needed; no-such-compiler was not found (set CC to name another).")


def test_a_model_on_a_cpu(few_cases: None, model: str, capsys: Capture) -> None:
    assert main(["--model", model]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"{model}: passes of 1 to 16 rows equal one row at a time, bit for bit.\n")


def test_json(few_cases: None, model: str, capsys: Capture) -> None:
    found = report(capsys, "--model", model)
    assert [row["case"] for row in found["operations"]] == ["qmm_rows, 4 bits", "argmax_rows"]
    assert [row["runs"] for row in found["operations"]] == ["cpu", "cpu"]
    assert all(row["failures"] == [] for row in found["operations"])
    assert (found["times_ms"], found["failures"]) == ([], [])
    assert found["model"] == {"name": model, "failures": []}
    assert {"device", "machine", "mlx", "mlx-lm", "mlx-spec", "kernels"} < found.keys()


def test_native_kernels_are_timed_against_stock(emulated: None, capsys: Capture) -> None:
    found = report(capsys, "--repeats", "1")
    assert found["kernels"] == "Native kernels run here."
    assert {row["runs"] for row in found["operations"]} == {"native, emulated"}
    assert [measured["case"] for measured in found["times_ms"]] == ["small product", "small argmax"]
    for measured in found["times_ms"]:
        for kernels in ("native", "stock"):
            assert [int(count) for count in measured[kernels]] == list(TIMED_ROWS)
            assert all(ms > 0 for ms in measured[kernels].values())
    assert main(["--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (first,) = (i for i, line in enumerate(lines) if line.startswith("small product"))
    assert lines[first - 1].split() == ["ms", "a", "call", "rows", "1", "2", "4", "8", "16"]
    assert lines[first].split()[2] == "native" and lines[first + 1].split()[0] == "stock"


def test_a_failed_kernel_is_named(few_cases: None, capsys: Capture) -> None:
    def faulty(kernel: Kernel) -> Launcher:
        def launch(**settings: Any) -> list[mx.array]:
            outputs = EMULATED(kernel)(**settings)
            return [x * 2 for x in outputs] if kernel.name == "qmm_rows" else outputs

        return launch

    with launching(faulty):
        assert main(["--repeats", "1"]) == 1
        out = capsys.readouterr().out
        found = report(capsys, "--repeats", "1", status=1)
    failure = "qmm_rows, 4 bits differs from its reference by 1 of the largest value"
    assert out.endswith(f"FAILED:\n{failure}\n")
    assert [line.split()[-1] for line in out.splitlines()[4:6]] == ["FAILED", "ok"]
    assert found["failures"] == found["operations"][0]["failures"] == [failure]


def test_a_kernel_that_does_not_run_has_no_error_to_print(few_cases: None, capsys: Capture) -> None:
    def broken(kernel: Kernel) -> Launcher:
        raise RuntimeError("out of registers")

    with launching(broken), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlx_spec.cli.check, "TIMED", ())
        found = report(capsys, status=1)
        assert main([]) == 1
    assert found["operations"][1] == {
        "case": "argmax_rows",
        "runs": "nothing",
        "error": None,
        "failures": ["argmax_rows failed: out of registers"],
    }
    assert "argmax_rows failed: out of registers" in capsys.readouterr().out


def test_a_model_whose_rows_depend_on_each_other(
    few_cases: None, model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = Target.logits

    def logits(self: Target, hidden: mx.array) -> mx.array:
        found = exact(self, hidden)
        if hidden.shape[0] > 14:
            found[2, 7] = found[2, 7] + 4
        return found

    monkeypatch.setattr(Target, "logits", logits)
    found = report(capsys, "--model", model, status=1)
    assert found["failures"] == found["model"]["failures"]
    assert len(found["failures"]) == 2
    for rows, failure in zip((15, 16), found["failures"], strict=True):
        assert failure.startswith(f"{model}, position 30: row 3 of {rows} differs by up to ")


def test_a_model_that_cannot_be_loaded(few_cases: None, capsys: Capture) -> None:
    assert main(["--model", "nowhere"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: 'nowhere' is neither a folder nor a Hugging Face repo (owner/name).\n"


def test_kernels_that_are_kept_from_running(
    emulated: None, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chosen in ("stock", "reference"):
        monkeypatch.setenv(VARIABLE, chosen)
        found = report(capsys)
        assert found["kernels"] == f"{VARIABLE}={chosen} keeps native kernels from running."
        assert {row["runs"] for row in found["operations"]} == {chosen}
    monkeypatch.setenv(VARIABLE, "metal")
    assert main([]) == 2
    assert "it takes native, stock, reference or cpu" in capsys.readouterr().err


def test_the_references_may_run_on_a_cpu(
    few_cases: None, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "reference")
    assert report(capsys)["kernels"].endswith("GPU: the references are used.")


def test_repeats_must_be_positive(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--repeats", "0"])
    assert stopped.value.code == 2
    assert "--repeats must be at least 1, not 0" in capsys.readouterr().err
