"""Rotary position encoding as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, eq=False)
class Rope:
    """How the first ``dims`` entries of a head are rotated, pair by pair; the entries after them stay as they are.

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
