"""The command ``python -m mlx_spec.drafters``: published drafters, and those that fit a model."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from mlx_spec.checkpoints.config import read_config
from mlx_spec.checkpoints.hub import expanded
from mlx_spec.cli.command import run_command
from mlx_spec.errors import ModelError
from mlx_spec.loading.published_drafters import PUBLISHED, PublishedDrafter, fitting_drafters

DESCRIPTION = """List published drafters by the model that they were trained for. Nothing is fetched.
The exit status is 0, or 1 where none is known for the model, or it cannot be read."""
EXAMPLES = """examples:
  python -m mlx_spec.drafters
  python -m mlx_spec.drafters --model ~/models/Qwen3-8B-4bit --json"""


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_spec.drafters",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="folder of a model: only drafters for its shape")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = setup_arg_parser().parse_args(argv)
    return run_command(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Print the list and return the exit status. Raises ModelError."""
    found = list(PUBLISHED) if args.model is None else drafters_for(args.model)
    if args.json:
        print(json.dumps([asdict(drafter) for drafter in found], indent=1))
    elif found:
        print(table(found))
    else:
        print(f"No published drafter is known for a model of the shape of {args.model}.", file=sys.stderr)
    return 0 if found else 1


def drafters_for(folder: str) -> list[PublishedDrafter]:
    """Return the drafters for the model in a folder. Raises ModelError where it cannot be read."""
    return fitting_drafters(read_config(expanded(folder), folder, "model", ModelError))


def table(drafters: Sequence[PublishedDrafter]) -> str:
    """Lay drafters out, a line each, under the names of the columns."""
    rows = [("target", "kind", "drafter"), *((each.target, each.kind, each.repo) for each in drafters)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
