"""Attention of a pass's rows over their sequences' pages and over each other, by absolute position."""

from dataclasses import dataclass, replace
from math import prod
from typing import cast

import mlx.core as mx

from metal_kernels.launching import cpu_library
from metal_kernels.launching.constants import floats, ints
from metal_kernels.launching.implementations import implementation
from metal_kernels.launching.launch import Kernel
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
COMBINE = Kernel(
    "attention_combine",
    inputs=("partials", "weights", "lengths", "starts", "paths", "sinks", "place", "sizes"),
    outputs=("out",),
    includes=("_attention_splits.h",),
)
# Of the kernel: simdgroups of a threadgroup, keys of a tile.
SIMDGROUPS, TILE = 8, 32
NO_WINDOW = 2**31 - 1


@dataclass(frozen=True)
class Cached:
    """What the S sequences of a pass hold, and how many of its rows belong to each.

    pages: int32 [S, P]. The first ceil(length / slots) of a sequence's entries are its pages; no others are read.
    lengths: int32 [S], positions held.
    counts: rows of each sequence; all rows of one sequence come before those of the next.
    starts: int32 [S + 1], the first row of each sequence, then R. With it, counts are upper bounds, so that one
        graph serves however the rows are shared out; only the kernel takes that, for S > 1.
    """

    pages: mx.array
    lengths: mx.array
    counts: tuple[int, ...]
    starts: mx.array | None = None


@dataclass(frozen=True)
class View:
    """What a row sees and how its scores are made; see attention_rows."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: mx.array | None = None
    block: bool = False


@dataclass(frozen=True)
class Call:
    """What attention_rows was given."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    pool: mx.array
    layer: int
    cached: Cached
    view: View
    paths: mx.array | None

    def sequence(self, index: int) -> "Call":
        """Return the part of one sequence."""
        start, count = sum(self.cached.counts[:index]), self.cached.counts[index]
        rows = slice(start, start + count)
        return replace(
            self,
            queries=self.queries[rows],
            keys=self.keys[rows],
            values=self.values[rows],
            cached=Cached(self.cached.pages[index : index + 1], self.cached.lengths[index : index + 1], (count,)),
            paths=None if self.paths is None else self.paths[rows, :count],
        )


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
    outputs = [
        (_native if is_native and count <= MAX_VERIFY_ROWS else _composed)(call.sequence(index))
        for index, count in enumerate(counts)
    ]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def joined_heads(attended: mx.array) -> mx.array:
    """Return heads [R, H, D] side by side, [R, H * D]."""
    shape = (attended.shape[0], attended.shape[1] * attended.shape[2])
    return cpu_library.copied(attended, shape) if implementation() == "cpu" else attended.reshape(shape)


def reference_attention_rows(
    queries: mx.array, keys: mx.array, values: mx.array, visible: mx.array, view: View
) -> mx.array:
    """Attend from queries [R, H, D] to keys and values [N, KV, D] where ``visible`` [R, N], in their dtype."""
    rows, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    by_head = (queries * view.scale).swapaxes(0, 1).reshape(kv_heads, -1, rows, dim)
    scores = by_head @ keys.transpose(1, 2, 0)[:, None]
    if view.softcap is not None:
        scores = mx.tanh(scores / view.softcap) * view.softcap
    scores = mx.where(visible, scores, -mx.inf)
    if view.sinks is not None:
        sinks = view.sinks.astype(scores.dtype).reshape(kv_heads, -1, 1, 1)
        scores = mx.concatenate([scores, mx.broadcast_to(sinks, (*scores.shape[:3], 1))], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)[..., : keys.shape[0]]
    return (weights @ values.swapaxes(0, 1)[:, None]).reshape(heads, rows, dim).swapaxes(0, 1)


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
    lanes, vectors = _work(dim)
    simdgroups = -(-max(cached.counts) * (heads // kv_heads) // vectors)
    work = [("LANES", lanes), ("VECTORS", vectors), ("SIMDGROUPS", SIMDGROUPS)]
    partials, weights = KERNEL(
        [queries, call.keys, call.values, pool, pages, cached.lengths, starts, tree, place, sizes, settings],
        template=[("T", queries.dtype), ("KV", kv_heads), *modes, *work, *_strides(pool)],
        groups=(kv_heads * -(-simdgroups // SIMDGROUPS), splits, len(cached.counts)),
        threads=(32 * min(simdgroups, SIMDGROUPS), 1, 1),
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


def _work(dim: int) -> tuple[int, int]:
    """Return how many lanes share a key, and how many queries a simdgroup holds so that registers suffice."""
    lanes = 8 if dim <= 112 else 16 if dim <= 224 else 32
    return lanes, min(4, 32 * lanes // dim)


def _strides(pool: mx.array) -> list[tuple[str, int]]:
    """Return the distances of pages, layers, slots, and of a value from its key, in elements."""
    page, layer, value, slot = (prod(pool.shape[i + 1 :]) for i in range(4))
    names = ("PAGE_STRIDE", "LAYER_STRIDE", "SLOT_STRIDE", "VALUE_STRIDE", "SLOTS")
    return list(zip(names, (page, layer, slot, value, pool.shape[3]), strict=True))


def _starts(counts: tuple[int, ...]) -> mx.array:
    return ints(*(sum(counts[:i]) for i in range(len(counts) + 1)))


def _path_by_path(call: Call, paths: mx.array) -> mx.array:
    """Attend from each row of a tree as from the last row of a chain: what is on its path."""
    outputs = []
    for row in range(call.queries.shape[0]):
        # After the path's end come copies of its first row, which the row does not see.
        path, depth = mx.maximum(paths[row], 0), mx.sum(paths[row] >= 0) - 1
        one = replace(
            call, queries=call.queries[row : row + 1], keys=call.keys[path], values=call.values[path], paths=None
        )
        outputs.append(_composed(one, depth))
    return mx.concatenate(outputs)


def _composed(call: Call, depth: mx.array | None = None) -> mx.array:
    """Attend from the rows of one sequence by MLX's operations; with ``depth`` from one row, which is at that key.

    Every key is at the index of its position and the key axis is padded to whole pages, so on a CPU a row is
    reduced in the same order whatever other rows there are and however many follow it. In a tree not every key can
    be, so there each row is a pass of its own.
    """
    is_cpu = mx.default_device().type == mx.DeviceType.cpu
    if call.paths is not None and is_cpu:
        return _path_by_path(call, call.paths)
    queries, values, view = call.queries, call.values, call.view
    count, slots, length = values.shape[0], call.pool.shape[3], call.cached.lengths[0]
    more = -(-count // slots)
    pages = mx.concatenate([call.cached.pages[0], mx.zeros((more,), dtype=mx.int32)])
    pages = mx.where(mx.arange(pages.size) * slots < length, pages, 0)
    key_at = mx.arange(pages.size * slots)
    new_at = length + mx.arange(count)
    row_at = new_at if depth is None else (length + depth)[None]

    def lay_out(side: int, new: mx.array) -> mx.array:
        old = call.pool[pages, call.layer, side]
        rows = old.reshape(-1, *new.shape[1:])
        if side == 1:
            # Slots of no position may hold anything, and 0 times infinity is not 0.
            rows = mx.where((key_at < length)[:, None, None], rows, mx.array(0, dtype=rows.dtype))
        rows[new_at] = new
        return rows

    visible = _visible(length, row_at, key_at, view, call.paths)
    if not is_cpu:
        return _attend(queries, lay_out(0, call.keys), lay_out(1, values), visible, view)
    # The CPU, which the others are compared with, keeps what a row does not see from it as the kernel does.
    is_finite = mx.all(mx.isfinite(values), axis=(1, 2))
    laid = lay_out(0, call.keys), lay_out(1, mx.where(is_finite[:, None, None], values, 0).astype(values.dtype))
    out = _attend(queries, *laid, visible, view)
    sees_others = mx.any(visible[:, new_at] & ~is_finite, axis=1)
    return mx.where(sees_others[:, None, None], mx.nan, out).astype(out.dtype)


def _attend(queries: mx.array, keys: mx.array, values: mx.array, visible: mx.array, view: View) -> mx.array:
    """Attend from queries [R, H, D] to keys and values [N, KV, D] where ``visible`` [R, N]."""
    if implementation() == "reference":
        wide = [x.astype(mx.float32) for x in (queries, keys, values)]
        return reference_attention_rows(wide[0], wide[1], wide[2], visible, view).astype(queries.dtype)
    if view.softcap is not None:
        return reference_attention_rows(queries, keys, values, visible, view)
    out = mx.fast.scaled_dot_product_attention(
        queries.swapaxes(0, 1)[None],
        *(x.swapaxes(0, 1)[None] for x in (keys, values)),
        scale=view.scale,
        mask=visible,
        sinks=None if view.sinks is None else view.sinks.astype(queries.dtype),
    )
    return out[0].swapaxes(0, 1)


def _visible(length: mx.array, row_at: mx.array, key_at: mx.array, view: View, paths: mx.array | None) -> mx.array:
    """Return [R, N]: which keys, those of the pass laid out after the cached ones, each row sees."""
    count = row_at.size
    if paths is not None:
        steps = mx.arange(count)
        row_at = length + mx.sum(paths >= 0, axis=1) - 1
        if view.window is not None:
            paths = mx.where(row_at[:, None] - (length + steps) < view.window, paths, -1)
        sees_row = mx.any(paths[:, :, None] == steps, axis=1)
        index = key_at - length
        sees_new = sees_row[:, mx.clip(index, 0, count - 1)] & (index < count)
    elif view.block:
        sees_new = key_at < length + count
    else:
        visible = key_at <= row_at[:, None]
        return visible if view.window is None else visible & (row_at[:, None] - key_at < view.window)
    sees_old = mx.array(True) if view.window is None else row_at[:, None] - key_at < view.window
    return mx.broadcast_to(mx.where(key_at < length, sees_old, sees_new), (count, key_at.size))


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
    if dim % (16 if dim <= 112 else 32) or not 16 <= dim <= 256:
        raise ValueError(
            "The attention kernel takes heads of 16 to 112 numbers in steps of 16 and to 256 in steps of 32, "
            f"not {dim}; MLX_SPEC_KERNELS=stock takes any."
        )
    if slots % TILE:
        raise ValueError(f"The attention kernel takes pages of a multiple of {TILE} slots, not {slots}.")
