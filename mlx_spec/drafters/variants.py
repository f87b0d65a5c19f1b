"""The contracts that a drafter's checkpoint may mean in place of the one that it declares, as data.

A wrong contract drafts fluently and is seldom accepted. Each variant changes one point; two of different points
can be made one after the other.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.rope_utils import initialize_rope

from metal_kernels import Linear, Rope
from mlx_spec.target import Target
from mlx_spec.target.layers import Attention, Norm
from mlx_spec.target.rope import rope_frequencies

# Bases of the rotary position encodings of published models.
ROPE_BASES = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
SCALING_FACTORS = (2.0, 4.0, 8.0)


@dataclass(frozen=True)
class Variant:
    """One other contract.

    name: what is otherwise, in words.
    point: what it is about; two variants of one point exclude each other.
    fix: how a checkpoint states it.
    change: makes the drafter that has this contract from one that has another; neither changes the other.
    at_load: ``load`` measures it, too.
    """

    name: str
    point: str
    fix: str
    change: Callable[[Any], Any]
    at_load: bool = False


def rope_base(rope: Rope) -> float | None:
    """Return the base of a rotary encoding; None where it has a table of its own."""
    base = rope.arguments["base"]
    return None if base is None else float(base)


def target_rope_base(target: Target) -> float | None:
    """Return the base of the target's own encoding, where it has one."""
    attention = next(layer.mixer for layer in target.layers if isinstance(layer.mixer, Attention))
    return rope_base(attention.rope)


def other_ropes(rope: Rope, target: Target) -> Mapping[tuple[str, str, str], Any]:
    """Return other rotary encodings as modules of mlx-lm, by the name, point and fix of their variant."""
    dims, base = rope.dims, rope_base(rope)
    pairs = "halves" if rope.traditional else "neighbours"
    found: dict[tuple[str, str, str], Any] = {}
    if base is None:
        plain = target_rope_base(target)
        if plain is not None:
            key = "no rope scaling", "rope scaling", '"rope_scaling": null'
            found[key] = initialize_rope(dims, plain, rope.traditional)
        return found
    key = f"rotary pairs of {pairs}", "rope pairs", f'"rope_is_neox_style": {str(rope.traditional).lower()}'
    found[key] = initialize_rope(dims, base, not rope.traditional)
    for other in sorted({*ROPE_BASES, target_rope_base(target) or base} - {base}):
        fix = f'"rope_theta": {other:.0f}'
        found[f"rope_theta {other:.0f}", "rope base", fix] = initialize_rope(dims, other, rope.traditional)
    scale = float(rope.arguments["scale"])
    factors = SCALING_FACTORS if math.isclose(scale, 1.0) else (1.0,)
    for factor in factors:
        scaling = None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        name = "no rope scaling" if scaling is None else f"rope scaled linearly by {factor:.0f}"
        fix = (
            '"rope_scaling": null'
            if scaling is None
            else f'"rope_scaling": {{"type": "linear", "factor": {factor}}}'
        )
        found[name, "rope scaling", fix] = initialize_rope(dims, base, rope.traditional, scaling)
    return found


def shifted(norm: Norm, by: float) -> Norm:
    """Return a norm whose weights are larger by a number."""
    return Norm(norm.weight + by, norm.eps)


def plain(linear: Linear) -> Linear:
    """Return the weights of a linear map unquantised, in the type that it computes in."""
    if linear.quantization is None:
        return linear
    assert linear.scales is not None
    weight = linear.dequantized().astype(linear.scales.dtype)
    return Linear(weight, bias=linear.bias)


def with_inputs(linear: Linear, order: mx.array) -> Linear:
    """Return a linear map [N, K] that takes its inputs in another order [K]."""
    own = plain(linear)
    return replace(own, weight=own.weight[:, order])


def halves_swapped(size: int) -> mx.array:
    """Return the order of ``size`` entries whose second half comes first."""
    return mx.concatenate([mx.arange(size // 2, size), mx.arange(size // 2)])


def with_rope(attention: Attention, module: Any) -> Attention:
    """Return an attention with another rotary encoding."""
    return replace(attention, rope=rope_frequencies(module))
