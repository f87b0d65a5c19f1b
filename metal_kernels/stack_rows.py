"""Keys and values of the layers of a pass, row by row: many arrays laid side by side in few launches."""

from collections.abc import Sequence

import mlx.core as mx

from metal_kernels.launching.implementations import implementation
from metal_kernels.launching.launch import Kernel

# Metal binds up to 31 arrays.
MAX_PARTS, THREADS = 20, 256
KERNEL = Kernel("stack_rows", inputs=tuple(f"part{i}" for i in range(MAX_PARTS)), outputs=("out",))


def stack_rows(parts: Sequence[mx.array]) -> mx.array:
    """Stack what each of L layers has for R rows.

    parts: [2, R, KV, D] each, of one dtype: keys, then values.

    Returns [R, L, 2, KV, D]. Raises ValueError where the shapes or dtypes differ. MLX's operation copies each part
    by a launch of its own, the kernel 20 parts by one.
    """
    shape, dtype = parts[0].shape, parts[0].dtype
    if len(shape) != 4 or shape[0] != 2 or any(part.shape != shape or part.dtype != dtype for part in parts):
        found = sorted({f"{part.shape} {part.dtype}" for part in parts})
        raise ValueError(f"stack_rows takes equal parts [2, R, KV, D], not {', '.join(found)}.")
    if implementation() == "native" and len(parts) > 1:
        few = [_native(parts[i : i + MAX_PARTS]) for i in range(0, len(parts), MAX_PARTS)]
        return few[0] if len(few) == 1 else mx.concatenate(few, axis=1)
    # Numbers are moved only: MLX's operations are the reference as well.
    return reference_stack_rows(parts)


def reference_stack_rows(parts: Sequence[mx.array]) -> mx.array:
    """Do the same in MLX's operations."""
    return mx.stack(list(parts)).transpose(2, 0, 1, 3, 4)


def _native(parts: Sequence[mx.array]) -> mx.array:
    _, rows, kv_heads, dim = parts[0].shape
    width = kv_heads * dim
    (out,) = KERNEL(
        [*parts, *[parts[0]] * (MAX_PARTS - len(parts))],
        template=[("T", parts[0].dtype), ("WIDTH", width), ("THREADS", THREADS)],
        groups=(-(-width // THREADS), rows, 2 * len(parts)),
        threads=(THREADS, 1, 1),
        shapes=[(rows, len(parts), 2, kv_heads, dim)],
        dtypes=[parts[0].dtype],
    )
    return out
