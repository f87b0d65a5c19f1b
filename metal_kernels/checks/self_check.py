"""Do the operations of this machine compute what they should, and each row alike? Checked case by case."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import shorten

import mlx.core as mx

from metal_kernels.checks.cases import ROWS, Case, Outputs
from metal_kernels.launching.implementations import implementation, using
from metal_kernels.launching.launch import Kernel, is_emulated, noting_launches, runs_on_cuda

# Of the largest magnitude: two units in the last place of a bfloat16.
TOLERANCE = 2**-7


@dataclass(frozen=True)
class Finding:
    """What the check of one case found.

    runs: the implementation that ran, in words. error: the largest difference from the reference, as a share of
    the largest magnitude. failures: a sentence for each thing that is wrong; MLX's own operations may differ from
    the reference as they like (on a CPU its quantised product sums in 16 bits).
    """

    case: str
    runs: str
    error: float
    failures: tuple[str, ...]


def check(case: Case) -> Finding:
    """Run 16 rows by what is chosen on this machine: against the reference, and each row against itself alone."""
    try:
        return _check(case)
    except Exception as error:  # a kernel that does not compile raises what its compiler likes
        return Finding(case.name, "nothing", float("nan"), (f"{case.name} failed: {shorten(str(error), 400)}",))


def _check(case: Case) -> Finding:
    case_run = case.make()
    with noting_launches() as launched:
        found = case_run.run(ROWS)
        mx.eval(found)
    with using("reference"):
        expected = case_run.run(ROWS)
    errors = [difference(a, b) for a, b in zip(found, expected, strict=True)]
    error = max(errors, key=lambda value: (math.isnan(value), value))
    failures = []
    if launched and not error <= TOLERANCE:
        failures.append(f"{case.name} differs from its reference by {error:.2g} of the largest value")
    unequal = [] if case_run.alone is None else unequal_rows(found, case_run.alone)
    if unequal:
        numbers = ", ".join(str(row + 1) for row in unequal)
        failures.append(f"{case.name}: of {ROWS} rows, number {numbers} differs from the row alone")
    return Finding(case.name, described(launched), error, tuple(failures))


def difference(found: mx.array, expected: mx.array) -> float:
    """Return the largest difference as a share of the largest magnitude; whole numbers differ or they do not."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return float("inf")
    if not mx.issubdtype(expected.dtype, mx.floating):
        return 0.0 if mx.array_equal(found, expected).item() else float("inf")
    a, b = found.astype(mx.float32), expected.astype(mx.float32)
    return float(mx.max(mx.abs(a - b)) / mx.max(mx.abs(b)))


def unequal_rows(found: Outputs, alone: Callable[[int], Outputs]) -> list[int]:
    """Return the numbers of the rows that differ in a bit from those of one-row passes."""

    def is_equal(row: int) -> bool:
        return all(mx.array_equal(a[row], b[0]).item() for a, b in zip(found, alone(row), strict=True))

    return [row for row in range(ROWS) if not is_equal(row)]


def described(launched: list[Kernel | str]) -> str:
    """Say in words what ran, by the kernels and CPU functions that were launched."""
    if not launched:
        return "reference" if implementation() == "reference" else "stock"
    kernels = [kernel for kernel in launched if isinstance(kernel, Kernel)]
    if not kernels:
        return "cpu"
    if is_emulated():
        return "native, emulated"
    if not runs_on_cuda():
        return "native on Metal"
    return "native on CUDA tensor cores" if any(kernel.cuda_twin for kernel in kernels) else "native on CUDA"
