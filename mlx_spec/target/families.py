"""The model families that the rows forward runs, and what is unusual about each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metal_kernels import linear_rows, moe_rows
from mlx_spec.errors import UnsupportedModel
from mlx_spec.target.linears import experts_of, joined_linears, linear_of

FeedForward = Callable[[mx.array, mx.array], mx.array]
"""The feed-forward sublayer: (normed rows [R, H], residual [R, H]) to the sum [R, H]."""


def dense(mlp: Any) -> Callable[..., mx.array]:
    """Return the gated feed-forward of an MLP module; without a residual it gives the sublayer's output alone."""
    gate_up, down = joined_linears([mlp.gate_proj, mlp.up_proj]), linear_of(mlp.down_proj)
    return lambda x, residual=None: linear_rows(linear_rows(x, gate_up, gated=True), down, residual=residual)


def dense_or_experts(mlp: Any) -> FeedForward:
    """Return the feed-forward of a mixture-of-experts model's layer; some layers may be dense.

    An expert that all rows share, where there is one, comes on top with a gate of its own.
    """
    if not hasattr(mlp, "switch_mlp"):
        return dense(mlp)
    experts = experts_of(mlp)
    if not hasattr(mlp, "shared_expert"):
        return lambda x, residual: residual + moe_rows(experts, x)
    shared, gate = dense(mlp.shared_expert), linear_of(mlp.shared_expert_gate)
    return lambda x, residual: residual + (moe_rows(experts, x) + mx.sigmoid(linear_rows(x, gate)) * shared(x))


@dataclass(frozen=True)
class Family:
    """Where a family departs from the plain pre-norm transformer with grouped-query attention.

    gated_attention: attention's output is multiplied by the sigmoid of a gate that comes with the queries.
    """

    qk_norm: bool = False
    gated_attention: bool = False
    feed_forward: Callable[[Any], FeedForward] = dense


FAMILIES = {
    "llama": Family(),
    "mimo": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(qk_norm=True),
    "qwen3_5": Family(qk_norm=True, gated_attention=True),
    "qwen3_5_moe": Family(qk_norm=True, gated_attention=True, feed_forward=dense_or_experts),
    "qwen3_moe": Family(qk_norm=True, feed_forward=dense_or_experts),
    "qwen3_next": Family(qk_norm=True, gated_attention=True, feed_forward=dense_or_experts),
}


def family_of(config: dict[str, Any], name: str) -> Family:
    """Look up the family of a model by its ``config.json``.

    Raises UnsupportedModel for an architecture that is not in the table.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"{name} is of model type {model_type!r}, which mlx_spec does not run; "
            f"supported are {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[model_type]
