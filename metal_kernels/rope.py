"""Rotary position encoding as plain data, taken from the module that mlx-lm made for a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models import rope_utils

# Kinds of mlx-lm that hold a table, and what each calls its factor on the rotated entries.
TABLES: dict[type, str] = {
    rope_utils.Llama3RoPE: "",
    rope_utils.ProportionalRoPE: "",
    rope_utils.YarnRoPE: "mscale",
    rope_utils.SuScaledRoPE: "_scale",
}


@dataclass(frozen=True, eq=False)
class Rope:
    """How the first ``dims`` entries of a head are rotated, pair by pair; entries behind them stay as they are.

    frequencies: [dims / 2] in float32; the angle of pair i at position p is p * frequencies[i].
    traditional: pairs are the entries (2i, 2i + 1), else (i, i + dims / 2).
    scale: factor on the rotated entries (YaRN, LongRoPE).
    arguments: base, scale and freqs with which ``mx.fast.rope`` rotates by the same angles.
    """

    dims: int
    traditional: bool
    scale: float
    frequencies: mx.array
    arguments: Mapping[str, Any]


def rope_frequencies(module: Any) -> Rope:
    """Read a rope module of mlx-lm. Raises ValueError for a kind whose angles are no fixed table."""
    if type(module) is nn.RoPE:
        frequencies = module.scale / np.float64(module.base) ** (np.arange(0, module.dims, 2) / module.dims)
        arguments = {"base": module.base, "scale": module.scale, "freqs": None}
        return Rope(module.dims, module.traditional, 1.0, _float32(frequencies), arguments)
    if type(module) not in TABLES:
        known = ", ".join(kind.__name__ for kind in (nn.RoPE, *TABLES))
        raise ValueError(f"rope_frequencies reads {known}, not {type(module).__name__}.")
    # The tables hold the reciprocals: after how many positions a pair has turned by one radian.
    periods = module._freqs
    arguments = {"base": None, "scale": 1.0, "freqs": periods}
    scale = float(getattr(module, TABLES[type(module)], 1.0))
    traditional = getattr(module, "traditional", False)
    return Rope(2 * periods.size, traditional, scale, _float32(1 / np.array(periods, np.float64)), arguments)


def _float32(values: np.ndarray) -> mx.array:
    return mx.array(values.astype(np.float32))
