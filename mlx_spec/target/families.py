"""The model families that ``Target`` runs, and where each departs from a plain transformer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx

from metal_kernels import Linear, linear_rows, moe_rows
from mlx_spec.errors import UnsupportedModel
from mlx_spec.target.linears import experts_of, joined_linears, linear_of

FeedForward = Callable[[mx.array, mx.array], mx.array]
"""The feed-forward sublayer: (normed rows [R, H], residual [R, H]) to the sum [R, H]."""


@dataclass(frozen=True)
class Dense:
    """The gated feed-forward: the projections of gate and up, side by side, and the one down."""

    gate_up: tuple[Linear, ...]
    down: Linear

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """Run normed rows [R, H]; without a residual the output alone is returned."""
        return linear_rows(self.activation(x), self.down, residual=residual)

    def activation(self, x: mx.array) -> mx.array:
        """Return silu(gate) * up of normed rows: [R, I]."""
        return linear_rows(x, self.gate_up, gated=True)


def dense(mlp: Any) -> Dense:
    """Read the gated feed-forward of an MLP module."""
    return Dense(joined_linears([mlp.gate_proj, mlp.up_proj]), linear_of(mlp.down_proj))


def dense_or_experts(mlp: Any) -> FeedForward:
    """Return the feed-forward of a layer of a mixture-of-experts model, where some layers may be dense.

    The output of a shared expert, where there is one, is added with a gate of its own.
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

    qk_norm: queries and keys are normed head by head.
    gated_attention: attention's output is multiplied by the sigmoid of a gate that is projected with the queries.
    feed_forward: reads the feed-forward sublayer of a layer's MLP module.
    model_type: in ``config.json``.
    config_class: the class of transformers that reads its ``config.json``.
    fixed: settings of which only these values are computed, by mlx-lm's modules or here.
    is_nested: the language model is part of a vision model.
    rotary_share: how much of a head is rotated where that is not said; 1 where it is always all of it.
    slides_everywhere: a ``sliding_window`` is one of all layers, where ``layer_types`` does not say otherwise.
    """

    model_type: str
    config_class: str
    qk_norm: bool = False
    gated_attention: bool = False
    feed_forward: Callable[[Any], FeedForward] = dense
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    is_nested: bool = False
    rotary_share: float = 1.0
    slides_everywhere: bool = False


NO_BIAS = {"attention_bias": (False,)}
gated_family = partial(Family, qk_norm=True, gated_attention=True, rotary_share=0.25)
ALL = (
    Family("llama", "LlamaConfig"),
    # A Qwen2 with heads for further tokens; its class comes with its checkpoints.
    Family("mimo", "Qwen2Config", fixed={"attention_bias": (True,)}),
    Family("mistral", "MistralConfig", slides_everywhere=True),
    Family("qwen2", "Qwen2Config"),
    Family("qwen3", "Qwen3Config", qk_norm=True, fixed=NO_BIAS),
    gated_family("qwen3_5", "Qwen3_5TextConfig", is_nested=True, fixed=NO_BIAS),
    gated_family(
        "qwen3_5_moe",
        "Qwen3_5MoeTextConfig",
        is_nested=True,
        feed_forward=dense_or_experts,
        fixed={**NO_BIAS, "mlp_only_layers": ([],)},
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeConfig",
        qk_norm=True,
        feed_forward=dense_or_experts,
        fixed=NO_BIAS,
        slides_everywhere=True,
    ),
    gated_family("qwen3_next", "Qwen3NextConfig", feed_forward=dense_or_experts),
)
FAMILIES = {family.model_type: family for family in ALL}


def family_of(config: Mapping[str, Any], name: str) -> Family:
    """Look up the family of a model.

    config: its ``config.json``.
    name: of the model, for the message.
    Raises UnsupportedModel for a model type that is not in the table.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModel(
            f"{name}: config.json gives model_type {model_type!r}, which mlx_spec does not run; "
            f"supported are {', '.join(sorted(FAMILIES))}."
        )
    if not isinstance(config.get("text_config", {}), Mapping):
        raise UnsupportedModel(
            f"{name}: config.json gives text_config {config['text_config']!r}; needed is an object with the "
            "language model's settings."
        )
    return FAMILIES[model_type]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a ``config.json`` that describes the language model: vision models nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def num_layers_of(config: Mapping[str, Any]) -> int:
    """Return how many decoder layers a ``config.json`` gives a model, 0 where it does not say."""
    layers = text_config(config).get("num_hidden_layers")
    return layers if isinstance(layers, int) else 0
