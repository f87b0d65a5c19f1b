"""Where the weights of an MTP head are: among the shards of a model, next to them, or in files of their own."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_spec.checkpoints.tensors import INDEX, is_stray, read_file, read_index
from mlx_spec.drafters.mtp.spec import MTPSpec, spec_of
from mlx_spec.drafters.mtp.tensors import belongs_to_head, is_bare
from mlx_spec.errors import DrafterMismatch

SPECULATORS_TYPES = ("mtp", "fast_mtp")
# Where programs for MLX put the head of a converted model.
NEXT_TO_SHARDS = ("*.safetensors", "mtp/*.safetensors")


def head_files(place: Path, spec: MTPSpec, target_layers: int, name: str) -> list[Path]:
    """Return the files that hold a head: ``place`` itself, or those of the folder; none where there is no head.

    A folder's index lists shards that hold the head; others need not be there. It may leave the head out, so all
    files that are there are looked into as well.

    place: the file or folder.
    spec: of the head.
    target_layers: of the target.
    name: of the checkpoint, for messages.
    Raises DrafterMismatch for a broken index, or a file that is missing or broken.
    """
    if place.is_file():
        return [place]
    shards = read_index(place / INDEX, name)
    found = [place / file for file in indexed_files(shards, spec, target_layers)]
    others = [path for pattern in NEXT_TO_SHARDS for path in sorted(place.glob(pattern)) if not is_stray(path)]
    return found + [path for path in others if path not in found and holds_head(path, spec, target_layers, name)]


def indexed_files(shards: Mapping[str, str], spec: MTPSpec, target_layers: int) -> list[str]:
    """Return the names of the shards that hold tensors of the head: all, where there is nothing else."""
    if is_bare(shards):
        return sorted(set(shards.values()))
    return sorted({file for tensor, file in shards.items() if belongs_to_head(tensor, spec, target_layers)})


def holds_head(path: Path, spec: MTPSpec, target_layers: int, name: str) -> bool:
    """Whether a file holds tensors of a head, or nothing but a head.

    Raises DrafterMismatch for one that cannot be read though it is called one.
    """
    try:
        tensors = read_file(path, name)
    except DrafterMismatch:
        if "mtp" in (path.parent.name, *re.split(r"[-_.]", path.name)):
            raise
        return False
    return is_bare(tensors) or any(belongs_to_head(tensor, spec, target_layers) for tensor in tensors)


def is_mtp(place: Path, config: Mapping[str, Any], target_layers: int, name: str) -> bool:
    """Whether a drafter's checkpoint is meant to be an MTP head.

    place: its file or folder.
    config: its ``config.json``.
    target_layers: of the target.
    name: of the checkpoint, for messages.
    Raises UnsupportedModel for heads that mlx_spec does not run.
    """
    if place.is_file() or is_mtp_config(config):
        return True
    if "speculators_model_type" in config:
        return False
    return bool(head_files(place, spec_of(config, name), target_layers, name))


def is_mtp_config(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` alone shows that its checkpoint is an MTP head."""
    if str(config.get("model_type")).endswith("_mtp"):
        return True
    return config.get("speculators_model_type") in SPECULATORS_TYPES
