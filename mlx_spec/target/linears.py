"""Reads the weights of linear, embedding and mixture-of-experts modules into the arrays that kernels take."""

from collections.abc import Hashable, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from metal_kernels import Experts, Linear, Quantization, linear_rows


def linear_of(module: nn.Module) -> Linear:
    """Take the weights of a linear or embedding module, quantised or not; nothing is copied.

    Raises TypeError for a module that holds anything else, such as a LoRA layer.
    """
    tensors = dict(module.parameters())
    unknown = sorted(tensors.keys() - {"weight", "scales", "biases", "bias"})
    if unknown or "weight" not in tensors:
        raise TypeError(f"{type(module).__name__} with {sorted(tensors)} is no plain or quantised linear map.")
    is_quantized = "scales" in tensors
    quantization = Quantization(module.group_size, module.bits, module.mode) if is_quantized else None
    return Linear(**tensors, quantization=quantization)


def joined_linears(modules: Sequence[nn.Module]) -> tuple[Linear, ...]:
    """Join the weights of several modules, so that one launch computes all their outputs.

    The modules become views of the joined arrays, so nothing is held twice. Where they differ in input size,
    dtype, bias or quantization, nothing is joined and one Linear for each is returned. Raises TypeError like
    ``linear_of``.
    """
    parts = tuple(linear_of(module) for module in modules)
    if len({_layout(part) for part in parts}) > 1:
        return parts
    whole = {
        name: mx.concatenate([module[name] for module in modules], axis=_output_axis(name))
        for name in modules[0].parameters()
    }
    mx.eval(whole)
    start = 0
    for module, part in zip(modules, parts, strict=True):
        own = slice(start, start + part.size)
        module.update({n: x[..., own] if n == "bias" else x[..., own, :] for n, x in whole.items()})
        start = own.stop
    return (Linear(**whole, quantization=parts[0].quantization),)


def experts_of(block: Any) -> Experts:
    """Read a ``Qwen3MoeSparseMoeBlock`` of mlx-lm; its gates and ups become views of joined weights.

    Raises TypeError for experts that hold anything but plain or quantised weights.
    """
    experts = block.switch_mlp
    biased = [name for name in ("gate_proj", "up_proj", "down_proj") if "bias" in experts[name]]
    if biased:
        raise TypeError(f"experts without biases are needed; {', '.join(biased)} have them.")
    gate_up = joined_linears([experts.gate_proj, experts.up_proj])
    return Experts(linear_of(block.gate), gate_up, linear_of(experts.down_proj), block.top_k, block.norm_topk_prob)


def module_rows(x: mx.array, module: nn.Module) -> mx.array:
    """Apply a linear module to rows [..., K], see ``linear_rows``."""
    return linear_rows(x, linear_of(module))


def _layout(linear: Linear) -> Hashable:
    """Return what linear maps must have in common to be joined: everything but the number of outputs."""
    shapes = {name: list(value.shape) for name, value in linear.tensors.items()}
    for name, shape in shapes.items():
        del shape[_output_axis(name)]
    dtypes = tuple(value.dtype for value in linear.tensors.values())
    return tuple((name, *shape) for name, shape in shapes.items()), dtypes, linear.quantization


def _output_axis(name: str) -> int:
    """Return the axis of outputs in an array, counted from the end: an axis of experts may come first."""
    return -1 if name == "bias" else -2
