"""Time a verify pass of 1 to 16 rows, with mlx_spec and with mlx-lm, and check that rows are batch-invariant.

Builds models of published shapes with random weights; nothing is downloaded. Meant for a GPU: on a CPU
MLX's operations run in place of our kernels.
"""

import argparse
import json
import time
from collections.abc import Callable
from importlib.metadata import version
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from tqdm import tqdm

from metal_kernels import MAX_VERIFY_ROWS
from metal_kernels.launching.implementations import implementation
from mlx_spec.diagnose.rows import logits_alone
from mlx_spec.measure.random_models import CONFIGS, random_model
from mlx_spec.target import CachedSequence, Target


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.kernel_table",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--models", nargs="+", default=["Qwen3-8B", "SmolLM2-135M"], choices=list(CONFIGS), help="shapes to build")
    add("--bits", type=int, default=4, choices=[2, 3, 4, 5, 6, 8, 16], help="bits a weight; 16: not quantised")
    add("--group-size", type=int, default=64, choices=[32, 64, 128], help="weights a scale")
    add("--layers", type=int, help="number of layers of each model (default: all)")
    add("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="rows of a pass")
    add("--context", type=int, default=1024, help="cached tokens")
    add("--contexts", type=int, nargs="*", default=[], help="also time whole rounds after so many cached tokens")
    add("--repeats", type=int, default=20, help="timed passes; the median counts")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def timed(run: Callable[[], list[mx.array]], repeats: int) -> float:
    """Return the median milliseconds of a pass, evaluated, after three passes that compile."""
    times = []
    for i in range(repeats + 3):
        started = time.perf_counter()
        mx.eval(run())
        if i >= 3:
            times.append((time.perf_counter() - started) * 1e3)
    return round(median(times), 3)


def prompt(config: dict[str, Any], count: int) -> list[int]:
    """Return ``count`` token ids of the model's vocabulary."""
    return [(7919 * i + 13) % min(config["vocab_size"], 40000) for i in range(count)]


def stock_ms(model: Any, config: dict[str, Any], rows: list[int], context: int, repeats: int) -> dict[int, float]:
    """Time mlx-lm's pass of each number of rows after ``context`` cached tokens."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([prompt(config, context)]), cache=cache), [layer.state for layer in cache])
    found = {}
    for count in rows:
        tokens = mx.array([prompt(config, count)])

        def run(tokens: mx.array = tokens, count: int = count) -> list[mx.array]:
            before = recurrent_states(cache)
            logits = model(tokens, cache=cache)
            after = [array for state in recurrent_states(cache) for array in state]
            rewind(cache, count, before)
            return [logits, *after]

        found[count] = timed(run, repeats)
    return found


def recurrent_states(cache: list[Any]) -> list[list[mx.array]]:
    """Return the states of the recurrent layers in a cache of mlx-lm."""
    return [list(layer.cache) for layer in cache if isinstance(layer, ArraysCache)]


def rewind(cache: list[Any], count: int, states: list[list[mx.array]]) -> None:
    """Remove the newest rows from a cache of mlx-lm.

    cache: of all layers.
    count: how many rows; keys and values are trimmed.
    states: of the recurrent layers before these rows.
    """
    before = iter(states)
    for layer in cache:
        if isinstance(layer, ArraysCache):
            layer.cache = next(before)
        else:
            layer.trim(count)


def our_ms(
    target: Target, sequence: CachedSequence, tokens: list[int], rows: list[int], repeats: int
) -> dict[int, float]:
    """Time our pass of each number of rows after a sequence, logits included."""

    def run(count: int) -> list[mx.array]:
        passed = target.forward([(sequence, mx.array(tokens[:count], dtype=mx.int32))])
        return [target.logits(passed.hidden), *passed.arrays]

    return {count: timed(lambda count=count: run(count), repeats) for count in rows}


def equal_rows(target: Target, sequence: CachedSequence, tokens: list[int]) -> list[int]:
    """Return the numbers of rows, of 1 to 16, whose logits equal those of one-row passes bit for bit."""
    rows = mx.array(tokens[:MAX_VERIFY_ROWS], dtype=mx.int32)
    alone, equal = list(logits_alone(target, sequence, rows)), []
    for count in range(1, MAX_VERIFY_ROWS + 1):
        logits = target.logits(target.forward([(sequence, rows[:count])]).hidden)
        if mx.array_equal(logits, mx.stack(alone[:count])).item():
            equal.append(count)
    return equal


def rounds(target: Target, sequence: CachedSequence, tokens: list[int], repeats: int) -> dict[str, float]:
    """Time rounds that verify 8 rows and commit 4, and measure their working memory."""
    rows, times, held = mx.array(tokens[:8], dtype=mx.int32), [], 0
    for i in range(repeats + 3):
        if i == 3:
            held = mx.get_active_memory()
            mx.reset_peak_memory()
        started = time.perf_counter()
        passed = target.forward([(sequence, rows)])
        mx.eval(target.logits(passed.hidden), *passed.arrays)
        target.commit(sequence, passed.prefix(0, 4))
        times.append((time.perf_counter() - started) * 1e3)
    return {"ms": round(median(times[3:]), 3), "extra_mb": round((mx.get_peak_memory() - held) / 1e6, 1)}


def growing(
    target: Target, config: dict[str, Any], contexts: list[int], repeats: int
) -> dict[int, dict[str, float]]:
    """Time rounds after each number of cached tokens, all of one sequence."""
    sequence, found = target.open(), {}
    for context in tqdm(sorted(contexts), desc="contexts", leave=False):
        tokens = prompt(config, context)
        target.prefill(sequence, tokens[sequence.length :])
        found[context] = rounds(target, sequence, tokens, repeats)
    sequence.free()
    return found


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Build a model, and time it with mlx-lm and with mlx_spec."""
    bits = None if args.bits == 16 else args.bits
    model, config = random_model(name, bits, args.group_size, args.layers)
    found: dict[str, Any] = {
        "model": name,
        "stock_ms": stock_ms(model, config, args.rows, args.context, args.repeats),
    }
    # Rounds commit 4 tokens each; some pages are partial.
    added = 4 * (args.repeats + 3) + 64
    cached = max(args.context, max(args.contexts, default=0) + added) + added
    target = Target(model, config, name, max_cached_tokens=cached)
    sequence = target.open()
    tokens = prompt(config, args.context + 16)
    target.prefill(sequence, tokens[: args.context])
    found["our_ms"] = our_ms(target, sequence, tokens[args.context :], args.rows, args.repeats)
    found["equal_rows"] = equal_rows(target, sequence, tokens[args.context :])
    sequence.free()
    found["rounds"] = growing(target, config, args.contexts, args.repeats)
    return found


def table(result: dict[str, Any], rows: list[int]) -> str:
    """Return one model's figures as text."""
    lines = [f"{result['model']}: ms a pass", "rows".ljust(10) + "".join(f"{n:>10}" for n in rows)]
    for label, key in (("mlx-lm", "stock_ms"), ("mlx_spec", "our_ms")):
        lines.append(label.ljust(10) + "".join(f"{result[key][n]:>10.3f}" for n in rows))
    ratio = "".join(f"{result['our_ms'][n] / result['our_ms'][rows[0]]:>10.2f}" for n in rows)
    lines.append("to 1 row".ljust(10) + ratio)
    equal = result["equal_rows"]
    lines.append(f"equal to one row at a time, bit for bit: {'1 to 16' if len(equal) == 16 else equal} rows")
    for context, each in result["rounds"].items():
        lines.append(
            f"a round after {context} tokens: {each['ms']:.3f} ms, {each['extra_mb']:.1f} MB of working memory"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    args = setup_arg_parser().parse_args()
    about = {
        "device": str(mx.device_info().get("device_name", mx.default_device())),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "kernels": implementation(),
        "bits": args.bits,
        "group_size": args.group_size,
        "context": args.context,
    }
    results = [measure(name, args) for name in tqdm(args.models, desc="models", leave=False)]
    if args.json:
        print(json.dumps({**about, "results": results}))
        return
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    for result in results:
        print(f"\n{table(result, args.rows)}")


if __name__ == "__main__":
    main()
