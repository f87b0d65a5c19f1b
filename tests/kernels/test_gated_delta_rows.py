"""gated_delta_rows, its replay and its advance against float64 numpy, against mlx-lm, and bit for bit."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import gated_delta_ops, gated_delta_update
from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs

from metal_kernels.causal_conv_rows import Heads, causal_conv_advance, causal_conv_replay, causal_conv_rows
from metal_kernels.gated_delta_rows import (
    DeltaInputs,
    Gates,
    gated_delta_advance,
    gated_delta_replay,
    gated_delta_rows,
    reference_gated_delta_rows,
)
from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import Kernel, Launcher, launching
from metal_kernels.row_spans import RowSpans

# Relative to the largest number of the result: the rounding of the output's dtype, or of sums in float32.
TOLERANCE = {mx.float32: 3e-6, mx.float16: 6e-4, mx.bfloat16: 5e-3}
# Hk, Hv, Dk, Dv
QWEN = (1, 3, 128, 128)
SMALL = (2, 4, 64, 32)


@pytest.fixture(params=["native", "stock", "reference", "cpu"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    with launching(launcher), using(request.param):
        yield request.param


@pytest.fixture
def native() -> Iterator[None]:
    with launching(launcher), using("native"):
        yield


def normal(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def uniform(seed: int, low: float, high: float, *shape: int) -> mx.array:
    return mx.random.uniform(low, high, shape, key=mx.random.key(seed))


def inputs(
    rows: int,
    sizes: tuple[int, int, int, int] = SMALL,
    dtype: mx.Dtype = mx.float32,
    size: float = 1.0,
    seed: int = 0,
) -> tuple[mx.array, DeltaInputs]:
    """Return q and the rows of a pass, with unit keys; ``size`` is the magnitude of the values."""
    key_heads, value_heads, key_size, value_size = sizes
    q, k = normal(seed + 1, rows, key_heads, key_size), normal(seed + 2, rows, key_heads, key_size)
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = size * normal(seed + 3, rows, value_heads, value_size)
    g, beta = uniform(seed + 4, 0.3, 1.0, rows, value_heads), uniform(seed + 5, 0.0, 1.0, rows, value_heads)
    return (q * key_size**-0.5).astype(dtype), DeltaInputs(k.astype(dtype), v.astype(dtype), g, beta)


def states(count: int, sizes: tuple[int, int, int, int] = SMALL, size: float = 1.0) -> mx.array:
    _, value_heads, key_size, value_size = sizes
    return size * normal(7, count, value_heads, value_size, key_size)


def part(rows: DeltaInputs, which: slice) -> DeltaInputs:
    return DeltaInputs(rows.k[which], rows.v[which], rows.g[which], rows.beta[which])


def spans(first: list[int], count: list[int], longest: int | None = None) -> RowSpans:
    return RowSpans(mx.array(first, dtype=mx.int32), mx.array(count, dtype=mx.int32), longest or max(count))


def accepted(count: int, of: int) -> RowSpans:
    return spans([0], [count], of)


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def recurrence(q: mx.array, rows: DeltaInputs, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Step one state [Hv, Dv, Dk] through rows: outputs and the state after them, in float64."""
    query, key, value, decay, rate = (float64(x) for x in (q, rows.k, rows.v, rows.g, rows.beta))
    per_head = value.shape[1] // key.shape[1]
    state, out = state.copy(), np.zeros(value.shape)
    for i in range(len(value)):
        for h in range(value.shape[1]):
            s, k = decay[i, h] * state[h], key[i, h // per_head]
            s += np.outer(rate[i, h] * (value[i, h] - s @ k), k)
            out[i, h], state[h] = s @ query[i, h // per_head], s
    return out, state


def assert_close(got: mx.array, expected: np.ndarray, tolerance: float) -> None:
    assert got.shape == expected.shape
    np.testing.assert_allclose(float64(got), expected, rtol=0, atol=tolerance * np.abs(expected).max())


def same(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(mx.array_equal(a, b))


@pytest.mark.parametrize("size", [0.1, 13.0])
@pytest.mark.parametrize(
    ("rows", "sizes", "dtype"),
    [
        (16, QWEN, mx.bfloat16),
        (1, QWEN, mx.bfloat16),
        (7, SMALL, mx.float32),
        (16, (1, 2, 32, 32), mx.float16),
        (3, (2, 2, 96, 64), mx.bfloat16),
        (5, (1, 2, 192, 128), mx.float16),
        (2, (1, 4, 256, 64), mx.float32),
        (4, (1, 1, 64, 256), mx.bfloat16),
        (32, (1, 1, 128, 192), mx.float32),
        (70, (1, 1, 32, 32), mx.float32),
    ],
)
def test_equals_the_recurrence(
    implementation: str, rows: int, sizes: tuple[int, int, int, int], dtype: mx.Dtype, size: float
) -> None:
    q, new = inputs(rows, sizes, dtype, size)
    state = states(1, sizes, size)
    out, after = recurrence(q, new, float64(state)[0])
    got = gated_delta_rows(q, new, state)
    assert got.dtype == dtype
    assert_close(got, out, TOLERANCE[dtype])
    replayed = gated_delta_replay(new, state, accepted(rows, rows))
    assert replayed.dtype == mx.float32
    assert_close(replayed, after[None], TOLERANCE[mx.float32])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_cpu_library_is_no_further_from_float64_than_stock(dtype: mx.Dtype) -> None:
    q, new = inputs(16, QWEN, dtype)
    state = states(1, QWEN)
    wanted, after = recurrence(q, new, float64(state)[0])
    distances = {}
    for chosen in ("cpu", "stock"):
        with using(chosen):
            got = gated_delta_rows(q, new, state)
            replayed = gated_delta_replay(new, state, accepted(16, 16))
        distances[chosen] = np.abs(float64(got) - wanted).mean(), np.abs(float64(replayed)[0] - after).mean()
    assert all(ours <= 1.001 * stock for ours, stock in zip(distances["cpu"], distances["stock"], strict=True))


def test_the_reference_equals_the_recurrence() -> None:
    q, new = inputs(5, QWEN)
    state = states(1, QWEN)
    out, after = recurrence(q, new, float64(state)[0])
    got, got_state = reference_gated_delta_rows(q, new, state)
    assert_close(got, out, TOLERANCE[mx.float32])
    assert_close(got_state, after[None], TOLERANCE[mx.float32])


def test_equals_the_operations_of_mlx_lm(implementation: str) -> None:
    q, new = inputs(6)
    state = states(1)
    out, after = gated_delta_ops(q[None], new.k[None], new.v[None], new.g[None], new.beta[None], state)
    assert_close(gated_delta_rows(q, new, state), float64(out)[0], TOLERANCE[mx.float32])
    assert_close(gated_delta_replay(new, state, accepted(6, 6)), float64(after), TOLERANCE[mx.float32])


def projected(rows: int, dtype: mx.Dtype) -> tuple[mx.array, DeltaInputs, Gates]:
    """Return rows whose gates are still projections, side by side with others: [junk 3, b 4, junk 1, a 4]."""
    q, new = inputs(rows, dtype=dtype)
    wide = (4 * normal(11, rows, 12)).astype(dtype)
    a_log, dt_bias = mx.log(uniform(12, 0.01, 16.0, 4)), normal(13, 4).astype(dtype)
    return q, DeltaInputs(new.k, new.v, wide, wide), Gates(a_log, dt_bias, a_column=8, b_column=3)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_computes_the_gates(implementation: str, dtype: mx.Dtype) -> None:
    q, new, gates = projected(6, dtype)
    a, b = float64(new.g[:, 8:12]), float64(new.beta[:, 3:7])
    decay = np.exp(-np.exp(float64(gates.a_log)) * np.logaddexp(0, a + float64(gates.dt_bias)))
    exact = DeltaInputs(new.k, new.v, mx.array(decay), mx.array(1 / (1 + np.exp(-b))))
    state = states(1)
    out, after = recurrence(q, exact, float64(state)[0])
    assert_close(gated_delta_rows(q, new, state, gates=gates), out, TOLERANCE[dtype])
    replayed = gated_delta_replay(new, state, accepted(6, 6), gates=gates)
    assert_close(replayed, after[None], TOLERANCE[mx.float32])


def test_gates_equal_those_of_mlx_lm(implementation: str) -> None:
    q, new, gates = projected(6, mx.float32)
    a, b = new.g[None, :, 8:12], new.beta[None, :, 3:7]
    state = states(1)
    out, after = gated_delta_update(
        q[None], new.k[None], new.v[None], a, b, gates.a_log, gates.dt_bias, state, use_kernel=False
    )
    assert_close(gated_delta_rows(q, new, state, gates=gates), float64(out)[0], TOLERANCE[mx.float32])
    replayed = gated_delta_replay(new, state, accepted(6, 6), gates=gates)
    assert_close(replayed, float64(after), TOLERANCE[mx.float32])


def test_a_layer_of_qwen3_5_equals_mlx_lm(implementation: str) -> None:
    """Three passes with some rows accepted in between give what mlx-lm's layer gives over the accepted rows."""
    mx.random.seed(1)
    layer = GatedDeltaNet(
        TextModelArgs(
            hidden_size=64,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=64,
            linear_value_head_dim=32,
        )
    )
    layer.A_log = mx.log(uniform(30, 0.1, 4.0, 4))
    layer.dt_bias = normal(31, 4)
    heads, weight, gates = Heads(2, 64, 4, 32), layer.conv1d.weight[..., 0], Gates(layer.A_log, layer.dt_bias)
    x, cache = 3 * normal(32, 12, 64), ArraysCache(size=2)
    expected = layer(x[None, :9], cache=cache)[0]

    def project(x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        return layer.in_proj_qkv(x), layer.in_proj_a(x), layer.in_proj_b(x)

    def finish(out: mx.array, x: mx.array) -> mx.array:
        return layer.out_proj(layer.norm(out, layer.in_proj_z(x).reshape(out.shape)).reshape(x.shape[0], -1))

    conv_state, state = mx.zeros((1, 3, heads.channels)), mx.zeros((1, 4, 32, 64))
    inputs, a, b = project(x[:5])
    q, k, v = causal_conv_rows(inputs, conv_state, weight, heads)
    rows = DeltaInputs(k, v, a, b)
    done = [finish(gated_delta_rows(q, rows, state, gates=gates), x[:5])]
    position = 5
    # Passes of 5, 4 and 4 rows; 2, then 3 rows are accepted.
    for accept, count in ((2, 4), (3, 4)):
        position, some = position - rows.k.shape[0] + accept, accepted(accept, rows.k.shape[0])
        old_inputs, old_rows = inputs, rows
        inputs, a, b = project(x[position : position + count])
        q, k, v, conv_state = causal_conv_advance(inputs, old_inputs, some, conv_state, weight, heads)
        rows = DeltaInputs(k, v, a, b)
        out, state = gated_delta_advance(q, rows, old_rows, some, state, gates=gates)
        done = [mx.concatenate(done)[:position], finish(out, x[position : position + count])]
        position += count
    assert_close(mx.concatenate(done), float64(expected), 2e-6)
    assert_close(causal_conv_replay(inputs, conv_state, accepted(4, 4), heads), float64(cache[0]), 1e-6)
    assert_close(gated_delta_replay(rows, state, accepted(4, 4), gates=gates), float64(cache[1]), 2e-6)


@pytest.mark.parametrize("a", [-80.0, -17.0, -15.0, -1e-3, 0.0, 20.0, 80.0])
def test_a_decay_near_one_keeps_its_distance(implementation: str, a: float) -> None:
    """A row that adds nothing leaves the decay itself in the state, as exact as float32 can hold."""
    _, new = inputs(1, (1, 1, 32, 32))
    rows = DeltaInputs(new.k, 0 * new.v, mx.array([[a]]), mx.array([[-200.0]]))
    gates = Gates(mx.log(mx.array([16.0])), mx.array([0.0]))
    decayed = gated_delta_replay(rows, mx.ones((1, 1, 32, 32)), accepted(1, 1), gates=gates)
    expected = np.exp(-16.0 * np.logaddexp(0, a))
    np.testing.assert_allclose(float64(decayed), expected, rtol=2e-6 if expected < 0.9 else 1.2e-7, atol=1e-37)


@pytest.mark.parametrize(("sizes", "dtype"), [(QWEN, mx.bfloat16), (SMALL, mx.float16), (SMALL, mx.float32)])
def test_rows_at_once_are_rows_one_by_one(
    implementation: str, sizes: tuple[int, int, int, int], dtype: mx.Dtype
) -> None:
    q, new = inputs(16, sizes, dtype, 13.0)
    state = states(1, sizes)
    stepped, outputs = [state], []
    for i in range(16):
        row = part(new, slice(i, i + 1))
        outputs.append(gated_delta_rows(q[i : i + 1], row, stepped[-1]))
        stepped.append(gated_delta_replay(row, stepped[-1], accepted(1, 1)))
    one_by_one = mx.concatenate(outputs)
    for rows in (1, 2, 3, 5, 8, 11, 16):
        some = part(new, slice(rows))
        assert same(gated_delta_rows(q[:rows], some, state), one_by_one[:rows]), rows
        for n in {0, 1, rows // 2, rows - 1, rows}:
            assert same(gated_delta_replay(some, state, accepted(n, rows)), stepped[n]), (rows, n)


def test_gates_of_rows_at_once_are_those_of_rows_one_by_one(implementation: str) -> None:
    q, new, gates = projected(16, mx.bfloat16)
    state = states(1)
    whole = gated_delta_rows(q, new, state, gates=gates)
    for i in range(16):
        row = part(new, slice(i, i + 1))
        assert same(gated_delta_rows(q[i : i + 1], row, state, gates=gates), whole[i : i + 1]), i
        state = gated_delta_replay(row, state, accepted(1, 1), gates=gates)
        assert same(gated_delta_replay(new, states(1), accepted(i + 1, 16), gates=gates), state), i


@pytest.mark.parametrize("old_count", range(4))
def test_an_advance_is_a_replay_and_a_pass(implementation: str, old_count: int) -> None:
    _, old = inputs(3, dtype=mx.bfloat16, seed=20)
    q, new = inputs(9, dtype=mx.bfloat16)
    state = states(1)
    out, after = gated_delta_advance(q, new, old, accepted(old_count, 3), state)
    expected = gated_delta_replay(old, state, accepted(old_count, 3))
    assert same(after, expected)
    assert same(out, gated_delta_rows(q, new, expected))


def test_an_advance_returns_the_states_after_a_prompt(implementation: str) -> None:
    """Of two sequences with 40 and 1 rows, more than the gates that are made at a time."""
    _, old = inputs(3, (1, 1, 32, 32), seed=20)
    q, new = inputs(41, (1, 1, 32, 32))
    before, which, state = spans([0, 0], [3, 1], 3), spans([0, 40], [40, 1]), states(2, (1, 1, 32, 32))
    out, after = gated_delta_advance(q, new, old, before, state, spans=which, after=True)
    expected, start = gated_delta_advance(q, new, old, before, state, spans=which)
    assert same(out, expected)
    assert same(after, gated_delta_replay(new, start, which))


def test_sequences_of_a_pass_do_not_mix(implementation: str) -> None:
    """Four sequences, two of them forks of one state, in another order, with NaN in what they do not own."""
    q, new = inputs(8, dtype=mx.bfloat16)
    _, old = inputs(7, dtype=mx.bfloat16, seed=20)
    old.v[4] = mx.nan
    state = states(4)
    state[1] = mx.nan
    slots = mx.array([3, 0, 3, 2], dtype=mx.int32)
    which, before = spans([5, 0, 1, 4], [3, 1, 3, 1]), spans([0, 2, 0, 5], [2, 0, 1, 2], 4)
    out, after = gated_delta_advance(q, new, old, before, state, spans=which, slots=slots)
    plain = gated_delta_rows(q, new, after, spans=which)
    replayed = gated_delta_replay(old, state, before, slots=slots)
    from_slots = gated_delta_rows(q, new, state, spans=which, slots=slots)
    assert same(from_slots, gated_delta_rows(q, new, state[slots], spans=which))
    assert same(out, plain) and same(after, replayed)
    assert bool(mx.all(mx.isfinite(out))) and bool(mx.all(mx.isfinite(after)))
    for s in range(4):
        first, count, old_first, old_count = (
            int(x[s].item()) for x in (which.first, which.count, before.first, before.count)
        )
        own, rows = state[slots[s]][None], part(new, slice(first, first + count))
        if old_count:
            own = gated_delta_replay(
                part(old, slice(old_first, old_first + old_count)), own, accepted(old_count, old_count)
            )
        assert same(after[s], own[0]), s
        assert same(out[first : first + count], gated_delta_rows(q[first : first + count], rows, own)), s


def test_nothing_recompiles_for_another_count(native: None) -> None:
    seen = set()

    def recording(kernel: Kernel) -> Launcher:
        def launch(**given: Any) -> list[mx.array]:
            seen.add((kernel.name, tuple(given["template"]), given["grid"], given["threadgroup"]))
            return launcher(kernel, check=False)(**given)

        return launch

    # MLX compiles arrays of less than 8 numbers apart; models have more heads.
    sizes = (2, 8, 64, 32)
    with launching(recording):
        for rows in range(1, 17):
            q, new = inputs(rows, sizes)
            gated_delta_advance(q, new, new, accepted(rows // 2, rows), states(1, sizes))
    assert len(seen) == 1


def test_refuses_what_it_cannot_take(implementation: str) -> None:
    q, new = inputs(4)
    state, some = states(1), accepted(4, 4)

    def rows(**changed: mx.array) -> DeltaInputs:
        return DeltaInputs(**{name: changed.get(name, getattr(new, name)) for name in ("k", "v", "g", "beta")})

    refused = [
        ("Hv a multiple of Hk", partial(gated_delta_rows, q, rows(v=new.v[:, :3]), state)),
        ("Hv a multiple of Hk", partial(gated_delta_rows, q, rows(v=new.v[:3]), state)),
        ("both alike", partial(gated_delta_rows, q, rows(v=new.v.astype(mx.float16)), state)),
        ("Dk must be a multiple of 32", partial(gated_delta_rows, q[..., :48], rows(k=new.k[..., :48]), state)),
        ("Dv must be a multiple of 32", partial(gated_delta_rows, q, rows(v=new.v[..., :16]), state)),
        ("up to 256, not 320", partial(gated_delta_rows, q, rows(v=mx.zeros((4, 4, 320))), state)),
        ("q must be like k", partial(gated_delta_rows, q[:3], new, state)),
        ("q must be like k", partial(gated_delta_rows, q.astype(mx.bfloat16), new, state)),
        ("state must be float32", partial(gated_delta_rows, q, new, state.astype(mx.bfloat16))),
        ("state must be float32", partial(gated_delta_rows, q, new, state.swapaxes(2, 3))),
        ("1 sequences with 2 states need slots", partial(gated_delta_rows, q, new, states(2))),
        ("slots must be int32", partial(gated_delta_rows, q, new, states(2), slots=mx.array([1], mx.uint32))),
        ("slots must be int32", partial(gated_delta_replay, new, states(2), some, slots=mx.array([1, 0]))),
        ("g must be", partial(gated_delta_rows, q, rows(g=new.g[:, :3]), state)),
        ("g must be float32", partial(gated_delta_rows, q, rows(g=new.g.astype(mx.bfloat16)), state)),
        ("beta must be", partial(gated_delta_rows, q, rows(beta=new.beta[:3]), state)),
        ("beta must be", partial(gated_delta_rows, q, rows(beta=new.beta.astype(mx.int32)), state)),
        (
            "g must be .* at least 5",
            partial(gated_delta_rows, q, new, state, gates=Gates(new.g[0], new.g[0], a_column=1)),
        ),
        ("a_log must be", partial(gated_delta_replay, new, state, some, gates=Gates(new.g[0, :3], new.g[0]))),
        ("1 to all of the 4 rows, not 5", partial(gated_delta_replay, new, state, accepted(2, 5))),
        (
            "first and count",
            partial(gated_delta_replay, new, state, RowSpans(some.first, some.count.astype(mx.float32), 4)),
        ),
        (
            "1 sequences have accepted rows",
            partial(gated_delta_advance, q, new, new, some, states(2), spans=spans([0, 2], [2, 2])),
        ),
        ("cannot precede", partial(gated_delta_advance, q, new, inputs(4, (1, 4, 64, 32))[1], some, state)),
    ]
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()
