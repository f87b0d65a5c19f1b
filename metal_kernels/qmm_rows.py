"""Affine quantised weights times few rows: memory gives every packed word once for all rows."""

from dataclasses import replace

import mlx.core as mx

from metal_kernels.implementations import implementation
from metal_kernels.launch import Kernel
from metal_kernels.row_products import Geometry, check_fused, check_packed, check_rows, finish, geometry
from metal_kernels.tensor_cores import CHUNK, INCLUDES, TensorCut, tensor_cut

KERNEL = Kernel(
    "qmm_rows",
    inputs=("x", "weight", "scales", "biases", "bias", "residual"),
    outputs=("out",),
    includes=("row_products.metal", "unpack.metal"),
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

    w[n, k] = scales[n, g] * q[n, k] + biases[n, g] with g = k // group_size, and q unpacked from ``weight`` as
    ``mx.quantize`` packs it in its affine mode. x: [R, K] in bfloat16, float16 or float32. weight:
    [N, K * bits / 32] uint32 with 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128. scales, biases:
    [N, K / group_size] in the dtype of x, or in 16 bits beside float32; bias: [N] likewise. residual: [R, N] in
    the dtype of x.

    gated: the first N / 2 outputs are gates, and the result is silu(gate) * other [R, N / 2], before a residual of
    that shape. Returns [R, N] in the dtype of x; the kernel sums in float32 and rounds once, and its rows do not
    depend on R or on each other. Rows of x begin at multiples of 16 bytes, as they do unless x was cut out of
    wider rows at an odd place. Raises ValueError for anything else.
    """
    check_rows("qmm_rows", x)
    if weight.ndim != 2:
        raise ValueError(f"qmm_rows takes weights [N, K * bits / 32], not {weight.shape}.")
    check_packed("qmm_rows", x.shape[1], x.dtype, weight, scales, biases, group_size, bits)
    check_fused("qmm_rows", x, weight.shape[0], bias, residual, gated)
    chosen = implementation()
    if chosen == "native":
        return _native(x, weight, scales, biases, group_size, bits, bias, residual, gated)
    if chosen == "reference":
        return reference_qmm_rows(
            x, weight, scales, biases, group_size=group_size, bits=bits, bias=bias, residual=residual, gated=gated
        )
    product = mx.quantized_matmul(x, weight, scales, biases, transpose=True, group_size=group_size, bits=bits)
    return finish(product, bias, residual, gated).astype(x.dtype)


def reference_qmm_rows(
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
    """Dequantise and multiply in float32, and round once."""
    whole = mx.dequantize(
        weight, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group_size, bits=bits
    )
    return finish(x.astype(mx.float32) @ whole.T, bias, residual, gated).astype(x.dtype)


def _cut(
    x: mx.array, outputs: int, scales: mx.array, bias: mx.array | None, group_size: int, bits: int, gated: bool
) -> tuple[Kernel, Geometry | TensorCut]:
    """Choose the kernel and its cut; neither depends on how many rows there are where bits could tell."""
    depth, chunk = x.shape[1], max(CHUNK, group_size * bits // 8)
    if bits in (4, 8) and scales.dtype == x.dtype and (bias is None or bias.dtype == x.dtype):
        tensor = tensor_cut(x, outputs, depth * bits // 8, chunk, gated)
        if tensor is not None:
            return TWIN, tensor
    return KERNEL, geometry(x.shape[0], outputs, depth, x.dtype, gated)


def _native(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    group_size: int,
    bits: int,
    bias: mx.array | None,
    residual: mx.array | None,
    gated: bool,
) -> mx.array:
    (rows, depth), outputs = x.shape, weight.shape[0]
    kernel, cut = _cut(x, outputs, scales, bias, group_size, bits, gated)
    # The kernel reads no absent input: x, which is there already, stands in for it.
    fused = [x if part is None else part for part in (bias, residual)]
    (out,) = kernel(
        [x, weight, scales, biases, *fused],
        template=[
            ("T", x.dtype),
            ("K", depth),
            ("N", outputs),
            ("BITS", bits),
            ("GROUP", group_size),
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
