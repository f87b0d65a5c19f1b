"""Reads the rotary position encoding of a model from its module in mlx-lm."""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models import rope_utils

from metal_kernels import Rope

# Kinds of mlx-lm that hold a table of periods, and the attribute of each that scales the rotated entries.
TABLES: dict[type, str] = {
    rope_utils.Llama3RoPE: "",
    rope_utils.ProportionalRoPE: "",
    rope_utils.YarnRoPE: "mscale",
    rope_utils.SuScaledRoPE: "_scale",
}


def rope_frequencies(module: Any) -> Rope:
    """Read a rope module of mlx-lm. Raises ValueError for a kind whose frequencies are not fixed."""
    if type(module) is nn.RoPE:
        frequencies = module.scale / np.float64(module.base) ** (np.arange(0, module.dims, 2) / module.dims)
        arguments = {"base": module.base, "scale": module.scale, "freqs": None}
        return Rope(module.dims, module.traditional, 1.0, _float32(frequencies), arguments)
    if type(module) not in TABLES:
        known = ", ".join(kind.__name__ for kind in (nn.RoPE, *TABLES))
        raise ValueError(f"rope_frequencies reads {known}, not {type(module).__name__}.")
    # The tables hold reciprocals of frequencies: positions a radian.
    periods = module._freqs
    arguments = {"base": None, "scale": 1.0, "freqs": periods}
    scale = float(getattr(module, TABLES[type(module)], 1.0))
    traditional = getattr(module, "traditional", False)
    return Rope(2 * periods.size, traditional, scale, _float32(1 / np.array(periods, np.float64)), arguments)


def _float32(values: np.ndarray) -> mx.array:
    return mx.array(values.astype(np.float32))
