"""The drafter's context: guards, windows, growth, forks, and the fused writer."""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from one_draft import block, extend, written_rows
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_models import tiny_target

from mlx_spec.drafters.base import Committed
from mlx_spec.drafters.dflash2.drafter import DFlash2Drafter
from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.drafters.dflash2.writer import BlockState
from mlx_spec.drafters.kv import ContextKV, context_pool, packed, unpacked
from mlx_spec.errors import PositionError

SHAPE = (2, 2, 2, 4)
FULL = "full_attention"


def numbered(start: int, count: int) -> mx.array:
    """Rows whose every entry is their position, with layer, side and so on in the fraction."""
    fraction = mx.arange(math.prod(SHAPE)).reshape(SHAPE) / 64
    return mx.arange(start, start + count).reshape(-1, 1, 1, 1, 1) + fraction


def new(keep: int | None, position: int = 0) -> ContextKV:
    """An empty context in a pool of its own."""
    return ContextKV(context_pool(numbered(0, 1)), keep, position)


def held(kv: ContextKV, layer: int, last: int | None) -> tuple[mx.array, mx.array, int]:
    """Keys and values [S, KV, D] of the ``last`` newest positions as attention finds them, and the first's."""
    _, pages = unpacked(packed([kv]), 1, 0)
    pool, table, length = kv.pool.data, *pages
    rows = pool[table[0]].transpose(0, 3, 1, 2, 4, 5).flatten(0, 1)[: length.item()]
    assert rows.shape[0] == kv.cursor - kv.base
    first = kv.base if last is None else max(kv.base, kv.cursor - last)
    return rows[first - kv.base :, layer, 0], rows[first - kv.base :, layer, 1], first


def assert_holds(kv: ContextKV, last: int | None, expected: np.ndarray) -> None:
    """``expected``: every row ever appended, by position."""
    for layer in range(SHAPE[0]):
        keys, values, first = held(kv, layer, last)
        np.testing.assert_array_equal(np.array(keys), expected[first : kv.cursor, layer, 0])
        np.testing.assert_array_equal(np.array(values), expected[first : kv.cursor, layer, 1])
        if last is not None and kv.keep is not None:
            assert first == max(0, kv.cursor - last)


def filled(keep: int | None, *counts: int) -> ContextKV:
    kv = new(keep)
    for count in counts:
        kv.append(kv.cursor, numbered(kv.cursor, count))
    return kv


def load(tmp_path: Path, **changes: Any) -> DFlash2Drafter:
    return load_dflash2(
        write_drafter(tmp_path, dflash2_config(**changes)), tiny_target("qwen3", mx.float32), "tiny"
    )


def features(count: int, seed: int = 1) -> mx.array:
    return mx.random.normal((count, 192), key=mx.random.key(seed))


@pytest.mark.parametrize("position", [0, 9, 11, 40])
def test_rows_that_do_not_begin_at_the_cursor_are_refused(position: int) -> None:
    kv = filled(None, 10)
    with pytest.raises(PositionError, match=f"begin at position {position}, the cursor is at 10"):
        kv.append(position, numbered(position, 2))
    assert kv.cursor == 10
    assert_holds(kv, None, np.array(numbered(0, 10)))


@pytest.mark.parametrize("position", [0, 39, 41, 60])
@pytest.mark.parametrize("count", [1, 50])
def test_the_drafter_refuses_them_too(count: int, position: int, tmp_path: Path) -> None:
    drafter = load(tmp_path)
    state = drafter.open()
    extend(drafter, state, Committed(0, mx.zeros(40, dtype=mx.int32), features(40)))
    with pytest.raises(PositionError, match=f"position {position}, the cursor is at 40"):
        extend(drafter, state, Committed(position, mx.zeros(count, dtype=mx.int32), features(count)))
    assert state.position == 40


def test_a_context_cannot_begin_before_what_was_captured() -> None:
    kv = new(23)
    with pytest.raises(PositionError, match="begin at position 7: its capture begins at 9"):
        kv.start_at(7, capture=9)
    assert (kv.base, kv.cursor) == (0, 0)


def test_a_context_cannot_begin_after_its_cursor() -> None:
    kv = filled(23, 10)
    with pytest.raises(PositionError, match="begin at position 9: its cursor is at 10"):
        kv.start_at(9, capture=0)
    assert_holds(kv, 23, np.array(numbered(0, 10)))


def test_a_context_may_begin_ahead() -> None:
    kv = filled(23, 10)
    kv.start_at(50, capture=10)
    assert (kv.base, kv.cursor) == (50, 50)
    kv.append(50, numbered(50, 3))
    keys, _, first = held(kv, 1, 23)
    assert first == 50
    np.testing.assert_array_equal(np.array(keys), np.array(numbered(50, 3))[:, 1, 0])


def test_rewinding_past_what_the_window_keeps_is_refused_with_both_numbers() -> None:
    kv = new(23)
    kv.start_at(100, capture=0)
    kv.append(100, numbered(100, 5))
    with pytest.raises(PositionError, match="position 99: that needs the context from 76 on, kept is 100"):
        kv.rewind(99)
    assert (kv.base, kv.cursor) == (100, 105)


def test_rewinding_after_the_window_moved_on_is_refused() -> None:
    kv = filled(5, *[3] * 40)
    assert kv.base > 0
    edge = kv.base + 5
    with pytest.raises(
        PositionError, match=f"position {edge - 1}: that needs .* {kv.base - 1} on, kept is {kv.base}"
    ):
        kv.rewind(edge - 1)
    with pytest.raises(PositionError, match="position 0"):
        kv.rewind(0)
    assert_holds(kv, 5, np.array(numbered(0, 120)))
    kv.rewind(edge)
    assert_holds(kv, 5, np.array(numbered(0, edge)))


@pytest.mark.parametrize("keep", [1, 23, 64])
def test_a_round_can_be_undone_wherever_a_page_ends(keep: int) -> None:
    kv = filled(keep)
    while kv.cursor < 200:
        kv.append(kv.cursor, numbered(kv.cursor, 16))
        kv.rewind(kv.cursor - 16)
        kv.append(kv.cursor, numbered(kv.cursor, 3))
    assert_holds(kv, keep, np.array(numbered(0, 210)))


@pytest.mark.parametrize("position", [10, 11, 1000])
def test_rewinding_to_or_ahead_of_the_cursor_changes_nothing(position: int) -> None:
    kv = filled(None, 10)
    kv.rewind(position)
    assert kv.cursor == 10
    assert_holds(kv, None, np.array(numbered(0, 10)))


@pytest.mark.parametrize("keep", [None, 23])
def test_rewinding_forgets_what_came_after(keep: int | None) -> None:
    kv = filled(keep, 30)
    kv.rewind(25)
    assert kv.cursor == 25
    kv.append(25, -numbered(25, 8))
    expected = np.concatenate([np.array(numbered(0, 25)), -np.array(numbered(25, 8))])
    assert_holds(kv, keep, expected)


def test_a_fork_and_its_origin_do_not_see_each_other() -> None:
    kv = filled(23, 10)
    fork, empty = kv.fork(), new(23).fork()
    kv.append(10, numbered(10, 4))
    fork.append(10, -numbered(10, 6))
    prefix = np.array(numbered(0, 10))
    assert_holds(kv, 23, np.concatenate([prefix, np.array(numbered(10, 4))]))
    assert_holds(fork, 23, np.concatenate([prefix, -np.array(numbered(10, 6))]))
    fork.rewind(3)
    fork.append(3, -numbered(3, 2))
    assert_holds(kv, 23, np.concatenate([prefix, np.array(numbered(10, 4))]))
    assert (kv.cursor, fork.cursor, empty.cursor) == (14, 5, 0)


def test_forks_of_a_drafter_draft_on_their_own(tmp_path: Path) -> None:
    drafter = load(tmp_path)

    def hidden_after(*chunks: mx.array, fork_first: bool) -> mx.array:
        state, position = drafter.open(), 0
        for index, chunk in enumerate(chunks):
            if fork_first and index == len(chunks) - 1:
                other, state = state, state.fork()
                extend(drafter, other, Committed(position, mx.zeros(9, dtype=mx.int32), features(9, seed=99)))
            extend(drafter, state, Committed(position, mx.zeros(chunk.shape[0], dtype=mx.int32), chunk))
            position += chunk.shape[0]
        return block(drafter, state, 7, 8)

    chunks = [features(40, 1), features(5, 2)]
    assert mx.array_equal(hidden_after(*chunks, fork_first=True), hidden_after(*chunks, fork_first=False))


def test_rows_wait_for_a_draft_and_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, rows = load(tmp_path, layer_types=[FULL] * 2), features(48)
    counts = written_rows(drafter, monkeypatch)
    state, alone = drafter.open(), drafter.open()

    def show(state: BlockState, start: int, end: int) -> None:
        extend(drafter, state, Committed(start, mx.zeros(end - start, dtype=mx.int32), rows[start:end]))

    for position in range(12):
        show(state, position, position + 1)
    fork = state.fork()
    # Into what waits, and to what is written.
    assert (drafter.rewind(state, 9), state.position, fork.position, counts) == (9, 9, 12, [])
    show(state, 9, 14)
    first = block(drafter, state, 7, 8)
    assert counts == [14]
    show(state, 14, 20)
    assert drafter.rewind(state, 10) == 10
    show(state, 10, 48)
    assert counts == [14, 38]
    show(alone, 0, 14)
    assert mx.allclose(block(drafter, alone, 7, 8), first, atol=1e-4)
    show(alone, 14, 48)
    assert mx.allclose(block(drafter, alone, 7, 8), block(drafter, state, 7, 8), atol=1e-4)
    show(fork, 12, 14)
    assert mx.allclose(block(drafter, fork, 7, 8), first, atol=1e-4)


@pytest.mark.parametrize("sizes", ["one row", "up to a block", "larger than the window"])
@pytest.mark.parametrize("keep", [1, 7, 23])
def test_a_window_over_many_rounds_equals_a_plain_list(keep: int, sizes: str) -> None:
    rng, kv = np.random.default_rng(keep), new(keep)
    low, high, rounds = {"one row": (1, 2, 200), "up to a block": (1, 9, 80)}.get(sizes, (1, 3 * keep + 2, 60))
    every = np.array(numbered(0, rounds * high))
    for _ in range(rounds):
        count = int(rng.integers(low, high))
        kv.append(kv.cursor, numbered(kv.cursor, count))
        for last in (keep, max(1, keep // 2), None):
            assert_holds(kv, last, every)
        assert kv.pool.pages_in_use <= 3 + keep // 32
    assert kv.base > 0


def test_full_attention_keeps_everything() -> None:
    rng, kv = np.random.default_rng(0), new(None)
    every = np.array(numbered(0, 400))
    while kv.cursor < 300:
        kv.append(kv.cursor, numbered(kv.cursor, int(rng.integers(1, 60))))
        assert kv.base == 0
        assert_holds(kv, None, every)
        assert_holds(kv, 10, every)
        assert kv.pool.pages_in_use == -(-kv.cursor // 32)


def test_forks_hold_their_common_part_once_and_give_back_what_is_theirs() -> None:
    kv = filled(None, 70)
    forks = [kv.fork() for _ in range(4)]
    assert kv.pool.pages_in_use == 3
    for fork in forks:
        fork.append(70, -numbered(70, 5))
    assert kv.pool.pages_in_use == 3 + 4
    for fork in forks:
        fork.free()
        assert fork.base == fork.cursor == 75
    assert kv.pool.pages_in_use == 3
    assert_holds(kv, None, np.array(numbered(0, 70)))


def test_a_context_after_a_gap_begins_at_its_position() -> None:
    kv = new(23, 50)
    kv.append(50, numbered(50, 3))
    assert (kv.base, kv.cursor) == (50, 53)
    keys, _, first = held(kv, 1, None)
    assert first == 50
    np.testing.assert_array_equal(np.array(keys), np.array(numbered(50, 3))[:, 1, 0])


@pytest.mark.parametrize("bias", [0, 13])
def test_the_fused_projection_equals_each_layers_own(bias: int, tmp_path: Path) -> None:
    drafter, tensors = load(tmp_path, layer_types=[FULL] * 2), random_tensors(dflash2_config())
    state, rows = drafter.open(bias), features(20)
    state.add(bias, rows)
    drafter.writer.write([state])
    fused = drafter.model.context(rows)
    for index, layer in enumerate(drafter.model.layers):
        k_proj, v_proj = (tensors[f"layers.{index}.self_attn.{side}_proj.weight"] for side in "kv")
        keys, values, first = held(state.context, index, None)
        expected = layer.self_attn.k_norm((fused @ k_proj.T).reshape(20, 2, 16))
        expected = drafter.model.rotate(expected[None], bias)
        assert first == bias
        np.testing.assert_allclose(np.array(keys), np.array(expected[0]), atol=1e-5)
        np.testing.assert_allclose(np.array(values), np.array((fused @ v_proj.T).reshape(20, 2, 16)), atol=1e-5)
        # The modules became views of the fused weight; block rows still run through them.
        assert mx.array_equal(layer.self_attn.k_proj.weight, k_proj)
        assert mx.array_equal(layer.self_attn.v_proj.weight, v_proj)


@pytest.mark.parametrize(
    "changes", [{}, dict(layer_types=[FULL] * 2), dict(layer_types=["sliding_attention", FULL])]
)
@pytest.mark.parametrize("chunk", [1, 7, 23, 24, 100])
def test_a_long_prompt_chunk_by_chunk_equals_at_once(chunk: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """float32, equal to rounding: the projections of few and of many rows need not round alike."""
    drafter, prompt = load(tmp_path, **changes), features(310)
    once, chunked = drafter.open(), drafter.open()
    extend(drafter, once, Committed(0, mx.zeros(310, dtype=mx.int32), prompt))
    for start in range(0, 310, chunk):
        part = prompt[start : start + chunk]
        extend(drafter, chunked, Committed(start, mx.zeros(part.shape[0], dtype=mx.int32), part))
    assert once.position == chunked.position == 310
    drafter.writer.write([once, chunked])
    last = drafter.config.context_window or 310
    for layer in range(2):
        for got, expected in zip(held(chunked.context, layer, last), held(once.context, layer, last), strict=True):
            np.testing.assert_allclose(np.array(got), np.array(expected), atol=1e-5)
    np.testing.assert_allclose(
        np.array(block(drafter, chunked, 7, 8)), np.array(block(drafter, once, 7, 8)), atol=1e-4
    )


def test_rows_outside_the_window_are_not_computed(tmp_path: Path) -> None:
    drafter = load(tmp_path)
    state = drafter.open()
    prompt = mx.concatenate([mx.full((287, 192), float("nan")), features(23)])
    extend(drafter, state, Committed(0, mx.zeros(310, dtype=mx.int32), prompt))
    assert (state.context.base, state.context.cursor) == (287, 310)
    assert mx.all(mx.isfinite(block(drafter, state, 7, 8))).item()


def wait(drafter: DFlash2Drafter, state: BlockState, count: int, seed: int) -> None:
    """Commit rows after those that the state holds."""
    rows = Committed(state.position, mx.zeros(count, dtype=mx.int32), features(count, seed))
    extend(drafter, state, rows)


def test_a_refused_rewind_changes_nothing(tmp_path: Path) -> None:
    drafter = load(tmp_path)
    refused, other = drafter.open(), drafter.open()
    for state in (refused, other):
        wait(drafter, state, 200, seed=1)
        wait(drafter, state, 3, seed=2)
    with pytest.raises(PositionError, match="Cannot rewind to position 50"):
        drafter.rewind(refused, 50)
    assert (refused.position, refused.waiting_rows) == (203, 3)
    assert mx.array_equal(block(drafter, refused, 7, 8), block(drafter, other, 7, 8))


@pytest.mark.parametrize("position", [39, 41])
def test_a_refused_extension_of_several_sequences_changes_none(position: int, tmp_path: Path) -> None:
    drafter = load(tmp_path)
    first, second = drafter.open(), drafter.open()
    wait(drafter, second, 40, seed=1)
    rows = [Committed(at, mx.zeros(2, dtype=mx.int32), features(2)) for at in (0, position)]
    with pytest.raises(PositionError, match=f"position {position}, the cursor is at 40"):
        drafter.extend([(first, rows[0]), (second, rows[1])])
    assert (first.position, second.position) == (0, 40)


def test_a_write_that_fails_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows wait than the window holds, so that the context would begin anew."""
    drafter = load(tmp_path)
    failed, other = drafter.open(), drafter.open()
    for state in (failed, other):
        state.add(0, features(40, seed=1))

    def fails(features: mx.array, positions: mx.array) -> mx.array:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(drafter.writer, "project", fails)
        drafter.writer.write([failed])
    assert failed.position == 40
    assert mx.array_equal(block(drafter, failed, 7, 8), block(drafter, other, 7, 8))
