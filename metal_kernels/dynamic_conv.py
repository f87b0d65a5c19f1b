"""The grouped dynamic causal convolution of a DFlash2 block."""

import math
from collections.abc import Iterator

import mlx.core as mx

from metal_kernels.launching import cpu_library
from metal_kernels.launching.implementations import implementation
from metal_kernels.launching.launch import Kernel

KERNEL = Kernel("dynamic_conv", inputs=("x", "base", "dynamic", "residual"), outputs=("out",))
THREADS = 256
MAX_REPEATED_ROWS = 256


def dynamic_conv(
    x: mx.array, base: mx.array, dynamic: mx.array, residual: mx.array | None = None, side: int | None = None
) -> mx.array:
    """Convolve each block of rows with a kernel that is partly fixed and partly made from the row itself.

    out[i, c] = residual[i, c] + sum over t <= i of (base[t, c] + dynamic[i, t, group(c)]) * x[i - t, c]

    x: [..., B, H] in bfloat16, float16 or float32, with B the rows of one block.
    base: [T, H]; with a side, [S, T, H].
    dynamic: [..., B, T, G] with H a multiple of G; with a side, [..., B, S, T, G].
    residual: like x; None counts as 0.
    side: which of S kernels is applied; cutting it out first would copy it.

    Returns [..., B, H] in the dtype of x. Rows before the first one count as zero. Raises ValueError for shapes
    that do not fit each other.
    The kernel and the C text take up to 256 rows in all and have no gradient: more rows, as in training, run MLX's
    operations.
    Source: Z Lab's DFlash2 (``GroupedDynamicCausalConv`` of PyPI ``dflash`` 0.1.0).
    """
    _check(x, base, dynamic, residual, side)
    chosen, few = implementation(), x.size // x.shape[-1] <= MAX_REPEATED_ROWS
    if chosen == "native" and few:
        return _native(x, base, dynamic, residual, side)
    if chosen == "cpu" and few and x.size and (residual is None or residual.dtype == x.dtype):
        return _cpu(x, base, dynamic, residual, side)
    if chosen == "cpu":
        cpu_library.leave("dynamic convolutions")
    if side is not None:
        base, dynamic = base[side], dynamic[..., side, :, :]
    if chosen == "reference":
        return reference_dynamic_conv(x, base, dynamic, residual)
    out = _convolve(x, base.astype(x.dtype), dynamic)
    return out if residual is None else residual + out


def reference_dynamic_conv(
    x: mx.array, base: mx.array, dynamic: mx.array, residual: mx.array | None = None
) -> mx.array:
    """Do the same, without sides, in float32 with one rounding at the end."""
    wide, base, dynamic = (part.astype(mx.float32) for part in (x, base, dynamic))
    out = mx.zeros_like(wide)
    for t, shifted in enumerate(_shifts(wide, base.shape[0])):
        of_channels = mx.repeat(dynamic[..., t, :], x.shape[-1] // dynamic.shape[-1], axis=-1)
        out = out + (base[t] + of_channels) * shifted
    return (out if residual is None else residual.astype(mx.float32) + out).astype(x.dtype)


def _check(x: mx.array, base: mx.array, dynamic: mx.array, residual: mx.array | None, side: int | None) -> None:
    sides = () if side is None else base.shape[:1]
    taps, width = base.shape[-2:]
    groups = dynamic.shape[-1]
    if (
        base.shape != (*sides, taps, width)
        or x.shape[-1:] != (width,)
        or dynamic.shape != (*x.shape[:-1], *sides, taps, groups)
        or width % groups
        or (side is not None and not 0 <= side < base.shape[0])
        or (residual is not None and residual.shape != x.shape)
    ):
        raise ValueError(
            "dynamic_conv takes x [..., B, H], base [T, H], dynamic [..., B, T, G] with H a multiple of G and a "
            f"residual like x, or sides before T; not {x.shape}, {base.shape}, {dynamic.shape}, "
            f"{None if residual is None else residual.shape} with side {side}."
        )


def _convolve(x: mx.array, base: mx.array, dynamic: mx.array) -> mx.array:
    out = mx.zeros_like(x)
    for t, shifted in enumerate(_shifts(x, base.shape[0])):
        out = out + base[t] * shifted + _of_channels(dynamic[..., t, :], x) * shifted
    return out


def _of_channels(shares: mx.array, x: mx.array) -> mx.array:
    """Give each channel of x [..., H] the share [..., G] of its group."""
    size = x.shape[-1] // shares.shape[-1]
    if x.size // x.shape[-1] <= MAX_REPEATED_ROWS:
        return mx.repeat(shares, size, axis=-1)
    # A product's gradient is a product; a repetition's is a sum of many short rows, which GPUs are slow at.
    return shares @ mx.repeat(mx.eye(shares.shape[-1], dtype=shares.dtype), size, axis=1)


def _shifts(x: mx.array, taps: int) -> Iterator[mx.array]:
    """Yield rows [..., B, H] moved by 0 .. taps - 1 places, with zeros before the first."""
    for t in range(min(taps, x.shape[-2])):
        yield x if t == 0 else mx.concatenate([mx.zeros_like(x[..., :t, :]), x[..., :-t, :]], axis=-2)


def _cpu(x: mx.array, base: mx.array, dynamic: mx.array, residual: mx.array | None, side: int | None) -> mx.array:
    types, (block, width), out = cpu_library.TYPES, x.shape[-2:], cpu_library.empty(x.shape, x.dtype)
    sides = 1 if side is None else base.shape[0]
    cpu_library.call(
        "cpu_dynamic_conv",
        *(x, types[x.dtype], base, types[base.dtype], dynamic, types[dynamic.dtype], residual),
        *(x.size // width, block, width, base.shape[-2], dynamic.shape[-1], sides, side or 0, out),
    )
    return out


def _native(
    x: mx.array, base: mx.array, dynamic: mx.array, residual: mx.array | None, side: int | None
) -> mx.array:
    block, width = x.shape[-2:]
    (out,) = KERNEL(
        [x, base, dynamic, x if residual is None else residual],
        template=[
            ("T", x.dtype),
            ("WIDTH", width),
            ("TAPS", base.shape[-2]),
            ("GROUPS", dynamic.shape[-1]),
            ("SIDES", 1 if side is None else base.shape[0]),
            ("SIDE", side or 0),
            ("RESIDUAL", residual is not None),
            ("THREADS", THREADS),
        ],
        groups=(-(-width // THREADS), block, math.prod(x.shape[:-2])),
        threads=(THREADS, 1, 1),
        shapes=[x.shape],
        dtypes=[x.dtype],
    )
    return out
