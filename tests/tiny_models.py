"""Tiny random targets of every family, for tests that need no weights from anywhere."""

import copy
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map_with_path
from mlx_lm.utils import _get_classes

from mlx_spec.target import Target

SHARED = dict(
    hidden_size=64,
    num_hidden_layers=4,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    vocab_size=96,
    max_position_embeddings=512,
    rope_theta=10000.0,
    tie_word_embeddings=False,
)
# Three layers of Gated DeltaNet, then one of attention.
HYBRID = dict(
    SHARED,
    head_dim=32,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_conv_kernel_dim=4,
    full_attention_interval=4,
)
EXPERTS = dict(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    norm_topk_prob=True,
    decoder_sparse_step=2,
    mlp_only_layers=[],
)
ROPE = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": dict(SHARED, model_type="llama", head_dim=16),
    "llama_sliding": dict(
        SHARED,
        model_type="llama",
        head_dim=16,
        sliding_window=40,
        layer_types=["full_attention", "sliding_attention"] * 2,
    ),
    "mistral": dict(SHARED, model_type="mistral", head_dim=32, tie_word_embeddings=True),
    "qwen2": dict(SHARED, model_type="qwen2"),
    "qwen3": dict(SHARED, model_type="qwen3", head_dim=32),
    "qwen3_moe": dict(SHARED, **EXPERTS, model_type="qwen3_moe", head_dim=32),
    # As published: the language model's configuration is nested in that of a vision model.
    "qwen3_5": dict(
        model_type="qwen3_5",
        text_config=dict(HYBRID, model_type="qwen3_5_text", rope_parameters=ROPE, max_position_embeddings=512),
        tie_word_embeddings=False,
    ),
    "qwen3_5_moe": dict(
        {**HYBRID, **EXPERTS, "full_attention_interval": 2},
        model_type="qwen3_5_moe",
        rope_parameters=ROPE,
        shared_expert_intermediate_size=32,
    ),
    "qwen3_next": dict(
        HYBRID,
        **EXPERTS,
        model_type="qwen3_next",
        partial_rotary_factor=0.5,
        shared_expert_intermediate_size=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "mimo": dict(SHARED, model_type="mimo"),
}
HYBRIDS = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]


def tiny_model(family: str, dtype: mx.Dtype = mx.bfloat16, bits: int | None = None, seed: int = 0) -> Any:
    """Build mlx-lm's model of a family with random weights, quantised (group 32) where ``bits`` is given.

    Weights are scaled up so that logits differ and greedy texts do not repeat one token from the start.
    """
    mx.random.seed(seed)
    config = CONFIGS[family]
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    model.update(tree_map_with_path(random_weight, model.parameters()))
    model.set_dtype(dtype)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    return model


def random_weight(name: str, initial: mx.array) -> mx.array:
    """Draw a weight; recurrent layers decay so slowly that a row has an effect a hundred rows later."""
    if name.endswith("A_log"):
        return mx.log(mx.random.uniform(0.005, 0.05, initial.shape))
    return mx.random.normal(initial.shape) * 0.15 if initial.ndim > 1 else initial


def tiny_target(
    family: str = "llama", dtype: mx.Dtype = mx.bfloat16, bits: int | None = None, seed: int = 0, **kwargs: Any
) -> Target:
    """Wrap ``tiny_model`` as a Target."""
    return Target(tiny_model(family, dtype, bits, seed), CONFIGS[family], f"tiny {family}", **kwargs)
