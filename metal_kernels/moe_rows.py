"""A mixture of experts whose result for a row does not depend on how many rows there are."""

import operator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import mlx.core as mx
from mlx import nn

from metal_kernels.gather_rows import gather_rows
from metal_kernels.implementations import using
from metal_kernels.linear_rows import MAX_VERIFY_ROWS, Linear, linear_rows


@dataclass(frozen=True)
class Experts:
    """A mixture's weights: ``gate_up`` [E, 2 I, H] with the gates first, ``down`` [E, H, I], ``router`` [E, H].

    Each row goes through the ``top_k`` experts with the largest gates; ``normalised``: these gates sum to 1.
    """

    router: Linear
    gate_up: tuple[Linear, ...]
    down: Linear
    top_k: int
    normalised: bool

    @staticmethod
    def of(block: Any) -> "Experts":
        """Read a ``Qwen3MoeSparseMoeBlock`` of mlx-lm; its gates and ups become views of joined weights.

        Raises TypeError for experts that hold anything but plain or quantised weights.
        """
        experts = block.switch_mlp
        biased = [name for name in ("gate_proj", "up_proj", "down_proj") if "bias" in experts[name]]
        if biased:
            raise TypeError(f"experts without biases are needed; {', '.join(biased)} have them.")
        gate_up = Linear.joined([experts.gate_proj, experts.up_proj])
        return Experts(
            Linear.of(block.gate), gate_up, Linear.of(experts.down_proj), block.top_k, block.norm_topk_prob
        )


def moe_rows(experts: Experts, x: mx.array) -> mx.array:
    """Run rows through their experts, every row alike.

    x: [R, H]. Returns [R, H] in the dtype of x. mlx-lm sorts rows by expert from 64 (row, expert) pairs on, which
    picks another kernel; here the pairs are never sorted. Up to 16 rows of plain or affine weights run through our
    kernels where these run.
    """
    gates = mx.softmax(linear_rows(x, experts.router), axis=-1, precise=True)
    chosen = mx.argpartition(gates, kth=-experts.top_k, axis=-1)[..., -experts.top_k :]
    weights = mx.take_along_axis(gates, chosen, axis=-1)
    if experts.normalised:
        weights = weights / _total(weights)
    chosen = chosen.astype(mx.int32)
    with using("stock") if x.shape[0] > MAX_VERIFY_ROWS else nullcontext():
        out = _apply(_gated(x, experts.gate_up, chosen), experts.down, chosen)
    return (out * weights[..., None]).sum(axis=-2).astype(x.dtype)


def _total(weights: mx.array) -> mx.array:
    """Sum [R, T] to [R, 1] in order and in float32; on GPUs ``mx.sum`` sums one row otherwise than several."""
    wide = weights.astype(mx.float32)
    return reduce(operator.add, (wide[:, t : t + 1] for t in range(wide.shape[1]))).astype(weights.dtype)


def _gated(x: mx.array, gate_up: tuple[Linear, ...], chosen: mx.array) -> mx.array:
    """Return silu(gate) * up of each row and expert: [R, T, I]."""
    if len(gate_up) == 1:
        return _apply(x, gate_up[0], chosen, gated=True)
    gate, up = (_apply(x, part, chosen) for part in gate_up)
    return nn.silu(gate) * up


def _apply(x: mx.array, linear: Linear, chosen: mx.array, gated: bool = False) -> mx.array:
    """Apply expert ``chosen[r, t]`` to row r: x [R, K] or [R, T, K] to [R, T, N], gated to [R, T, N / 2]."""
    packing = linear.packing
    if packing is None:
        return gather_rows(x, linear.weight, None, None, chosen, gated=gated)
    group_size, bits = packing.group_size, packing.bits
    if packing.mode == "affine":
        tensors = linear.weight, linear.scales, linear.biases
        return gather_rows(x, *tensors, chosen, group_size=group_size, bits=bits, gated=gated)
    assert linear.scales is not None
    out = mx.gather_qmm(
        x[:, None, None] if x.ndim == 2 else x[:, :, None],
        linear.weight,
        linear.scales,
        rhs_indices=chosen,
        transpose=True,
        group_size=group_size,
        bits=bits,
        mode=packing.mode,
    ).squeeze(-2)
    if not gated:
        return out
    gate, up = mx.split(out, 2, axis=-1)
    return nn.silu(gate) * up
