"""A walk through the candidates of a block's rows, each ranked by the one before it."""

import mlx.core as mx

from metal_kernels.launching.implementations import implementation
from metal_kernels.launching.launch import Kernel

KERNEL = Kernel("walk_rows", inputs=("ranks",), outputs=("picks",))
# The lanes of a simdgroup.
MAX_CANDIDATES = 32


def walk_rows(ranks: mx.array) -> mx.array:
    """Pick the candidate that ranks highest at each step, the first among equals, from step to step.

    ranks: float32 [N, k, K, K] of N blocks with k steps of K candidates: ranks[n, t, a, b] is that of candidate b
        after candidate a of the step before. The first step begins after candidate 0.

    Returns int32 [N, k], numbers of candidates. Raises ValueError for other shapes and dtypes. The kernel takes up
    to 32 candidates; with more, MLX's operations run. Nothing is computed, so the result is the same.
    """
    if ranks.ndim != 4 or ranks.shape[2] != ranks.shape[3] or not ranks.size or ranks.dtype != mx.float32:
        raise ValueError(f"walk_rows takes ranks [N, k, K, K] in float32, not {ranks.shape} {ranks.dtype}.")
    if implementation() == "native" and ranks.shape[2] <= MAX_CANDIDATES:
        return _native(ranks)
    # Only numbers are compared: MLX's own operations are the reference as well.
    return reference_walk_rows(ranks)


def reference_walk_rows(ranks: mx.array) -> mx.array:
    """Do the same in MLX's operations."""
    blocks, count, candidates, _ = ranks.shape
    picked, picks = mx.zeros((blocks,), dtype=mx.int32), list[mx.array]()
    for step in range(count):
        rows = mx.take_along_axis(ranks[:, step], picked[:, None, None], axis=1)
        picked = mx.argmax(rows.reshape(blocks, candidates), axis=-1).astype(mx.int32)
        picks.append(picked)
    return mx.stack(picks, axis=1)


def _native(ranks: mx.array) -> mx.array:
    blocks, count, candidates, _ = ranks.shape
    (picks,) = KERNEL(
        [ranks],
        template=[("COUNT", count), ("CANDIDATES", candidates)],
        groups=(blocks, 1, 1),
        threads=(32, 1, 1),
        shapes=[(blocks, count)],
        dtypes=[mx.int32],
    )
    return picks
