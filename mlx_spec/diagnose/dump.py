"""The stages of one draft pass in a file, to compare two devices or two checkouts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mlx_spec.diagnose.stages import ROWS, UNIT_ROUNDOFF, Departure, departures, observed
from mlx_spec.diagnose.text import read_text
from mlx_spec.drafters.base import ObservedDrafter
from mlx_spec.drafters.reference import Array, Formula
from mlx_spec.errors import RequestError
from mlx_spec.target import Target

STEPS = 3
# Units of the type's rounding, for each of the layers before, from which on hidden states of two machines differ.
CAPTURE_UNITS = 8.0


@dataclass(frozen=True)
class Dump:
    """Stages of a pass over some tokens, in the order of computing, and where it was run."""

    tokens: tuple[int, ...]
    device: str
    dtype: str
    stages: Mapping[str, Array]


def stages_here(target: Target, drafter: ObservedDrafter, tokens: Sequence[int], device: str) -> Dump:
    """Run the pass."""
    layer_ids = drafter.target_layer_ids
    steps = min(STEPS, drafter.max_draft)
    used = list(tokens[: ROWS + steps + 1])
    if len(used) < ROWS + steps + 1:
        raise RequestError(f"The text has {len(used)} tokens; {ROWS + steps + 1} are needed.")
    text = read_text(target, "text", used, 1, layer_ids)
    return Dump(tuple(used), device, str(target.dtype), observed(drafter, text, steps))


def write_dump(dump: Dump, path: Path) -> None:
    """Write a dump. Raises OSError."""
    about = {"tokens": list(dump.tokens), "device": dump.device, "dtype": dump.dtype, "order": list(dump.stages)}
    arrays = {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in dump.stages.items()}
    save_file(arrays, path, {"mlx_spec_dump": json.dumps(about)})


def read_dump(path: Path) -> Dump:
    """Read a dump. Raises RequestError for a file that is none, OSError."""
    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads(file.metadata()["mlx_spec_dump"])
            stages = {name: file.get_tensor(name).astype(np.float64) for name in about["order"]}
        return Dump(tuple(about["tokens"]), about["device"], about["dtype"], stages)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RequestError(f"{path} is no dump that mlx_spec.probe --dump wrote ({error}).") from None


@dataclass(frozen=True)
class Parting:
    """The first stage in which two dumps part.

    here, there: how far the stage is from its formula on each side, in units of rounding.
    difference: between the two, relative to the stage.
    """

    stage: str
    here: float
    there: float
    difference: float


def parting(here: Dump, there: Dump, formulas: Sequence[Formula], layers: int, dtype: mx.Dtype) -> Parting | None:
    """Return the first stage in which two dumps part by more than rounding, None where they agree.

    layers: of the target, before the first stage.
    """
    if here.tokens != there.tokens:
        raise RequestError("The dump is of other tokens than the pass here.")
    relative = difference(here.stages["capture"], there.stages["capture"])
    if relative > CAPTURE_UNITS * layers**0.5 * UNIT_ROUNDOFF[dtype]:
        return Parting("capture", 0.0, 0.0, relative)
    units = [{each.stage: each for each in departures(dump.stages, formulas, dtype)} for dump in (here, there)]
    for stage, own in units[0].items():
        other = units[1].get(stage, Departure(stage, float("inf")))
        if own.departs or other.departs:
            return Parting(stage, own.units, other.units, difference(here.stages[stage], there.stages[stage]))
    return None


def difference(here: Array, there: Array) -> float:
    """Return the root mean square of a difference, relative to that of what it is taken from."""
    if here.shape != there.shape:
        return float("inf")
    size = float(np.sqrt(np.mean(np.square(there))))
    return float(np.sqrt(np.mean(np.square(here - there)))) / max(size, 1e-30)
