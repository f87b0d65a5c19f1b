"""A mixture of experts whose result for a row does not depend on how many rows there are."""

from typing import Any

import mlx.core as mx


def moe_rows(block: Any, x: mx.array) -> mx.array:
    """Run a ``Qwen3MoeSparseMoeBlock`` of mlx-lm over rows, every row through the same expert kernel.

    x: [R, H]. Returns [R, H] in the dtype of x. mlx-lm sorts rows by expert from 64 (row, expert) pairs on, which
    picks another kernel; here the pairs are never sorted.
    """
    gates = mx.softmax(block.gate(x), axis=-1, precise=True)
    chosen = mx.argpartition(gates, kth=-block.top_k, axis=-1)[..., -block.top_k :]
    weights = mx.take_along_axis(gates, chosen, axis=-1)
    if block.norm_topk_prob:
        weights = weights / mx.sum(weights, axis=-1, keepdims=True)
    experts = block.switch_mlp
    rows = x[:, None, None, :]
    up, gate = _expert_linear(experts.up_proj, rows, chosen), _expert_linear(experts.gate_proj, rows, chosen)
    out = _expert_linear(experts.down_proj, experts.activation(up, gate), chosen).squeeze(-2)
    return (out * weights[..., None]).sum(axis=-2).astype(x.dtype)


def _expert_linear(linear: Any, x: mx.array, chosen: mx.array) -> mx.array:
    """Apply expert ``chosen[r, e]`` to row r: x [R, E or 1, 1, I], chosen [R, E], to [R, E, 1, O]."""
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu and "scales" not in linear and linear.weight.dtype != mx.float32:
        # MLX's gather_mm knows float32 only on the CPU.
        return x @ linear.weight[chosen].swapaxes(-1, -2)
    return linear(x, chosen)
