"""The command ``python -m mlx_spec.probe``: is a drafter healthy, weak, or a broken port?"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from metal_kernels.launching.implementations import using
from mlx_spec.cli.command import run_command, status_of
from mlx_spec.diagnose.dump import stages_here, write_dump
from mlx_spec.diagnose.logits import RowLogits, check_rows, row_logits
from mlx_spec.diagnose.plot import check_plots, save_plot
from mlx_spec.diagnose.probe import Patient, Probe, probe
from mlx_spec.diagnose.report import as_json, as_text, table
from mlx_spec.diagnose.variants import TEXT
from mlx_spec.diagnose.verdict import Status, verdict_of
from mlx_spec.drafters.kind import BITS
from mlx_spec.errors import RequestError
from mlx_spec.loading.pair import Pair, load_pair

DESCRIPTION = """Measure a drafter on a few hundred positions of text, and say in one line what it is.

healthy              its drafts are right as often as they should be, and everything is consistent
weak drafter         everything is consistent, and acceptance is low: it was trained little, or on other text
broken port          something is computed otherwise than it was trained: the line says what, and how to fix it
not enough evidence  too few positions, or stopped before the end

Generation is lossless with any of them; what is at stake is speed."""
EXAMPLES = """examples:
  python -m mlx_spec.probe --model demo --drafter mtp
  python -m mlx_spec.probe --model mlx-community/Qwen3-8B-4bit --drafter RedHatAI/Qwen3-8B-speculator.dflash2
  python -m mlx_spec.probe --model demo --drafter ./my-port --text chat.txt --json > probe.json

The exit status is 0 for healthy, 3 for a weak drafter, 4 for a broken port, 5 for not enough evidence, 2 after an
error, 130 after Ctrl-C, which prints what is known so far. A broken port is looked into with mlx_spec.bisect."""
STATUS: dict[Status, int] = {"healthy": 0, "weak drafter": 3, "broken port": 4, "not enough evidence": 5}


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_spec.probe",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="demo", help="demo, a folder or a Hugging Face repo (default: demo)")
    add("--drafter", default="auto", help="folder or repo of the drafter (default: what comes with the model)")
    add("--text", type=Path, metavar="FILE", help="text to measure on (default: the target's own replies)")
    add("--draft-bits", type=int, choices=BITS, help="quantise an MTP or EAGLE head to so many bits, 16 for none")
    add("--trust-remote-code", action="store_true", help="let the tokenizer run code that comes with the model")
    add("--json", action="store_true", help="print one JSON object with all figures")
    add(
        "--logits",
        type=int,
        nargs="+",
        metavar="ROW",
        help="show the logits of these rows of the last draft pass, 1 for the first draft",
    )
    add("--dump", type=Path, metavar="FILE", help="keep the stages of one pass, for bisect --against elsewhere")
    add(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw acceptance and ranks by position (needs mlx-spec[plots])",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = setup_arg_parser().parse_args(argv)
    return run_command(lambda: run(args), failed=2)


def run(args: argparse.Namespace) -> int:
    """Probe, print what was found, and return the exit status. Raises MlxSpecError, OSError."""
    if args.plot is not None:
        check_plots()
    pair = load_pair(args.model, args.drafter, args.draft_bits, args.trust_remote_code, sys.stderr.isatty())
    check_rows(pair.found.drafter, args.logits or ())
    tokens = None if args.text is None else read_tokens(args.text, pair)
    if args.dump is not None:
        dump(args.dump, pair)
    found, stopped = Probe(), None
    try:
        with tqdm(desc="probing", leave=False, disable=None, bar_format="{desc} {bar} {n_fmt}/{total_fmt}") as bar:
            bar.total = PARTS
            with using(pair.kernels):
                probe(patient_of(pair), found, tokens, lambda what: advance(bar, what))
    except KeyboardInterrupt as error:
        stopped = error
    verdict, rows = verdict_of(found), list[RowLogits]()
    if args.logits and found.texts:
        with using(pair.kernels):
            rows = row_logits(pair.found.drafter, found.texts[-1], args.logits)
    if args.json:
        values = as_json(found, verdict) | ({"logits": [asdict(row) for row in rows]} if rows else {})
        print(json.dumps({"model": args.model, "drafter": args.drafter, **values}))
    else:
        parts = [logits_text(row, pair.tokenizer) for row in rows]
        print("\n\n".join([*parts, as_text(found, verdict)]))
    if args.plot is not None and found.positions:
        save_plot(found, verdict, f"{args.drafter} for {args.model}", args.plot)
    return STATUS[verdict.status] if stopped is None else status_of(stopped)


def logits_text(row: RowLogits, tokenizer: Any) -> str:
    """Lay out the logits of a row."""
    right = row.right
    head = f"Row {row.row} of the draft after position {row.anchor}: "
    head += "the right token cannot be drafted" if right is None else f"the right token has rank {right.rank}"
    shown = row.top if right is None or right.rank < len(row.top) else [*row.top, right]
    lines = [
        (repr(tokenizer.decode([each.token])), str(each.token), f"{each.logit:.3f}", f"{each.logprob:.3f}")
        + (("right",) if right is not None and each.token == right.token else ("",))
        for each in shown
    ]
    return f"{head}\n{table(('token', 'id', 'logit', 'log-probability', ''), lines)}"


# Parts of a probe but for its contracts, of which there are as many as the drafter's kind has.
PARTS = 6


def advance(bar: "tqdm[None]", what: str) -> None:
    """Show what comes next."""
    name, _, count = what.partition(":")
    if count:
        bar.total = PARTS + int(count)
    bar.set_description(f"probing: {name}", refresh=False)
    bar.update()


def dump(path: Path, pair: Pair) -> None:
    """Write the stages of one pass to a file."""
    with using(pair.kernels):
        tokens = list(pair.tokenizer.encode(TEXT))
        write_dump(stages_here(pair.target, pair.found.drafter, tokens, device_name()), path)


def device_name() -> str:
    """Return what this machine computes on."""
    return str(mx.device_info().get("device_name", mx.default_device()))


def patient_of(pair: Pair) -> Patient:
    """Return what is probed of a loaded pair."""
    found = pair.found
    return Patient(pair.target, found.drafter, found.kind, found.source, pair.tokenizer, pair.costs, pair.folder)


def read_tokens(path: Path, pair: Pair) -> list[int]:
    """Read a text. Raises RequestError where it is no text, OSError where it cannot be read."""
    try:
        return list(pair.tokenizer.encode(path.read_text(encoding="utf-8")))
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is no text in UTF-8 ({error}).") from None


if __name__ == "__main__":
    sys.exit(main())
