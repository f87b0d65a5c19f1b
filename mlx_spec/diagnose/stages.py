"""The stages of one draft pass: their numbers, and how far they depart from an independent computation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_spec.diagnose.acceptance import request
from mlx_spec.diagnose.text import Text
from mlx_spec.drafters.base import Committed, ObservedDrafter
from mlx_spec.drafters.reference import Array, Formula

# Rows of context: so few that they wait, and are part of the pass.
ROWS = 12
# Runs with inputs that are rounded otherwise, which show what rounding does to a stage.
RUNS = 3
# Units of expected rounding from which on a stage departs. What rounds as expected has about 0.3 to 1.
DEPARTS = 4.0
# Rows by which the inputs of a stage that departs may be moved.
SHIFTS = (-1, 1)
UNIT_ROUNDOFF = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class StageNumbers:
    """What is in a stage.

    not_finite: how many of its numbers are NaN or infinite.
    least, most, rms: of those that are finite.
    """

    stage: str
    not_finite: int
    least: float
    most: float
    rms: float

    @staticmethod
    def of(stage: str, value: Array) -> "StageNumbers":
        """Take the numbers of a stage."""
        finite = value[np.isfinite(value)]
        if not finite.size:
            return StageNumbers(stage, value.size, 0.0, 0.0, 0.0)
        rms = float(np.sqrt(np.mean(np.square(finite))))
        return StageNumbers(stage, value.size - finite.size, float(finite.min()), float(finite.max()), rms)


@dataclass(frozen=True)
class Departure:
    """How far a stage is from its formula.

    units: the largest of its rows', in units of what rounding its inputs does to the row.
    shift: its rows are those that its formula gives of inputs so many rows later; 0 where they are not.
    """

    stage: str
    units: float
    shift: int = 0

    @property
    def departs(self) -> bool:
        """Whether rounding does not explain it."""
        return not self.units < DEPARTS


def observed(
    drafter: ObservedDrafter, text: Text, steps: int, begin: int = 0, rows: int = ROWS
) -> dict[str, Array]:
    """Return all stages of a draft pass over part of a text, by name in the order of computing, in float64.

    steps: tokens to draft, which are the text's.
    begin: the first row of the context; the drafter sees none before it.
    rows: of the context.
    The hidden states that it reads, ``capture``, come first.
    """
    stages: dict[str, Array] = {}

    def record(stage: str, value: mx.array) -> None:
        stages[stage] = float64(value)

    committed = text.committed(begin, begin + rows, drafter.target_layer_ids)
    record("capture", committed.aux_hidden_states)
    state = drafter.open(begin)
    try:
        drafter.extend([(state, Committed(begin, committed.tokens, committed.aux_hidden_states))])
        anchor = begin + rows
        tokens = [int(token) for token in np.array(text.tokens[anchor : anchor + steps + 1])]
        mx.eval([draft.tokens for draft in drafter.observe([request(state, tokens)], record)])
    finally:
        state.free()
    return stages


def float64(value: mx.array) -> Array:
    """Return an array in float64."""
    return np.array(value.astype(mx.float32), dtype=np.float64)


def numbers(stages: Mapping[str, Array]) -> list[StageNumbers]:
    """Return what is in each stage."""
    return [StageNumbers.of(stage, value) for stage, value in stages.items() if "positions" not in stage]


def departures(stages: Mapping[str, Array], formulas: Sequence[Formula], dtype: mx.Dtype) -> Iterator[Departure]:
    """Yield how far each stage is from its formula, computed from the stages that it follows from.

    So a stage is blamed for what it does itself, and an ill-conditioned one gets a large unit.
    dtype: in which the pass computes.
    """
    for formula in formulas:
        if formula.stage in stages and all(name in stages for name in formula.inputs):
            roundoff = max(UNIT_ROUNDOFF[dtype], formula.least_roundoff)
            found = Departure(formula.stage, units_of(stages, formula, roundoff))
            shifts = SHIFTS if found.departs and formula.inputs else ()
            shift = next((by for by in shifts if units_of(stages, formula, roundoff, by) < DEPARTS), 0)
            yield Departure(found.stage, found.units, shift)


def units_of(stages: Mapping[str, Array], formula: Formula, roundoff: float, shift: int = 0) -> float:
    """Return how far a stage is from its formula, in units of expected rounding.

    shift: with its inputs so many rows later; the rows at the ends, which have none, are left out.
    """
    inputs = [np.roll(stages[name], -shift, axis=0) for name in formula.inputs]
    with np.errstate(all="ignore"):
        expected = formula.compute(*inputs)
        found = stages[formula.stage].reshape(expected.shape)
        squares = np.square(roundoff * expected)
        rng = np.random.default_rng(0)
        for _ in range(RUNS):
            rounded = [
                x
                * (
                    1
                    + (UNIT_ROUNDOFF[mx.float32] if "positions" in name else roundoff)
                    * rng.uniform(-1, 1, x.shape)
                )
                for name, x in zip(formula.inputs, inputs, strict=True)
            ]
            squares = squares + np.square(formula.compute(*rounded) - expected) / RUNS
        by_row = [np.sqrt(np.mean(x.reshape(len(x), -1), axis=1)) for x in (np.square(found - expected), squares)]
    if shift:
        by_row = [row[1:-1] for row in by_row]
        if not by_row[0].size:
            return float("inf")
    if not np.isfinite(by_row[0]).all():
        return float("inf")
    tiny = np.finfo(np.float32).tiny
    return float(np.max(by_row[0] / np.maximum(by_row[1], tiny)))
