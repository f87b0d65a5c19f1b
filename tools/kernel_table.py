"""Time a verify pass of 1 to 16 rows, ours and mlx-lm's, and check that rows do not depend on each other.

Builds models of published shapes with random weights; nothing is downloaded. One run prints one table.
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

from metal_kernels.launching.implementations import implementation
from mlx_spec.target import CachedSequence, Target
from tools.random_models import CONFIGS, random_model


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.kernel_table",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--models", nargs="+", default=["Qwen3-8B", "SmolLM2-135M"], choices=list(CONFIGS))
    add("--bits", type=int, default=4, choices=[2, 3, 4, 5, 6, 8, 16], help="16: not quantised")
    add("--group-size", type=int, default=64, choices=[32, 64, 128])
    add("--layers", type=int, help="only so many layers of each model")
    add("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    add("--context", type=int, default=1024, help="cached tokens")
    add("--contexts", type=int, nargs="*", default=[], help="also time whole rounds behind so many cached tokens")
    add("--repeats", type=int, default=20, help="timed passes; the median counts")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def timed(run: Callable[[], list[mx.array]], repeats: int) -> float:
    """Return the median milliseconds of a pass, its one synchronisation included, after three that compile."""
    times = []
    for i in range(repeats + 3):
        started = time.perf_counter()
        mx.eval(run())
        if i >= 3:
            times.append((time.perf_counter() - started) * 1e3)
    return round(median(times), 3)


def prompt(config: dict[str, Any], count: int) -> list[int]:
    """Return ``count`` token ids that any vocabulary has."""
    return [(7919 * i + 13) % min(config["vocab_size"], 40000) for i in range(count)]


def stock_ms(model: Any, config: dict[str, Any], rows: list[int], context: int, repeats: int) -> dict[int, float]:
    """Time mlx-lm's forward of each row count behind a cached context."""
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
    """Return what the recurrent layers of an mlx-lm cache hold."""
    return [list(layer.cache) for layer in cache if isinstance(layer, ArraysCache)]


def rewind(cache: list[Any], count: int, states: list[list[mx.array]]) -> None:
    """Take ``count`` rows out of an mlx-lm cache: keys and values are trimmed, states replaced by those before."""
    before = iter(states)
    for layer in cache:
        if isinstance(layer, ArraysCache):
            layer.cache = next(before)
        else:
            layer.trim(count)


def our_ms(
    target: Target, sequence: CachedSequence, tokens: list[int], rows: list[int], repeats: int
) -> dict[int, float]:
    """Time our pass, logits included, of each row count behind a cached context."""

    def run(count: int) -> list[mx.array]:
        passed = target.forward([(sequence, mx.array(tokens[:count], dtype=mx.int32))])
        return [target.logits(passed.hidden), *passed.arrays]

    return {count: timed(lambda count=count: run(count), repeats) for count in rows}


def equal_rows(target: Target, sequence: CachedSequence, tokens: list[int]) -> list[int]:
    """Return the row counts, of 1 to 16, whose logits equal those of one row after another, bit for bit."""
    alone, single = sequence.fork(), []
    for token in tokens[:16]:
        passed = target.forward([(alone, mx.array([token], dtype=mx.int32))])
        single.append(target.logits(passed.hidden)[0])
        target.commit(alone, passed)
        mx.eval(single[-1], *alone.arrays)
    alone.free()
    equal = []
    for count in range(1, 17):
        passed = target.forward([(sequence, mx.array(tokens[:count], dtype=mx.int32))])
        if mx.array_equal(target.logits(passed.hidden), mx.stack(single[:count])).item():
            equal.append(count)
    return equal


def rounds(target: Target, sequence: CachedSequence, tokens: list[int], repeats: int) -> dict[str, float]:
    """Time rounds that verify 8 rows and commit 4 of them; also the memory they need beside what is held."""
    rows, times, held = mx.array(tokens[:8], dtype=mx.int32), [], 0
    for i in range(repeats + 3):
        if i == 3:
            held = mx.get_active_memory()
            mx.reset_peak_memory()
        started = time.perf_counter()
        passed = target.forward([(sequence, rows)])
        mx.eval(target.logits(passed.hidden), *passed.arrays)
        target.commit(sequence, passed.rows(0, 4))
        times.append((time.perf_counter() - started) * 1e3)
    return {"ms": round(median(times[3:]), 3), "extra_mb": round((mx.get_peak_memory() - held) / 1e6, 1)}


def growing(
    target: Target, config: dict[str, Any], contexts: list[int], repeats: int
) -> dict[int, dict[str, float]]:
    """Time rounds behind ever more cached tokens of one sequence."""
    sequence, found = target.open(), {}
    for context in tqdm(sorted(contexts), desc="contexts", leave=False):
        tokens = prompt(config, context)
        target.prefill(sequence, tokens[sequence.length :])
        found[context] = rounds(target, sequence, tokens, repeats)
    sequence.free()
    return found


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Build a model and measure it both ways."""
    bits = None if args.bits == 16 else args.bits
    model, config = random_model(name, bits, args.group_size, args.layers)
    found: dict[str, Any] = {
        "model": name,
        "stock_ms": stock_ms(model, config, args.rows, args.context, args.repeats),
    }
    room = 4 * (args.repeats + 3) + 64
    target = Target(
        model, config, name, max_cached_tokens=max(args.context, sum(sorted(args.contexts)[-1:]) + room) + room
    )
    sequence = target.open()
    tokens = prompt(config, args.context + 16)
    target.prefill(sequence, tokens[: args.context])
    found["our_ms"] = our_ms(target, sequence, tokens[args.context :], args.rows, args.repeats)
    found["equal_rows"] = equal_rows(target, sequence, tokens[args.context :])
    sequence.free()
    found["rounds"] = growing(target, config, args.contexts, args.repeats)
    return found


def table(result: dict[str, Any], rows: list[int]) -> str:
    """Lay out one model's figures."""
    lines = [f"{result['model']}: ms a pass", "rows".ljust(10) + "".join(f"{n:>10}" for n in rows)]
    for lane in ("stock_ms", "our_ms"):
        label = lane.removesuffix("_ms").replace("stock", "mlx-lm").replace("our", "mlx_spec")
        lines.append(label.ljust(10) + "".join(f"{result[lane][n]:>10.3f}" for n in rows))
    ratio = "".join(f"{result['our_ms'][n] / result['our_ms'][rows[0]]:>10.2f}" for n in rows)
    lines.append("to 1 row".ljust(10) + ratio)
    equal = result["equal_rows"]
    lines.append(f"equal to one row at a time, bit for bit: {'1 to 16' if len(equal) == 16 else equal} rows")
    for context, each in result["rounds"].items():
        lines.append(
            f"a round behind {context} tokens: {each['ms']:.3f} ms, {each['extra_mb']:.1f} MB beside what is held"
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
