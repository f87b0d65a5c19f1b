"""Attention of rows by MLX's operations: prompts, and what the kernel is compared with."""

from dataclasses import replace

import mlx.core as mx

from metal_kernels.attention_call import Call, View
from metal_kernels.launching.implementations import implementation


def _path_by_path(call: Call, paths: mx.array) -> mx.array:
    """Attend from each row of a tree as from the last row of a chain: what is on its path."""
    outputs = []
    for row in range(call.queries.shape[0]):
        # After the path's end come copies of its first row, which the row does not see.
        path, depth = mx.maximum(paths[row], 0), mx.sum(paths[row] >= 0) - 1
        one = replace(
            call, queries=call.queries[row : row + 1], keys=call.keys[path], values=call.values[path], paths=None
        )
        outputs.append(composed_attention(one, depth))
    return mx.concatenate(outputs)


def composed_attention(call: Call, depth: mx.array | None = None) -> mx.array:
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
