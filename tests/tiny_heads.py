"""Tiny random MTP heads for the tiny targets, in the layouts of published checkpoints."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tiny_models import CONFIGS

from mlx_spec.drafters.mtp.head import MTPHead


def head_tensors(family: str, seed: int = 0, dtype: mx.Dtype = mx.float32) -> dict[str, mx.array]:
    """Random tensors of a head whose layer is that of a tiny target, under our names, norm weights whole."""
    mx.random.seed(seed)
    tensors = {}
    for name, value in tree_flatten(MTPHead(CONFIGS[family]).parameters()):
        noise = mx.random.normal(value.shape)
        tensors[name] = (noise * 0.2 if value.ndim > 1 else 1 + 0.3 * noise).astype(dtype)
    return tensors


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, mx.array], **metadata: str) -> Path:
    """Write a checkpoint folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata)
    return folder
