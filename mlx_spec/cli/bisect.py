"""The command ``python -m mlx_spec.bisect``: where does a drafter, or its target, first go wrong?"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from metal_kernels.launching.implementations import using
from mlx_spec.cli.command import run_command
from mlx_spec.cli.probe import device_name, patient_of, read_tokens
from mlx_spec.diagnose.dump import ROWS, STEPS, Parting, parting, read_dump, stages_here
from mlx_spec.diagnose.probe import SAMPLED_DEPTH, Patient, departures_of, texts_of
from mlx_spec.diagnose.record import read_run
from mlx_spec.diagnose.replay import BadRound, first_bad_round
from mlx_spec.diagnose.report import table
from mlx_spec.diagnose.runs import Finding, inspect_target
from mlx_spec.diagnose.stages import Departure
from mlx_spec.diagnose.text import PROMPTS, as_chat
from mlx_spec.diagnose.variants import Found, Search, contracts_of, layer_ids_of
from mlx_spec.drafters.kind import BITS
from mlx_spec.errors import RequestError
from mlx_spec.loading.pair import Pair, load_pair

LOOKS = ("stages", "variants", "target")
DESCRIPTION = """Find where a drafter, or its target, first goes wrong.

stages    each stage of a draft pass beside its formula in float64 numpy on the checkpoint's own tensors, computed
          from the stages before it: the first that departs by more than rounding explains
variants  the drafter under every other contract that its checkpoint may mean: which fits significantly better, and
          the line of config that would fix it
target    speculative against plain runs of the target, at several depths: a tie, numerics or a corrupted state,
          and the first cached position, or row, layer and operation, that differs"""
EXAMPLES = """examples:
  python -m mlx_spec.bisect --model demo --drafter ./my-port
  python -m mlx_spec.bisect --model demo --drafter eagle --only target
  python -m mlx_spec.generate --model demo --prompt "Write a poem." --record run.jsonl
  python -m mlx_spec.bisect --model demo --replay run.jsonl
  python -m mlx_spec.probe --model demo --drafter eagle --dump here.safetensors      on one machine
  python -m mlx_spec.bisect --model demo --drafter eagle --against here.safetensors  on another

The exit status is 0 where nothing is wrong, 1 where something is, 2 after an error, 130 after Ctrl-C."""


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_spec.bisect",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="demo", help="demo, a folder or a Hugging Face repo (default: demo)")
    add("--drafter", default="auto", help="folder or repo of the drafter (default: what comes with the model)")
    add(
        "--only", choices=LOOKS, action="append", help="look here only; may be given more than once (default: all)"
    )
    add("--text", type=Path, metavar="FILE", help="text for the variants (default: the target's own replies)")
    add(
        "--replay",
        type=Path,
        metavar="FILE",
        help="find the first bad round of a run that generate --record wrote",
    )
    add("--against", type=Path, metavar="FILE", help="compare with what probe --dump wrote on another machine")
    add("--max-tokens", type=int, default=48, help="of each text that the target writes (default: 48)")
    add(
        "--draft-bits",
        type=int,
        choices=BITS,
        help="quantise an MTP or EAGLE head to so many bits (default: as stored)",
    )
    add("--trust-remote-code", action="store_true", help="let the tokenizer run code that comes with the model")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = setup_arg_parser()
    args = parser.parse_args(argv)
    if args.max_tokens < 1:
        parser.error(f"--max-tokens must be at least 1, not {args.max_tokens}")
    return run_command(lambda: run(args), failed=2)


def run(args: argparse.Namespace) -> int:
    """Look, print what was found, and return the exit status. Raises MlxSpecError, OSError."""
    recorded = None if args.replay is None else read_run(args.replay)
    dumped = None if args.against is None else read_dump(args.against)
    bits = max(BITS) if args.draft_bits is None else args.draft_bits
    pair = load_pair(args.model, args.drafter, bits, args.trust_remote_code, sys.stderr.isatty())
    patient = patient_of(pair)
    looks: dict[str, Callable[[], tuple[bool, Any, str]]] = {}
    if recorded is not None:
        looks["replay"] = lambda: of_replay(first_bad_round(pair.engine(), recorded), len(recorded.rounds))
    if dumped is not None:
        looks["against"] = lambda: look_against(patient, dumped)
    if not looks:
        every: dict[str, Callable[[], tuple[bool, Any, str]]] = {
            "stages": lambda: look_at_stages(patient),
            "variants": lambda: look_at_variants(patient, args.text, pair),
            "target": lambda: look_at_target(pair, args.max_tokens),
        }
        looks = {name: look for name, look in every.items() if args.only is None or name in args.only}
    results: dict[str, Any] = {}
    wrong = False
    with using(pair.kernels):
        for name, look in looks.items():
            is_wrong, values, text = look()
            wrong = wrong or is_wrong
            results[name] = values
            if not args.json:
                print(f"{name}: {text}\n", flush=True)
    if args.json:
        print(json.dumps({"model": args.model, "drafter": args.drafter, "wrong": wrong, **results}))
    return 1 if wrong else 0


def look_at_stages(patient: Patient) -> tuple[bool, Any, str]:
    """Compare the stages of a pass with their formulas."""
    texts = texts_of(patient, patient.drafter.target_layer_ids, sample_tokens(patient))
    return of_stages(departures_of(patient, texts))


def of_stages(found: Sequence[Departure]) -> tuple[bool, Any, str]:
    """Report stages."""
    if not found:
        raise RequestError("No stage was compared: the text is too short.")
    first = next((each for each in found if each.departs), None)
    values = [{"stage": each.stage, "units": finite(each.units), "departs": each.departs} for each in found]
    most = max(found, key=lambda each: each.units)
    if first is None:
        return False, values, f"all {len(found)} agree, at most {most.units:.1f} units of rounding ({most.stage})"
    rows = [(each.stage, f"{each.units:.3g}", "departs" if each.departs else "") for each in around(found, first)]
    text = f"{first.stage} departs first, by {first.units:.3g} units of rounding; what it is computed from agrees"
    return True, values, f"{text}\n{table(('stage', 'units', ''), rows)}"


def around(found: Sequence[Departure], first: Departure) -> Sequence[Departure]:
    """Return the stages just before and after one."""
    at = list(found).index(first)
    return found[max(0, at - 3) : at + 5]


def finite(value: float) -> float | None:
    """Return a number for JSON, where infinity is null."""
    return float(f"{value:.4g}") if np.isfinite(value) else None


def look_at_variants(patient: Patient, text: Path | None, pair: Pair) -> tuple[bool, Any, str]:
    """Measure other contracts."""
    variants = patient.kind.variants(patient.drafter, patient.target)
    tokens = None if text is None else read_tokens(text, pair)
    texts = texts_of(patient, layer_ids_of(patient.drafter, variants), tokens)
    contracts = contracts_of(variants)
    depth = min(SAMPLED_DEPTH, patient.drafter.max_draft)
    with tqdm(total=len(contracts) + 1, desc="contracts", leave=False, disable=None) as bar:
        found = Search(patient.drafter, texts, depth, lambda name: bar.update() and None).run(contracts)
    return of_variants(found)


def of_variants(found: Sequence[Found]) -> tuple[bool, Any, str]:
    """Report contracts."""
    values = [
        {
            "name": each.contract.name,
            "fixes": each.contract.fixes,
            "right": round(float(each.hits.right.mean()), 4),
            "as_declared": round(float(each.other.right.mean()), 4),
            "clearly_better": each.is_better,
        }
        for each in found
    ]
    rows = [
        (
            each.contract.name,
            f"{each.hits.right.mean():.0%}",
            f"{each.other.right.mean():.0%}",
            f"{each.hits.score:.3f}",
        )
        for each in found
    ]
    better = next((each for each in found if each.is_better), None)
    lines = table(("contract", "right", "without it", "score"), rows)
    if better is None:
        return (
            False,
            values,
            f"none of {len(found)} contracts fits significantly better than the declared one\n{lines}",
        )
    fixes = "".join(f"\n  fix: {fix}" for fix in better.contract.fixes)
    return True, values, f"{better.contract.name} fits significantly better{fixes}\n{lines}"


def look_at_target(pair: Pair, count: int) -> tuple[bool, Any, str]:
    """Compare speculative runs with plain ones."""
    prompts = [as_chat(pair.tokenizer, prompts[0]) for prompts in PROMPTS.values()]
    most = pair.found.drafter.max_draft
    depths = sorted({1, (most + 1) // 2, most})
    with tqdm(total=len(prompts) * len(depths), desc="runs", leave=False, disable=None) as bar:
        found = inspect_target(pair.engine(), prompts, count, depths, bar.update)
    return of_target(found, len(prompts), depths)


def of_target(found: Finding | None, prompts: int, depths: Sequence[int]) -> tuple[bool, Any, str]:
    """Report what a target does."""
    if found is None:
        runs = f"{prompts} texts at depths {', '.join(map(str, depths))}"
        return False, None, f"{runs}: every row and every cached position equals plain decoding, bit for bit"
    return True, asdict(found), str(found)


def of_replay(found: BadRound | None, rounds: int) -> tuple[bool, Any, str]:
    """Report the first bad round of a recorded run."""
    if found is None:
        return False, None, f"all {rounds} rounds are what recomputation from scratch gives"
    return True, asdict(found), str(found)


def look_against(patient: Patient, dumped: Any) -> tuple[bool, Any, str]:
    """Compare a pass here with a dump of one there."""
    here = stages_here(patient.target, patient.drafter, dumped.tokens, device_name())
    steps = min(STEPS, patient.drafter.max_draft)
    formulas = patient.kind.formulas(patient.source, patient.drafter, patient.target, steps, ROWS)
    found = parting(here, dumped, formulas, patient.target.num_layers, patient.target.dtype)
    return of_parting(found, dumped.device)


def of_parting(found: Parting | None, device: str) -> tuple[bool, Any, str]:
    """Report where two machines part."""
    if found is None:
        return False, None, f"the pass here and that on {device} agree up to rounding"
    if found.stage == "capture":
        text = (
            f"the target's hidden states differ by {found.difference:.2g} of their size: look at the target first"
        )
    else:
        text = (
            f"{found.stage} departs: by {found.here:.3g} units of rounding here, by {found.there:.3g} on {device}"
        )
    values = {**asdict(found), "here": finite(found.here), "there": finite(found.there)}
    return True, values, text


def sample_tokens(patient: Patient) -> list[int]:
    """Return the tokens of the built-in prompts, for a pass whose text does not matter."""
    prompts = " ".join(prompt for prompts in PROMPTS.values() for prompt in prompts)
    return list(patient.tokenizer.encode(prompts))


if __name__ == "__main__":
    sys.exit(main())
