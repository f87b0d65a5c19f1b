"""Logits of which some entries are forbidden, by minus infinity."""

import mlx.core as mx

from metal_kernels.launching import cpu_library
from metal_kernels.launching.implementations import implementation
from metal_kernels.launching.launch import Kernel

KERNEL = Kernel("mask_rows", inputs=("logits", "bits"), outputs=("masked",))
THREADS, EACH = 256, 8
WORD = 32


def mask_rows(logits: mx.array, bits: mx.array) -> mx.array:
    """Return logits [R, V] with minus infinity where an entry's bit is 0, in their dtype.

    logits: [R, V] in bfloat16, float16 or float32, R and V at least 1.
    bits: [R, ceil(V / 32)] uint32, as llguidance writes them: bit i % 32 of word i // 32 is entry i's.

    Entries that are allowed keep their bits, whatever they hold. Raises ValueError for other shapes and dtypes.
    """
    fits = logits.ndim == 2 and bits.shape == (logits.shape[0], -(-logits.shape[1] // WORD))
    if not fits or not logits.size or bits.dtype != mx.uint32:
        raise ValueError(
            "mask_rows takes logits [R, V] and bits [R, ceil(V / 32)] uint32, "
            f"not {logits.shape} and {bits.shape} {bits.dtype}."
        )
    chosen = implementation()
    if chosen == "native":
        return _native(logits, bits)
    if chosen == "cpu":
        return _cpu(logits, bits)
    return reference_mask_rows(logits, bits)


def reference_mask_rows(logits: mx.array, bits: mx.array) -> mx.array:
    """Do the same in MLX's operations."""
    spread = (bits[:, :, None] >> mx.arange(WORD, dtype=mx.uint32)) & 1
    allowed = spread.reshape(bits.shape[0], -1)[:, : logits.shape[1]] != 0
    return mx.where(allowed, logits, mx.array(-mx.inf, dtype=logits.dtype))


def _cpu(logits: mx.array, bits: mx.array) -> mx.array:
    masked = cpu_library.empty(logits.shape, logits.dtype)
    cpu_library.call("cpu_mask", logits, cpu_library.TYPES[logits.dtype], bits, *logits.shape, masked)
    return masked


def _native(logits: mx.array, bits: mx.array) -> mx.array:
    rows, count = logits.shape
    (masked,) = KERNEL(
        [logits, bits],
        template=[
            ("T", logits.dtype),
            ("COUNT", count),
            ("WORDS", bits.shape[1]),
            ("EACH", EACH),
            ("THREADS", THREADS),
        ],
        groups=(-(-count // (THREADS * EACH)), rows, 1),
        threads=(THREADS, 1, 1),
        shapes=[logits.shape],
        dtypes=[logits.dtype],
    )
    return masked
