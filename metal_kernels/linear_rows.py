"""Linear maps over rows: the weights of one map, or of several that read the same rows."""

import mlx.core as mx
from mlx import nn

from metal_kernels.gemm_rows import gemm_rows
from metal_kernels.launching import cpu_library
from metal_kernels.launching.implementations import implementation
from metal_kernels.limits import MAX_VERIFY_ROWS
from metal_kernels.linear import Linear
from metal_kernels.qmm_rows import qmm_rows
from metal_kernels.row_products import cpu_product, suits_cpu


def linear_rows(
    x: mx.array, linears: Linear | tuple[Linear, ...], *, residual: mx.array | None = None, gated: bool = False
) -> mx.array:
    """Apply a linear map, or several whose outputs lie side by side, to rows.

    Up to MAX_VERIFY_ROWS rows of plain or affine weights run through our kernels where these run, and any number
    through our C text on a CPU; more rows, and other quantizations, run through MLX's operations.

    x: [..., K] in bfloat16, float16 or float32.
    linears: weights [N, K] in the dtype of x, or quantised; of several, N is their sum.
    residual: [..., N], or [..., N / 2] with ``gated``, in the dtype of x; it is added.
    gated: the first half of the outputs are gates: silu(gate) * up, [..., N / 2].

    Returns [..., N], gated [..., N / 2]. Raises ValueError, where kernels run, for shapes and dtypes that do not
    fit.
    """
    if isinstance(linears, Linear):
        return _one(x, linears, residual, gated)
    if len(linears) == 1:
        return _one(x, linears[0], residual, gated)
    return _finish(mx.concatenate([_one(x, each, None, False) for each in linears], axis=-1), residual, gated)


def gate_by_silu(gate: mx.array, up: mx.array) -> mx.array:
    """Return silu(gate) * up, by MLX's compiled silu as in mlx-lm: single operations may round differently."""
    return nn.silu(gate) * up


def _one(x: mx.array, linear: Linear, residual: mx.array | None, gated: bool) -> mx.array:
    rows, quantization, chosen = x.size // x.shape[-1], linear.quantization, implementation()
    if chosen == "cpu" and suits_cpu(x, linear) and (residual is None or residual.dtype == x.dtype):
        return cpu_product(x, linear, residual, gated)
    if chosen == "cpu":
        cpu_library.leave(f"products of {_kind(linear)} weights")
    affine = quantization is None or quantization.mode == "affine"
    if rows > MAX_VERIFY_ROWS or not affine or chosen in ("stock", "cpu"):
        return _finish(_stock(x, linear), residual, gated)
    flat = x.reshape(rows, -1)
    residual = None if residual is None else residual.reshape(rows, -1)
    if quantization is None:
        out = gemm_rows(flat, linear.weight, bias=linear.bias, residual=residual, gated=gated)
    else:
        assert linear.scales is not None and linear.biases is not None
        out = qmm_rows(
            flat,
            linear.weight,
            linear.scales,
            linear.biases,
            group_size=quantization.group_size,
            bits=quantization.bits,
            bias=linear.bias,
            residual=residual,
            gated=gated,
        )
    return out.reshape(*x.shape[:-1], -1)


def _kind(linear: Linear) -> str:
    return (
        str(linear.weight.dtype).removeprefix("mlx.core.")
        if linear.quantization is None
        else linear.quantization.mode
    )


def _stock(x: mx.array, linear: Linear) -> mx.array:
    quantization = linear.quantization
    if quantization is None:
        out = x @ linear.weight.T
    else:
        assert linear.scales is not None
        out = mx.quantized_matmul(
            x,
            linear.weight,
            linear.scales,
            linear.biases,
            transpose=True,
            group_size=quantization.group_size,
            bits=quantization.bits,
            mode=quantization.mode,
        ).astype(x.dtype)  # not that of scales of another type
    return out if linear.bias is None else out + linear.bias


def _finish(out: mx.array, residual: mx.array | None, gated: bool) -> mx.array:
    if gated:
        out = gate_by_silu(*mx.split(out, 2, axis=-1))
    return out if residual is None else residual + out
