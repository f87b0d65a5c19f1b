"""The grouped dynamic causal convolution of a DFlash2 block."""

import mlx.core as mx


def dynamic_conv(x: mx.array, base: mx.array, dynamic: mx.array) -> mx.array:
    """Convolve each block of rows with a kernel that is partly fixed and partly made from the row itself.

    out[i, c] = sum over t <= i of (base[t, c] + dynamic[i, t, group(c)]) * x[i - t, c]

    x: [..., B, H] with B the rows of one block, base: [T, H], dynamic: [..., B, T, G] with H a multiple of G.
    Returns [..., B, H] in the dtype of x. Rows before the first one count as zero.
    Source: Z Lab's DFlash2 (``GroupedDynamicCausalConv`` of PyPI ``dflash`` 0.1.0).
    """
    taps, groups = dynamic.shape[-2:]
    grouped = x.reshape(*x.shape[:-1], groups, -1)
    base = base.reshape(taps, groups, -1).astype(x.dtype)
    out = mx.zeros_like(grouped)
    for t in range(min(taps, x.shape[-2])):
        shifted = (
            grouped
            if t == 0
            else mx.concatenate([mx.zeros_like(grouped[..., :t, :, :]), grouped[..., :-t, :, :]], axis=-3)
        )
        out = out + base[t] * shifted + dynamic[..., t, :, None] * shifted
    return out.reshape(x.shape)
