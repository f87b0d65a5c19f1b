"""The k largest entries of each logits row."""

import mlx.core as mx


def topk_rows(logits: mx.array, k: int) -> tuple[mx.array, mx.array, mx.array]:
    """Find the k largest values of each row, largest first, the lower index first among equals.

    logits: [..., R, V], k <= V. Returns values [..., R, k] in the dtype of logits, indices [..., R, k] int32, and
    a scalar bool that is false when any entry is NaN or infinite: such rows have no meaningful order.
    """
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
