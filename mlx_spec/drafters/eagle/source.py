"""Where the weights of an EAGLE head are: in safetensors files, or in those that torch writes."""

from pathlib import Path

import mlx.core as mx

from mlx_spec.checkpoints.tensors import read_files
from mlx_spec.checkpoints.torch_file import read_torch_files
from mlx_spec.errors import DrafterMismatch

TORCH_FILES = "pytorch_model*.bin"


def read_head(folder: Path, name: str) -> dict[str, mx.array]:
    """Read every tensor of a folder, of its safetensors files if it has any.

    Raises DrafterMismatch when there is no file, or one is broken or holds more than tensors.
    """
    if files := sorted(folder.glob("*.safetensors")):
        return read_files(files, name)
    if files := sorted(folder.glob(TORCH_FILES)):
        return read_torch_files(files, name)
    raise DrafterMismatch(f"{name} holds neither a safetensors file nor {TORCH_FILES}.")
