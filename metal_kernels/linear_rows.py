"""Linear maps over rows: the weights of one module, of several that read the same rows, or a part of one."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx import nn

from metal_kernels.gemm_rows import gemm_rows
from metal_kernels.implementations import implementation
from metal_kernels.qmm_rows import qmm_rows

MAX_VERIFY_ROWS = 16


@dataclass(frozen=True)
class Packing:
    """How MLX packed quantised weights: ``mode`` affine has scales and biases, the others only scales."""

    group_size: int
    bits: int
    mode: str


@dataclass(frozen=True)
class Linear:
    """Weights [N, K] as MLX holds them, quantised where ``packing`` is set, and what is added, ``bias`` [N].

    Those of experts have an axis more, [E, N, K] and [E, N]; see ``moe_rows``.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bias: mx.array | None = None
    packing: Packing | None = None

    @staticmethod
    def of(module: nn.Module) -> "Linear":
        """Take the weights of a linear or embedding module, quantised or not; nothing is copied.

        Raises TypeError for a module that holds anything else, such as a LoRA layer.
        """
        tensors = dict(module.parameters())
        unknown = sorted(tensors.keys() - {"weight", "scales", "biases", "bias"})
        if unknown or "weight" not in tensors:
            raise TypeError(f"{type(module).__name__} with {sorted(tensors)} is no plain or quantised linear map.")
        packing = Packing(module.group_size, module.bits, module.mode) if "scales" in tensors else None
        return Linear(**tensors, packing=packing)

    @staticmethod
    def joined(modules: Sequence[nn.Module]) -> tuple["Linear", ...]:
        """Lay the output rows of several modules side by side, so that one launch computes them all.

        The modules become views of the joined arrays, so nothing is held twice. Modules that are packed unlike
        each other stay apart: then one Linear for each is returned. Raises TypeError like ``of``.
        """
        parts = tuple(Linear.of(module) for module in modules)
        if len({part._layout for part in parts}) > 1:
            return parts
        whole = {
            name: mx.concatenate([module[name] for module in modules], axis=_output_axis(name))
            for name in modules[0].parameters()
        }
        mx.eval(whole)
        start = 0
        for module, part in zip(modules, parts, strict=True):
            place = slice(start, start + part.size)
            module.update({n: x[..., place] if n == "bias" else x[..., place, :] for n, x in whole.items()})
            start = place.stop
        return (Linear(**whole, packing=parts[0].packing),)

    def select_outputs(self, index: mx.array) -> "Linear":
        """Return a copy of the output rows ``index`` [N]."""
        tensors = {name: value[index] for name, value in self.tensors.items()}
        return Linear(**tensors, packing=self.packing)

    @property
    def size(self) -> int:
        """Number of output rows N."""
        return self.weight.shape[-2]

    @property
    def tensors(self) -> dict[str, mx.array]:
        """The arrays that are there, by name."""
        return {n: v for n, v in vars(self).items() if isinstance(v, mx.array)}

    @property
    def _layout(self) -> Hashable:
        shapes = {name: list(value.shape) for name, value in self.tensors.items()}
        for name, shape in shapes.items():
            del shape[_output_axis(name)]
        dtypes = tuple(value.dtype for value in self.tensors.values())
        return tuple((name, *shape) for name, shape in shapes.items()), dtypes, self.packing


def _output_axis(name: str) -> int:
    """Return the axis of an array that counts output rows: experts may stand before it."""
    return -1 if name == "bias" else -2


def linear_rows(
    x: mx.array, linears: Linear | tuple[Linear, ...], *, residual: mx.array | None = None, gated: bool = False
) -> mx.array:
    """Apply a linear map, or several whose outputs stand side by side, to rows: x [..., K] to [..., N].

    ``residual`` [..., N] is added. With ``gated`` the first half are gates: silu(gate) * up, [..., N / 2].
    Up to 16 rows of plain or affine weights run through our kernels where these run; more rows, and other
    packings, through MLX's own.
    """
    if isinstance(linears, Linear):
        return _one(x, linears, residual, gated)
    if len(linears) == 1:
        return _one(x, linears[0], residual, gated)
    return _finish(mx.concatenate([_one(x, each, None, False) for each in linears], axis=-1), residual, gated)


def module_rows(x: mx.array, module: nn.Module) -> mx.array:
    """Apply a linear module to rows [..., K], see ``linear_rows``."""
    return linear_rows(x, Linear.of(module))


def _one(x: mx.array, linear: Linear, residual: mx.array | None, gated: bool) -> mx.array:
    rows = x.size // x.shape[-1]
    affine = linear.packing is None or linear.packing.mode == "affine"
    if rows > MAX_VERIFY_ROWS or not affine or implementation() == "stock":
        return _finish(_stock(x, linear), residual, gated)
    flat, bias, packing = x.reshape(rows, -1), linear.bias, linear.packing
    residual = None if residual is None else residual.reshape(rows, -1)
    if packing is None:
        out = gemm_rows(flat, linear.weight, bias=bias, residual=residual, gated=gated)
    else:
        assert linear.scales is not None and linear.biases is not None
        out = qmm_rows(
            flat,
            linear.weight,
            linear.scales,
            linear.biases,
            group_size=packing.group_size,
            bits=packing.bits,
            bias=bias,
            residual=residual,
            gated=gated,
        )
    return out.reshape(*x.shape[:-1], -1)


def _stock(x: mx.array, linear: Linear) -> mx.array:
    packing = linear.packing
    if packing is None:
        out = x @ linear.weight.T
    else:
        assert linear.scales is not None
        out = mx.quantized_matmul(
            x,
            linear.weight,
            linear.scales,
            linear.biases,
            transpose=True,
            group_size=packing.group_size,
            bits=packing.bits,
            mode=packing.mode,
        )
    return out if linear.bias is None else out + linear.bias


def _finish(out: mx.array, residual: mx.array | None, gated: bool) -> mx.array:
    if gated:
        gate, up = mx.split(out, 2, axis=-1)
        out = nn.silu(gate) * up
    return out if residual is None else residual + out
