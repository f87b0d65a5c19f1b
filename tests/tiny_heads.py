"""Tiny random MTP heads for the tiny targets, in the layouts of published checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tiny_models import CONFIGS

from mlx_spec.checkpoints.settings import Settings
from mlx_spec.drafters.mtp.head import MTPHead
from mlx_spec.drafters.mtp.spec import layer_config
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target.families import text_config

Tensors = dict[str, mx.array]

MIMO = {
    "pre_fc_norm_embedding.": "token_layernorm.",
    "pre_fc_norm_hidden.": "hidden_layernorm.",
    "fc.": "input_proj.",
    "norm.": "final_layernorm.",
    "layers.0.": "",
}
NEXTN = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "fc.": "eh_proj.",
    "norm.": "shared_head.norm.",
    "lm_head.": "shared_head.head.",
    "layers.0.": "",
}


def layer_of(family: str) -> dict[str, Any]:
    """Return what describes the decoder layer of a tiny target of a family."""
    return dict(layer_config(Settings(CONFIGS[family], "tiny", DrafterMismatch)).values)


def head_tensors(family: str, seed: int = 0, dtype: mx.Dtype = mx.float32) -> Tensors:
    """Return random tensors of a head whose layer is that of a tiny target, under our names.

    Norm weights are whole and have the means of published Qwen3.5 heads.
    """
    mx.random.seed(seed)
    tensors = {}
    for name, value in tree_flatten(MTPHead(layer_of(family)).parameters()):
        noise = mx.random.normal(value.shape)
        mean = 1.74 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.35
        tensors[name] = (noise * 0.2 if value.ndim > 1 else mean + 0.2 * noise).astype(dtype)
    return tensors


def renamed(tensors: Tensors, names: dict[str, str], prefix: str) -> Tensors:
    """Give tensors the names of another layout, after a prefix."""

    def other(name: str) -> str:
        old = next((old for old in names if name.startswith(old)), "")
        return prefix + names.get(old, "") + name.removeprefix(old)

    return {other(name): value for name, value in tensors.items()}


def zero_centred(tensors: Tensors) -> Tensors:
    """Return the tensors with 1 subtracted from norm weights."""
    return {name: value - 1 if "norm" in name else value for name, value in tensors.items()}


def fused_experts(tensors: Tensors) -> Tensors:
    """Fuse the experts' tensors as in Qwen3.5's original checkpoints."""
    out = {name: value for name, value in tensors.items() if "switch_mlp" not in name}
    gate, up, down = (tensors[f"layers.0.mlp.switch_mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    module = "layers.0.mlp.experts"
    return out | {f"{module}.gate_up_proj": mx.concatenate([gate, up], axis=1), f"{module}.down_proj": down}


def numbered_experts(tensors: Tensors) -> Tensors:
    """Split the experts' tensors as in Qwen3-Next's original checkpoints."""
    out = {}
    for name, value in tensors.items():
        if "switch_mlp" in name:
            out |= {name.replace("switch_mlp", f"experts.{e}"): each for e, each in enumerate(value)}
        else:
            out[name] = value
    return out


WRAPPED = "language_model.model.layers.4."
# Layouts of a checkpoint that holds only a head: changes of the config, and the renaming of our tensors.
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors]]] = {
    "original": ({}, lambda t: renamed(zero_centred(t), {}, "mtp.")),
    "original, wrapped": ({}, lambda t: renamed(zero_centred(t), {}, "language_model.mtp.")),
    "converted and embedded": ({}, lambda t: renamed(t, {}, "model.mtp.")),
    "sidecar": ({"model_type": "qwen3_5_mtp"}, dict),
    "sidecar, norms not shifted": ({"model_type": "qwen3_5_mtp"}, zero_centred),
    "speculators": ({"speculators_model_type": "mtp"}, lambda t: renamed(t, MIMO, "mtp_layers.0.")),
    "DeepSeek": ({"model_type": "deepseek_v3_mtp"}, lambda t: renamed(t, NEXTN, "model.layers.4.")),
    "GLM, wrapped": (
        {"model_type": "glm4_moe_mtp"},
        lambda t: renamed(t, NEXTN, WRAPPED),
    ),
    "Step": ({"model_type": "step3p5_mtp"}, lambda t: renamed(zero_centred(t), NEXTN, "model.layers.4.")),
    "MiMo": ({"model_type": "mimo_mtp"}, lambda t: renamed(t, MIMO, "model.mtp_layers.0.")),
}


def layout_config(layout: str, family: str) -> dict[str, Any]:
    """Return the ``config.json`` of a head in a layout, whose layer is that of a tiny target."""
    changes, model = LAYOUTS[layout][0], CONFIGS[family]
    text = text_config(model)
    if "speculators_model_type" in changes:
        return {**changes, "transformer_layer_config": text}
    return {**changes, "text_config": text} if changes else model


def write_head(
    folder: Path, config: dict[str, Any] | None, tensors: Tensors, file: str = "model.safetensors"
) -> Path:
    """Write a checkpoint folder, with a config if one is given, and return it."""
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / file), tensors)
    return folder


def write_layout(folder: Path, layout: str, family: str, tensors: Tensors) -> Path:
    """Write tensors under our names in a published layout and return the folder."""
    return write_head(folder, layout_config(layout, family), LAYOUTS[layout][1](tensors))
