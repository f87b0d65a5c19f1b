"""Attention of a sequence's new rows over its pages and over each other, by absolute position."""

import mlx.core as mx


def attention_rows(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    pool: mx.array,
    layer: int,
    pages: mx.array,
    length: int,
    *,
    scale: float,
    window: int | None = None,
) -> mx.array:
    """Attend causally from the rows at positions ``length .. length + R - 1`` of one sequence.

    queries: [R, H, D], keys and values: [R, KV, D], all with position encoding applied, H a multiple of KV.
    pool: [pages, layers, 2, slots, KV, D]; ``pages``: [ceil(length / slots)] page numbers of the sequence.
    A query at position q sees a key at position p when p <= q, and q - p < window where there is one.

    Returns [R, H, D]. Keys stand at the index of their position and the key axis is padded to whole pages, so a
    row is reduced in the same order whatever rows stand beside it or are cached behind it.
    """
    rows, slots = queries.shape[0], pool.shape[3]
    total = -(-(length + rows) // slots) * slots

    def lay_out(cached: mx.array, new: mx.array) -> mx.array:
        parts = [cached.reshape(-1, *cached.shape[2:])[:length]] if length else []
        tail = mx.zeros((total - length - rows, *new.shape[1:]), dtype=new.dtype)
        return mx.concatenate([*parts, new, tail]).swapaxes(0, 1)[None]

    query_at = mx.arange(length, length + rows)[:, None]
    key_at = mx.arange(total)[None]
    visible = key_at <= query_at
    if window is not None:
        visible = visible & (query_at - key_at < window)
    out = mx.fast.scaled_dot_product_attention(
        queries.swapaxes(0, 1)[None],
        lay_out(pool[pages, layer, 0], keys),
        lay_out(pool[pages, layer, 1], values),
        scale=scale,
        mask=visible,
    )
    return out[0].swapaxes(0, 1)
