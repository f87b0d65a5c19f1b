"""The command ``python -m mlx_spec.check``: what runs on this machine, whether it is right, and how fast it is."""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from math import isfinite
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from metal_kernels import MAX_VERIFY_ROWS
from metal_kernels.checks.cases import CASES, TIMED
from metal_kernels.checks.self_check import Finding, check
from metal_kernels.checks.timing import call_ms
from metal_kernels.launching.cores import wanted_threads
from metal_kernels.launching.cpu_library import missing
from metal_kernels.launching.implementations import VARIABLE, Implementation, implementation, using
from metal_kernels.launching.launch import can_launch
from mlx_spec.cli.command import run_command
from mlx_spec.diagnose.rows import check_rows
from mlx_spec.loading.load import chosen_kernels, load
from mlx_spec.measure.store import version_of

TIMED_ROWS = (1, 2, 4, 8, 16)
IMPLEMENTATIONS: tuple[Implementation, ...] = ("native", "stock")
DESCRIPTION = """Check every operation on this machine, and with --model a model's rows, bit for bit.
The exit status is 0 when all is well, 1 when something failed, 2 when the model cannot be loaded."""
EXAMPLES = """examples:
  python -m mlx_spec.check
  python -m mlx_spec.check --model demo --json > report.json"""


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_spec.check",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help="demo, a folder or a Hugging Face repo, whose passes of 1 to 16 rows are checked too")
    add("--repeats", type=int, default=10, help="timed calls of each kind; the median counts (default: 10)")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = setup_arg_parser()
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, not {args.repeats}")
    return run_command(lambda: run(args), failed=2)


def run(args: argparse.Namespace) -> int:
    """Check, print the report and return the exit status. Raises MlxSpecError."""
    report = examine(args.model, args.repeats)
    print(json.dumps(report) if args.json else as_text(report))
    return 1 if report["failures"] else 0


def examine(model: str | None, repeats: int) -> dict[str, Any]:
    """Check and time everything, and return what was found as JSON values. Raises ModelError."""
    chosen_kernels(exact=True)
    findings = [check(case) for case in tqdm(CASES, desc="checking", leave=False, disable=None)]
    rows = None if model is None else model_rows(model)
    return {
        "device": str(mx.device_info().get("device_name", mx.default_device())),
        "machine": f"{platform.system()} {platform.machine()}",
        **{name: version_of(name) for name in ("mlx", "mlx-lm", "mlx-spec")},
        "kernels": kernels_in_words(),
        "operations": [operation(finding) for finding in findings],
        "times_ms": times(repeats) if implementation() == "native" else [],
        "model": rows,
        "failures": [*(f for finding in findings for f in finding.failures), *(rows["failures"] if rows else [])],
    }


def operation(finding: Finding) -> dict[str, Any]:
    """Return a finding as JSON values; an error that is no number is null."""
    error = float(f"{finding.error:.3g}") if isfinite(finding.error) else None
    return {"case": finding.case, "runs": finding.runs, "error": error, "failures": list(finding.failures)}


def kernels_in_words() -> str:
    """Say whether native kernels run, and what runs in their place."""
    chosen = implementation()
    if chosen == "native":
        return "Native kernels run here."
    if chosen == "cpu":
        return f"The CPU library runs here, in {wanted_threads()} threads."
    if can_launch():
        return f"{VARIABLE}={chosen} keeps native kernels from running."
    used = "MLX's own operations are used" if chosen == "stock" else "the references are used"
    needed = f"Native kernels do not run on {mx.default_device()}, they need an Apple or NVIDIA GPU: {used}."
    return " ".join([needed, *([reason] if (reason := missing()) else [])])


def times(repeats: int) -> list[dict[str, Any]]:
    """Time native kernels against MLX's own operations."""
    found = []
    for case in tqdm(TIMED, desc="timing", leave=False, disable=None):
        measured: dict[str, Any] = {"case": case.name}
        for kernels in IMPLEMENTATIONS:
            with using(kernels):
                measured[kernels] = call_ms(case, TIMED_ROWS, repeats)
        found.append(measured)
    return found


def model_rows(name: str) -> dict[str, Any]:
    """Compare passes of 1 to 16 rows of a model with one row at a time. Raises ModelError."""
    engine, _ = load(name, None, progress=sys.stderr.isatty())
    with using(engine.kernels):
        checked = check_rows(engine.target, range(1, MAX_VERIFY_ROWS + 1))
        bar = tqdm(checked, desc=f"passes of {name}", total=MAX_VERIFY_ROWS, leave=False, disable=None)
        failures = [f"{name}, {difference}" for difference in bar if difference is not None]
    return {"name": name, "failures": failures}


def as_text(report: dict[str, Any]) -> str:
    """Lay out a report for people."""
    about = ", ".join(f"{name} {report[name]}" for name in ("mlx-spec", "mlx", "mlx-lm"))
    lines = [f"{report['device']}, {report['machine']}; {about}", report["kernels"], ""]
    lines.append(f"{'operation':<42}{'runs':<30}{'largest error':<16}")
    for row in report["operations"]:
        error = "-" if row["error"] is None else f"{row['error']:.2g}"
        lines.append(f"{row['case']:<42}{row['runs']:<30}{error:<16}{'FAILED' if row['failures'] else 'ok'}")
    if report["times_ms"]:
        lines += ["", f"{'ms a call':<42}{'rows':<8}" + "".join(f"{count:>9}" for count in TIMED_ROWS)]
    for measured in report["times_ms"]:
        for kernels in IMPLEMENTATIONS:
            figures = "".join(f"{measured[kernels][count]:>9.3f}" for count in TIMED_ROWS)
            lines.append(f"{measured['case'] if kernels == 'native' else '':<42}{kernels:<8}{figures}")
    return "\n".join([*lines, "", *verdicts(report)])


def verdicts(report: dict[str, Any]) -> list[str]:
    """Say what failed, or what the checks showed."""
    if report["failures"]:
        return ["FAILED:", *report["failures"]]
    lines = ["Each of 16 rows equals the row alone, bit for bit, in every operation."]
    if report["model"]:
        lines.append(f"{report['model']['name']}: passes of 1 to 16 rows equal one row at a time, bit for bit.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
