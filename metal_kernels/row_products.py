"""What products of few rows share: how their kernels are cut and launched, what they take, what is fused in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from metal_kernels.launching import cpu_library
from metal_kernels.launching.launch import Kernel
from metal_kernels.limits import MAX_VERIFY_ROWS
from metal_kernels.linear import Linear

FLOATS = (mx.bfloat16, mx.float16, mx.float32)
BITS = (2, 3, 4, 5, 6, 8)
# What the kernels index with an int.
MAX_WEIGHTS = 1 << 31


class Cut(Protocol):
    """How a kernel divides a product: its template values, and the launch that fits them."""

    @property
    def groups(self) -> int:
        """Threadgroups."""

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""

    @property
    def template(self) -> list[tuple[str, int]]:
        """The kernel's template values for this cut."""


@dataclass(frozen=True)
class Geometry:
    """How ``_row_products.h`` cuts a product, and the launch that fits.

    rows: of x. columns: weight rows that one lane multiplies. splits: simdgroups that share K; the order of the
    sums depends on it, so it follows from K alone. teams: groups of simdgroups with columns of their own. steps:
    pieces of K that wait in threadgroup memory at once.
    """

    rows: int
    columns: int
    splits: int
    teams: int
    steps: int
    groups: int
    threads: int

    @property
    def template(self) -> list[tuple[str, int]]:
        """The kernel's template values for this cut."""
        names = ("R", "COLUMNS", "SPLITS", "TEAMS", "STEPS")
        values = (self.rows, self.columns, self.splits, self.teams, self.steps)
        return list(zip(names, values, strict=True))


def geometry(rows: int, outputs: int, depth: int, dtype: mx.Dtype, gated: bool) -> Geometry:
    """Cut a product of ``rows`` rows of ``depth`` values in ``dtype`` with ``outputs`` weight rows.

    Two columns to a lane where four would leave cores of a large GPU without simdgroups; few rows have less to do
    and need more of them.
    """
    splits, teams = (1 if depth < 1024 else 2), 2
    columns = 4 if outputs // 16 * splits >= (1024 if rows <= 2 else 256) else 2
    step_bytes = rows * splits * 256 * dtype.size
    steps = min(max(8192 // step_bytes, 1), -(-depth // (splits * 256)))
    width, group = (outputs // 2, teams * columns * 2) if gated else (outputs, teams * columns * 4)
    threads = 32 * splits * teams * (2 if rows > 8 else 1)
    return Geometry(rows, columns, splits, teams, steps, -(-width // group), threads)


def check_rows(name: str, x: mx.array) -> None:
    """Raise ValueError unless x is [R, K] with 1 to 16 rows of floats."""
    if x.ndim != 2 or not 1 <= x.shape[0] <= MAX_VERIFY_ROWS or x.dtype not in FLOATS:
        raise ValueError(
            f"{name} takes x [R, K] with 1 to {MAX_VERIFY_ROWS} rows in bfloat16, float16 or float32, "
            f"not {x.shape} in {x.dtype}."
        )


def check_dense(name: str, depth: int, dtype: mx.Dtype, weight: mx.array) -> None:
    """Raise ValueError unless weight [..., N, K] fits rows of ``depth`` values of ``dtype``."""
    if weight.shape[-1] != depth or weight.dtype != dtype:
        raise ValueError(
            f"{name} takes weights of {depth} values in {dtype}, like x, not {weight.shape} in {weight.dtype}."
        )
    if depth % 8 or not weight.size or weight.shape[-2] * depth >= MAX_WEIGHTS:
        raise ValueError(
            f"{name} takes weights [N, K] whose K is a multiple of 8 and that have 1 to 2^31 - 1 values, "
            f"not {weight.shape}."
        )


def check_quantized(
    name: str,
    depth: int,
    dtype: mx.Dtype,
    linear: Linear,
) -> None:
    """Raise ValueError unless affine weights [..., N, .] fit rows of ``depth`` values of ``dtype``."""
    weight, scales, biases, quantization = linear.weight, linear.scales, linear.biases, linear.quantization
    assert scales is not None and biases is not None and quantization is not None
    group_size, bits = quantization.group_size, quantization.bits
    if bits not in BITS or group_size not in (32, 64, 128):
        raise ValueError(
            f"{name} takes 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128, not {bits} in {group_size}."
        )
    if depth % group_size:
        raise ValueError(f"{name} takes a K that is a multiple of the group, {group_size}, not {depth}.")
    outputs = weight.shape[:-1]
    if weight.dtype != mx.uint32 or weight.shape[-1] != depth * bits // 32:
        raise ValueError(
            f"{name}: {depth} values of {bits} bits are {depth * bits // 32} words in uint32, "
            f"not {weight.shape} in {weight.dtype}."
        )
    groups = (*outputs, depth // group_size)
    if scales.shape != groups or biases.shape != groups:
        raise ValueError(f"{name} takes scales and biases {groups}, not {scales.shape} and {biases.shape}.")
    if scales.dtype != biases.dtype or not _suits(scales.dtype, dtype):
        raise ValueError(
            f"{name} takes scales and biases of x's dtype, or of 16 bits beside float32, "
            f"not {scales.dtype} and {biases.dtype} beside {dtype}."
        )
    # MLX hands inputs of fewer than 8 elements to a kernel in another address space.
    if weight.size < 8 or weight.shape[-2] * depth >= MAX_WEIGHTS:
        raise ValueError(f"{name} takes at least 8 packed words of up to 2^31 - 1 values, not {weight.shape}.")


def check_fused(name: str, x: mx.array, linear: Linear, residual: mx.array | None, gated: bool) -> None:
    """Raise ValueError unless what is fused into the product of x with a linear map fits it."""
    outputs, bias = linear.size, linear.bias
    if gated and outputs % 2:
        raise ValueError(f"{name}: gates and what they gate are two halves, so {outputs} outputs cannot be gated.")
    if bias is not None and (bias.shape != (outputs,) or not _suits(bias.dtype, x.dtype)):
        raise ValueError(
            f"{name} takes a bias [{outputs}] in {x.dtype}, or of 16 bits beside float32, "
            f"not {bias.shape} in {bias.dtype}."
        )
    shape = (x.shape[0], outputs // 2 if gated else outputs)
    if residual is not None and (residual.shape != shape or residual.dtype != x.dtype):
        raise ValueError(
            f"{name} takes a residual {shape} in {x.dtype}, not {residual.shape} in {residual.dtype}."
        )


def _suits(dtype: mx.Dtype, rows: mx.Dtype) -> bool:
    """Whether scales or a bias of ``dtype`` fit rows of another."""
    return dtype == rows or (rows == mx.float32 and dtype in FLOATS)


def finish(product: mx.array, bias: mx.array | None, residual: mx.array | None, gated: bool) -> mx.array:
    """Do in MLX's operations what the kernels fuse: add the bias, gate by silu, add the residual."""
    if bias is not None:
        product = product + bias
    if gated:
        gate, up = mx.split(product, 2, axis=-1)
        product = gate * mx.sigmoid(gate) * up
    return product if residual is None else product + residual


def launch_product(
    kernel: Kernel,
    cut: Cut,
    inputs: Sequence[mx.array],
    linear: Linear,
    residual: mx.array | None,
    gated: bool,
) -> mx.array:
    """Launch ``qmm_rows`` or ``gemm_rows``; ``inputs`` are x and the weights, which bias and residual follow."""
    x, outputs = inputs[0], linear.size
    # The kernel reads no absent input: x, which is there already, takes its place.
    fused = [x if part is None else part for part in (linear.bias, residual)]
    template: list[tuple[str, Any]] = [("T", x.dtype), ("K", x.shape[1]), ("N", outputs)]
    if linear.quantization is not None:
        template += [("BITS", linear.quantization.bits), ("GROUP", linear.quantization.group_size)]
    template += [("HAS_BIAS", linear.bias is not None), ("HAS_RESIDUAL", residual is not None), ("GATED", gated)]
    (out,) = kernel(
        [*inputs, *fused],
        template=[*template, *cut.template],
        groups=(cut.groups, 1, 1),
        threads=(cut.threads, 1, 1),
        shapes=[(x.shape[0], outputs // 2 if gated else outputs)],
        dtypes=[x.dtype],
    )
    return out


def suits_cpu(x: mx.array, linear: Linear) -> bool:
    """Whether the CPU library multiplies rows [..., K], however many, by a linear map.

    Scales, biases and the bias may be of any floating type; plain weights are of that of x.
    """
    weight, scales, biases, quantization = linear.weight, linear.scales, linear.biases, linear.quantization
    floats = [x, *(part for part in (scales, biases, linear.bias) if part is not None)]
    if not x.size or not weight.size or any(part.dtype not in FLOATS for part in floats):
        return False
    if quantization is None:
        return weight.dtype == x.dtype and weight.shape[-1] == x.shape[-1]
    if quantization.mode != "affine" or scales is None or biases is None or scales.dtype != biases.dtype:
        return False
    is_whole = quantization.group_size % 32 == 0 and x.shape[-1] == scales.shape[-1] * quantization.group_size
    return is_whole and quantization.bits in BITS


def cpu_product(x: mx.array, linear: Linear, residual: mx.array | None, gated: bool) -> mx.array:
    """Multiply rows [..., K] by a linear map that ``suits_cpu``, with what is fused, in the CPU library."""
    depth, outputs, types = x.shape[-1], linear.size, cpu_library.TYPES
    out = cpu_library.empty((*x.shape[:-1], outputs // 2 if gated else outputs), x.dtype)
    bias_type = 0 if linear.bias is None else types[linear.bias.dtype]
    cpu_library.call(
        "cpu_linear",
        *(x, types[x.dtype], x.size // depth),
        *(*cpu_weights(linear), depth, outputs),
        *(linear.bias, bias_type, residual, gated, out),
    )
    return out


def cpu_weights(linear: Linear) -> tuple[mx.array | int | None, ...]:
    """Return weights as the CPU library takes them: numbers, scales, biases, bits, type, group."""
    quantization = linear.quantization
    bits, group_size = (0, 0) if quantization is None else (quantization.bits, quantization.group_size)
    numbers = linear.weight if linear.scales is None else linear.scales
    return linear.weight, linear.scales, linear.biases, bits, cpu_library.TYPES[numbers.dtype], group_size
