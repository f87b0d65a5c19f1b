"""Ways to decode the same prompts, timed in turns: what a round takes and brings, and whether texts agree."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from tqdm import tqdm

from mlx_spec.engine import Engine, Request
from mlx_spec.target import Target

# Rounds at the start of a text that are not counted: they compile, and fill what is queued.
FIRST_ROUNDS = 3


@dataclass
class Timed:
    """Rounds of one or several texts that were decoded together.

    ms: of each round.
    tokens: that each round brought, of all texts together.
    texts: ids without the prompts.
    """

    ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    @property
    def ms_a_token(self) -> float:
        """Milliseconds a token, all texts together; 0 where too few rounds were timed."""
        tokens = sum(self.tokens[FIRST_ROUNDS:])
        return sum(self.ms[FIRST_ROUNDS:]) / tokens if tokens else 0.0


Arm = Callable[[], Timed]


def engine_arm(engine: Engine, requests: Sequence[Request]) -> Timed:
    """Decode requests together, and time rounds from when all prompts are read."""
    timed, generations = Timed(), [engine.start(request) for request in requests]
    try:
        for generation in generations:
            engine.read(generation)
        while any(generation.finish_reason is None for generation in generations):
            started = time.perf_counter()
            rounds = engine.step(generations)
            timed.ms.append((time.perf_counter() - started) * 1e3)
            timed.tokens.append(sum(len(each.tokens) for each in rounds))
            if (error := next((each.error for each in rounds if each.error), None)) is not None:
                raise error
        timed.texts = [g.tokens[len(g.request.prompt) :] for g in generations]
        return timed
    finally:
        for generation in generations:
            engine.close(generation)


def mlx_lm_arm(model: Any, prompt: Sequence[int], count: int) -> Timed:
    """Decode one prompt greedily with mlx-lm's own loop, which queues a token while it reads the one before."""
    timed, text, last = Timed(), list[int](), 0.0
    for token, _ in generate_step(mx.array(list(prompt)), model, max_tokens=count):
        now = time.perf_counter()
        if last:
            timed.ms.append((now - last) * 1e3)
            timed.tokens.append(1)
        last = now
        text.append(int(token))
    timed.texts = [text]
    return timed


def in_turns(arms: Mapping[str, Arm], turns: int, progress: bool = False) -> dict[str, list[Timed]]:
    """Run every arm once for each turn, after a run of each that compiles and is not counted."""
    runs: dict[str, list[Timed]] = {name: [] for name in arms}
    with tqdm([*arms] * (turns + 1), "turns", leave=False, disable=not progress) as names:
        for index, name in enumerate(names):
            timed = arms[name]()
            if index >= len(arms):
                runs[name].append(timed)
    return runs


def summary(runs: Sequence[Timed]) -> dict[str, Any]:
    """Return the medians of an arm's runs as JSON values, and a hash of its texts."""
    rounds = [ms for run in runs for ms in run.ms[FIRST_ROUNDS:]]
    ms_a_token = median(run.ms_a_token for run in runs)
    brought = [count for run in runs for count in run.tokens[FIRST_ROUNDS:]]
    return {
        "round_ms": round(median(rounds), 3) if rounds else 0.0,
        "token_ms": round(ms_a_token, 3),
        "tokens_a_round": round(sum(brought) / len(brought), 3) if brought else 0.0,
        "tokens_per_second": round(1e3 / ms_a_token, 1) if ms_a_token else 0.0,
        "ids": hashlib.sha256(repr(runs[-1].texts).encode()).hexdigest()[:16],
    }


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the number of the first token in which two texts differ, None where one is the other's beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


def margin(target: Target, tokens: Sequence[int]) -> float:
    """Return by how much the target prefers its best token after these to its second: a difference of logits."""
    sequence = target.open()
    try:
        target.prefill(sequence, tokens[:-1])
        row = mx.array(list(tokens[-1:]), dtype=mx.int32)
        logits = np.array(target.logits(target.forward([(sequence, row)]).hidden)[0].astype(mx.float32))
    finally:
        sequence.free()
    second, best = np.sort(logits)[-2:]
    return float(best - second)
