"""Tiny random DFlash checkpoints in the published layouts."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.dflash2.config import read_config


def dflash2_config(**changes: Any) -> dict[str, Any]:
    """Return a native DFlash 2 configuration for the tiny targets; ``changes`` go where their keys belong."""
    config: dict[str, Any] = dict(
        architectures=["DFlash2DraftModel"],
        model_type="qwen3",
        hidden_act="silu",
        attention_bias=False,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=96,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        num_target_layers=4,
        layer_types=["sliding_attention"] * 2,
        sliding_window=24,
        is_causal=False,
        dflash_config=dict(
            block_size=8,
            mask_token_id=95,
            target_layer_ids=[0, 2, 3],
            conv_kernel_size=2,
            conv_group_size=16,
            selector_rank=8,
            selector_top_k=16,
        ),
    )
    for key, value in changes.items():
        (config if key in config or key not in DFLASH_KEYS else config["dflash_config"])[key] = value
    return {key: value for key, value in config.items() if value is not ...}


DFLASH_KEYS = {
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "input_embedding_scale",
    "output_multiplier",
    "draft_token_ids",
}


def random_tensors(config: dict[str, Any], seed: int = 0, dtype: mx.Dtype = mx.float32) -> dict[str, mx.array]:
    """Return random tensors for a configuration, under the names of the published native layout."""
    mx.random.seed(seed)
    tensors = {}
    for name, value in tree_flatten(DraftModel(read_config(config, "tiny")).parameters()):
        scale = 0.3 if value.ndim > 1 else 0.1
        tensors[name] = (mx.random.normal(value.shape) * scale + (value.ndim == 1)).astype(dtype)
    return {n.removesuffix(".weight") if "codebook" in n else n: v for n, v in tensors.items()}


def write_drafter(folder: Path, config: dict[str, Any], tensors: dict[str, mx.array] | None = None) -> Path:
    """Write a checkpoint folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors or random_tensors(config))
    return folder
