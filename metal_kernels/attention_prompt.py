"""Attention of a prompt's rows by MLX's fused attention, over what is cached laid side by side."""

import mlx.core as mx

from metal_kernels.attention_call import Call

# Head sizes whose attention MLX fuses on every GPU; of others it makes all scores first.
FUSED = (64, 80, 128)
# Numbers that the scores of unfused rows may take at once.
MOST_SCORES = 2**27


def attention_prompt(call: Call, length: int) -> mx.array:
    """Attend from the rows of one sequence after ``length`` cached positions: a chain, without softcap.

    Nothing is read that the first row does not see, and scores take no memory that grows with the prompt.
    """
    count, window = call.queries.shape[0], call.view.window
    first = 0 if window is None else max(length + 1 - window, 0)
    # Whole pages are gathered; the first `skipped` positions of them are left out.
    slots = call.pool.shape[3]
    pages = call.cached.pages[0, first // slots : -(-length // slots)]
    skipped = first % slots

    def lay_out(side: int, new: mx.array) -> mx.array:
        old = call.pool[pages, call.layer, side].reshape(-1, *new.shape[1:])
        rows = mx.concatenate([old[skipped : length - first // slots * slots], new])
        return rows.swapaxes(0, 1)[None]

    keys, values = lay_out(0, call.keys), lay_out(1, call.values)
    queries, held = call.queries.swapaxes(0, 1)[None], length - first
    step = count if call.queries.shape[2] in FUSED else max(16, MOST_SCORES // (keys.shape[2] * queries.shape[1]))
    parts = []
    for start in range(0, count, step):
        end = min(start + step, count)
        parts.append(
            mx.fast.scaled_dot_product_attention(
                queries[:, :, start:end],
                keys[:, :, : held + end],
                values[:, :, : held + end],
                scale=call.view.scale,
                mask=_mask(held, start, end, window),
                sinks=None if call.view.sinks is None else call.view.sinks.astype(queries.dtype),
            )
        )
    return mx.concatenate(parts, axis=2)[0].swapaxes(0, 1)


def _mask(held: int, start: int, end: int, window: int | None) -> str | mx.array:
    """Return which keys the rows from ``start`` to ``end`` see: all up to their own, or [rows, held + end]."""
    if window is None or held + end <= window:
        return "causal"
    distance = mx.arange(held + start, held + end)[:, None] - mx.arange(held + end)
    return (distance >= 0) & (distance < window)
