"""Tiny random targets of every family, for tests that need no weights from anywhere."""

from typing import Any

import mlx.core as mx
from mlx import nn
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
    "qwen3_moe": dict(
        SHARED,
        model_type="qwen3_moe",
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        mlp_only_layers=[],
        moe_intermediate_size=64,
        norm_topk_prob=True,
    ),
    "mimo": dict(SHARED, model_type="mimo"),
}


def tiny_model(family: str, dtype: mx.Dtype = mx.bfloat16, bits: int | None = None, seed: int = 0) -> Any:
    """Build mlx-lm's model of a family with random weights, quantised (group 32) where ``bits`` is given.

    Weights are scaled up so that logits are spread and greedy texts do not fall into one token at once.
    """
    mx.random.seed(seed)
    config = CONFIGS[family]
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.update(
        nn.utils.tree_map(lambda w: mx.random.normal(w.shape) * 0.15 if w.ndim > 1 else w, model.parameters())
    )
    model.set_dtype(dtype)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    return model


def tiny_target(
    family: str = "llama", dtype: mx.Dtype = mx.bfloat16, bits: int | None = None, seed: int = 0, **kwargs: Any
) -> Target:
    """Wrap ``tiny_model`` as a Target."""
    return Target(tiny_model(family, dtype, bits, seed), CONFIGS[family], f"tiny {family}", **kwargs)
