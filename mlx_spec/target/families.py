"""The model families that the rows forward runs, and what is unusual about each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metal_kernels import moe_rows
from mlx_spec.errors import UnsupportedModel


def dense(mlp: Any, x: mx.array) -> mx.array:
    """Run a feed-forward module over rows: [R, H] to [R, H]."""
    return mlp(x)


def dense_or_experts(mlp: Any, x: mx.array) -> mx.array:
    """Run a layer of a mixture-of-experts model, some of whose layers may be dense: [R, H] to [R, H]."""
    return moe_rows(mlp, x) if hasattr(mlp, "switch_mlp") else mlp(x)


@dataclass(frozen=True)
class Family:
    """Where a family departs from the plain pre-norm transformer with grouped-query attention."""

    qk_norm: bool = False
    feed_forward: Callable[[Any, mx.array], mx.array] = dense


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, feed_forward=dense_or_experts),
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
