"""What draft and verify passes cost on this machine, measured once per machine, model and version.

The doctor and the bench read these tables. An engine learns the costs of its rounds instead, see ``kept_costs``.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
from tqdm import tqdm

from metal_kernels import MAX_VERIFY_ROWS
from mlx_spec.decoding.accept import Greedy
from mlx_spec.drafters.base import Committed, Drafter, DraftRequest
from mlx_spec.engine.costs import Costs
from mlx_spec.measure import store
from mlx_spec.target import CachedSequence, Target

# Cached tokens before the passes.
CONTEXT = 64
# Sequences of the draft pass that shows what each further sequence costs.
TOGETHER = 4
# Runs of each pass; the first compiles.
RUNS = 3

logger = logging.getLogger(__name__)

Name = TypeVar("Name")


def measured_costs(target: Target, drafter: Drafter, drafter_name: str, progress: bool = False) -> Costs:
    """Return the stored costs, or measure them (one or two seconds, ten on a CPU) and store them.

    target, drafter: what is timed.
    drafter_name: identifies the drafter in the store.
    progress: whether to show a progress bar.
    """
    key = cost_key(target, drafter, drafter_name)
    costs = from_json(store.read().get(key))
    is_known = costs is not None
    if costs is None:
        costs = measure(target, drafter, progress)
        store.write(key, as_json(costs))
    logger.info(
        "Costs of %s with %s are %s: %.2f ms for one row, %.2f ms for the first draft.",
        target.name,
        drafter_name,
        "stored" if is_known else "measured",
        costs.verify_ms(1),
        costs.draft_ms(1),
    )
    return costs


def measure(target: Target, drafter: Drafter, progress: bool = False) -> Costs:
    """Time passes of several sizes after a short context.

    A timed draft includes taking in the rows of the round before, of which half of the drafts were accepted.
    Verify passes are timed up to MAX_VERIFY_ROWS rows, because a pass over several sequences may have as many.
    """
    sequence, states = target.open(), [drafter.open()]
    try:
        return timed(target, drafter, sequence, states, progress)
    finally:
        sequence.free()
        for state in states:
            state.free()


def timed(target: Target, drafter: Drafter, sequence: CachedSequence, states: list[Any], progress: bool) -> Costs:
    """Fill a new sequence, and time passes and drafts after it.

    states: the drafter's state of the sequence alone; forks are appended, for the caller to free.
    """
    most = drafter.max_draft
    tokens = mx.zeros((min(CONTEXT, sequence.free_positions),), dtype=mx.int32)
    before = max(1, tokens.size - 1 - most // 2)
    rows = target.forward([(sequence, tokens)], drafter.target_layer_ids)
    target.commit(sequence, rows)
    drafter.extend([(states[0], Committed(0, tokens[:before], rows.aux_hidden_states[:before]))])

    def propose(drafting: list[Any], count: int) -> list[mx.array]:
        requests = [DraftRequest(state, 0, count, Greedy()) for state in drafting]
        return [draft.tokens for draft in drafter.propose(requests)]

    # The first draft takes in the context, which is not timed.
    mx.eval(sequence.arrays, rows.aux_hidden_states, propose(states, 1))

    def verify(count: int) -> list[mx.array]:
        passed = target.forward([(sequence, tokens[:count])], drafter.target_layer_ids)
        return [mx.argmax(target.logits(passed.hidden), axis=-1), *passed.arrays]

    def draft(count: int, sequences: int) -> list[mx.array]:
        forks = [states[0].fork() for _ in range(sequences)]
        states.extend(forks)
        round_before = slice(before, before + 1 + count // 2)
        committed = Committed(before, tokens[round_before], rows.aux_hidden_states[round_before])
        drafter.extend([(fork, committed) for fork in forks])
        return propose(forks, count)

    counts, drafts = sorted({1, 2, (most + 3) // 2, most + 1, MAX_VERIFY_ROWS}), sorted({1, most})
    passes = {("verify", n): partial(verify, n) for n in counts}
    passes |= {("draft", n): partial(draft, n, 1) for n in drafts}
    passes |= {("together", n): partial(draft, n, TOGETHER) for n in drafts}
    ms = fastest(passes, progress)
    more = {n: max(0.0, ms["together", n] - ms["draft", n]) / (TOGETHER - 1) for n in drafts}
    return Costs({n: ms["verify", n] for n in counts}, {n: ms["draft", n] for n in drafts}, more)


def fastest(passes: Mapping[Name, Callable[[], list[mx.array]]], progress: bool = False) -> dict[Name, float]:
    """Return the milliseconds of the fastest run of each pass, building its graph included.

    Passes take turns, so that a moment in which the machine is busy spoils one run of a pass and not all.
    """
    best = dict.fromkeys(passes, math.inf)
    with tqdm([*passes] * RUNS, "Timing passes, once", leave=False, disable=not progress) as turns:
        for name in turns:
            started = time.perf_counter()
            mx.eval(passes[name]())
            best[name] = min(best[name], (time.perf_counter() - started) * 1e3)
    return best


def as_json(costs: Costs) -> dict[str, dict[str, float]]:
    """Return the curves with string keys, as JSON has them."""
    curves = vars(costs).items()
    return {name: {str(count): round(ms, 3) for count, ms in curve.items()} for name, curve in curves}


def from_json(entry: Any) -> Costs | None:
    """Return the costs of a stored entry, or None where it is missing or damaged, or no times of passes."""
    try:
        curves = [{int(n): float(ms) for n, ms in entry[field.name].items()} for field in fields(Costs)]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None
    verify, draft, draft_more = curves
    counts = [count for curve in curves for count in curve]
    times = [*verify.values(), *draft.values()]
    is_usable = (
        all(curves)
        and min(counts) > 0
        and all(0 < ms < math.inf for ms in times)
        and all(0 <= ms < math.inf for ms in draft_more.values())
    )
    return Costs(verify, draft, draft_more) if is_usable else None


def cost_key(target: Target, drafter: Drafter, drafter_name: str) -> str:
    """Return a key of machine, model, drafter and versions."""
    return store.key(target, drafter_name, str(drafter.max_draft))
