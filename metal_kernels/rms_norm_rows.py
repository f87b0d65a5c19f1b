"""The RMSNorm of rows, with the residual addition that stands before it in a block."""

import mlx.core as mx

from metal_kernels.constants import floats
from metal_kernels.implementations import implementation
from metal_kernels.launch import Kernel

KERNEL = Kernel("rms_norm_rows", inputs=("x", "residual", "weight", "eps"), outputs=("out",))
MAX_THREADS = 1024


def rms_norm_rows(
    x: mx.array, weight: mx.array, eps: float, residual: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Add rows to a residual and norm the sum.

    y = x + residual; normed = y / sqrt(mean(y ** 2) + eps) * weight

    x, residual: [R, K] in one dtype, weight: [K]. Returns (y, normed), both [R, K] in the dtype of x; without a
    residual y is x itself. y is rounded to that dtype before it is normed. Raises ValueError for other shapes and
    dtypes.
    """
    like_x = residual is None or (residual.shape, residual.dtype) == (x.shape, x.dtype)
    if x.ndim != 2 or not x.size or weight.shape != x.shape[1:] or not like_x:
        found = "no residual" if residual is None else f"residual {residual.shape} {residual.dtype}"
        raise ValueError(
            "rms_norm_rows takes x [R, K], weight [K] and a residual like x, "
            f"not {x.shape} {x.dtype}, {weight.shape} and {found}."
        )
    if implementation() == "native":
        return _native(x, weight, eps, residual)
    y = x if residual is None else x + residual
    if implementation() == "reference":
        return y, reference_rms_norm_rows(y, weight, eps)
    return y, mx.fast.rms_norm(y, weight, eps).astype(y.dtype)


def reference_rms_norm_rows(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Norm rows in float32, with one rounding at the end."""
    wide = x.astype(mx.float32)
    scale = mx.rsqrt(mx.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(mx.float32)).astype(x.dtype)


def _native(x: mx.array, weight: mx.array, eps: float, residual: mx.array | None) -> tuple[mx.array, mx.array]:
    rows, width = x.shape
    threads = min(MAX_THREADS, -(-width // 128) * 32)
    (out,) = KERNEL(
        [x, x if residual is None else residual, weight, floats(eps)],
        template=[("T", x.dtype), ("WIDTH", width), ("THREADS", threads), ("RESIDUAL", residual is not None)],
        groups=(1, rows, 1),
        threads=(threads, 1, 1),
        shapes=[(rows if residual is None else 2 * rows, width)],
        dtypes=[x.dtype],
    )
    return (x, out) if residual is None else (out[rows:], out[:rows])
