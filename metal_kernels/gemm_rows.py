"""Weights of the rows' own type times few rows: memory gives every weight once for all rows."""

from dataclasses import replace

import mlx.core as mx

from metal_kernels.launching.implementations import implementation
from metal_kernels.launching.launch import Kernel
from metal_kernels.launching.tensor_cores import INCLUDES, TensorCut, tensor_cut
from metal_kernels.linear import Linear
from metal_kernels.row_products import (
    Geometry,
    check_dense,
    check_fused,
    check_rows,
    cpu_product,
    finish,
    geometry,
    launch_product,
)

KERNEL = Kernel(
    "gemm_rows", inputs=("x", "weight", "bias", "residual"), outputs=("out",), includes=("_row_products.h",)
)
TWIN = replace(KERNEL, includes=INCLUDES, cuda_twin="gemm_rows.cu")
# Bytes of a weight row that a warp of gemm_rows.cu takes at a time.
TWIN_CHUNK = 128


def gemm_rows(
    x: mx.array,
    weight: mx.array,
    *,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    gated: bool = False,
) -> mx.array:
    """Multiply 1 to 16 rows by weights: out[r, n] = sum_k x[r, k] weight[n, k] + bias[n] + residual[r, n].

    x: [R, K] in bfloat16, float16 or float32, K a multiple of 8. Rows begin at multiples of 16 bytes, as they do
        unless x was cut out of wider rows at an odd place.
    weight: [N, K] in the dtype of x.
    bias: [N] in the dtype of x, or in 16 bits beside float32.
    residual: [R, N], or [R, N / 2] with ``gated``, in the dtype of x.
    gated: the first N / 2 outputs are gates, and the result is silu(gate) * other.

    Returns [R, N], gated [R, N / 2], in the dtype of x. The kernel sums in float32 and rounds once; its rows do
    not depend on R or on each other. Raises ValueError for anything else.
    """
    check_rows("gemm_rows", x)
    if weight.ndim != 2:
        raise ValueError(f"gemm_rows takes weights [N, K], not {weight.shape}.")
    linear = Linear(weight, bias=bias)
    check_dense("gemm_rows", x.shape[1], x.dtype, weight)
    check_fused("gemm_rows", x, linear, residual, gated)
    chosen = implementation()
    if chosen == "native":
        return launch_product(*_cut(x, linear, gated), [x, weight], linear, residual, gated)
    if chosen == "cpu":
        return cpu_product(x, linear, residual, gated)
    if chosen == "reference":
        return reference_gemm_rows(x, linear, residual, gated)
    return finish(x @ weight.T, bias, residual, gated).astype(x.dtype)


def reference_gemm_rows(x: mx.array, linear: Linear, residual: mx.array | None, gated: bool) -> mx.array:
    """Multiply in float32, and round once."""
    product = x.astype(mx.float32) @ linear.weight.astype(mx.float32).T
    return finish(product, linear.bias, residual, gated).astype(x.dtype)


def _cut(x: mx.array, linear: Linear, gated: bool) -> tuple[Kernel, Geometry | TensorCut]:
    """Choose the kernel and its cut; neither depends on how many rows there are where bits could tell."""
    tensor = tensor_cut(x, linear.size, x.shape[1] * 2, TWIN_CHUNK, gated)
    if tensor is not None:
        return TWIN, tensor
    return KERNEL, geometry(x.shape[0], linear.size, x.shape[1], x.dtype, gated)
