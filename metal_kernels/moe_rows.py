"""A mixture of experts whose result for a row does not depend on how many rows there are."""

import operator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce

import mlx.core as mx

from metal_kernels.gather_rows import gather_rows
from metal_kernels.launching import cpu_library
from metal_kernels.launching.implementations import implementation, using
from metal_kernels.limits import MAX_VERIFY_ROWS
from metal_kernels.linear import Linear
from metal_kernels.linear_rows import gate_by_silu, linear_rows


@dataclass(frozen=True)
class Experts:
    """A mixture's weights.

    router: [E, H], what chooses experts.
    gate_up: [E, 2 I, H] with the gates first; where gates and ups cannot be joined, two of [E, I, H].
    down: [E, H, I].
    top_k: how many experts a row goes through, those with the largest gates.
    normalised: the gates of a row's experts are divided by their sum.
    """

    router: Linear
    gate_up: tuple[Linear, ...]
    down: Linear
    top_k: int
    normalised: bool


def moe_rows(experts: Experts, x: mx.array) -> mx.array:
    """Run rows through their experts, every row alike.

    mlx-lm sorts rows by expert from 64 (row, expert) pairs on, which picks another kernel; here the pairs are
    never sorted. Up to MAX_VERIFY_ROWS rows of plain or affine weights run through our kernels where these run.

    experts: weights whose biases are None, plain or quantised.
    x: [R, H] in bfloat16, float16 or float32.

    Returns [R, H] in the dtype of x. Raises ValueError, where kernels run, for shapes and dtypes that do not fit.
    """
    gates = mx.softmax(linear_rows(x, experts.router), axis=-1, precise=True)
    chosen = mx.argpartition(gates, kth=-experts.top_k, axis=-1)[..., -experts.top_k :]
    weights = mx.take_along_axis(gates, chosen, axis=-1)
    if experts.normalised:
        weights = weights / _total(weights)
    chosen = chosen.astype(mx.int32)
    is_prompt = x.shape[0] > MAX_VERIFY_ROWS and implementation() != "cpu"
    with using("stock") if is_prompt else nullcontext():
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
    return gate_by_silu(gate, up)


def _apply(x: mx.array, linear: Linear, chosen: mx.array, gated: bool = False) -> mx.array:
    """Apply expert ``chosen[r, t]`` to row r: x [R, K] or [R, T, K] to [R, T, N], gated to [R, T, N / 2]."""
    quantization = linear.quantization
    if quantization is None:
        return gather_rows(x, linear.weight, None, None, chosen, gated=gated)
    group_size, bits = quantization.group_size, quantization.bits
    if quantization.mode == "affine":
        tensors = linear.weight, linear.scales, linear.biases
        return gather_rows(x, *tensors, chosen, group_size=group_size, bits=bits, gated=gated)
    assert linear.scales is not None
    if implementation() == "cpu":
        cpu_library.leave(f"experts of {quantization.mode} weights")
    out = mx.gather_qmm(
        x[:, None, None] if x.ndim == 2 else x[:, :, None],
        linear.weight,
        linear.scales,
        rhs_indices=chosen,
        transpose=True,
        group_size=group_size,
        bits=bits,
        mode=quantization.mode,
    ).squeeze(-2)
    return gate_by_silu(*mx.split(out, 2, axis=-1)) if gated else out
