"""Attention of a pass's rows over their sequences' pages and over each other, by absolute position."""

from dataclasses import replace
from math import prod
from typing import cast

import mlx.core as mx

from metal_kernels.attention_call import Cached, Call, View
from metal_kernels.attention_composed import composed_attention
from metal_kernels.attention_prompt import attention_prompt
from metal_kernels.launching import cpu_library
from metal_kernels.launching.constants import floats, ints
from metal_kernels.launching.implementations import implementation
from metal_kernels.launching.launch import Kernel
from metal_kernels.launching.tensor_cores import INCLUDES, has_tensor_cores
from metal_kernels.limits import MAX_VERIFY_ROWS

KERNEL = Kernel(
    "attention_rows",
    inputs=(
        "queries",
        "keys",
        "values",
        "pool",
        "pages",
        "lengths",
        "starts",
        "paths",
        "place",
        "sizes",
        "settings",
    ),
    outputs=("partials", "weights"),
    includes=("_attention_splits.h",),
    scratch=("partials", "weights"),
)
# For rows of 16 bits on NVIDIA GPUs.
TWIN = replace(
    KERNEL,
    includes=("launching/cuda_dialect.h", *INCLUDES, "_attention_splits.h"),
    cuda_twin="attention_rows.cu",
)
COMBINE = Kernel(
    "attention_combine",
    inputs=("partials", "weights", "lengths", "starts", "paths", "sinks", "place", "sizes"),
    outputs=("out",),
    includes=("_attention_splits.h",),
)
# Of the kernel: simdgroups of a threadgroup, keys of a tile.
SIMDGROUPS, TILE = 8, 32
NO_WINDOW = 2**31 - 1


def attention_rows(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    pool: mx.array,
    layer: int,
    cached: Cached,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    paths: mx.array | None = None,
    block: bool = False,
) -> mx.array:
    """Attend from the rows of all sequences of a pass to what is cached before them and to each other.

    Row i of a sequence has the position length + i and sees the positions up to its own.

    queries: [R, H, D] in bfloat16, float16 or float32, with position encoding applied; H is a multiple of KV.
    keys, values: [R, KV, D] in the same dtype, keys with position encoding applied.
    pool: [pages, layers, 2, slots, KV, D] in the same dtype, keys before values.
    layer: which of the pool's layers is read.
    cached: the pages of each sequence and its number of rows.
    scale: factor on scores.
    window: how many positions a row sees: a key at position p is seen from q when p <= q and q - p < window.
    softcap: scores s become softcap * tanh(s / softcap).
    sinks: [H], one score more a head, which has no value.
    paths: int32 [R, R], for trees. paths[i] lists the rows from a root to row i, numbered within their sequence,
        then -1 up to the end. Row i sees them at the positions length, length + 1, ... and has the last of these.
    block: every row of a sequence sees all of its rows, and of what is cached the window.

    Returns [R, H, D] in the dtype of the queries. In sequences of up to 16 rows the kernel gives a row the same
    bits whatever other rows the pass has, whichever of its keys are cached, and wherever their pages lie:
    positions are reduced in pieces that begin at fixed ones. Sequences of more rows (prompts) go through MLX's
    attention, except on a CPU, where our C text takes any number.
    Raises ValueError for shapes and dtypes that do not fit.
    """
    call = Call(queries, keys, values, pool, layer, cached, View(scale, window, softcap, sinks, block), paths)
    _check(call)
    if implementation() == "cpu":
        return _cpu(call)
    is_native, counts = implementation() == "native", cached.counts
    if is_native and max(counts) <= MAX_VERIFY_ROWS:
        return _native(call)
    outputs = [_of_one(call.sequence(index)) for index in range(len(counts))]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _of_one(call: Call) -> mx.array:
    """Attend from the rows of the only sequence of a pass that some prompt is in, or that has no kernel."""
    (count,), held = call.cached.counts, call.cached.held
    if implementation() == "native" and count <= MAX_VERIFY_ROWS:
        return _native(call)
    is_chain = call.paths is None and not call.view.block and call.view.softcap is None
    if implementation() != "native" or held is None or not is_chain:
        return composed_attention(call)
    return attention_prompt(call, held[0])


def joined_heads(attended: mx.array) -> mx.array:
    """Return heads [R, H, D] side by side, [R, H * D]."""
    shape = (attended.shape[0], attended.shape[1] * attended.shape[2])
    return cpu_library.copied(attended, shape) if implementation() == "cpu" else attended.reshape(shape)


def split_of(position: int) -> int:
    """Return the number of the split that holds a position; the same function as in _attention_splits.h."""
    unit = position // 64
    level = min((unit // 32 + 1).bit_length() - 1, 3)
    return 32 * level + (unit - 32 * (2**level - 1)) // 2**level


def _native(call: Call) -> mx.array:
    queries, pool, cached, view, paths = call.queries, call.pool, call.cached, call.view, call.paths
    rows, heads, dim = queries.shape
    kv_heads, slots = call.keys.shape[1], pool.shape[3]
    _check_kernel(dim, slots)
    pages = cached.pages if cached.pages.size else mx.zeros((len(cached.counts), 1), dtype=mx.int32)
    splits = split_of(cached.pages.shape[1] * slots + max(cached.counts) - 1) + 1
    starts = _starts(cached.counts) if cached.starts is None else cached.starts
    place = ints(call.layer, view.window or NO_WINDOW)
    sizes = ints(pages.shape[1], rows, splits)
    settings = floats(view.scale, view.softcap or 0.0)
    tree = ints(0) if paths is None else paths
    modes = [("H", heads), ("D", dim), ("HAS_PATHS", paths is not None), ("IS_BLOCK", view.block)]
    kernel, work, simdgroups = _work(queries.dtype, max(cached.counts) * (heads // kv_heads))
    together = min(simdgroups, SIMDGROUPS)
    partials, weights = kernel(
        [queries, call.keys, call.values, pool, pages, cached.lengths, starts, tree, place, sizes, settings],
        template=[("T", queries.dtype), ("KV", kv_heads), *modes, *work, *_strides(pool)],
        groups=(kv_heads * -(-simdgroups // together), splits, len(cached.counts)),
        threads=(32 * together, 1, 1),
        shapes=[(rows, heads, splits, dim), (rows, heads, splits, 2)],
        dtypes=[mx.float32, mx.float32],
    )
    sinks = floats(0.0) if view.sinks is None else view.sinks
    (out,) = COMBINE(
        [partials, weights, cached.lengths, starts, tree, sinks, place, sizes],
        template=[("T", queries.dtype), *modes, ("HAS_SINKS", view.sinks is not None)],
        groups=(rows * heads, 1, 1),
        threads=(-(-dim // 32) * 32, 1, 1),
        shapes=[queries.shape],
        dtypes=[queries.dtype],
    )
    return out


def _cpu(call: Call) -> mx.array:
    queries, pool, cached, view, types = call.queries, call.pool, call.cached, call.view, cpu_library.TYPES
    longest, places = max(cast(list[int], cached.lengths.tolist())), cached.pages.shape[1] * pool.shape[3]
    if longest > places:
        raise ValueError(f"Pages for {longest} cached positions are needed; these hold {places}.")
    out = cpu_library.empty(queries.shape, queries.dtype)
    strides = dict(_strides(pool))
    cpu_library.call(
        "cpu_attention",
        *(queries, call.keys, call.values, types[queries.dtype], pool, call.layer * strides["LAYER_STRIDE"]),
        *(cached.pages, cached.lengths, _starts(cached.counts), call.paths),
        *(view.sinks, 0 if view.sinks is None else types[view.sinks.dtype], out),
        *(*queries.shape[:2], call.keys.shape[1], queries.shape[2], len(cached.counts), cached.pages.shape[1]),
        *(pool.shape[3], strides["PAGE_STRIDE"], strides["VALUE_STRIDE"]),
        *(view.window or 0, view.block, view.scale, view.softcap or 0.0),
    )
    return out


def _work(dtype: mx.Dtype, queries: int) -> tuple[Kernel, list[tuple[str, int]], int]:
    """Return the kernel, its cut, and how many simdgroups share the queries of a sequence and KV head."""
    if has_tensor_cores(dtype):
        return TWIN, [], -(-queries // 16)
    return KERNEL, [("SIMDGROUPS", SIMDGROUPS)], -(-queries // 8)


def _strides(pool: mx.array) -> list[tuple[str, int]]:
    """Return the distances of pages, layers, slots, and of a value from its key, in elements."""
    page, layer, value, slot = (prod(pool.shape[i + 1 :]) for i in range(4))
    names = ("PAGE_STRIDE", "LAYER_STRIDE", "SLOT_STRIDE", "VALUE_STRIDE", "SLOTS")
    return list(zip(names, (page, layer, slot, value, pool.shape[3]), strict=True))


def _starts(counts: tuple[int, ...]) -> mx.array:
    return ints(*(sum(counts[:i]) for i in range(len(counts) + 1)))


def _check(call: Call) -> None:
    queries, keys, values, pool = call.queries, call.keys, call.values, call.pool
    view, paths = call.view, call.paths
    if queries.ndim != 3 or keys.ndim != 3:
        raise ValueError(f"Queries must be [R, H, D] and keys [R, KV, D], not {queries.shape} and {keys.shape}.")
    rows, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    if (keys.shape, values.shape) != ((rows, kv_heads, dim),) * 2:
        raise ValueError(
            f"Queries {queries.shape} need keys and values [{rows}, KV, {dim}], "
            f"not {keys.shape} and {values.shape}."
        )
    if heads % kv_heads:
        raise ValueError(f"The number of query heads must be a multiple of the {kv_heads} KV heads, not {heads}.")
    dtypes = [x.dtype for x in (queries, keys, values, pool)]
    if len(set(dtypes)) > 1 or dtypes[0] not in (mx.bfloat16, mx.float16, mx.float32):
        raise ValueError(
            "Queries, keys, values and pool must all be bfloat16, float16 or float32, "
            f"not {', '.join(map(str, dtypes))}."
        )
    layers = pool.shape[1] if pool.ndim == 6 else 0
    if pool.ndim != 6 or pool.shape[2] != 2 or pool.shape[4:] != (kv_heads, dim):
        raise ValueError(
            f"The pool must be [pages, layers, 2, slots, KV, D] with {kv_heads} KV heads of {dim} numbers, "
            f"not {pool.shape}."
        )
    if not 0 <= call.layer < layers:
        raise ValueError(f"The pool holds layers 0 to {layers - 1}, not {call.layer}.")
    if view.window is not None and view.window < 1:
        raise ValueError(f"A window holds at least 1 position, not {view.window}.")
    if view.sinks is not None and view.sinks.shape != (heads,):
        raise ValueError(f"Sinks must be one number for each of {heads} heads, not {view.sinks.shape}.")
    if paths is not None and (view.block or paths.shape != (rows, rows) or paths.dtype != mx.int32):
        raise ValueError(f"Paths must be int32 {(rows, rows)} and without block, not {paths.dtype} {paths.shape}.")
    _check_cached(call.cached, rows)


def _check_cached(cached: Cached, rows: int) -> None:
    sequences = len(cached.counts)
    if cached.starts is not None and (sequences > 1 or cached.counts != (rows,)):
        if cached.starts.shape != (sequences + 1,) or cached.starts.dtype != mx.int32:
            raise ValueError(
                f"starts must be int32 [{sequences + 1}], not {cached.starts.dtype} {cached.starts.shape}."
            )
        if implementation() != "native" or not 1 <= max(cached.counts) <= MAX_VERIFY_ROWS:
            raise ValueError(
                f"Only the kernel takes starts, for 1 to {MAX_VERIFY_ROWS} rows of a sequence, "
                f"not {cached.counts}."
            )
    elif min(cached.counts, default=0) < 1 or sum(cached.counts) != rows:
        raise ValueError(f"Counts of at least 1 must add up to the {rows} rows, not {cached.counts}.")
    if cached.lengths.shape != (sequences,) or cached.pages.ndim != 2 or cached.pages.shape[0] != sequences:
        raise ValueError(
            f"{sequences} sequences need pages [{sequences}, P] and lengths [{sequences}], "
            f"not {cached.pages.shape} and {cached.lengths.shape}."
        )
    if (cached.pages.dtype, cached.lengths.dtype) != (mx.int32, mx.int32):
        raise ValueError(f"Pages and lengths must be int32, not {cached.pages.dtype} and {cached.lengths.dtype}.")


def _check_kernel(dim: int, slots: int) -> None:
    if dim % 16 or not 16 <= dim <= 256:
        raise ValueError(
            f"The attention kernel takes heads of 16 to 256 numbers in steps of 16, not {dim}; "
            "MLX_SPEC_KERNELS=stock takes any."
        )
    if slots % TILE:
        raise ValueError(f"The attention kernel takes pages of a multiple of {TILE} slots, not {slots}.")
