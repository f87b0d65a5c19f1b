"""Weights of the rows' own type times few rows: memory gives every weight once for all rows."""

from dataclasses import replace

import mlx.core as mx

from metal_kernels.implementations import implementation
from metal_kernels.launch import Kernel
from metal_kernels.row_products import Geometry, check_dense, check_fused, check_rows, finish, geometry
from metal_kernels.tensor_cores import INCLUDES, TensorCut, tensor_cut

KERNEL = Kernel(
    "gemm_rows", inputs=("x", "weight", "bias", "residual"), outputs=("out",), includes=("row_products.metal",)
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

    x: [R, K] in bfloat16, float16 or float32, K a multiple of 8. weight: [N, K] in the dtype of x. bias: [N] in
    the dtype of x, or in 16 bits beside float32. residual: [R, N] in the dtype of x.

    gated: the first N / 2 outputs are gates, and the result is silu(gate) * other [R, N / 2], before a residual of
    that shape. Returns [R, N] in the dtype of x; the kernel sums in float32 and rounds once, and its rows do not
    depend on R or on each other. Rows of x begin at multiples of 16 bytes, as they do unless x was cut out of
    wider rows at an odd place. Raises ValueError for anything else.
    """
    check_rows("gemm_rows", x)
    if weight.ndim != 2:
        raise ValueError(f"gemm_rows takes weights [N, K], not {weight.shape}.")
    check_dense("gemm_rows", x.shape[1], x.dtype, weight)
    check_fused("gemm_rows", x, weight.shape[0], bias, residual, gated)
    chosen = implementation()
    if chosen == "native":
        return _native(x, weight, bias, residual, gated)
    if chosen == "reference":
        return reference_gemm_rows(x, weight, bias=bias, residual=residual, gated=gated)
    return finish(x @ weight.T, bias, residual, gated).astype(x.dtype)


def reference_gemm_rows(
    x: mx.array,
    weight: mx.array,
    *,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    gated: bool = False,
) -> mx.array:
    """Multiply in float32, and round once."""
    product = x.astype(mx.float32) @ weight.astype(mx.float32).T
    return finish(product, bias, residual, gated).astype(x.dtype)


def _cut(x: mx.array, outputs: int, bias: mx.array | None, gated: bool) -> tuple[Kernel, Geometry | TensorCut]:
    """Choose the kernel and its cut; neither depends on how many rows there are where bits could tell."""
    if bias is None or bias.dtype == x.dtype:
        tensor = tensor_cut(x, outputs, x.shape[1] * 2, TWIN_CHUNK, gated)
        if tensor is not None:
            return TWIN, tensor
    return KERNEL, geometry(x.shape[0], outputs, x.shape[1], x.dtype, gated)


def _native(
    x: mx.array, weight: mx.array, bias: mx.array | None, residual: mx.array | None, gated: bool
) -> mx.array:
    (rows, depth), outputs = x.shape, weight.shape[0]
    kernel, cut = _cut(x, outputs, bias, gated)
    # The kernel reads no absent input: x, which is there already, stands in for it.
    fused = [x if part is None else part for part in (bias, residual)]
    (out,) = kernel(
        [x, weight, *fused],
        template=[
            ("T", x.dtype),
            ("K", depth),
            ("N", outputs),
            ("HAS_BIAS", bias is not None),
            ("HAS_RESIDUAL", residual is not None),
            ("GATED", gated),
            *cut.template,
        ],
        groups=(cut.groups, 1, 1),
        threads=(cut.threads, 1, 1),
        shapes=[(rows, outputs // 2 if gated else outputs)],
        dtypes=[x.dtype],
    )
    return out
