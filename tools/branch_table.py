"""Time several branches of one prefix together: plain, drafted, and with mlx-lm's BatchGenerator.

Each branch has a seed of its own. Rates are decode rates of all branches together, without the prefill. The
tokens of plain and drafted branches are compared with those of each branch decoded alone, without drafts. A GPU
is not needed, but rates on a CPU say little about one.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from tqdm import tqdm

from metal_kernels.launching.implementations import implementation
from mlx_spec.cli.bench import HELD_OUT, read_prompts
from mlx_spec.cli.generate_flags import draft_tokens
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.engine import Engine, Generation, Request
from mlx_spec.engine.learned_costs import LearnedCosts
from mlx_spec.errors import MlxSpecError
from mlx_spec.loading.load import load
from mlx_spec.measure.kept_costs import as_json

RUNS = ("mlx-lm", "plain", "drafted")


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.branch_table",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="demo", help="demo, a folder or a Hugging Face repo")
    add("--drafter", default="auto", help="folder or repo of the drafter; auto: the model's own; none")
    add("--branches", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of branches, at most 16")
    add("--prefix", type=int, default=1000, help="tokens that all branches share")
    add("--tokens", type=int, default=128, help="tokens of each branch")
    add("--num-draft-tokens", default="auto", help="drafts a round: auto, adaptive or a number")
    add("--temp", type=float, default=0.8, help="temperature")
    add("--repeats", type=int, default=3, help="timed runs after one that compiles; the median counts")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    return parser


def long_prompt(tokenizer: Any, count: int) -> list[int]:
    """Return a chat prompt of about ``count`` tokens, cut from questions that no drafter was trained on."""
    questions = "\n\n".join(item["prompt"] for item in read_prompts(HELD_OUT, None)).split(" ")
    words = questions * (1 + count // len(questions))

    def prompt(size: int) -> list[int]:
        text = "Answer the question that you like best.\n\n" + " ".join(words[:size])
        messages = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    low, high = 0, len(words)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(prompt(middle)) <= count else (low, middle)
    return prompt(low)


class Run:
    """What one run of several branches measured.

    seconds: of decoding.
    tokens: decoded, of all branches together.
    bytes: memory in use at the end, see ``bytes_in_use``.
    pages: of the target's pool in use at the end.
    texts: the tokens of each branch; empty for mlx-lm.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = 0
        self.bytes = 0
        self.pages = 0
        self.texts: list[list[int]] = []

    @property
    def rate(self) -> float:
        """Tokens a second of all branches together."""
        return self.tokens / self.seconds


def bytes_in_use(engine: Engine) -> int:
    """Return the bytes that MLX holds, without the free pages of pools, which grow in steps."""
    pools = [engine.target.pool, *([engine.drafter.pool] if engine.drafter else [])]
    free = sum(pool.data.nbytes - pool.pages_in_use * pool.page_bytes for pool in pools)
    return mx.get_active_memory() - free


def our_run(engine: Engine, request: Request, branches: int) -> Run:
    """Prefill the prefix, fork it, and time decoding all branches to their end."""
    run = Run()
    first = engine.start(request)
    generations: list[Generation] = [first, *(engine.fork(first, seed=seed) for seed in range(1, branches))]
    try:
        mx.synchronize()
        started = time.perf_counter()
        while any(generation.finish_reason is None for generation in generations):
            for each in engine.step(generations):
                run.tokens += len(each.tokens)
                if each.error is not None:
                    raise each.error
        mx.synchronize()
        run.seconds = time.perf_counter() - started
        run.pages, run.bytes = engine.target.pool.pages_in_use, bytes_in_use(engine)
        run.texts = [generation.tokens[len(request.prompt) :] for generation in generations]
    finally:
        for generation in generations:
            engine.close(generation)
    return run


def stock_run(engine: Engine, request: Request, branches: int) -> Run:
    """Time mlx-lm decoding as many sequences with the same prompt, from when all of them decode."""
    run = Run()
    batch = BatchGenerator(
        engine.target.model,
        max_tokens=request.max_tokens,
        sampler=make_sampler(request.sampling.temp),
        completion_batch_size=branches,
        prefill_batch_size=branches,
    )
    try:
        batch.insert([list(request.prompt)] * branches)
        left = branches
        while len(responses := batch.next_generated()) < branches:
            left -= sum(response.finish_reason is not None for response in responses)
        mx.synchronize()
        started = time.perf_counter()
        while left:
            run.bytes = max(run.bytes, bytes_in_use(engine))
            responses = batch.next_generated()
            run.tokens += len(responses)
            left -= sum(response.finish_reason is not None for response in responses)
        mx.synchronize()
        run.seconds = time.perf_counter() - started
    finally:
        batch.close()
    return run


def runners(engine: Engine, request: Request) -> dict[str, Callable[[int], Run]]:
    """Return functions that run a number of branches, by name of the run."""
    plain = replace(request, num_draft_tokens=0)
    found: dict[str, Callable[[int], Run]] = {
        "mlx-lm": lambda branches: stock_run(engine, request, branches),
        "plain": lambda branches: our_run(engine, plain, branches),
    }
    if engine.drafter is not None:
        found["drafted"] = lambda branches: our_run(engine, request, branches)
    return found


def measure(engine: Engine, request: Request, branches: list[int], repeats: int) -> dict[str, Any]:
    """Time every run with every number of branches, the runs in turns.

    engine: of the model.
    request: of the first branch; the others differ in their seeds.
    branches: numbers of branches.
    repeats: timed runs each.
    Returns the rows of the table, what a branch adds, and how many texts equal those of branches alone.
    """
    functions = runners(engine, request)
    rows: dict[int, dict[str, Any]] = {}
    # Of the largest number of branches.
    texts: dict[str, list[list[int]]] = {}
    for count in tqdm(branches, desc="branches", leave=False):
        runs: dict[str, list[Run]] = {name: [] for name in functions}
        for _ in tqdm(range(repeats + 1), desc="runs", leave=False):
            for name, run in functions.items():
                runs[name].append(run(count))
        rows[count] = {}
        for name, done in runs.items():
            texts[name] = max(texts.get(name, []), done[-1].texts, key=len)
            rows[count][name] = {
                "tokens_per_second": round(median(run.rate for run in done[1:]), 1),
                "mb": round(done[-1].bytes / 1e6, 2),
                "pages": done[-1].pages,
            }
    alone = [alone_text(engine, request, seed) for seed in range(max(branches))]
    equal = {
        name: sum(a == b for a, b in zip(found, alone, strict=True)) for name, found in texts.items() if found
    }
    more = {name: added(rows, name, "mb") for name in functions}
    pages = added(rows, "plain", "pages")
    return {"rows": rows, "added_mb": more, "added_pages": pages, "equal_texts": equal, "texts": len(alone)}


def alone_text(engine: Engine, request: Request, seed: int) -> list[int]:
    """Return the tokens of the branch with this seed, decoded alone and without drafts."""
    sampling = replace(request.sampling, seed=seed)
    return our_run(engine, replace(request, sampling=sampling, num_draft_tokens=0), 1).texts[0]


def added(rows: dict[int, dict[str, Any]], name: str, what: str) -> float | None:
    """Return how much each further branch adds to ``what`` of a run, on average; None for a single row."""
    few, many = min(rows), max(rows)
    return None if few == many else round((rows[many][name][what] - rows[few][name][what]) / (many - few), 3)


def print_table(result: dict[str, Any], page_mb: float) -> None:
    """Print a line for each number of branches, then what a branch adds."""
    rows = result["rows"]
    names = [name for name in RUNS if name in next(iter(rows.values()))]
    print("tokens/s of all branches together")
    print("branches".ljust(10) + "".join(f"{name:>10}" for name in names))
    for count, row in rows.items():
        print(f"{count:<10}" + "".join(f"{row[name]['tokens_per_second']:>10.1f}" for name in names))
    if len(rows) > 1:
        print("MB for each added branch: " + ", ".join(f"{name} {result['added_mb'][name]:.2f}" for name in names))
        pages = result["added_pages"]
        print(f"of which pages: {pages:.1f} of {page_mb:.2f} MB, {pages * page_mb:.2f} MB")
    for name, equal in result["equal_texts"].items():
        print(f"{name} branches equal to the same branch alone, without drafts: {equal} of {result['texts']}")


def main() -> int:
    """Run the command; exit status 1 when a text differs, 2 when it could not run."""
    args = setup_arg_parser().parse_args()
    try:
        engine, tokenizer = load(args.model, None if args.drafter == "none" else args.drafter, progress=True)
        prompt = long_prompt(tokenizer, args.prefix)
        sampling = Sampling(temp=args.temp)
        request = Request(prompt, args.tokens, draft_tokens(args.num_draft_tokens), sampling)
        result = measure(engine, request, args.branches, args.repeats)
    except MlxSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    page_mb = engine.target.pool.page_bytes / 1e6
    about = {
        "device": str(mx.device_info().get("device_name", mx.default_device())),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "kernels": implementation(),
        "model": args.model,
        "prefix": len(prompt),
        "tokens": args.tokens,
        "temp": args.temp,
        "exact": engine.exactness.holds,
        "page_mb": round(page_mb, 3),
        "costs": as_json(engine.costs) if isinstance(engine.costs, LearnedCosts) else None,
    }
    if args.json:
        print(json.dumps({**about, **result}))
    else:
        print(", ".join(f"{name} {value}" for name, value in about.items() if name != "costs"))
        print_table(result, page_mb)
    return 1 if any(equal < result["texts"] for equal in result["equal_texts"].values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
