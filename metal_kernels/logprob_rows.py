"""The log-probability of one token a row."""

import mlx.core as mx

from metal_kernels.launching import cpu_library
from metal_kernels.launching.implementations import implementation
from metal_kernels.launching.launch import Kernel

KERNEL = Kernel("logprob_rows", inputs=("logits", "tokens", "partials"), outputs=("results",))
THREADS, EACH = 256, 32
NO_PARTIALS = mx.zeros((1,), dtype=mx.float32)


def logprob_rows(logits: mx.array, tokens: mx.array) -> tuple[mx.array, mx.array]:
    """Return what normalises each row, and the log-probability of the row's token.

    logits: [R, V] in bfloat16, float16 or float32, R and V at least 1.
    tokens: [R] int32.

    Returns (log-sum-exp [R], logits[r, tokens[r]] - log-sum-exp [R]), both float32. Entries of -inf count as
    probability 0. A row with NaN or +inf, or of -inf alone, gives no finite number; a token outside 0 .. V - 1
    gives NaN. Raises ValueError for other shapes and dtypes.
    """
    if logits.ndim != 2 or not logits.size or tokens.shape != logits.shape[:1] or tokens.dtype != mx.int32:
        raise ValueError(
            "logprob_rows takes logits [R, V] and tokens [R] int32, "
            f"not {logits.shape} and {tokens.shape} {tokens.dtype}."
        )
    chosen = implementation()
    if chosen == "native":
        return _native(logits, tokens)
    if chosen == "cpu":
        return _cpu(logits, tokens)
    return reference_logprob_rows(logits, tokens)


def reference_logprob_rows(logits: mx.array, tokens: mx.array) -> tuple[mx.array, mx.array]:
    """Do the same in MLX's operations, in float32."""
    logits = logits.astype(mx.float32)
    peak = mx.max(logits, axis=-1, keepdims=True)
    above = mx.log(mx.sum(mx.exp(logits - peak), axis=-1))
    known = (tokens >= 0) & (tokens < logits.shape[1])
    picked = mx.take_along_axis(logits, mx.where(known, tokens, 0)[:, None], axis=-1)[:, 0]
    return peak[:, 0] + above, mx.where(known, picked - peak[:, 0] - above, mx.nan)


def _cpu(logits: mx.array, tokens: mx.array) -> tuple[mx.array, mx.array]:
    rows, count = logits.shape
    totals, picked = (cpu_library.empty((rows,), mx.float32) for _ in range(2))
    code = cpu_library.TYPES[logits.dtype]
    cpu_library.call("cpu_logprob", logits, code, tokens, rows, count, totals, picked)
    return totals, picked


def _native(logits: mx.array, tokens: mx.array) -> tuple[mx.array, mx.array]:
    rows, count = logits.shape
    slices = -(-count // (THREADS * EACH))
    template = [("COUNT", count), ("SLICES", slices), ("EACH", EACH), ("THREADS", THREADS)]
    (partials,) = KERNEL(
        [logits, tokens, NO_PARTIALS],
        template=[*template, ("FIRST", True)],
        groups=(slices, rows, 1),
        threads=(THREADS, 1, 1),
        shapes=[(rows, slices, 2)],
        dtypes=[mx.float32],
    )
    (results,) = KERNEL(
        [logits, tokens, partials],
        template=[*template, ("FIRST", False)],
        groups=(1, rows, 1),
        threads=(32, 1, 1),
        shapes=[(2 * rows,)],
        dtypes=[mx.float32],
    )
    return results[:rows], results[rows:]
