"""Measure speculative against plain decoding: accepted length, acceptance by position, tokens a second.

Both run in turns in one process, prompt by prompt, and their tokens are compared. Rates leave out the time of
reading a prompt.

With --workloads, kinds of work are compared instead: plain decoding, copies alone, the drafter alone, and both.

With --synthetic nothing is downloaded: a model of a published shape gets random weights, and a drafter whose
passes are real and whose drafts are right with a chosen chance.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from metal_kernels import MAX_VERIFY_ROWS
from mlx_spec.cli.command import run_command
from mlx_spec.cli.generate_flags import draft_tokens
from mlx_spec.demo import HELD_OUT, WORKLOADS
from mlx_spec.diagnose.plot import check_plots
from mlx_spec.engine import Engine, Request
from mlx_spec.engine.learned_costs import LearnedCosts
from mlx_spec.engine.statistics import SourceCounts, Statistics, added, in_words
from mlx_spec.errors import RequestError
from mlx_spec.generate.options import make_sampling
from mlx_spec.generate.stream import stream_generate
from mlx_spec.loading.load import load
from mlx_spec.measure.kept_costs import as_json
from mlx_spec.measure.random_models import CONFIGS
from mlx_spec.measure.store import version_of
from mlx_spec.measure.synthetic import Synthetic, time_synthetic
from mlx_spec.measure.turns import Timed, mlx_lm_arm
from mlx_spec.measure.workloads import Task, time_workloads

EXAMPLES = """examples:
  python -m mlx_spec.bench --limit 10
  python -m mlx_spec.bench --model mlx-community/Qwen3-8B-4bit --drafter RedHatAI/Qwen3-8B-speculator.dflash2
  python -m mlx_spec.bench --num-draft-tokens 7 --no-plain     accepted length at one depth
  python -m mlx_spec.bench --limit 10 --compare-mlx-lm         mlx_lm.generate's tokens a second, too
  python -m mlx_spec.bench --workloads --max-tokens 600        edits, quotes, summaries, chat, code, prose
  python -m mlx_spec.bench --synthetic Qwen3-8B --context 8192 --plot rounds.png

The last line is a JSON object with all figures. The exit status is 1 when a reply differs from plain decoding's
that must not, 2 after an error, 130 after Ctrl-C, 143 after SIGTERM."""


KINDS, BITS = ("dflash2", "eagle", "mtp"), (2, 3, 4, 5, 6, 8, 16)


@dataclass
class Tally:
    """Sums over the prompts of one kind."""

    prompts: int = 0
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    plain_tokens: int = 0
    plain_seconds: float = 0.0
    mlx_lm_ms: list[float] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted_by: dict[str, SourceCounts] = field(default_factory=dict)
    sibling_drafts: int = 0
    accepted_sibling_drafts: int = 0

    def add(self, speculative: Statistics, plain: Statistics | None, mlx_lm: Timed | None = None) -> None:
        """Add one prompt."""
        if mlx_lm is not None and mlx_lm.ms_a_token:
            self.mlx_lm_ms.append(mlx_lm.ms_a_token)
        self.prompts += 1
        self.tokens += speculative.tokens
        self.rounds += speculative.rounds
        self.seconds += speculative.seconds
        self.drafted = add_lists(self.drafted, speculative.drafted)
        self.accepted = add_lists(self.accepted, speculative.accepted)
        self.drafted_by = added([self.drafted_by, speculative.drafted_by])
        self.sibling_drafts += speculative.sibling_drafts
        self.accepted_sibling_drafts += speculative.accepted_sibling_drafts
        if plain is not None:
            self.plain_tokens += plain.tokens
            self.plain_seconds += plain.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values; rates are 0 where nothing was measured."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        plain = self.plain_tokens / self.plain_seconds if self.plain_seconds else 0.0
        mlx_lm = 1e3 * len(self.mlx_lm_ms) / sum(self.mlx_lm_ms) if self.mlx_lm_ms else 0.0
        more = (
            {"mlx_lm_tokens_per_second": round(mlx_lm, 2), "ratio_to_mlx_lm": round(rate / mlx_lm, 3)}
            if mlx_lm
            else {}
        )
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "accepted_length": round(self.tokens / max(self.rounds, 1), 3),
            "acceptance": [round(a / d, 3) for a, d in zip(self.accepted, self.drafted, strict=True)],
            "drafted_by": {name: asdict(counts) for name, counts in self.drafted_by.items()},
            "sibling_drafts": self.sibling_drafts,
            "accepted_sibling_drafts": self.accepted_sibling_drafts,
            "tokens_per_second": round(rate, 2),
            "plain_tokens_per_second": round(plain, 2),
            "ratio": round(rate / plain, 3) if plain else 0.0,
            **more,
        }


def add_lists(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """Add two lists of counts, the shorter one filled with zeros."""
    size = max(len(a), len(b))
    return [sum(x[i] for x in (a, b) if i < len(x)) for i in range(size)]


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_spec.bench",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="demo", help="demo, a folder or a Hugging Face repo (default: demo)")
    add("--drafter", default="auto", help="folder or repo of the drafter (default: what comes with the model)")
    add(
        "--prompts",
        type=Path,
        default=HELD_OUT,
        help="JSON lines with prompt, kind and system (default: 40 that the demo's drafters were not trained on)",
    )
    add("--limit", type=int, help="number of prompts to use, evenly spread over the file (default: all)")
    add("--max-tokens", type=int, default=128, help="longest reply (default: 128)")
    add(
        "--num-draft-tokens",
        default="auto",
        help="tokens to draft a round: auto, adaptive or a number (default: auto)",
    )
    add(
        "--num-sibling-drafts",
        type=int,
        help="second choices to verify beside a number of drafts (default: chosen by measured costs)",
    )
    add("--temp", type=float, default=0.0, help="temperature (default: 0, greedy)")
    add("--seed", type=int, default=0, help="of the draws with --temp (default: 0)")
    add(
        "--accept",
        choices=("coupled", "rejection"),
        default="coupled",
        help="with --temp: coupled gives plain decoding's text (default), rejection other draws",
    )
    add("--exact", choices=("on", "off"), default="on", help="off takes MLX's own operations (default: on)")
    add("--no-plain", action="store_true", help="leave plain decoding out: acceptance only, in half of the time")
    add("--compare-mlx-lm", action="store_true", help="time mlx-lm's own greedy loop on each prompt, too")
    add(
        "--workloads",
        nargs="?",
        type=Path,
        const=WORKLOADS,
        metavar="FILE",
        help="compare ways to decode on kinds of work, in turns; a task with a reply is teacher-forced: the model "
        "is made to say it (default file: the one that comes with mlx_spec)",
    )
    add("--plot", type=Path, help="draw the rates into this file (needs matplotlib, extra plots)")
    made = parser.add_argument_group("models with random weights")
    made.add_argument("--synthetic", choices=sorted(CONFIGS), help="shape of a model to time")
    made.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=["dflash2"], help="drafters to time (default: dflash2)"
    )
    made.add_argument(
        "--synthetic-acceptance", type=float, default=0.8, help="chance that a draft is right (default: 0.8)"
    )
    made.add_argument("--bits", type=int, default=4, choices=BITS, help="of weights; 16: bfloat16 (default: 4)")
    made.add_argument("--context", type=int, default=1024, help="tokens of the prompt (default: 1024)")
    made.add_argument("--streams", type=int, default=1, help="texts that are decoded together (default: 1)")
    made.add_argument("--depths", type=int, nargs="+", default=[7], help="drafts a round (default: 7)")
    made.add_argument(
        "--turns", type=int, default=3, help="runs of each way, in turns; of --workloads, too (default: 3)"
    )
    made.add_argument("--layers", type=int, help="fewer layers than the shape has, for a quick try")
    return parser


def check_options(args: argparse.Namespace) -> None:
    """Raise RequestError for what no model could run, before one is loaded."""
    depth = draft_tokens(args.num_draft_tokens)
    sampling = make_sampling({"temp": args.temp, "seed": args.seed, "accept": args.accept})
    Request([0], args.max_tokens, depth, sampling).check_limits()


def read_prompts(path: Path, limit: int | None) -> list[dict[str, str]]:
    """Read a prompt file, or ``limit`` evenly spread lines of it. Raises RequestError where it holds none."""
    try:
        items = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        usable = all(isinstance(item["prompt"], str) for item in items)
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path}: each line must be a JSON object with a prompt ({error!r}).") from None
    if not items or not usable or (limit is not None and limit < 1):
        raise RequestError(f"{path} must hold JSON lines with prompts, of which --limit takes at least 1.")
    if limit is None or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def prompt_of(tokenizer: Any, item: dict[str, str]) -> list[int]:
    """Return a prompt in the chat template."""
    messages = [{"role": "user", "content": item["prompt"]}]
    if item.get("system"):
        messages.insert(0, {"role": "system", "content": item["system"]})
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))


def run_prompt(
    engine: Engine, tokenizer: Any, item: dict[str, str], **options: Any
) -> tuple[list[int], Statistics]:
    """Generate the reply to one prompt in the chat template."""
    tokens, statistics = [], Statistics()
    for response in stream_generate(engine, tokenizer, prompt_of(tokenizer, item), **options):
        if response.token is not None:
            tokens.append(response.token)
        statistics = response.statistics
    return tokens, statistics


def measure(
    engine: Engine, tokenizer: Any, items: Iterable[dict[str, str]], args: argparse.Namespace
) -> dict[str, Any]:
    """Run all prompts in turns and return the tallies by kind, and how many replies were equal."""
    options = {"max_tokens": args.max_tokens, "temp": args.temp, "seed": args.seed, "accept": args.accept}
    depth = draft_tokens(args.num_draft_tokens)
    tallies: dict[str, Tally] = defaultdict(Tally)
    equal = compared = 0
    try:
        for item in tqdm(list(items), unit="prompt", disable=None):
            tokens, statistics = run_prompt(
                engine,
                tokenizer,
                item,
                num_draft_tokens=depth,
                num_sibling_drafts=args.num_sibling_drafts,
                **options,
            )
            plain = None
            if not args.no_plain:
                plain_tokens, plain = run_prompt(engine, tokenizer, item, num_draft_tokens=0, **options)
                compared += 1
                equal += plain_tokens == tokens
            mlx_lm = None
            if args.compare_mlx_lm:
                mlx_lm = mlx_lm_arm(engine.target.model, prompt_of(tokenizer, item), len(tokens))
            for kind in (item.get("kind", "prompts"), "all"):
                tallies[kind].add(statistics, plain, mlx_lm)
    except KeyboardInterrupt:
        print("stopped, the figures are those of the prompts so far", file=sys.stderr)
    kinds = {kind: tally.as_dict() for kind, tally in sorted(tallies.items(), key=lambda pair: pair[0] == "all")}
    return {"kinds": kinds, "equal_replies": equal, "compared_replies": compared}


def accepted_by_source(row: Mapping[str, Any]) -> str:
    """Return in words how much of what each source drafted was accepted."""
    return in_words({name: SourceCounts(**counts) for name, counts in row.get("drafted_by", {}).items()})


def print_table(result: dict[str, Any]) -> None:
    """Print a line for each kind, and acceptance by position over all."""
    print(f"{'kind':<14}{'prompts':>8}{'tokens':>8}{'a round':>9}{'tokens/s':>10}{'plain':>8}{'ratio':>7}")
    for kind, row in result["kinds"].items():
        print(
            f"{kind:<14}{row['prompts']:>8}{row['tokens']:>8}{row['accepted_length']:>9.2f}"
            f"{row['tokens_per_second']:>10.2f}{row['plain_tokens_per_second']:>8.2f}{row['ratio']:>7.2f}"
        )
    for position, share in enumerate(result["kinds"].get("all", {}).get("acceptance", []), 1):
        print(f"position {position}: {share:.3f} of the drafts accepted")
    if accepted := accepted_by_source(result["kinds"].get("all", {})):
        print(f"drafts accepted: {accepted}")
    if siblings := result["kinds"].get("all", {}).get("sibling_drafts"):
        print(f"sibling drafts accepted: {result['kinds']['all']['accepted_sibling_drafts']} of {siblings}")
    if rate := result["kinds"].get("all", {}).get("mlx_lm_tokens_per_second"):
        print(f"mlx-lm: {rate:.2f} tokens/s, drafted {result['kinds']['all']['ratio_to_mlx_lm']:.2f} times that")
    if result["compared_replies"]:
        print(f"replies equal to plain decoding: {result['equal_replies']} of {result['compared_replies']}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    The exit status is 1 when a reply differs that must not, 2 when the command could not run, 130 after Ctrl-C.
    """
    args = setup_arg_parser().parse_args(argv)
    return run_command(lambda: run(args), failed=2)


def machine() -> dict[str, str]:
    """Return what figures depend on besides the model: the device, and versions."""
    return {
        "device": str(mx.device_info().get("device_name", mx.default_device())),
        "machine": f"{platform.system()} {platform.machine()}",
        "mlx": version_of("mlx"),
        "mlx_lm": version_of("mlx-lm"),
        "mlx_spec": version_of("mlx_spec"),
        "commit": commit(),
    }


def commit() -> str:
    """Return the commit of a checkout; "" for an installed package, which may lie inside another checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    line = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def run_synthetic(args: argparse.Namespace) -> int:
    """Time a model with random weights; the exit status is 1 where drafted texts are not the plain ones."""
    wanted = Synthetic(
        shape=args.synthetic,
        kinds=tuple(args.kinds),
        bits=None if args.bits == 16 else args.bits,
        acceptance=args.synthetic_acceptance,
        context=args.context,
        streams=args.streams,
        tokens=args.max_tokens,
        depths=tuple(args.depths),
        layers=args.layers,
    )
    check_synthetic(wanted, args.turns)
    arms = time_synthetic(wanted, args.turns, sys.stderr.isatty())
    print(f"{'':<14}{'ms a round':>11}{'tokens a round':>15}{'ms a token':>11}{'tokens/s':>10}  plain text")
    for name, row in arms.items():
        figures = f"{row['round_ms']:>11.2f}{row['tokens_a_round']:>15.2f}{row['token_ms']:>11.2f}"
        text = (
            "equal" if row["equal"] else f"other from token {row['first_difference']} on, margin {row['margin']}"
        )
        print(f"{name:<14}{figures}{row['tokens_per_second']:>10.1f}  {text}")
    if args.plot is not None:
        draw(args.plot, {name: row["tokens_per_second"] for name, row in arms.items()}, "tokens/s")
    arguments = {name: str(value) for name, value in vars(args).items()}
    print(json.dumps({**machine(), "arms": arms, "arguments": arguments}))
    return 0 if all(row["equal"] for name, row in arms.items() if name != "mlx-lm") else 1


def run_workloads(args: argparse.Namespace) -> int:
    """Compare ways to decode by kind of work; the exit status is 1 where a reply is not plain decoding's."""
    items = read_prompts(args.workloads, args.limit)
    check_options(args)
    if args.turns < 1:
        raise RequestError(f"--turns must be at least 1, not {args.turns}.")
    engine, tokenizer = load(args.model, args.drafter, exact=args.exact == "on", progress=sys.stderr.isatty())
    ends = frozenset(tokenizer.eos_token_ids)
    tasks = [task_of(tokenizer, item, min(ends)) for item in items]
    kinds, different = time_workloads(engine, tasks, args.turns, args.max_tokens, ends, sys.stderr.isatty())
    print(f"{'kind':<10}{'way':<10}{'tokens':>8}{'a round':>9}{'tokens/s':>10}{'ratio':>7}  drafts accepted")
    for kind, by_way in kinds.items():
        for way, row in by_way.items():
            print(
                f"{kind:<10}{way:<10}{row['tokens']:>8}{row['tokens_a_round']:>9.2f}"
                f"{row['tokens_per_second']:>10.1f}{row['ratio']:>7.2f}  {accepted_by_source(row)}"
            )
    print(f"replies other than plain decoding's: {different}")
    print(f"exact: {'yes' if engine.exactness.holds else 'no'}, {engine.exactness.reason}")
    about = {
        **machine(),
        "costs": as_json(engine.costs) if isinstance(engine.costs, LearnedCosts) else None,
        "arguments": {name: str(value) for name, value in vars(args).items()},
    }
    print(json.dumps({**about, "kinds": kinds, "different_replies": different}))
    return 1 if args.exact == "on" and different else 0


def task_of(tokenizer: Any, item: dict[str, str], end: int) -> Task:
    """Return a task of a prompt file, with the end token after its reply, if it has one."""
    reply = item.get("reply")
    ids = None if reply is None else [*tokenizer.encode(reply, add_special_tokens=False), end]
    return Task(item.get("kind", "prompts"), prompt_of(tokenizer, item), ids)


def check_synthetic(wanted: Synthetic, turns: int) -> None:
    """Raise RequestError for numbers without a meaning."""
    numbers = {
        "--context": wanted.context,
        "--streams": wanted.streams,
        "--max-tokens": wanted.tokens,
        "--turns": turns,
        "--depths": min(wanted.depths),
        "--layers": 1 if wanted.layers is None else wanted.layers,
    }
    for flag, value in numbers.items():
        if value < 1:
            raise RequestError(f"{flag} must be at least 1, not {value}.")
    if not 0 <= wanted.acceptance <= 1:
        raise RequestError(f"--synthetic-acceptance is a chance from 0 to 1, not {wanted.acceptance}.")
    if wanted.streams > MAX_VERIFY_ROWS:
        raise RequestError(f"--streams takes up to {MAX_VERIFY_ROWS}, the rows of a pass, not {wanted.streams}.")


def draw(path: Path, rates: dict[str, float], label: str) -> None:
    """Draw a bar for each rate into a file."""
    from matplotlib.figure import Figure  # an extra

    figure = Figure(figsize=(7, 0.5 + 0.45 * len(rates)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(rates), list(rates.values()))
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    figure.savefig(path)


def run(args: argparse.Namespace) -> int:
    """Measure, print the figures and return the exit status. Raises MlxSpecError, OSError."""
    if args.plot is not None:
        check_plots()
    if args.synthetic is not None:
        return run_synthetic(args)
    if args.workloads is not None:
        return run_workloads(args)
    items = read_prompts(args.prompts, args.limit)
    check_options(args)
    engine, tokenizer = load(args.model, args.drafter, exact=args.exact == "on", progress=sys.stderr.isatty())
    started = time.perf_counter()
    result = measure(engine, tokenizer, items, args)
    print_table(result)
    print(f"exact: {'yes' if engine.exactness.holds else 'no'}, {engine.exactness.reason}")
    if args.plot is not None:
        kinds = result["kinds"]
        draw(args.plot, {name: row["tokens_per_second"] for name, row in kinds.items()}, "drafted, tokens/s")
    about = {
        **machine(),
        "dtype": str(engine.target.dtype),
        "exact": engine.exactness.holds,
        "seconds": round(time.perf_counter() - started, 1),
        "costs": as_json(engine.costs) if isinstance(engine.costs, LearnedCosts) else None,
        "arguments": {name: str(value) for name, value in vars(args).items()},
    }
    print(json.dumps({**about, **result}))
    equal = args.exact == "on" and (args.temp == 0 or args.accept == "coupled")
    return 1 if equal and result["equal_replies"] < result["compared_replies"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
