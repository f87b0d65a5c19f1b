"""Gated DeltaNet over the few rows of a pass, and the replay of those that were accepted.

The recurrence of one value head, whose state S is a matrix [Dv, Dk] (Yang et al., "Gated Delta Networks", 2024)::

    S = g S
    S = S + beta (v - S k) k'
    o = S q

A pass reads the state of the accepted rows and leaves it alone. What a rewind needs is the rows themselves
(``DeltaInputs``, kept from the pass), not a state for each: at 48 value heads of 128 x 128 a state is 3.1 MB and a
row 17 KB, so 16 states would write 50 MB a layer where 16 rows are 0.27 MB that the pass has anyway. The state
after the first n rows comes from stepping again through them: by ``gated_delta_replay``, or by
``gated_delta_advance`` at the start of the next pass, which reads the state once for both.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from metal_kernels.launching import cpu_library
from metal_kernels.launching.implementations import implementation
from metal_kernels.launching.launch import Kernel
from metal_kernels.row_spans import RowSpans

STEP = ("_gated_delta_step.h",)
ROWS = ("k", "v", "g", "beta")
PLACES = ("a_log", "dt_bias", "state", "slots", "first", "count")
OLD = tuple(f"old_{name}" for name in (*ROWS, "first", "count"))
KERNEL = Kernel("gated_delta_rows", inputs=("q", *ROWS, *PLACES), outputs=("out",), includes=STEP)
REPLAY = Kernel("gated_delta_replay", inputs=(*ROWS, *PLACES), outputs=("new_state",), includes=STEP)
ADVANCE = Kernel(
    "gated_delta_advance", inputs=("q", *ROWS, *PLACES, *OLD), outputs=("out", "new_state"), includes=STEP
)
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
LARGEST_HEAD = 256
# Value rows of a threadgroup, and its threads: SIMDGROUPS, LANES and VALUES of _gated_delta_step.h.
TILE = 32
THREADS = 128

Update = Callable[..., tuple[mx.array, mx.array]]


@dataclass(frozen=True)
class DeltaInputs:
    """What R rows bring to the state of one layer.

    k: [R, Hk, Dk], normalised. v: [R, Hv, Dv] in the dtype of k, Hv a multiple of Hk.
    g, beta: the decay, float32 [R, Hv], and the update rate [R, Hv]; or, with ``Gates``, the arrays that hold the
    projections which these are computed from.
    """

    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array


@dataclass(frozen=True)
class Gates:
    """How the gates are made from the projections a and b of a row, in float32.

    g = exp(-exp(a_log) softplus(a + dt_bias)), beta = sigmoid(b), with a_log and dt_bias [Hv].
    a_column, b_column: where a and b begin in the rows of ``DeltaInputs.g`` and ``DeltaInputs.beta``, which may
        hold other projections as well.
    """

    a_log: mx.array
    dt_bias: mx.array
    a_column: int = 0
    b_column: int = 0


def gated_delta_rows(
    q: mx.array,
    rows: DeltaInputs,
    state: mx.array,
    *,
    spans: RowSpans | None = None,
    slots: mx.array | None = None,
    gates: Gates | None = None,
) -> mx.array:
    """Return o = S q of each row, S the state after that row of its sequence; one launch.

    Arrays that are views begin at a multiple of four numbers.

    q: [R, Hk, Dk], normalised and scaled, float32, float16 or bfloat16.
    rows: keys and values in the dtype of q, and gates; Dk and Dv are multiples of 32 up to 256.
    state: float32 [P, Hv, Dv, Dk]; it is only read.
    spans: the rows of each sequence; every row belongs to one. None: all rows are one sequence.
    slots: int32 [S], which of the P states each sequence starts from; two sequences may start from one. None: that
        of its own number.
    gates: how gates are made from what ``rows`` holds. None: it holds the gates.

    Returns [R, Hv, Dv] in the dtype of q. A row's result depends on its own sequence up to it and on nothing else:
    R rows at once give the bits of R passes of one row with a replay after each. Raises
    ValueError for other shapes and dtypes. ``spans`` and ``slots`` are on the device: what they hold is not
    checked.
    """
    spans = spans or RowSpans.all_rows(rows.k.shape[0])
    _require(rows, state, spans, slots, gates, q)
    chosen = implementation()
    if chosen == "cpu":
        return _cpu(q, rows, None, spans, None, state, slots, gates)[0]
    if chosen != "native":
        y, _ = _by_sequence(UPDATES[chosen], q, rows, state, spans, slots, gates)
        return spans.scatter(y, q.shape[0]).astype(q.dtype)
    inputs = [q, *_row_inputs(rows), *_place_inputs(rows, state, spans, slots, gates)]
    (out,) = _launch(KERNEL, inputs, rows, spans, gates, [rows.v.shape], [q.dtype])
    return out


def gated_delta_replay(
    rows: DeltaInputs,
    state: mx.array,
    accepted: RowSpans,
    *,
    slots: mx.array | None = None,
    gates: Gates | None = None,
) -> mx.array:
    """Return the state of each sequence after its first accepted rows, in one launch.

    rows, state, slots, gates: those of the pass.
    accepted: the first row of each sequence in the pass, and how many of its rows were accepted, 0 included.

    Returns float32 [S, Hv, Dv, Dk], the bits of n passes of one row with a replay after each. Raises ValueError as
    ``gated_delta_rows`` does.
    """
    _require(rows, state, accepted, slots, gates)
    chosen = implementation()
    if chosen == "cpu":
        return _cpu(None, None, rows, accepted, accepted, state, slots, gates)[1]
    if chosen != "native":
        return _by_sequence(UPDATES[chosen], rows.k, rows, state, accepted, slots, gates)[1]
    inputs = [*_row_inputs(rows), *_place_inputs(rows, state, accepted, slots, gates)]
    shape = (accepted.sequences, *state.shape[1:])
    (new_state,) = _launch(REPLAY, inputs, rows, accepted, gates, [shape], [mx.float32])
    return new_state


def gated_delta_advance(
    q: mx.array,
    rows: DeltaInputs,
    old_rows: DeltaInputs,
    accepted: RowSpans,
    state: mx.array,
    *,
    spans: RowSpans | None = None,
    slots: mx.array | None = None,
    gates: Gates | None = None,
    after: bool = False,
) -> tuple[mx.array, mx.array]:
    """Replay the accepted rows of the pass before, then run a pass from there, in one launch.

    q, rows, spans, gates: as for ``gated_delta_rows``.
    old_rows, accepted, state, slots: as for ``gated_delta_replay``; old_rows has the widths of rows. The sequences
        of ``accepted`` are those of ``spans``, so a forked one names its parent's rows and slot.
    after: return the states after the new rows, as prompts do, none of whose rows is rejected.

    Returns the outputs [R, Hv, Dv] and the states before the new rows, float32 [S, Hv, Dv, Dk]: the bits of the
    two functions one after the other, with one reading of the state less. Raises ValueError as they do.
    """
    spans = spans or RowSpans.all_rows(rows.k.shape[0])
    accepted.require_like(spans)
    _require(rows, state, spans, slots, gates, q)
    _require(old_rows, state, accepted, slots, gates)
    if _widths(old_rows) != _widths(rows) or old_rows.k.dtype != rows.k.dtype:
        raise ValueError(f"Rows of widths {_widths(old_rows)} cannot precede rows of widths {_widths(rows)}.")
    chosen = implementation()
    if chosen == "cpu":
        return _cpu(q, rows, old_rows, spans, accepted, state, slots, gates, after)
    if chosen != "native":
        new_state = gated_delta_replay(old_rows, state, accepted, slots=slots, gates=gates)
        out = gated_delta_rows(q, rows, new_state, spans=spans, gates=gates)
        return out, gated_delta_replay(rows, new_state, spans, gates=gates) if after else new_state
    inputs = [q, *_row_inputs(rows), *_place_inputs(rows, state, spans, slots, gates)]
    inputs += [*_row_inputs(old_rows), accepted.first, accepted.count]
    shapes = [rows.v.shape, (spans.sequences, *state.shape[1:])]
    out, new_state = _launch(ADVANCE, inputs, rows, spans, gates, shapes, [q.dtype, mx.float32], after)
    return out, new_state


def reference_gated_delta_rows(
    q: mx.array,
    rows: DeltaInputs,
    state: mx.array,
    *,
    spans: RowSpans | None = None,
    slots: mx.array | None = None,
    gates: Gates | None = None,
) -> tuple[mx.array, mx.array]:
    """Return the outputs [R, Hv, Dv] and the states after all rows [S, Hv, Dv, Dk], by the formula in float32."""
    spans = spans or RowSpans.all_rows(rows.k.shape[0])
    y, new_state = _by_sequence(_formula, q, rows, state, spans, slots, gates)
    return spans.scatter(y, q.shape[0]).astype(q.dtype), new_state


def _formula(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: mx.array
) -> tuple[mx.array, mx.array]:
    per_head = v.shape[2] // k.shape[2]
    q, k = mx.repeat(q, per_head, axis=2), mx.repeat(k, per_head, axis=2)
    outputs = []
    for t in range(v.shape[1]):
        key, query = k[:, t, :, None, :], q[:, t, :, None, :]
        stepped = g[:, t, :, None, None] * state
        delta = beta[:, t, :, None] * (v[:, t] - mx.sum(stepped * key, axis=-1))
        stepped = stepped + delta[..., None] * key
        outputs.append(mx.sum(stepped * query, axis=-1))
        state = mx.where(mask[:, t, None, None, None], stepped, state)
    return mx.stack(outputs, axis=1), state


def _stock(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: mx.array
) -> tuple[mx.array, mx.array]:
    y, new_state = mx.fast.gated_delta_update(q, k, v, g, beta, state, mask)
    return y, new_state


UPDATES: dict[str, Update] = {"stock": _stock, "reference": _formula}


def _by_sequence(
    update: Update,
    q: mx.array,
    rows: DeltaInputs,
    state: mx.array,
    spans: RowSpans,
    slots: mx.array | None,
    gates: Gates | None,
) -> tuple[mx.array, mx.array]:
    """Run an update over rows laid out by sequence: outputs [S, longest, Hv, Dv] and new states, in float32.

    In float32 from the start: MLX's own update rounds g and beta to the dtype of q on the CPU.
    """
    g, beta = _computed_gates(rows, gates)
    laid_out = [spans.gather(x).astype(mx.float32) for x in (q, rows.k, rows.v, g, beta)]
    return update(*laid_out, state if slots is None else state[slots], spans.present())


def _computed_gates(rows: DeltaInputs, gates: Gates | None) -> tuple[mx.array, mx.array]:
    if gates is None:
        return rows.g, rows.beta
    heads = rows.v.shape[1]
    a = rows.g[:, gates.a_column : gates.a_column + heads].astype(mx.float32)
    b = rows.beta[:, gates.b_column : gates.b_column + heads].astype(mx.float32)
    softplus = mx.logaddexp(a + gates.dt_bias.astype(mx.float32), mx.array(0.0))
    return mx.exp(-mx.exp(gates.a_log.astype(mx.float32)) * softplus), mx.sigmoid(b)


def _cpu(
    q: mx.array | None,
    rows: DeltaInputs | None,
    old_rows: DeltaInputs | None,
    spans: RowSpans,
    accepted: RowSpans | None,
    state: mx.array,
    slots: mx.array | None,
    gates: Gates | None,
    after: bool = False,
) -> tuple[mx.array, mx.array]:
    """Step through accepted old rows, if there are any, and through new ones, if there are any.

    Returns the outputs and the new states, as ``gated_delta_advance`` does; what was not asked for is empty.
    """
    given, types = rows or old_rows, cpu_library.TYPES
    assert given is not None
    out = cpu_library.empty(given.v.shape if rows else (0,), given.v.dtype)
    new_state = cpu_library.empty((spans.sequences, *state.shape[1:]) if old_rows else (0,), mx.float32)
    old_first, old_count = (None, None) if accepted is None else (accepted.first, accepted.count)
    (_, key_heads, key_size), (_, value_heads, value_size) = given.k.shape, given.v.shape
    made: tuple[mx.array | int | None, ...] = (None, 0, None, 0)
    if gates is not None:
        made = (gates.a_log, types[gates.a_log.dtype], gates.dt_bias, types[gates.dt_bias.dtype])
    columns = (gates.a_column, gates.b_column) if gates else (0, 0)
    cpu_library.call(
        "cpu_gated_delta",
        *(q, *_cpu_rows(rows), spans.first, spans.count),
        *(*_cpu_rows(old_rows), old_first, old_count, types[given.k.dtype]),
        *(*made, state, spans.own_slots() if slots is None else slots),
        *(spans.sequences, key_heads, key_size, value_heads, value_size),
        *(given.g.shape[1], columns[0], given.beta.shape[1], columns[1]),
        *(out, new_state, after),
    )
    return out, new_state


def _cpu_rows(rows: DeltaInputs | None) -> tuple[mx.array | int | None, ...]:
    """Return rows as the CPU library takes them: k, v, g and its type, beta and its type."""
    if rows is None:
        return None, None, None, 0, None, 0
    types = cpu_library.TYPES
    return rows.k, rows.v, rows.g, types[rows.g.dtype], rows.beta, types[rows.beta.dtype]


def _launch(
    kernel: Kernel,
    inputs: list[mx.array],
    rows: DeltaInputs,
    spans: RowSpans,
    gates: Gates | None,
    shapes: list[tuple[int, ...]],
    dtypes: list[mx.Dtype],
    after: bool = False,
) -> list[mx.array]:
    (_, key_heads, key_size), (_, value_heads, value_size) = rows.k.shape, rows.v.shape
    template = [
        ("T", rows.k.dtype),
        ("HK", key_heads),
        ("HV", value_heads),
        ("DK", key_size),
        ("DV", value_size),
        ("RAW", gates is not None),
        ("G_ROW", rows.g.shape[1]),
        ("G_AT", gates.a_column if gates else 0),
        ("BETA_ROW", rows.beta.shape[1]),
        ("BETA_AT", gates.b_column if gates else 0),
        *[("AFTER", after)] * (kernel is ADVANCE),
    ]
    groups = (value_size // TILE, value_heads, spans.sequences)
    return kernel(inputs, template=template, groups=groups, threads=(THREADS, 1, 1), shapes=shapes, dtypes=dtypes)


def _row_inputs(rows: DeltaInputs) -> list[mx.array]:
    return [rows.k, rows.v, rows.g, rows.beta]


def _place_inputs(
    rows: DeltaInputs, state: mx.array, spans: RowSpans, slots: mx.array | None, gates: Gates | None
) -> list[mx.array]:
    # Without gates the kernel reads neither a_log nor dt_bias; any array takes their place.
    a_log, dt_bias = (gates.a_log, gates.dt_bias) if gates else (spans.count, spans.count)
    return [a_log, dt_bias, state, spans.own_slots() if slots is None else slots, spans.first, spans.count]


def _widths(rows: DeltaInputs) -> tuple[tuple[int, ...], ...]:
    return tuple(x.shape[1:] for x in _row_inputs(rows))


def _require(
    rows: DeltaInputs,
    state: mx.array,
    spans: RowSpans,
    slots: mx.array | None,
    gates: Gates | None,
    q: mx.array | None = None,
) -> None:
    k, v = rows.k, rows.v
    if k.ndim != 3 or v.ndim != 3 or k.shape[0] != v.shape[0] or v.shape[1] % k.shape[1]:
        raise ValueError(
            f"k must be [R, Hk, Dk] and v [R, Hv, Dv] with Hv a multiple of Hk, not {k.shape} and {v.shape}."
        )
    if k.dtype not in FLOATS or v.dtype != k.dtype:
        raise ValueError(f"k and v must be float32, float16 or bfloat16, both alike, not {k.dtype} and {v.dtype}.")
    for name, size in (("Dk", k.shape[2]), ("Dv", v.shape[2])):
        if size % 32 or not 32 <= size <= LARGEST_HEAD:
            raise ValueError(f"{name} must be a multiple of 32 up to {LARGEST_HEAD}, not {size}.")
    if q is not None and (q.shape != k.shape or q.dtype != k.dtype):
        raise ValueError(f"q must be like k, {k.dtype} {k.shape}, not {q.dtype} {q.shape}.")
    spans.require(k.shape[0])
    spans.require_slots(slots, state.shape[0])
    expected = (v.shape[1], v.shape[2], k.shape[2])
    if state.ndim != 4 or state.shape[1:] != expected or state.dtype != mx.float32:
        raise ValueError(
            f"state must be float32 [states, Hv, Dv, Dk] with {expected}, not {state.dtype} {state.shape}."
        )
    _require_gates(rows, gates)


def _require_gates(rows: DeltaInputs, gates: Gates | None) -> None:
    count, heads = rows.v.shape[:2]
    for name, x, column in (
        ("g", rows.g, gates.a_column if gates else 0),
        ("beta", rows.beta, gates.b_column if gates else 0),
    ):
        fits = x.ndim == 2 and x.shape[0] == count and 0 <= column <= x.shape[1] - heads
        if not fits or (gates is None and x.shape[1] != heads):
            wanted = f"[{count}, {heads}]" if gates is None else f"[{count}, at least {column + heads}]"
            raise ValueError(f"{name} must be {wanted}, not {x.shape}.")
        if x.dtype not in FLOATS:
            raise ValueError(f"{name} must be float32, float16 or bfloat16, not {x.dtype}.")
    if gates is None and rows.g.dtype != mx.float32:
        raise ValueError(f"g must be float32, not {rows.g.dtype}: a decay close to 1 has no room in 16 bits.")
    if gates is not None:
        for name, x in (("a_log", gates.a_log), ("dt_bias", gates.dt_bias)):
            if x.shape != (heads,) or x.dtype not in FLOATS:
                raise ValueError(f"{name} must be floating [{heads}], not {x.dtype} {x.shape}.")
