"""The largest entry of each logits row."""

import mlx.core as mx

from metal_kernels.launching import cpu_library
from metal_kernels.launching.implementations import implementation
from metal_kernels.launching.launch import Kernel

KERNEL = Kernel("argmax_rows", inputs=("values", "ids", "flags"), outputs=("best", "choices", "finite"))
THREADS, EACH = 256, 32
NO_IDS, NO_FLAGS = mx.zeros((1,), dtype=mx.int32), mx.zeros((1,), dtype=mx.bool_)


def argmax_rows(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Find the largest entry of each row, the lowest index among equals.

    logits: [R, V] in bfloat16, float16 or float32, R and V at least 1.

    Returns (choices [R] int32, finite [R] bool).
    A row that holds NaN has no largest entry: its choice is -1. ``finite`` is false where a row holds NaN or an
    infinity of either sign. Raises ValueError for other shapes.
    """
    if logits.ndim != 2 or not logits.size:
        raise ValueError(f"argmax_rows takes logits [R, V] with at least one entry, not {logits.shape}.")
    chosen = implementation()
    if chosen == "native":
        return _native(logits)
    if chosen == "cpu":
        return _cpu(logits)
    # Nothing is rounded, so MLX's own operations are the reference as well.
    return reference_argmax_rows(logits)


def reference_argmax_rows(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Do the same in MLX's operations."""
    has_nan = mx.any(mx.isnan(logits), axis=-1)
    choices = mx.where(has_nan, -1, mx.argmax(logits, axis=-1).astype(mx.int32))
    return choices, mx.all(mx.isfinite(logits), axis=-1)


def _cpu(logits: mx.array) -> tuple[mx.array, mx.array]:
    rows, count = logits.shape
    choices, finite = cpu_library.empty((rows,), mx.int32), cpu_library.empty((rows,), mx.bool_)
    cpu_library.call("cpu_argmax", logits, cpu_library.TYPES[logits.dtype], rows, count, choices, finite)
    return choices, finite


def _native(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Find the best of every slice of THREADS * EACH entries, then the best of those."""
    rows, count = logits.shape
    slices = -(-count // (THREADS * EACH))
    found = _launch([logits, NO_IDS, NO_FLAGS], slices, THREADS, EACH)
    if slices > 1:
        found = _launch(found, 1, 32, -(-slices // 32))
    _, choices, finite = found
    return choices.reshape(rows), finite.reshape(rows)


def _launch(inputs: list[mx.array], slices: int, threads: int, each: int) -> list[mx.array]:
    """Run one of the two launches; only the first has no ids yet."""
    rows, count = inputs[0].shape
    return KERNEL(
        inputs,
        template=[("COUNT", count), ("EACH", each), ("THREADS", threads), ("FIRST", inputs[1] is NO_IDS)],
        groups=(slices, rows, 1),
        threads=(threads, 1, 1),
        shapes=[(rows, slices)] * 3,
        dtypes=[mx.float32, mx.int32, mx.bool_],
    )
