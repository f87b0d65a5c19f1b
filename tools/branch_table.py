"""Time several continuations of one prefix together: plain and drafted, and by mlx-lm's BatchGenerator.

Each branch draws with a seed of its own. Rates are decode rates of all branches together: the prefix is read once
before, and is left out. Texts of drafted branches are compared with those that each branch gives alone, undrafted.
"""

import argparse
import json
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
from mlx_spec.cli.generate import draft_tokens
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.engine import Engine, Generation, Request
from mlx_spec.errors import MlxSpecError
from mlx_spec.loading.load import load
from mlx_spec.measure.costs import as_json

LANES = ("mlx-lm", "plain", "drafted")


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
    add("--branches", type=int, nargs="+", default=[1, 2, 4, 8], help="branches of each row, at most 16")
    add("--prefix", type=int, default=1000, help="tokens that all branches share")
    add("--tokens", type=int, default=128, help="tokens of each branch")
    add("--draft-tokens", default="auto", help="auto, adaptive or a number")
    add("--temp", type=float, default=0.8, help="temperature")
    add("--repeats", type=int, default=3, help="timed runs behind one that compiles; the median counts")
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
    """What one run of B branches measured: seconds and tokens of decoding, memory in use at its end, and texts.

    bytes: all that MLX holds, free pages left out: a pool grows in steps.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = 0
        self.bytes = 0
        self.pages = 0
        self.texts: list[list[int]] = []

    @property
    def rate(self) -> float:
        """Tokens a second, of all branches together."""
        return self.tokens / self.seconds


def bytes_in_use(engine: Engine) -> int:
    """Return all that MLX holds, without the free pages of the target's and the drafter's pool."""
    pools = [engine.target.pool, *([engine.drafter.pool] if engine.drafter else [])]
    free = sum(pool.data.nbytes - pool.pages_in_use * pool.page_bytes for pool in pools)
    return mx.get_active_memory() - free


def our_run(engine: Engine, request: Request, branches: int) -> Run:
    """Read the prefix, fork it, and decode all branches to their end."""
    run = Run()
    first = engine.start(request)
    generations: list[Generation] = [first, *(engine.fork(first, seed=seed) for seed in range(1, branches))]
    try:
        mx.synchronize()
        started = time.perf_counter()
        while any(generation.finish_reason is None for generation in generations):
            for done in engine.step(generations):
                run.tokens += len(done.tokens)
                if done.error is not None:
                    raise done.error
        mx.synchronize()
        run.seconds = time.perf_counter() - started
        run.pages, run.bytes = engine.target.pool.pages_in_use, bytes_in_use(engine)
        run.texts = [generation.tokens[len(request.prompt) :] for generation in generations]
    finally:
        for generation in generations:
            engine.close(generation)
    return run


def stock_run(engine: Engine, request: Request, branches: int) -> Run:
    """Decode so many sequences with the same prompt by mlx-lm, from the moment on when all are decoding."""
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
    """Return what runs each lane."""
    plain = replace(request, num_draft_tokens=0)
    lanes: dict[str, Callable[[int], Run]] = {
        "mlx-lm": lambda branches: stock_run(engine, request, branches),
        "plain": lambda branches: our_run(engine, plain, branches),
    }
    if engine.drafter is not None:
        lanes["drafted"] = lambda branches: our_run(engine, request, branches)
    return lanes


def measure(engine: Engine, request: Request, branches: list[int], repeats: int) -> dict[str, Any]:
    """Run every lane with every number of branches; the lanes of a row take turns."""
    lanes = runners(engine, request)
    rows: dict[int, dict[str, Any]] = {}
    # Of the row with the most branches.
    texts: dict[str, list[list[int]]] = {}
    for count in tqdm(branches, desc="branches", leave=False):
        runs: dict[str, list[Run]] = {lane: [] for lane in lanes}
        for _ in tqdm(range(repeats + 1), desc="runs", leave=False):
            for lane, run in lanes.items():
                runs[lane].append(run(count))
        rows[count] = {}
        for lane, done in runs.items():
            texts[lane] = max(texts.get(lane, []), done[-1].texts, key=len)
            rows[count][lane] = {
                "tokens_per_second": round(median(run.rate for run in done[1:]), 1),
                "mb": round(done[-1].bytes / 1e6, 2),
                "pages": done[-1].pages,
            }
    alone = [alone_text(engine, request, seed) for seed in range(max(branches))]
    equal = {
        lane: sum(a == b for a, b in zip(found, alone, strict=True)) for lane, found in texts.items() if found
    }
    more = {lane: added(rows, lane, "mb") for lane in lanes}
    pages = added(rows, "plain", "pages")
    return {"rows": rows, "added_mb": more, "added_pages": pages, "equal_texts": equal, "texts": len(alone)}


def alone_text(engine: Engine, request: Request, seed: int) -> list[int]:
    """Return what one branch says by itself, undrafted."""
    sampling = replace(request.sampling, seed=seed)
    return our_run(engine, replace(request, sampling=sampling, num_draft_tokens=0), 1).texts[0]


def added(rows: dict[int, dict[str, Any]], lane: str, what: str) -> float | None:
    """Return how much each branch beyond the fewest adds, over the whole table."""
    few, many = min(rows), max(rows)
    return None if few == many else round((rows[many][lane][what] - rows[few][lane][what]) / (many - few), 3)


def print_table(result: dict[str, Any], page_mb: float) -> None:
    """Print a line for each number of branches, then what a branch adds."""
    rows = result["rows"]
    lanes = [lane for lane in LANES if lane in next(iter(rows.values()))]
    print("tokens/s of all branches together")
    print("branches".ljust(10) + "".join(f"{lane:>10}" for lane in lanes))
    for count, row in rows.items():
        print(f"{count:<10}" + "".join(f"{row[lane]['tokens_per_second']:>10.1f}" for lane in lanes))
    if len(rows) > 1:
        print("MB for each added branch: " + ", ".join(f"{lane} {result['added_mb'][lane]:.2f}" for lane in lanes))
        pages = result["added_pages"]
        print(f"of which pages: {pages:.1f} of {page_mb:.2f} MB, {pages * page_mb:.2f} MB")
    for lane, equal in result["equal_texts"].items():
        print(f"texts of {lane} branches equal to those alone, undrafted: {equal} of {result['texts']}")


def main() -> int:
    """Run the command; exit status 1 when a text differs, 2 when it could not run."""
    args = setup_arg_parser().parse_args()
    try:
        engine, tokenizer = load(args.model, None if args.drafter == "none" else args.drafter, progress=True)
        prompt = long_prompt(tokenizer, args.prefix)
        sampling = Sampling(temp=args.temp)
        request = Request(prompt, args.tokens, draft_tokens(args.draft_tokens), sampling)
        result = measure(engine, request, args.branches, args.repeats)
    except MlxSpecError as error:
        print(f"error: {error}")
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
        "costs": None if engine.costs is None else as_json(engine.costs),
    }
    if args.json:
        print(json.dumps({**about, **result}))
    else:
        print(", ".join(f"{name} {value}" for name, value in about.items() if name != "costs"))
        print_table(result, page_mb)
    return 1 if any(equal < result["texts"] for equal in result["equal_texts"].values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
