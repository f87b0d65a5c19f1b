"""Rows times the weights of the experts that each row chose."""

import mlx.core as mx

from metal_kernels.implementations import implementation
from metal_kernels.launch import Kernel
from metal_kernels.row_products import FLOATS, check_dense, check_packed, finish, geometry

PACKED = Kernel(
    "gather_qmm_rows",
    inputs=("x", "weight", "scales", "biases", "experts"),
    outputs=("out",),
    includes=("row_products.metal", "unpack.metal"),
)
DENSE = Kernel(
    "gather_gemm_rows", inputs=("x", "weight", "experts"), outputs=("out",), includes=("row_products.metal",)
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

    x: [R, K], one row for all its experts, or [R, T, K], in bfloat16, float16 or float32. experts: [R, T] int32,
    each from 0 to E - 1, which nothing checks. Quantised weights: weight [E, N, K * bits / 32] uint32 with scales
    and biases [E, N, K / group_size], as ``qmm_rows`` takes them. Plain weights: weight [E, N, K] in the dtype of
    x with K a multiple of 8, and None for scales and biases.

    gated: the first N / 2 outputs are gates, and the result is silu(gate) * other [R, T, N / 2]. Returns [R, T, N]
    in the dtype of x; the kernel gives a row and an expert the bits that ``qmm_rows`` or ``gemm_rows`` give them.
    Raises ValueError for anything else.
    """
    _check(x, weight, scales, biases, experts, group_size, bits, gated)
    chosen = implementation()
    if chosen == "native":
        return _native(x, weight, scales, biases, experts, group_size, bits, gated)
    if chosen == "reference":
        return reference_gather_rows(
            x, weight, scales, biases, experts, group_size=group_size, bits=bits, gated=gated
        )
    return _stock(x, weight, scales, biases, experts, group_size, bits, gated)


def reference_gather_rows(
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
    """Dequantise the chosen experts and multiply in float32, and round once."""
    chosen = weight[experts]
    if scales is not None and biases is not None:
        scale, bias = (part[experts].astype(mx.float32) for part in (scales, biases))
        chosen = mx.dequantize(chosen, scale, bias, group_size=group_size, bits=bits)
    rows = _row_of_each_pair(x).astype(mx.float32)
    product = (rows @ chosen.astype(mx.float32).swapaxes(-1, -2)).squeeze(-2)
    return finish(product, None, None, gated).astype(x.dtype)


def _row_of_each_pair(x: mx.array) -> mx.array:
    """Return x as [R, T or 1, 1, K]."""
    return x[:, None, None] if x.ndim == 2 else x[:, :, None]


def _stock(
    x: mx.array,
    weight: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    experts: mx.array,
    group_size: int,
    bits: int,
    gated: bool,
) -> mx.array:
    rows = _row_of_each_pair(x)
    if scales is not None:
        product = mx.gather_qmm(
            rows, weight, scales, biases, rhs_indices=experts, transpose=True, group_size=group_size, bits=bits
        )
    elif mx.default_device().type == mx.DeviceType.cpu and weight.dtype != mx.float32:
        # MLX's gather_mm knows float32 only on the CPU.
        product = rows @ weight[experts].swapaxes(-1, -2)
    else:
        product = mx.gather_mm(rows, weight.swapaxes(-1, -2), rhs_indices=experts)
    return finish(product.squeeze(-2), None, None, gated).astype(x.dtype)


def _native(
    x: mx.array,
    weight: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    experts: mx.array,
    group_size: int,
    bits: int,
    gated: bool,
) -> mx.array:
    (count, each), (outputs, depth) = experts.shape, (weight.shape[1], x.shape[-1])
    cut = geometry(1, outputs, depth, x.dtype, gated)
    template = [("T", x.dtype), ("K", depth), ("N", outputs), ("GATED", gated)]
    template += [("PAIRS_OF_ROW", each if x.ndim == 2 else 1), *cut.template]
    kernel, inputs = DENSE, [x, weight, experts]
    if scales is not None and biases is not None:
        kernel, inputs = PACKED, [x, weight, scales, biases, experts]
        template += [("BITS", bits), ("GROUP", group_size)]
    (out,) = kernel(
        inputs,
        template=template,
        groups=(cut.groups, count * each, 1),
        threads=(cut.threads, 1, 1),
        shapes=[(count, each, outputs // 2 if gated else outputs)],
        dtypes=[x.dtype],
    )
    return out


def _check(
    x: mx.array,
    weight: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    experts: mx.array,
    group_size: int,
    bits: int,
    gated: bool,
) -> None:
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
    if gated and weight.shape[1] % 2:
        raise ValueError(f"gather_rows: {weight.shape[1]} outputs are no two halves, gates and what they gate.")
    if (scales is None) != (biases is None):
        raise ValueError("gather_rows takes scales and biases together, or neither.")
    if scales is None or biases is None:
        check_dense("gather_rows", x.shape[-1], x.dtype, weight)
    else:
        check_packed("gather_rows", x.shape[-1], x.dtype, weight, scales, biases, group_size, bits)
