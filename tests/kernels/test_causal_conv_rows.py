"""causal_conv_rows, its replay and its advance against float64 numpy, against mlx-lm, and bit for bit."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from emulator import launcher
from mlx_lm.models.gated_delta import normalize_qk

from metal_kernels.causal_conv_rows import (
    Heads,
    causal_conv_advance,
    causal_conv_replay,
    causal_conv_rows,
    reference_causal_conv_rows,
)
from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import Kernel, Launcher, launching
from metal_kernels.row_spans import RowSpans

# Relative to the largest number of the result: the rounding of the output's dtype, or of sums in float32.
TOLERANCE = {mx.float32: 3e-6, mx.float16: 6e-4, mx.bfloat16: 5e-3}
SMALL = Heads(2, 32, 3, 64)
QWEN = Heads(1, 128, 3, 128)


@pytest.fixture(params=["native", "stock", "reference", "cpu"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    with launching(launcher), using(request.param):
        yield request.param


def normal(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def inputs(
    rows: int,
    heads: Heads = SMALL,
    dtype: mx.Dtype = mx.float32,
    size: float = 1.0,
    taps: int = 4,
    states: int = 1,
) -> tuple[mx.array, mx.array, mx.array]:
    """Return x, the states and the weight; ``size`` is the magnitude of the inputs."""
    x = (size * normal(1, rows, heads.channels)).astype(dtype)
    state = (size * normal(2, states, taps - 1, heads.channels)).astype(dtype)
    return x, state, (0.5 * normal(3, heads.channels, taps)).astype(dtype)


def spans(first: list[int], count: list[int], longest: int | None = None) -> RowSpans:
    return RowSpans(mx.array(first, dtype=mx.int32), mx.array(count, dtype=mx.int32), longest or max(count))


def accepted(count: int, of: int) -> RowSpans:
    return spans([0], [count], of)


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def formula(x: mx.array, state: mx.array, weight: mx.array, heads: Heads) -> list[np.ndarray]:
    """Convolve the rows after one state [W - 1, C], and normalise, channel by channel in float64."""
    seen, taps = np.concatenate([float64(state), float64(x)]), float64(weight)
    width = taps.shape[1]
    y = np.array([np.sum(seen[i : i + width].T * taps, axis=1) for i in range(len(x))])
    y = y / (1 + np.exp(-y))
    keys = heads.key_heads * heads.key_size
    q, k = (y[:, at : at + keys].reshape(len(x), heads.key_heads, -1) for at in (0, keys))
    q, k = (part / np.sqrt(np.sum(part**2, axis=-1, keepdims=True) + 1e-6) for part in (q, k))
    return [q / np.sqrt(heads.key_size), k, y[:, 2 * keys :].reshape(len(x), heads.value_heads, -1)]


def assert_close(got: tuple[mx.array, ...], expected: list[np.ndarray], dtype: mx.Dtype) -> None:
    for part, wanted in zip(got, expected, strict=True):
        assert part.dtype == dtype and part.shape == wanted.shape
        np.testing.assert_allclose(float64(part), wanted, rtol=0, atol=TOLERANCE[dtype] * np.abs(wanted).max())


def same(a: tuple[mx.array, ...], b: tuple[mx.array, ...]) -> bool:
    return all(
        x.shape == y.shape and x.dtype == y.dtype and bool(mx.array_equal(x, y)) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("size", [0.1, 13.0])
@pytest.mark.parametrize(
    ("rows", "heads", "dtype", "taps"),
    [
        (16, QWEN, mx.bfloat16, 4),
        (1, QWEN, mx.bfloat16, 4),
        (5, SMALL, mx.float32, 4),
        (3, SMALL, mx.float16, 4),
        (2, Heads(1, 256, 1, 32), mx.float32, 2),
        (32, Heads(1, 96, 2, 192), mx.bfloat16, 3),
        (4, Heads(3, 64, 3, 256), mx.float16, 5),
    ],
)
def test_equals_the_formula(
    implementation: str, rows: int, heads: Heads, dtype: mx.Dtype, taps: int, size: float
) -> None:
    x, state, weight = inputs(rows, heads, dtype, size, taps)
    assert_close(causal_conv_rows(x, state, weight, heads), formula(x, state[0], weight, heads), dtype)


def test_the_reference_equals_the_formula() -> None:
    x, state, weight = inputs(5)
    got = reference_causal_conv_rows(x, state, weight, SMALL)
    assert_close(got, formula(x, state[0], weight, SMALL), mx.float32)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_cpu_library_is_no_further_from_float64_than_stock(dtype: mx.Dtype) -> None:
    x, state, weight = inputs(16, QWEN, dtype)
    wanted, distances = formula(x, state[0], weight, QWEN), {}
    for chosen in ("cpu", "stock"):
        with using(chosen):
            got = causal_conv_rows(x, state, weight, QWEN)
        distances[chosen] = [
            np.abs(float64(part) - expected).mean() for part, expected in zip(got, wanted, strict=True)
        ]
    assert all(ours <= 1.001 * stock for ours, stock in zip(distances["cpu"], distances["stock"], strict=True))


def test_rows_of_zeros_stay_zeros(implementation: str) -> None:
    """The length of a zero vector is not divided by alone: no NaN."""
    x, state, weight = inputs(2)
    for part in causal_conv_rows(0 * x, 0 * state, weight, SMALL):
        assert bool(mx.all(part == 0))


def test_equals_the_operations_of_mlx_lm(implementation: str) -> None:
    x, state, weight = inputs(6)
    conv = nn.Conv1d(SMALL.channels, SMALL.channels, 4, groups=SMALL.channels, bias=False)
    conv.weight = weight[..., None]
    q, k, v = SMALL.split(nn.silu(conv(mx.concatenate([state, x[None]], axis=1)))[0])
    q, k = normalize_qk(q, k, inv_scale=SMALL.key_size**-0.5, eps=1e-6)
    expected = [float64(part) for part in (q, k, v)]
    assert_close(causal_conv_rows(x, state, weight, SMALL), expected, mx.float32)


@pytest.mark.parametrize(("heads", "dtype"), [(QWEN, mx.bfloat16), (SMALL, mx.float16), (SMALL, mx.float32)])
def test_rows_at_once_are_rows_one_by_one(implementation: str, heads: Heads, dtype: mx.Dtype) -> None:
    x, state, weight = inputs(16, heads, dtype, 13.0)
    kept, outputs = [state], []
    for i in range(16):
        row = x[i : i + 1]
        outputs.append(causal_conv_rows(row, kept[-1], weight, heads))
        kept.append(causal_conv_replay(row, kept[-1], accepted(1, 1), heads))
    one_by_one = [mx.concatenate(parts) for parts in zip(*outputs, strict=True)]
    for rows in (1, 2, 3, 4, 8, 13, 16):
        got = causal_conv_rows(x[:rows], state, weight, heads)
        assert same(got, tuple(part[:rows] for part in one_by_one)), rows
        for n in range(rows + 1):
            replayed = causal_conv_replay(x[:rows], state, accepted(n, rows), heads)
            assert same((replayed,), (kept[n],)), (rows, n)
            seen = mx.concatenate([state[0], x[:n]])
            assert same((replayed[0],), (seen[-3:],)), (rows, n)


@pytest.mark.parametrize("old_count", range(6))
def test_an_advance_is_a_replay_and_a_pass(implementation: str, old_count: int) -> None:
    x, state, weight = inputs(5, dtype=mx.bfloat16)
    old = normal(20, 5, SMALL.channels, dtype=mx.bfloat16)
    *got, kept = causal_conv_advance(x, old, accepted(old_count, 5), state, weight, SMALL)
    expected = causal_conv_replay(old, state, accepted(old_count, 5), SMALL)
    assert same((*got, kept), (*causal_conv_rows(x, expected, weight, SMALL), expected))


def test_an_advance_returns_the_states_after_a_prompt(implementation: str) -> None:
    """Of two sequences, with fewer rows than taps and with more."""
    x, state, weight = inputs(42, dtype=mx.bfloat16, states=2)
    old = normal(20, 3, SMALL.channels, dtype=mx.bfloat16)
    before, which = spans([0, 1], [2, 0], 3), spans([0, 40], [40, 2])
    *got, after = causal_conv_advance(x, old, before, state, weight, SMALL, spans=which, after=True)
    *expected, start = causal_conv_advance(x, old, before, state, weight, SMALL, spans=which)
    assert same((*got, after), (*expected, causal_conv_replay(x, start, which, SMALL)))


def test_reads_its_channels_out_of_wider_rows(implementation: str) -> None:
    x, state, weight = inputs(4, dtype=mx.bfloat16)
    old = normal(20, 3, SMALL.channels, dtype=mx.bfloat16)

    def beside(rows: mx.array) -> mx.array:
        junk = mx.full((rows.shape[0], 5), mx.nan, dtype=rows.dtype)
        return mx.concatenate([junk, rows, junk[:, :2]], axis=1)

    got = causal_conv_rows(beside(x), state, weight, SMALL, column=5)
    assert same(got, causal_conv_rows(x, state, weight, SMALL))
    some = accepted(2, 3)
    assert same(
        (causal_conv_replay(beside(old), state, some, SMALL, column=5),),
        (causal_conv_replay(old, state, some, SMALL),),
    )
    assert same(
        causal_conv_advance(beside(x), beside(old), some, state, weight, SMALL, column=5),
        causal_conv_advance(x, old, some, state, weight, SMALL),
    )


def test_sequences_of_a_pass_do_not_mix(implementation: str) -> None:
    """Four sequences, two of them forks of one state, in another order, with NaN in what they do not own."""
    x, state, weight = inputs(8, dtype=mx.bfloat16, states=4)
    old = normal(20, 7, SMALL.channels, dtype=mx.bfloat16)
    old[4], state[1] = mx.nan, mx.nan
    slots = mx.array([3, 0, 3, 2], dtype=mx.int32)
    which, before = spans([5, 0, 1, 4], [3, 1, 3, 1]), spans([0, 2, 0, 5], [2, 0, 1, 2], 4)
    *got, kept = causal_conv_advance(x, old, before, state, weight, SMALL, spans=which, slots=slots)
    assert same((kept,), (causal_conv_replay(old, state, before, SMALL, slots=slots),))
    assert same(tuple(got), causal_conv_rows(x, kept, weight, SMALL, spans=which))
    from_slots = causal_conv_rows(x, state, weight, SMALL, spans=which, slots=slots)
    assert same(from_slots, causal_conv_rows(x, state[slots], weight, SMALL, spans=which))
    assert all(bool(mx.all(mx.isfinite(part))) for part in (*got, kept))
    for s in range(4):
        first, count, old_first, old_count = (
            int(v[s].item()) for v in (which.first, which.count, before.first, before.count)
        )
        own = mx.concatenate([state[slots[s]], old[old_first : old_first + old_count]])[-3:]
        assert same((kept[s],), (own,)), s
        rows = slice(first, first + count)
        assert same(tuple(part[rows] for part in got), causal_conv_rows(x[rows], own[None], weight, SMALL)), s


def test_nothing_recompiles_for_another_count() -> None:
    seen = set()

    def recording(kernel: Kernel) -> Launcher:
        def launch(**given: Any) -> list[mx.array]:
            seen.add((kernel.name, tuple(given["template"]), given["threadgroup"]))
            return launcher(kernel, check=False)(**given)

        return launch

    with launching(recording):
        for rows in range(1, 17):
            x, state, weight = inputs(rows)
            causal_conv_advance(x, x, accepted(rows // 2, rows), state, weight, SMALL)
    assert len(seen) == 1


def test_refuses_what_it_cannot_take(implementation: str) -> None:
    x, state, weight = inputs(4)
    some = accepted(4, 4)
    run = partial(causal_conv_rows, heads=SMALL)
    refused = [
        ("Dk must be a multiple of 32", partial(run, x, state, weight, heads=Heads(2, 48, 3, 32))),
        ("up to 256, not 288", partial(run, x, state, weight, heads=Heads(2, 32, 1, 288))),
        ("x must be float32", partial(run, x.astype(mx.int32), state, weight)),
        ("at least 320", partial(run, x[:, :300], state, weight)),
        ("at least 321", partial(run, x, state, weight, column=1)),
        ("x must be", partial(run, x[None], state, weight)),
        ("state must be", partial(run, x, state.astype(mx.bfloat16), weight)),
        ("state must be", partial(run, x, state[:, :, :300], weight)),
        ("W from 2 on", partial(run, x, state[:, :0], weight[:, :1])),
        ("weight must be", partial(run, x, state, weight[:, :3])),
        ("weight must be", partial(run, x, state, weight.T)),
        ("1 sequences with 2 states need slots", partial(run, x, inputs(4, states=2)[1], weight)),
        ("slots must be int32", partial(run, x, state, weight, slots=mx.array([0.0]))),
        ("1 to all of the 4 rows, not 5", partial(causal_conv_replay, x, state, accepted(2, 5), SMALL)),
        (
            "1 sequences have accepted rows, 2",
            partial(causal_conv_advance, x, x, some, state, weight, SMALL, spans=spans([0, 2], [2, 2])),
        ),
        (
            "cannot precede",
            partial(causal_conv_advance, x, mx.zeros((4, 400)), some, state, weight, SMALL),
        ),
    ]
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()
