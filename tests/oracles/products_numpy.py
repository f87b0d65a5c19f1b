"""Products of rows with plain and affine quantised weights in float64, and bounds of rounding errors."""

import mlx.core as mx
import numpy as np

Array = np.ndarray
# The largest relative error of one rounding to a dtype.
ROUNDING = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11, mx.float32: 2.0**-24}
# The error of a sum in float32, relative to the sum of its parts' magnitudes.
SUMMING = 2.0**-21


def as_numpy(x: mx.array) -> Array:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def integers_of(words: mx.array, bits: int) -> Array:
    """Read each row of uint32 words as one stream of ``bits``-bit numbers, the lowest bits first."""
    rows = np.array(words).astype("<u4").view(np.uint8)
    stream = np.unpackbits(rows, axis=-1, bitorder="little")
    return stream.reshape(*rows.shape[:-1], -1, bits) @ (1 << np.arange(bits))


def dequantised(
    words: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int
) -> tuple[Array, Array]:
    """Return the weights scale * q + bias, and bounds of the magnitudes of their parts."""
    scale, bias = (np.repeat(as_numpy(part), group_size, axis=-1) for part in (scales, biases))
    return scale * integers_of(words, bits) + bias, np.abs(scale) * 2**bits + np.abs(bias)


def product(x: Array, weights: Array, sizes: Array | None = None) -> tuple[Array, Array]:
    """Multiply rows by weights [..., N, K]; return the sums, and error bounds of float32 sums."""
    sizes = np.abs(weights) if sizes is None else sizes
    return np.einsum("...k,...nk->...n", x, weights), SUMMING * np.einsum("...k,...nk->...n", np.abs(x), sizes)


def fused(
    sums: Array, noise: Array, bias: mx.array | None, residual: mx.array | None, gated: bool
) -> tuple[Array, Array]:
    """Add the bias, gate the second half by silu of the first, add the residual; in float64."""
    if bias is not None:
        sums = sums + as_numpy(bias)
    if gated:
        (gate, up), (gate_noise, up_noise) = np.split(sums, 2, axis=-1), np.split(noise, 2, axis=-1)
        silu = gate / (1 + np.exp(-gate))
        sums = silu * up
        # The slope of silu is at most 1.1.
        noise = 1.1 * gate_noise * np.abs(up) + up_noise * np.abs(silu) + SUMMING * np.abs(sums)
    return sums if residual is None else sums + as_numpy(residual), noise


def assert_rounded_once(got: mx.array, expected: Array, noise: Array, dtype: mx.Dtype) -> None:
    """Assert that ``got`` is ``expected`` rounded to ``dtype``, after float32 sums with errors up to ``noise``."""
    assert (got.shape, got.dtype) == (expected.shape, dtype)
    error = np.abs(as_numpy(got) - expected)
    allowed = ROUNDING[dtype] * (np.abs(expected) + noise) + noise + 1e-30
    assert np.all(error <= allowed), f"{np.max(error / allowed):.2f} times the bound of rounding errors"
