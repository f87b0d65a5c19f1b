"""Tiny random EAGLE heads for the tiny targets, in the layouts of published checkpoints."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from tiny_models import CONFIGS

from mlx_spec.checkpoints.settings import Settings
from mlx_spec.drafters.eagle.head import EagleHead
from mlx_spec.drafters.eagle.spec import read_head_config, read_spec
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target.families import text_config

Tensors = dict[str, mx.array]
# 40 of the 96 tokens, unevenly distributed, so that offsets differ.
DRAFT_IDS = sorted(np.random.default_rng(4).choice(96, 40, replace=False).tolist())
PARTS = {
    "fc": "fc.weight",
    "fc bias": "fc.bias",
    "fc_norm": "fc_norm.0.weight",
    "input_norm": "input_norm.weight",
    "qk_norm": "layers.0.self_attn.q_norm.weight",
    "q bias": "layers.0.self_attn.q_proj.bias",
    "k bias": "layers.0.self_attn.k_proj.bias",
    "v bias": "layers.0.self_attn.v_proj.bias",
}


def eagle_config(family: str = "llama", version: int = 3, **changes: Any) -> dict[str, Any]:
    """Return a configuration as SafeAILab publishes it, for the tiny target of a family."""
    target = text_config(CONFIGS[family])
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if version == 3 else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rms_norm_eps": 1e-5,
        "vocab_size": target["vocab_size"],
        "max_position_embeddings": 512,
        **({"draft_vocab_size": len(DRAFT_IDS)} if version == 3 else {"bias": True}),
        **changes,
    }
    return {key: value for key, value in config.items() if value is not ...}


def settings(config: dict[str, Any], name: str = "tiny") -> Settings:
    """Return a configuration as the loader reads it."""
    return Settings(config, name, DrafterMismatch)


def eagle_tensors(
    config: dict[str, Any],
    version: int = 3,
    parts: tuple[str, ...] = ("fc",),
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    layers: int = 4,
) -> Tensors:
    """Return random tensors of a head, under our names.

    config: see ``eagle_config``.
    version: of EAGLE, 1 or 3.
    parts: keys of PARTS that the head has.
    layers: of the target.
    """
    mx.random.seed(seed)
    read = settings(config)
    sizes, spec = read_head_config(read), read_spec(read, version == 3, layers)
    head = EagleHead(sizes, spec, {PARTS[part] for part in parts})
    if version == 3:
        head.lm_head = nn.Linear(sizes.hidden_size, len(DRAFT_IDS), bias=False)
    tensors = {}
    for name, value in tree_flatten(head.parameters()):
        noise = mx.random.normal(value.shape)
        is_norm = value.ndim == 1 and not name.endswith("bias")
        tensors[name] = (1.2 + 0.3 * noise if is_norm else noise * 0.15).astype(dtype)
    return tensors | (vocabulary(DRAFT_IDS, sizes.vocab_size) if version == 3 else {})


def vocabulary(ids: list[int], size: int) -> Tensors:
    """Return the offsets and the mask of a draft vocabulary."""
    marked = np.zeros(size, dtype=bool)
    marked[ids] = True
    return {"d2t": mx.array(np.array(ids) - np.arange(len(ids))), "t2d": mx.array(marked)}


def midlayer(tensors: Tensors) -> Tensors:
    """Give tensors the names of SafeAILab, AngelSlim, SpecForge and NVIDIA."""
    return {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}


def speculators(config: dict[str, Any]) -> dict[str, Any]:
    """Put a configuration into the form of the speculators library."""
    outside = {"draft_vocab_size", "norm_before_residual", "norm_output", "fc_norm", "target_hidden_size"}
    outside |= {"eagle_aux_hidden_state_layer_ids", "norm_before_fc", "eagle_config"}
    layer = {key: value for key, value in config.items() if key not in outside and key != "architectures"}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        **{key: value for key, value in config.items() if key in outside},
    }


def write_eagle(folder: Path, config: dict[str, Any], tensors: Tensors, file: str = "model.safetensors") -> Path:
    """Write a checkpoint folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / file), tensors)
    return folder
