"""Reading a drafter's tensors, and whether they fit its modules."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from mlx_spec.checkpoints.config import LFS_POINTER
from mlx_spec.checkpoints.torch_file import read_torch_files
from mlx_spec.errors import DrafterMismatch

INDEX = "model.safetensors.index.json"
TORCH_FILES = "pytorch_model*.bin"
# How names of files begin that lie beside weights: hidden ones, and those of training.
STRAY = (".", "adapter", "optimizer", "optim_", "scheduler", "training_", "trainer", "rng_state", "random_states")
ZIP = b"PK\x03\x04"  # how its files begin
# Tensors of quantisations that are not read here; ``weight_scale_inv`` is, beside weights in FP8.
FOREIGN = re.compile(
    r".+[._](weight_scale(_inv|_2)?|(weight_|input_)?global_scale|input_scale|weight_packed|weight_zero_point"
    r"|qweight|qzeros|g_idx|absmax|quant_map|activation_scale)"
)
FP8_BLOCK = 128


def weight_files(folder: Path, name: str) -> list[Path]:
    """Return the files that hold the weights of a checkpoint: those of its index, else all safetensors files.

    Of a folder without safetensors files they are those that torch wrote. Files of other programs are left out.
    Raises DrafterMismatch for a broken index.
    """
    found = [path for path in sorted(folder.glob("*.safetensors")) if not is_stray(path)]
    indexed = {folder / file for file in read_index(folder / INDEX, name).values()}
    if indexed and indexed <= set(found):
        return sorted(indexed)
    return found or [path for path in sorted(folder.glob(TORCH_FILES)) if not is_stray(path)]


def is_stray(path: Path) -> bool:
    """Whether a file is none of a checkpoint's weights, by its name: of macOS, of training, or an adapter."""
    return path.name.startswith(STRAY)


def read_tensors(folder: Path, name: str) -> dict[str, mx.array]:
    """Read the weights of a folder. Raises DrafterMismatch when there are none, or a file is broken."""
    tensors = read_files(weight_files(folder, name), name)
    if not tensors:
        raise DrafterMismatch(f"{name} holds no safetensors file with tensors, nor {TORCH_FILES}.")
    return tensors


def read_files(paths: Sequence[Path], name: str) -> dict[str, mx.array]:
    """Read the tensors of files, lazily but for headers.

    Raises DrafterMismatch, with the reason, when one is missing, broken, or of a format that is not read.
    """
    tensors: dict[str, mx.array] = {}
    for path in paths:
        tensors.update(read_file(path, name))
    return tensors


def read_file(path: Path, name: str) -> dict[str, mx.array]:
    """Read the tensors of one file, see ``read_files``."""
    try:
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
        if start.startswith(LFS_POINTER):
            raise DrafterMismatch(
                f"{name}: {path.name} is a Git LFS pointer, not the file itself: run git lfs pull."
            )
        if start.startswith(ZIP):
            return read_torch_files([path], name)
        if path.suffix != ".safetensors":
            raise DrafterMismatch(
                f"{name}: {path.name} is {kind_of(path, start)}; drafters are read from safetensors files, "
                "and from tensors that torch.save wrote into a zip archive."
            )
        loaded = mx.load(str(path), format="safetensors")
    except (OSError, RuntimeError, ValueError) as error:
        reason = "it is empty" if path.is_file() and not path.stat().st_size else shorten(str(error), 200)
        raise DrafterMismatch(f"{name}: {path.name} cannot be read ({reason}); download it again.") from None
    assert isinstance(loaded, dict)
    return loaded


def kind_of(path: Path, start: bytes) -> str:
    """Return what a file of another format is, by its first bytes."""
    return (
        "a GGUF file" if start.startswith(b"GGUF") else f"no such file, by its name (*{path.suffix}) and contents"
    )


def tensor_names(paths: Iterable[Path], name: str) -> set[str]:
    """Return the names of all tensors in files; those that cannot be read are passed over."""
    names = set[str]()
    for path in paths:
        with suppress(DrafterMismatch):
            names |= read_file(path, name).keys()
    return names


def read_index(path: Path, name: str) -> dict[str, str]:
    """Return which file holds each tensor by the index of a checkpoint; empty where there is no index."""
    try:
        shards = json.loads(path.read_text())["weight_map"] if path.exists() else {}
        return {str(tensor): str(file) for tensor, file in shards.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DrafterMismatch(f"{name}: {path.name} is no index of safetensors files ({error!r}).") from None


def load_tensors(module: nn.Module, tensors: dict[str, mx.array], name: str) -> None:
    """Load tensors into a module, quantised where the checkpoint is, and evaluate them.

    module: what the tensors are for, not quantised yet.
    tensors: by their paths in the module.
    name: of the checkpoint, for messages.
    Raises DrafterMismatch that names every missing, unused or wrongly shaped tensor, or NaN and infinity.
    """
    tensors = decode_fp8(tensors)
    try:
        nn.quantize(module, class_predicate=lambda path, m: _quantization(path, m, tensors))
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise DrafterMismatch(
            f"{name}: its quantised tensors do not fit together ({shorten(str(error), 200)})."
        ) from None
    expected = dict(tree_flatten(module.parameters()))
    check_tensors(expected, tensors, name)
    module.load_weights(list(tensors.items()))
    module.eval()
    mx.eval(module.parameters())
    broken = [path for path, value in tensors.items() if not is_finite(value)]
    if broken:
        raise DrafterMismatch(f"{name}: NaN or infinity in {', '.join(sorted(broken)[:8])}; download it again.")


def check_tensors(expected: Mapping[str, mx.array], tensors: Mapping[str, mx.array], name: str) -> None:
    """Raise DrafterMismatch that names every missing, unused, wrongly shaped or wrongly typed tensor."""
    unused, shared = tensors.keys() - expected.keys(), sorted(expected.keys() & tensors.keys())
    if foreign := sorted(path for path in unused if FOREIGN.fullmatch(path)):
        raise DrafterMismatch(
            f"{name}: {foreign[0]} belongs to a quantisation that mlx_spec does not read; use the checkpoint in "
            "bfloat16, or one that MLX quantised."
        )
    problems = [
        *_listed("missing", expected.keys() - tensors.keys()),
        *_listed("unused", unused),
        *(
            f"{path} is {list(tensors[path].shape)}, not {list(expected[path].shape)}"
            for path in shared
            if expected[path].shape != tensors[path].shape
        ),
    ]
    if problems:
        raise DrafterMismatch(f"{name}: its tensors do not fit its config.json: {'; '.join(problems)}.")
    for path in shared:
        if not same_kind(expected[path].dtype, tensors[path].dtype):
            raise DrafterMismatch(
                f"{name}: {path} is of type {type_name(tensors[path].dtype)}, whose bits are no weights without "
                "scales; use the checkpoint in bfloat16, or one that MLX quantised."
            )


def same_kind(expected: mx.Dtype, found: mx.Dtype) -> bool:
    """Whether a tensor may be of a type: any floating one where numbers are expected, else the same."""
    return mx.issubdtype(found, mx.floating) if mx.issubdtype(expected, mx.floating) else found == expected


def type_name(dtype: mx.Dtype) -> str:
    """Return the name of a type, such as "float16"."""
    return str(dtype).removeprefix("mlx.core.")


def decode_fp8(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return tensors with weights in FP8 decoded to bfloat16 where a scale for each block lies beside them.

    That is the layout of DeepSeek and Qwen: bytes [..., N, K] and ``weight_scale_inv`` [..., N / 128, K / 128].
    """
    decoded = dict(tensors)
    for path in [path for path in tensors if path.endswith("_scale_inv")]:
        weight = tensors.get(path.removesuffix("_scale_inv"))
        if weight is not None and weight.dtype == mx.uint8 and weight.ndim > 1:
            *most, rows, width = weight.shape
            blocks = (*most, -(-rows // FP8_BLOCK), -(-width // FP8_BLOCK))
            if tensors[path].shape == blocks:
                scales = mx.repeat(mx.repeat(decoded.pop(path), FP8_BLOCK, -1)[..., :width], FP8_BLOCK, -2)
                plain = mx.from_fp8(weight, dtype=mx.bfloat16) * scales[..., :rows, :]
                decoded[path.removesuffix("_scale_inv")] = plain.astype(mx.bfloat16)
    return decoded


def quantize_head(head: nn.Module, group_size: int, bits: int, mode: str = "affine") -> None:
    """Quantise the matrices of a head, all but the small ones that choose experts.

    group_size: how many weights share a scale; matrices whose width is no multiple of it stay as they are.
    bits: of a weight.
    mode: as ``mx.quantize`` takes it.
    """

    def is_chosen(path: str, module: nn.Module) -> bool:
        routes = path.endswith(("mlp.gate", "shared_expert_gate"))
        return hasattr(module, "to_quantized") and not routes and module.weight.shape[-1] % group_size == 0

    nn.quantize(head, group_size, bits, mode=mode, class_predicate=is_chosen)


def is_quantized(module: nn.Module) -> bool:
    """Whether any weights of a module are quantised."""
    return any("scales" in part for part in module.modules())


def is_finite(tensor: mx.array) -> bool:
    """Whether a tensor holds neither NaN nor infinity."""
    return not mx.issubdtype(tensor.dtype, mx.floating) or bool(mx.all(mx.isfinite(tensor)))


def _quantization(path: str, module: nn.Module, tensors: dict[str, mx.array]) -> dict[str, Any] | bool:
    if not hasattr(module, "to_quantized") or f"{path}.scales" not in tensors:
        return False
    return infer_quant_config(path, module, tensors)


def _listed(what: str, names: Iterable[str]) -> list[str]:
    names = sorted(names)
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return [f"{what} {shown}"] if names else []
