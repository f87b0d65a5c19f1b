"""Affine quantised weights times few rows: memory gives every packed word once for all rows."""

from dataclasses import replace

import mlx.core as mx

from metal_kernels.launching.implementations import implementation
from metal_kernels.launching.launch import Kernel
from metal_kernels.launching.tensor_cores import CHUNK, INCLUDES, TensorCut, tensor_cut
from metal_kernels.linear import Linear
from metal_kernels.row_products import (
    Geometry,
    check_fused,
    check_quantized,
    check_rows,
    cpu_product,
    finish,
    geometry,
    launch_product,
)

KERNEL = Kernel(
    "qmm_rows",
    inputs=("x", "weight", "scales", "biases", "bias", "residual"),
    outputs=("out",),
    includes=("_row_products.h", "_dequantize.h"),
)
TWIN = replace(KERNEL, includes=INCLUDES, cuda_twin="qmm_rows.cu")


def qmm_rows(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    group_size: int,
    bits: int,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    gated: bool = False,
) -> mx.array:
    """Multiply 1 to 16 rows by quantised weights: out[r, n] = sum_k x[r, k] w[n, k] + bias[n] + residual[r, n].

    w[n, k] = scales[n, g] * q[n, k] + biases[n, g] with g = k // group_size, and q as the affine mode of
    ``mx.quantize`` packs it into ``weight``.

    x: [R, K] in bfloat16, float16 or float32. Rows begin at multiples of 16 bytes, as they do unless x was cut out
        of wider rows at an odd place.
    weight: [N, K * bits / 32] uint32.
    scales, biases: [N, K / group_size] in the dtype of x, or in 16 bits beside float32.
    group_size: 32, 64 or 128.
    bits: 2, 3, 4, 5, 6 or 8.
    bias: [N], in a dtype that scales may have.
    residual: [R, N], or [R, N / 2] with ``gated``, in the dtype of x.
    gated: the first N / 2 outputs are gates, and the result is silu(gate) * other.

    Returns [R, N], gated [R, N / 2], in the dtype of x. The kernel sums in float32 and rounds once; its rows do
    not depend on R or on each other. Raises ValueError for anything else.
    """
    check_rows("qmm_rows", x)
    if weight.ndim != 2:
        raise ValueError(f"qmm_rows takes weights [N, K * bits / 32], not {weight.shape}.")
    linear = Linear.affine(weight, scales, biases, group_size, bits, bias)
    check_quantized("qmm_rows", x.shape[1], x.dtype, linear)
    check_fused("qmm_rows", x, linear, residual, gated)
    chosen = implementation()
    if chosen == "native":
        inputs = [x, weight, scales, biases]
        return launch_product(*_cut(x, linear, gated), inputs, linear, residual, gated)
    if chosen == "cpu":
        return cpu_product(x, linear, residual, gated)
    if chosen == "reference":
        return reference_qmm_rows(x, linear, residual, gated)
    product = mx.quantized_matmul(x, weight, scales, biases, transpose=True, group_size=group_size, bits=bits)
    return finish(product, bias, residual, gated).astype(x.dtype)


def reference_qmm_rows(x: mx.array, linear: Linear, residual: mx.array | None, gated: bool) -> mx.array:
    """Dequantise and multiply in float32, and round once."""
    product = x.astype(mx.float32) @ linear.dequantized().T
    return finish(product, linear.bias, residual, gated).astype(x.dtype)


def _cut(x: mx.array, linear: Linear, gated: bool) -> tuple[Kernel, Geometry | TensorCut]:
    """Choose the kernel and its cut; neither depends on how many rows there are where bits could tell."""
    assert linear.quantization is not None
    bits, depth = linear.quantization.bits, x.shape[1]
    chunk = max(CHUNK, linear.quantization.group_size * bits // 8)
    if bits in (4, 8):
        tensor = tensor_cut(x, linear.size, depth * bits // 8, chunk, gated)
        if tensor is not None:
            return TWIN, tensor
    return KERNEL, geometry(x.shape[0], linear.size, depth, x.dtype, gated)
