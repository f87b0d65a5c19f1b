"""Rows times the weights of the experts that each row chose."""

import mlx.core as mx

from metal_kernels.launching import cpu_library
from metal_kernels.launching.implementations import implementation
from metal_kernels.launching.launch import Kernel
from metal_kernels.linear import Linear
from metal_kernels.row_products import FLOATS, check_dense, check_quantized, cpu_weights, finish, geometry

QUANTIZED = Kernel(
    "gather_qmm_rows",
    inputs=("x", "weight", "scales", "biases", "experts"),
    outputs=("out",),
    includes=("_row_products.h", "_dequantize.h"),
)
DENSE = Kernel(
    "gather_gemm_rows", inputs=("x", "weight", "experts"), outputs=("out",), includes=("_row_products.h",)
)
# The launch grid's second axis on NVIDIA GPUs.
MAX_PAIRS = 65535


def gather_rows(
    x: mx.array,
    weight: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    experts: mx.array,
    *,
    group_size: int = 64,
    bits: int = 4,
    gated: bool = False,
) -> mx.array:
    """Multiply rows by the weights of their experts: out[r, t] = weight[experts[r, t]] times x[r], or x[r, t].

    x: [R, K], one row for all its experts, or [R, T, K], in bfloat16, float16 or float32.
    weight: quantised [E, N, K * bits / 32] uint32, or plain [E, N, K] in the dtype of x with K a multiple of 8.
    scales, biases: [E, N, K / group_size] as ``qmm_rows`` takes them, or None for plain weights.
    experts: [R, T] int32, each from 0 to E - 1, which nothing checks.
    group_size, bits: as for ``qmm_rows``; plain weights have none.
    gated: the first N / 2 outputs are gates, and the result is silu(gate) * other.

    Returns [R, T, N], gated [R, T, N / 2], in the dtype of x; the kernel gives a row and an expert the bits that
    ``qmm_rows`` or ``gemm_rows`` give them. Raises ValueError for anything else.
    """
    if (scales is None) != (biases is None):
        raise ValueError("gather_rows takes scales and biases together, or neither.")
    linear = Linear(weight)
    if scales is not None and biases is not None:
        linear = Linear.affine(weight, scales, biases, group_size, bits)
    _check(x, linear, experts, gated)
    chosen = implementation()
    if chosen == "native":
        return _native(x, linear, experts, gated)
    if chosen == "cpu":
        return _cpu(x, linear, experts, gated)
    if chosen == "reference":
        return reference_gather_rows(x, linear, experts, gated)
    return finish(_stock(x, linear, experts).squeeze(-2), None, None, gated).astype(x.dtype)


def reference_gather_rows(x: mx.array, linear: Linear, experts: mx.array, gated: bool) -> mx.array:
    """Dequantise the chosen experts and multiply in float32, and round once."""
    rows = _row_of_each_pair(x).astype(mx.float32)
    product = (rows @ linear.dequantized(experts).swapaxes(-1, -2)).squeeze(-2)
    return finish(product, None, None, gated).astype(x.dtype)


def _row_of_each_pair(x: mx.array) -> mx.array:
    """Return x as [R, T or 1, 1, K]."""
    return x[:, None, None] if x.ndim == 2 else x[:, :, None]


def _stock(x: mx.array, linear: Linear, experts: mx.array) -> mx.array:
    """Return the products [R, T, 1, N] by MLX's operations."""
    rows, weight, quantization = _row_of_each_pair(x), linear.weight, linear.quantization
    if quantization is not None:
        assert linear.scales is not None
        return mx.gather_qmm(
            rows,
            weight,
            linear.scales,
            linear.biases,
            rhs_indices=experts,
            transpose=True,
            group_size=quantization.group_size,
            bits=quantization.bits,
        )
    if mx.default_device().type == mx.DeviceType.cpu and weight.dtype != mx.float32:
        # MLX's gather_mm knows float32 only on the CPU.
        return rows @ weight[experts].swapaxes(-1, -2)
    return mx.gather_mm(rows, weight.swapaxes(-1, -2), rhs_indices=experts)


def _native(x: mx.array, linear: Linear, experts: mx.array, gated: bool) -> mx.array:
    (count, each), (outputs, depth) = experts.shape, (linear.size, x.shape[-1])
    cut = geometry(1, outputs, depth, x.dtype, gated)
    template = [("T", x.dtype), ("K", depth), ("N", outputs), ("GATED", gated)]
    template += [("PAIRS_OF_ROW", each if x.ndim == 2 else 1), *cut.template]
    kernel, inputs = DENSE, [x, linear.weight, experts]
    if linear.quantization is not None:
        assert linear.scales is not None and linear.biases is not None
        kernel, inputs = QUANTIZED, [x, linear.weight, linear.scales, linear.biases, experts]
        template += [("BITS", linear.quantization.bits), ("GROUP", linear.quantization.group_size)]
    (out,) = kernel(
        inputs,
        template=template,
        groups=(cut.groups, count * each, 1),
        threads=(cut.threads, 1, 1),
        shapes=[(count, each, outputs // 2 if gated else outputs)],
        dtypes=[x.dtype],
    )
    return out


def _cpu(x: mx.array, linear: Linear, experts: mx.array, gated: bool) -> mx.array:
    (count, each), outputs = experts.shape, linear.size
    out = cpu_library.empty((count, each, outputs // 2 if gated else outputs), x.dtype)
    cpu_library.call(
        "cpu_gather",
        *(x, cpu_library.TYPES[x.dtype], count * each, each if x.ndim == 2 else 1, experts),
        *(*cpu_weights(linear), x.shape[-1], outputs, gated, out),
    )
    return out


def _check(x: mx.array, linear: Linear, experts: mx.array, gated: bool) -> None:
    weight = linear.weight
    if x.dtype not in FLOATS or weight.ndim != 3:
        raise ValueError(
            "gather_rows takes rows in bfloat16, float16 or float32 and weights [E, N, ...], "
            f"not {x.dtype} and {weight.shape}."
        )
    if experts.ndim != 2 or experts.dtype != mx.int32 or x.shape[:-1] not in (experts.shape[:1], experts.shape):
        raise ValueError(
            "gather_rows takes experts [R, T] in int32 beside x [R, K] or [R, T, K], "
            f"not {experts.shape} in {experts.dtype} beside {x.shape}."
        )
    if not experts.size or (experts.size > MAX_PAIRS and implementation() == "native"):
        raise ValueError(
            f"The kernel of gather_rows takes 1 to {MAX_PAIRS} pairs of a row and an expert, not {experts.size}."
        )
    if gated and linear.size % 2:
        raise ValueError(f"gather_rows: {linear.size} outputs are no two halves, gates and what they gate.")
    if linear.quantization is None:
        check_dense("gather_rows", x.shape[-1], x.dtype, weight)
    else:
        check_quantized("gather_rows", x.shape[-1], x.dtype, linear)
