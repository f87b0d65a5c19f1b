"""Reading a drafter's tensors, and whether they fit its modules."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from mlx_spec.errors import DrafterMismatch, ModelError

INDEX = "model.safetensors.index.json"


def read_tensors(folder: Path, name: str) -> dict[str, mx.array]:
    """Read every safetensors file of a folder. Raises DrafterMismatch when there is none or one is broken."""
    tensors = read_files(sorted(folder.glob("*.safetensors")), name)
    if not tensors:
        raise DrafterMismatch(f"{name} holds no safetensors file.")
    return tensors


def read_files(paths: Sequence[Path], name: str, error: type[ModelError] = DrafterMismatch) -> dict[str, mx.array]:
    """Read safetensors files, lazily but for headers. Raises ``error`` when one is missing or broken."""
    tensors: dict[str, mx.array] = {}
    for path in paths:
        try:
            loaded = mx.load(str(path))
            assert isinstance(loaded, dict)
            tensors.update(loaded)
        except Exception as reason:
            raise error(f"{name}: {path.name} cannot be read ({reason}); download it again.") from None
    return tensors


def read_index(path: Path, name: str, error: type[ModelError] = DrafterMismatch) -> dict[str, str]:
    """Return which file holds each tensor by the index of a checkpoint; empty where there is no index.

    Raises ``error`` where it is no index.
    """
    try:
        shards = json.loads(path.read_text())["weight_map"] if path.exists() else {}
        return {str(tensor): str(file) for tensor, file in shards.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as reason:
        raise error(f"{name}: {path.name} is no index of safetensors files ({reason!r}).") from None


def load_tensors(module: nn.Module, tensors: dict[str, mx.array], name: str) -> None:
    """Load tensors into a module, quantised where the checkpoint is, and evaluate them.

    module: what the tensors are for, not quantised yet.
    tensors: by their paths in the module.
    name: of the checkpoint, for messages.
    Raises DrafterMismatch that names every missing, unused or wrongly shaped tensor, or NaN and infinity.
    """
    try:
        nn.quantize(module, class_predicate=lambda path, m: _quantization(path, m, tensors))
    except (KeyError, ValueError) as error:
        raise DrafterMismatch(f"{name}: its quantised tensors do not fit together ({error}).") from None
    expected = dict(tree_flatten(module.parameters()))
    problems = [
        *_listed("missing", expected.keys() - tensors.keys()),
        *_listed("unused", tensors.keys() - expected.keys()),
    ]
    for path in sorted(expected.keys() & tensors.keys()):
        if expected[path].shape != tensors[path].shape:
            problems.append(f"{path} is {list(tensors[path].shape)}, not {list(expected[path].shape)}")
    if problems:
        raise DrafterMismatch(f"{name}: its tensors do not fit its config.json: {'; '.join(problems)}.")
    module.load_weights(list(tensors.items()))
    module.eval()
    mx.eval(module.parameters())
    broken = [path for path, value in tensors.items() if not is_finite(value)]
    if broken:
        raise DrafterMismatch(f"{name}: NaN or infinity in {', '.join(sorted(broken)[:8])}; download it again.")


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
