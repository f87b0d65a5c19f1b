"""The short causal convolution before the gated delta rule, over the few rows of a pass.

Of each channel c of the projected row x_i, with W taps::

    y_i = silu(sum over t < W of weight[c, t] x_{i - W + 1 + t}[c])

then q and k of each head are divided by sqrt(y y' + 1e-6), and q is multiplied by Dk^-1/2, as Qwen3-Next and
Qwen3.5 do; all of it in float32, rounded once. The state of a sequence is its last W - 1 inputs. A pass reads it
and leaves it alone. ``causal_conv_replay`` shifts n accepted rows into it, and so does ``causal_conv_advance`` at
the start of the next pass, in the same launch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from metal_kernels.launching import cpu_library
from metal_kernels.launching.implementations import implementation
from metal_kernels.launching.launch import Kernel
from metal_kernels.row_spans import RowSpans

STEP = ("_causal_conv_step.h",)
PLACES = ("state", "slots", "first", "count")
HEADS = ("q", "k", "v")
KERNEL = Kernel("causal_conv_rows", inputs=("x", "weight", *PLACES), outputs=HEADS, includes=STEP)
REPLAY = Kernel("causal_conv_replay", inputs=("x", *PLACES), outputs=("new_state",), includes=STEP)
ADVANCE = Kernel(
    "causal_conv_advance",
    inputs=("x", "weight", *PLACES, "old_x", "old_first", "old_count"),
    outputs=(*HEADS, "new_state"),
    includes=STEP,
)
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
LARGEST_HEAD = 256
EPSILON = 1e-6
# SIMDGROUPS of _causal_conv_step.h.
SIMDGROUPS = 4


@dataclass(frozen=True)
class Heads:
    """The channels of a projected row: Hk query heads of Dk, Hk key heads of Dk, Hv value heads of Dv."""

    key_heads: int
    key_size: int
    value_heads: int
    value_size: int

    @property
    def channels(self) -> int:
        """C, the number of channels."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    def require(self) -> None:
        """Raise ValueError for heads of a size that the kernels do not take."""
        for name, size in (("Dk", self.key_size), ("Dv", self.value_size)):
            if size % 32 or not 32 <= size <= LARGEST_HEAD:
                raise ValueError(f"{name} must be a multiple of 32 up to {LARGEST_HEAD}, not {size}.")

    def split(self, y: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Cut [..., C] into q [..., Hk, Dk], k [..., Hk, Dk], v [..., Hv, Dv]."""
        keys = self.key_heads * self.key_size
        q, k, v = mx.split(y, [keys, 2 * keys], axis=-1)
        at = y.shape[:-1]
        key_shape = (*at, self.key_heads, self.key_size)
        return q.reshape(key_shape), k.reshape(key_shape), v.reshape(*at, self.value_heads, self.value_size)


def causal_conv_rows(
    x: mx.array,
    state: mx.array,
    weight: mx.array,
    heads: Heads,
    *,
    column: int = 0,
    spans: RowSpans | None = None,
    slots: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Convolve the channels of each row, and normalise q and k; one launch.

    x: [R, N], float32, float16 or bfloat16; it may hold other projections besides the C channels.
    state: [P, W - 1, C] in the dtype of x, oldest input first; it is only read.
    weight: [C, W], float32, float16 or bfloat16, W from 2 on.
    heads: what the channels are; Dk and Dv are multiples of 32 up to 256.
    column: where the channels begin in x.
    spans: the rows of each sequence; every row belongs to one. None: all rows are one sequence.
    slots: int32 [S], which of the P states each sequence starts from. None: that of its own number.

    Returns q [R, Hk, Dk] and k [R, Hk, Dk], normalised, and v [R, Hv, Dv] in the dtype of x. A row's bits depend
    on the inputs under its taps only. Raises ValueError for other shapes and dtypes; ``spans`` and ``slots`` are
    on the device: what they hold is not checked.
    """
    spans = spans or RowSpans.all_rows(x.shape[0])
    _require(x, state, heads, column, spans, slots)
    _require_weight(weight, state)
    chosen = implementation()
    if chosen == "cpu":
        q, k, v, _ = _cpu(x, spans, None, None, state, slots, weight, heads, column)
        return q, k, v
    if chosen != "native":
        return _by_sequence(CONVOLUTIONS[chosen], x, state, weight, heads, column, spans, slots)
    inputs = [x, weight, *_place_inputs(state, spans, slots)]
    q, k, v = _launch(KERNEL, inputs, x, state, heads, column, spans)
    return q, k, v


def causal_conv_replay(
    x: mx.array,
    state: mx.array,
    accepted: RowSpans,
    heads: Heads,
    *,
    column: int = 0,
    slots: mx.array | None = None,
) -> mx.array:
    """Return the last W - 1 inputs of each sequence after its first accepted rows, in one launch.

    x, state, heads, column, slots: those of the pass.
    accepted: the first row of each sequence in x, and how many of its rows were accepted, 0 included.

    Returns [S, W - 1, C] in the dtype of x. Raises ValueError as ``causal_conv_rows`` does.
    """
    _require(x, state, heads, column, accepted, slots)
    chosen = implementation()
    if chosen == "cpu":
        return _cpu(None, accepted, x, accepted, state, slots, None, heads, column)[3]
    if chosen == "native":
        inputs = [x, *_place_inputs(state, accepted, slots)]
        (new_state,) = _launch(REPLAY, inputs, x, state, heads, column, accepted)
        return new_state
    kept = state if slots is None else state[slots]
    window = mx.concatenate([kept, accepted.gather(_channels(x, heads, column))], axis=1)
    places = accepted.count[:, None] + mx.arange(state.shape[1])[None]
    return mx.take_along_axis(window, places[..., None], axis=1)


def causal_conv_advance(
    x: mx.array,
    old_x: mx.array,
    accepted: RowSpans,
    state: mx.array,
    weight: mx.array,
    heads: Heads,
    *,
    column: int = 0,
    spans: RowSpans | None = None,
    slots: mx.array | None = None,
    after: bool = False,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Replay the accepted rows of the pass before, then run a pass from there, in one launch.

    x, weight, heads, column, spans: as for ``causal_conv_rows``.
    old_x, accepted, state, slots: as for ``causal_conv_replay``; old_x has the width of x. The sequences of
        ``accepted`` are those of ``spans``, so a forked one names its parent's rows and slot.
    after: return the states after the new rows, as prompts do, none of whose rows is rejected.

    Returns q, k, v and the states before the new rows [S, W - 1, C]: the bits of the two functions one after the
    other. Raises ValueError as they do.
    """
    spans = spans or RowSpans.all_rows(x.shape[0])
    accepted.require_like(spans)
    _require(x, state, heads, column, spans, slots)
    _require(old_x, state, heads, column, accepted, slots)
    _require_weight(weight, state)
    if old_x.shape[1] != x.shape[1]:
        raise ValueError(f"Rows of width {old_x.shape[1]} cannot precede rows of width {x.shape[1]}.")
    chosen = implementation()
    if chosen == "cpu":
        return _cpu(x, spans, old_x, accepted, state, slots, weight, heads, column, after)
    if chosen != "native":
        new_state = causal_conv_replay(old_x, state, accepted, heads, column=column, slots=slots)
        q, k, v = causal_conv_rows(x, new_state, weight, heads, column=column, spans=spans)
        if after:
            new_state = causal_conv_replay(x, new_state, spans, heads, column=column)
        return q, k, v, new_state
    inputs = [x, weight, *_place_inputs(state, spans, slots), old_x, accepted.first, accepted.count]
    q, k, v, new_state = _launch(ADVANCE, inputs, x, state, heads, column, spans, after)
    return q, k, v, new_state


def reference_causal_conv_rows(
    x: mx.array,
    state: mx.array,
    weight: mx.array,
    heads: Heads,
    *,
    column: int = 0,
    spans: RowSpans | None = None,
    slots: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Return what ``causal_conv_rows`` returns, by the formula in float32."""
    spans = spans or RowSpans.all_rows(x.shape[0])
    return _by_sequence(_formula, x, state, weight, heads, column, spans, slots)


def _formula(window: mx.array, weight: mx.array) -> mx.array:
    taps = weight.shape[1]
    rows = window.shape[1] - taps + 1
    out = mx.zeros((window.shape[0], rows, window.shape[2]))
    for t in range(taps):
        out = out + weight[:, t] * window[:, t : t + rows]
    return out


def _stock(window: mx.array, weight: mx.array) -> mx.array:
    return mx.conv1d(window, weight[..., None], groups=weight.shape[0])


CONVOLUTIONS: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "stock": _stock,
    "reference": _formula,
}


def _by_sequence(
    convolution: Callable[[mx.array, mx.array], mx.array],
    x: mx.array,
    state: mx.array,
    weight: mx.array,
    heads: Heads,
    column: int,
    spans: RowSpans,
    slots: mx.array | None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Convolve windows [S, W - 1 + longest, C] in float32, and take the result back to rows."""
    kept = state if slots is None else state[slots]
    window = mx.concatenate([kept, spans.gather(_channels(x, heads, column))], axis=1)
    y = convolution(window.astype(mx.float32), weight.astype(mx.float32))
    q, k, v = heads.split(spans.scatter(y * mx.sigmoid(y), x.shape[0]))
    q, k = (part * mx.rsqrt(mx.sum(part * part, axis=-1, keepdims=True) + EPSILON) for part in (q, k))
    return (q * heads.key_size**-0.5).astype(x.dtype), k.astype(x.dtype), v.astype(x.dtype)


def _channels(x: mx.array, heads: Heads, column: int) -> mx.array:
    return x[:, column : column + heads.channels]


def _cpu(
    x: mx.array | None,
    spans: RowSpans,
    old_x: mx.array | None,
    accepted: RowSpans | None,
    state: mx.array,
    slots: mx.array | None,
    weight: mx.array | None,
    heads: Heads,
    column: int,
    after: bool = False,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Replay accepted old rows, if there are any, and convolve new ones, if there are any.

    Returns q, k, v and the new states, as ``causal_conv_advance`` does; what was not asked for is empty.
    """
    kind, types, rows = state.dtype, cpu_library.TYPES, 0 if x is None else x.shape[0]
    q, k = (cpu_library.empty((rows, heads.key_heads, heads.key_size), kind) for _ in range(2))
    v = cpu_library.empty((rows, heads.value_heads, heads.value_size), kind)
    sequences = spans.sequences if old_x is not None else 0
    new_state = cpu_library.empty((sequences, *state.shape[1:]), kind)
    old_first, old_count = (None, None) if accepted is None else (accepted.first, accepted.count)
    given = old_x if x is None else x
    assert given is not None
    cpu_library.call(
        "cpu_causal_conv",
        *(x, spans.first, spans.count, old_x, old_first, old_count, types[kind]),
        *(state, spans.own_slots() if slots is None else slots),
        *(weight, 0 if weight is None else types[weight.dtype], given.shape[1], column, state.shape[1] + 1),
        *(spans.sequences, heads.key_heads, heads.key_size, heads.value_heads, heads.value_size),
        *(q, k, v, new_state, after),
    )
    return q, k, v, new_state


def _launch(
    kernel: Kernel,
    inputs: list[mx.array],
    x: mx.array,
    state: mx.array,
    heads: Heads,
    column: int,
    spans: RowSpans,
    after: bool = False,
) -> list[mx.array]:
    template = [
        ("T", x.dtype),
        ("HK", heads.key_heads),
        ("DK", heads.key_size),
        ("HV", heads.value_heads),
        ("DV", heads.value_size),
        ("W", state.shape[1] + 1),
        ("X_ROW", x.shape[1]),
        ("X_AT", column),
        *[("AFTER", after)] * (kernel is ADVANCE),
    ]
    keys = (x.shape[0], heads.key_heads, heads.key_size)
    shape_of = {
        "q": keys,
        "k": keys,
        "v": (x.shape[0], heads.value_heads, heads.value_size),
        "new_state": (spans.sequences, *state.shape[1:]),
    }
    tiles = -(-(2 * heads.key_heads + heads.value_heads) // SIMDGROUPS)
    rows = 1 if kernel is REPLAY else spans.longest
    return kernel(
        inputs,
        template=template,
        groups=(tiles, rows, spans.sequences),
        threads=(32 * SIMDGROUPS, 1, 1),
        shapes=[shape_of[name] for name in kernel.outputs],
        dtypes=[x.dtype] * len(kernel.outputs),
    )


def _place_inputs(state: mx.array, spans: RowSpans, slots: mx.array | None) -> list[mx.array]:
    return [state, spans.own_slots() if slots is None else slots, spans.first, spans.count]


def _require(
    x: mx.array, state: mx.array, heads: Heads, column: int, spans: RowSpans, slots: mx.array | None
) -> None:
    heads.require()
    if x.dtype not in FLOATS:
        raise ValueError(f"x must be float32, float16 or bfloat16, not {x.dtype}.")
    if x.ndim != 2 or not 0 <= column <= x.shape[1] - heads.channels:
        raise ValueError(f"x must be [R, at least {column + heads.channels}], not {x.shape}.")
    if state.ndim != 3 or state.shape[1] < 1 or state.shape[2] != heads.channels or state.dtype != x.dtype:
        raise ValueError(
            f"state must be {x.dtype} [states, W - 1, {heads.channels}] with W from 2 on, "
            f"not {state.dtype} {state.shape}."
        )
    spans.require(x.shape[0])
    spans.require_slots(slots, state.shape[0])


def _require_weight(weight: mx.array, state: mx.array) -> None:
    expected = (state.shape[2], state.shape[1] + 1)
    if weight.shape != expected or weight.dtype not in FLOATS:
        raise ValueError(f"weight must be floating [C, W] = {expected}, not {weight.dtype} {weight.shape}.")
