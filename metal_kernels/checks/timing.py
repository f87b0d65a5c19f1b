"""How long an operation takes on this machine, by the implementation that is chosen."""

import time
from collections.abc import Sequence
from statistics import median

import mlx.core as mx

from metal_kernels.checks.cases import Case

# Copies of the inputs that take turns: the cache of a large GPU would hold one.
COPIES = 4
WARM_UP = 2


def call_ms(case: Case, counts: Sequence[int], repeats: int) -> dict[int, float]:
    """Return the milliseconds of a call with each number of rows, compilation left out: medians of ``repeats``."""
    copies = [case.make() for _ in range(COPIES)]
    found = {}
    for count in counts:
        times = []
        for _ in range(WARM_UP + repeats):
            calls = [case_run.run(count) for case_run in copies]
            started = time.perf_counter()
            mx.eval(calls)
            times.append((time.perf_counter() - started) * 1e3 / COPIES)
        found[count] = round(median(times[WARM_UP:]), 4)
    return found
