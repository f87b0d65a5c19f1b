"""Fitting a loaded model's weights to the machine: dequantised where that is faster, in one floating type."""

import os

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import dequantize_model

from metal_kernels.launching.implementations import implementation


def fit_to_machine(model: nn.Module) -> nn.Module:
    """Dequantise weights where that is faster, settle on one floating type, and evaluate the weights."""
    quantized = any(name.endswith(".scales") for name in dict(tree_flatten(model.parameters())))
    dequantize = quantized and quantized_is_slow() and dequantized_bytes(model) < memory_bytes() // 2
    kinds = len({weight.dtype for weight in castable(model).values()})
    if dequantize:
        model = dequantize_model(model)
    if dequantize or kinds > 1:
        weights = castable(model)
        if implementation() == "cpu":  # whose library takes scales and biases of any type as they are
            weights = {name: w for name, w in weights.items() if not name.endswith((".scales", ".biases"))}
        model.update(tree_unflatten([(name, w.astype(mx.bfloat16)) for name, w in weights.items()]))
    mx.eval(model.parameters())
    return model


def castable(model: nn.Module) -> dict[str, mx.array]:
    """Return the floating weights of a model by name, without those whose precision mlx-lm keeps (A_log, say)."""
    may_cast = getattr(model, "cast_predicate", lambda name: True)
    weights = dict(tree_flatten(model.parameters()))
    return {name: w for name, w in weights.items() if mx.issubdtype(w.dtype, mx.floating) and may_cast(name)}


def dequantized_bytes(model: nn.Module) -> int:
    """Return the bytes that the quantised weights of a model take in bfloat16."""
    modules = [module for _, module in model.named_modules() if "scales" in module]
    return sum(2 * module.scales.size * module.group_size for module in modules)


def memory_bytes() -> int:
    """Return the physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def quantized_is_slow() -> bool:
    """Whether a quantised product costs as much per row as the first row: MLX's own on a CPU does."""
    return on_cpu() and implementation() != "cpu"


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return mx.default_device().type == mx.DeviceType.cpu
