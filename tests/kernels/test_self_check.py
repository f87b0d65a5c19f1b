"""The self-check: silent where kernels are right, and exact about the one that is not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from emulator import launcher

from metal_kernels.checks import self_check
from metal_kernels.checks.cases import CASES, ROWS, TIMED, Case, CaseRun
from metal_kernels.checks.self_check import TOLERANCE, Finding, check, described, difference
from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import BODY, FOLDER, Kernel, Launcher, launching, noting_launches

EMULATED = partial(launcher, check=False)
BY_NAME = {case.name: case for case in CASES}
Fault = Callable[[Kernel, dict[str, Any], list[mx.array]], list[mx.array]]


def check_emulated(case: Case, fault: Fault = lambda kernel, settings, outputs: outputs) -> Finding:
    """Check a case through the emulator, whose outputs go through ``fault``."""

    def faulty(kernel: Kernel) -> Launcher:
        return lambda **settings: fault(kernel, settings, EMULATED(kernel)(**settings))

    with launching(faulty):
        return check(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_pass(case: Case) -> None:
    found = check_emulated(case)
    assert found.failures == ()
    assert (found.case, found.runs) == (case.name, "native, emulated")
    assert found.error <= TOLERANCE


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_of_stock_operations_are_independent_on_a_cpu(case: Case) -> None:
    with using("stock"):
        found = check(case)
    assert (found.failures, found.runs) == ((), "stock")


# These move or compare numbers only, and MLX's operations do that as fast.
NOT_IN_C = ("walk_rows", "stack_rows")


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in NOT_IN_C], ids=lambda case: case.name)
def test_the_cpu_library_passes(case: Case) -> None:
    with using("cpu"):
        found = check(case)
    assert (found.failures, found.runs) == ((), "cpu")
    assert found.error <= TOLERANCE


def test_the_cases_launch_every_kernel() -> None:
    launched: set[str] = set()

    def name_only(kernel: Kernel) -> Launcher:
        launched.add(kernel.name)
        return EMULATED(kernel)

    with launching(name_only):
        for case in CASES:
            check(case)
    assert launched == {path.stem for path in FOLDER.glob("*.metal") if BODY in path.read_text()}


def test_names_are_unique_and_timed_cases_are_cases_of_their_own() -> None:
    assert len(BY_NAME) == len(CASES)
    assert not BY_NAME.keys() & {case.name for case in TIMED}
    assert {case.name.split(",")[0] for case in TIMED} <= {name.split(",")[0] for name in BY_NAME}


def off(x: mx.array) -> mx.array:
    if x.dtype == mx.bool_:
        return mx.logical_not(x)
    return (x * 1.1).astype(x.dtype) if mx.issubdtype(x.dtype, mx.floating) else x + 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_outputs_are_found_in_every_case(case: Case) -> None:
    found = check_emulated(case, lambda kernel, settings, outputs: [off(x) for x in outputs])
    assert found.failures[0].startswith(f"{case.name} differs from its reference by ")


def test_an_output_that_is_no_number_is_found() -> None:
    found = check_emulated(BY_NAME["gemm_rows"], lambda kernel, settings, outputs: [x * mx.nan for x in outputs])
    assert "gemm_rows differs from its reference by nan of the largest value" in found.failures


def test_the_last_output_alone_may_be_no_number() -> None:
    def spoil(kernel: Kernel, settings: dict[str, Any], outputs: list[mx.array]) -> list[mx.array]:
        (out,) = outputs
        return [mx.where(mx.arange(out.size) < ROWS, out, mx.nan)] if out.ndim == 1 else outputs

    found = check_emulated(BY_NAME["logprob_rows"], spoil)
    assert "logprob_rows differs from its reference by nan of the largest value" in found.failures


@pytest.mark.parametrize(
    "name, kernel_name",
    [
        ("qmm_rows, 4 bits", "qmm_rows"),
        ("attention_rows", "attention_combine"),
        ("gated_delta_rows", "gated_delta_rows"),
        ("dynamic_conv", "dynamic_conv"),
    ],
)
def test_a_row_that_depends_on_its_neighbours_is_named(name: str, kernel_name: str) -> None:
    """One bit of one row, in passes of 16 rows only."""

    def flip(kernel: Kernel, settings: dict[str, Any], outputs: list[mx.array]) -> list[mx.array]:
        (out,) = outputs if kernel.name == kernel_name else (None,)
        if out is None or out.shape[0] < ROWS:
            return outputs
        bits = out.view(mx.uint16)
        bits[4] = bits[4] ^ 1
        return [bits.view(out.dtype)]

    found = check_emulated(BY_NAME[name], flip)
    assert found.failures == (f"{name}: of 16 rows, number 5 differs from the row alone",)
    assert found.error <= TOLERANCE


def test_a_kernel_that_does_not_run_is_a_failure_and_no_exception() -> None:
    def broken(kernel: Kernel) -> Launcher:
        raise RuntimeError("no such function: simd_sum")

    with launching(broken):
        found = check(BY_NAME["argmax_rows"])
    assert found.failures == ("argmax_rows failed: no such function: simd_sum",)
    assert found.runs == "nothing"


def test_stock_operations_are_not_held_to_the_reference() -> None:
    case = Case("doubled", lambda: CaseRun(lambda count: (mx.ones((count, 2)) * scale(),), None))

    def scale() -> float:
        return 1.0 if self_check.implementation() == "reference" else 2.0

    found = check(case)
    assert (found.error, found.failures) == (1.0, ())


@pytest.mark.parametrize(
    "found, expected, error",
    [
        (mx.array([1.0, 2.0]), mx.array([1.0, -2.0]), 2.0),
        (mx.array([1, 2]), mx.array([1, 2]), 0.0),
        (mx.array([1, 2]), mx.array([1, 3]), float("inf")),
        (mx.array([True]), mx.array([False]), float("inf")),
        (mx.array([1.0]), mx.array([1.0, 2.0]), float("inf")),
        (mx.array([1.0]), mx.array([1.0], dtype=mx.bfloat16), float("inf")),
    ],
)
def test_differences(found: mx.array, expected: mx.array, error: float) -> None:
    assert difference(found, expected) == error


def test_what_runs_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Kernel("plain", inputs=(), outputs=())
    twin = Kernel("twin", inputs=(), outputs=(), cuda_twin="twin.cu")
    assert described([]) == "stock"
    with using("reference"):
        assert described([]) == "reference"
    assert described(["cpu_linear"]) == "cpu"
    assert described([twin]) == "native on Metal"
    monkeypatch.setattr(self_check, "runs_on_cuda", lambda: True)
    assert described([plain]) == "native on CUDA"
    assert described([plain, twin]) == "native on CUDA tensor cores"


def test_launches_are_noted_until_the_block_ends() -> None:
    kernel = Kernel("noted", inputs=(), outputs=())

    def launch() -> None:
        kernel([], template=[], groups=(1, 1, 1), threads=(1, 1, 1), shapes=[], dtypes=[])

    with launching(lambda kernel: lambda **_: []):
        with noting_launches() as outer:
            launch()
            with noting_launches() as inner:
                launch()
                launch()
            launch()
        launch()
    assert (outer, inner) == ([kernel] * 2, [kernel] * 2)
