"""The k largest entries of each logits row."""

import mlx.core as mx

from metal_kernels.launching import cpu_library
from metal_kernels.launching.implementations import implementation
from metal_kernels.launching.launch import Kernel

KERNEL = Kernel("topk_rows", inputs=("values", "ids", "flags"), outputs=("top_values", "top_ids", "finite"))
THREADS, EACH, MAX_K = 128, 32, 16
MAX_CPU_K = 64
NO_IDS, NO_FLAGS = mx.zeros((1,), dtype=mx.int32), mx.zeros((1,), dtype=mx.bool_)


def topk_rows(logits: mx.array, k: int) -> tuple[mx.array, mx.array, mx.array]:
    """Find the k largest values of each row, largest first, the lower index first among equals.

    logits: [..., R, V] in bfloat16, float16 or float32.
    k: 1 to V.

    Returns values [..., R, k] in the dtype of
    logits, indices [..., R, k] int32, and a scalar bool that is false when any entry is NaN or infinite: such rows
    have no meaningful order, but their indices are still those of entries. Raises ValueError for other k.

    The kernel takes k up to 16 and V up to a million, the C text k up to 64. Beyond, MLX's operations run: nothing
    is rounded, so the result is the same.
    """
    count = logits.shape[-1]
    if not 1 <= k <= count:
        raise ValueError(f"topk_rows finds 1 to V entries of rows with V = {count} entries, not {k}.")
    slices = -(-count // (THREADS * EACH))
    chosen = implementation()
    if chosen == "native" and k <= MAX_K and slices * k <= THREADS * EACH:
        return _native(logits, k, slices)
    if chosen == "cpu" and k <= MAX_CPU_K:
        return _cpu(logits, k)
    if chosen == "cpu":
        cpu_library.leave(f"the best {k} of a row")
    if chosen == "reference":
        return reference_topk_rows(logits, k)
    return _stock(logits, k)


def reference_topk_rows(logits: mx.array, k: int) -> tuple[mx.array, mx.array, mx.array]:
    """Sort whole rows."""
    order = mx.argsort(-logits, axis=-1)[..., :k]
    values = mx.take_along_axis(logits, order, axis=-1)
    return values, order.astype(mx.int32), mx.all(mx.isfinite(logits))


def _stock(logits: mx.array, k: int) -> tuple[mx.array, mx.array, mx.array]:
    finite = mx.all(mx.isfinite(logits))
    found = mx.argpartition(-logits, kth=k - 1, axis=-1)[..., :k]
    # A partition leaves its part unordered: sort the few by index, then stably by value.
    found = mx.sort(found, axis=-1)
    values = mx.take_along_axis(logits, found, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return (
        mx.take_along_axis(values, order, axis=-1),
        mx.take_along_axis(found, order, axis=-1).astype(mx.int32),
        finite,
    )


def _cpu(logits: mx.array, k: int) -> tuple[mx.array, mx.array, mx.array]:
    shape, count = (*logits.shape[:-1], k), logits.shape[-1]
    values, ids = cpu_library.empty(shape, logits.dtype), cpu_library.empty(shape, mx.int32)
    finite = cpu_library.empty((), mx.bool_)
    rows = logits.size // count
    cpu_library.call("cpu_topk", logits, cpu_library.TYPES[logits.dtype], rows, count, k, values, ids, finite)
    return values, ids, finite


def _native(logits: mx.array, k: int, slices: int) -> tuple[mx.array, mx.array, mx.array]:
    """Find the best k of every slice of THREADS * EACH entries, then the best k of those."""
    rows = logits.reshape(-1, logits.shape[-1])
    found = _launch([rows, NO_IDS, NO_FLAGS], k, slices, EACH, mx.float32)
    values, ids, finite = _launch(found, k, 1, -(-slices * k // THREADS), logits.dtype)
    shape = (*logits.shape[:-1], k)
    return values.reshape(shape), ids.reshape(shape), finite.reshape(())


def _launch(inputs: list[mx.array], k: int, slices: int, each: int, dtype: mx.Dtype) -> list[mx.array]:
    """Run one of the two launches; only the first has no ids yet."""
    rows, count = inputs[0].shape
    first = inputs[1] is NO_IDS
    return KERNEL(
        inputs,
        template=[
            ("T", dtype),
            ("K", k),
            ("COUNT", count),
            ("EACH", each),
            ("THREADS", THREADS),
            ("FIRST", first),
        ],
        groups=(slices, rows, 1),
        threads=(THREADS, 1, 1),
        shapes=[(rows, slices * k), (rows, slices * k), (rows, slices) if first else (1,)],
        dtypes=[dtype, mx.int32, mx.bool_],
    )
