"""Pages: sharing, copy-on-write, rewinding, growth and running out."""

from contextlib import suppress

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_target

from mlx_spec.errors import ContextFull, PositionError
from mlx_spec.target.pages import PAGE_SLOTS, CachedSequence, PagePool, reserve_positions

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 4
PREFIX = [int(t) for t in np.random.default_rng(0).integers(0, 96, 45)]


def make_pool(max_pages: int = 64, dtype: mx.Dtype = mx.float32) -> PagePool:
    return PagePool(LAYERS, KV_HEADS, HEAD_DIM, dtype, max_pages)


def some_rows(count: int, seed: int) -> mx.array:
    shape = (count, LAYERS, 2, KV_HEADS, HEAD_DIM)
    return mx.random.normal(shape, key=mx.random.key(seed))


def contents(sequence: CachedSequence) -> np.ndarray:
    """Read a sequence back by position: [length, layers, 2, KV, D]."""
    data = np.array(sequence.pool.data.astype(mx.float32))
    slots = [data[sequence.pages[p // PAGE_SLOTS], :, :, p % PAGE_SLOTS] for p in range(sequence.length)]
    return np.array(slots).reshape(-1, *data.shape[1:3], *data.shape[4:])


def test_page_bytes_counts_keys_and_values_of_all_layers() -> None:
    pool = make_pool(dtype=mx.bfloat16)
    assert pool.page_bytes == LAYERS * 2 * PAGE_SLOTS * KV_HEADS * HEAD_DIM * 2


def test_rows_come_back_in_the_order_of_their_positions() -> None:
    sequence, rows = CachedSequence(make_pool()), some_rows(77, 1)
    for start, stop in ((0, 1), (1, 31), (31, 33), (33, 64), (64, 77)):
        sequence.append(rows[start:stop])
    assert (sequence.length, len(sequence.pages)) == (77, 3)
    np.testing.assert_array_equal(contents(sequence), np.array(rows))


def test_four_forks_hold_the_prefix_once() -> None:
    pool = make_pool()
    prefix = CachedSequence(pool)
    prefix.append(some_rows(2 * PAGE_SLOTS + 5, 1))
    forks = [prefix.fork() for _ in range(3)]
    assert pool.pages_in_use == 3
    assert pool.free_pages == pool.max_pages - 3
    for fork in forks:
        np.testing.assert_array_equal(contents(fork), contents(prefix))


def test_a_shared_partial_page_is_copied_when_it_is_written() -> None:
    pool, rows = make_pool(), some_rows(PAGE_SLOTS + 5, 1)
    prefix = CachedSequence(pool)
    prefix.append(rows)
    forks = [prefix.fork() for _ in range(3)]
    full_page, partial_page = prefix.pages
    for index, fork in enumerate(forks):
        fork.append(some_rows(4, 10 + index))
        assert fork.pages[0] == full_page
        assert fork.pages[1] != partial_page
        assert pool.pages_in_use == 2 + index + 1
    assert not pool.is_shared(partial_page)
    prefix.append(some_rows(4, 20))
    assert prefix.pages == [full_page, partial_page]
    for sequence, seed in ((prefix, 20), *((f, 10 + i) for i, f in enumerate(forks))):
        expected = np.concatenate([np.array(rows), np.array(some_rows(4, seed))])
        np.testing.assert_array_equal(contents(sequence), expected)


def test_a_shared_full_page_is_never_copied() -> None:
    pool = make_pool()
    prefix = CachedSequence(pool)
    prefix.append(some_rows(PAGE_SLOTS, 1))
    fork = prefix.fork()
    fork.append(some_rows(1, 2))
    prefix.append(some_rows(1, 3))
    assert fork.pages[0] == prefix.pages[0]
    assert fork.pages[1] != prefix.pages[1]
    assert pool.pages_in_use == 3


@pytest.mark.parametrize("position", [0, 1, 31, 32, 33, 64, 69, 70])
def test_rewind_then_append_equals_having_appended_only_that(position: int) -> None:
    pool, rows, more = make_pool(), some_rows(70, 1), some_rows(40, 2)
    sequence = CachedSequence(pool)
    sequence.append(rows)
    other = sequence.fork()
    sequence.rewind(position)
    assert sequence.length == position
    assert len(sequence.pages) == -(-position // PAGE_SLOTS)
    sequence.append(more)
    np.testing.assert_array_equal(contents(sequence), np.concatenate([np.array(rows[:position]), np.array(more)]))
    np.testing.assert_array_equal(contents(other), np.array(rows))


@pytest.mark.parametrize("position", [-1, 11, 400])
def test_rewind_to_a_position_that_is_not_cached_is_refused(position: int) -> None:
    sequence = CachedSequence(make_pool())
    sequence.append(some_rows(10, 1))
    with pytest.raises(PositionError, match=f"position {position}: the sequence holds 10"):
        sequence.rewind(position)
    assert sequence.length == 10


def test_free_returns_every_page_once_its_last_owner_is_gone() -> None:
    pool = make_pool()
    one = CachedSequence(pool)
    one.append(some_rows(70, 1))
    two = one.fork()
    two.append(some_rows(40, 2))
    assert pool.pages_in_use == 5
    one.free()
    assert pool.pages_in_use == 4
    np.testing.assert_array_equal(
        contents(two), np.concatenate([np.array(some_rows(70, 1)), np.array(some_rows(40, 2))])
    )
    two.free()
    assert (pool.pages_in_use, pool.free_pages) == (0, pool.max_pages)
    assert (two.pages, two.length) == ([], 0)


def test_running_out_names_both_numbers_and_changes_nothing() -> None:
    pool = make_pool(max_pages=4)
    one = CachedSequence(pool)
    one.append(some_rows(40, 1))
    two = one.fork()
    owners, before = list(pool._owners), contents(one)
    # The copy of the shared partial page counts: 57 more rows need pages 2 and 3 and a copy of page 1.
    with pytest.raises(ContextFull, match="57 more tokens after position 40 need 3 KV pages, 2 of 4 are free"):
        two.append(some_rows(57, 2))
    assert (two.length, two.pages, pool._owners) == (40, one.pages, owners)
    np.testing.assert_array_equal(contents(one), before)
    two.append(some_rows(56, 2))
    assert pool.free_pages == 0


def test_allocating_beyond_the_limit_is_refused() -> None:
    pool, pages = make_pool(max_pages=2), list[int]()
    pool.allocate(pages)
    pool.allocate(pages)
    with pytest.raises(ContextFull, match=f"All 2 KV pages of {PAGE_SLOTS} tokens"):
        pool.allocate(pages)
    pool.release(0)
    pool.allocate(pages)
    assert pages == [0, 1, 0]


def test_growth_doubles_up_to_the_limit_and_keeps_contents() -> None:
    pool, rows = make_pool(max_pages=20), some_rows(20 * PAGE_SLOTS, 1)
    sequence, sizes = CachedSequence(pool), []
    for page in range(20):
        sequence.append(rows[page * PAGE_SLOTS : (page + 1) * PAGE_SLOTS])
        sizes.append(pool.data.shape[0])
    assert sizes == [8] * 8 + [16] * 8 + [20] * 4
    np.testing.assert_array_equal(contents(sequence), np.array(rows))


def test_random_histories_equal_plain_lists() -> None:
    """Forks, appends, rewinds and frees in random order, compared with a list of rows for each sequence."""
    rng, pool = np.random.default_rng(3), make_pool(max_pages=16)
    sequences: list[tuple[CachedSequence, np.ndarray]] = [(CachedSequence(pool), np.array(some_rows(0, 0)))]
    refused = 0
    for step in range(150):
        index = int(rng.integers(len(sequences)))
        sequence, expected = sequences[index]
        action = rng.choice(["append", "append", "append", "fork", "rewind", "free"])
        if action == "append":
            more = some_rows(int(rng.integers(1, 50)), step)
            try:
                sequence.append(more)
                sequences[index] = (sequence, np.concatenate([expected, np.array(more)]))
            except ContextFull:
                refused += 1
        elif action == "fork" and len(sequences) < 6:
            sequences.append((sequence.fork(), expected))
        elif action == "rewind":
            position = int(rng.integers(max(0, sequence.length - 40), sequence.length + 1))
            sequence.rewind(position)
            sequences[index] = (sequence, expected[:position])
        elif action == "free" and len(sequences) > 1 and rng.random() < 0.4:
            sequence.free()
            del sequences[index]
        assert pool.pages_in_use == len({page for s, _ in sequences for page in s.pages})
        if step % 10 == 9:
            for sequence, expected in sequences:
                np.testing.assert_array_equal(contents(sequence), expected)
    assert refused > 0


def test_forks_of_a_target_decode_like_unshared_sequences() -> None:
    """bfloat16: four branches in one pass; every row equals bit for bit that of a sequence that shares nothing."""
    target, alone_target = tiny_target("qwen3"), tiny_target("qwen3")
    prefix = target.open()
    target.prefill(prefix, PREFIX)
    forks = [prefix.fork() for _ in range(4)]
    assert target.pool.pages_in_use == 2
    alone = [alone_target.open() for _ in forks]
    for sequence in alone:
        alone_target.prefill(sequence, PREFIX)
    assert alone_target.pool.pages_in_use == 8
    drawn = np.random.default_rng(1).integers(0, 96, (4, 24))
    for step in range(24):
        tokens = [mx.array([int(drawn[i, step])]) for i in range(4)]
        rows = target.forward(list(zip(forks, tokens, strict=True)))
        for i, fork in enumerate(forks):
            part = rows.prefix(i, 1)
            expected = alone_target.forward([(alone[i], tokens[i])])
            assert mx.array_equal(part.hidden, expected.hidden), (step, i)
            assert mx.array_equal(part.kv, expected.kv), (step, i)
            target.commit(fork, part)
            alone_target.commit(alone[i], expected)
    assert len({tuple(contents(f)[-1].ravel()) for f in forks}) == 4
    # The full page is held once; each fork has its own second and third page, and the prefix its second.
    assert target.pool.pages_in_use == 1 + 4 * 2 + 1


@pytest.mark.parametrize("seed", range(12))
def test_sequences_can_append_the_reserved_positions_and_no_more(seed: int) -> None:
    """Sequences with shared and own pages, in pools that are nearly full."""
    random = np.random.default_rng(seed)
    pool = make_pool(max_pages=int(random.integers(3, 9)))
    sequences = [CachedSequence(pool)]
    sequences[0].append(some_rows(int(random.integers(1, 64)), seed))
    for _ in range(3):
        fork = sequences[int(random.integers(0, len(sequences)))].fork()
        with suppress(ContextFull):
            fork.append(some_rows(int(random.integers(1, 20)), seed))
        sequences.append(fork)
    found = reserve_positions(sequences, 16)
    for sequence, count in zip(sequences, found, strict=True):
        if count:
            sequence.append(some_rows(count, seed))
    for sequence, count in zip(sequences, found, strict=True):
        if count < 16:
            with pytest.raises(ContextFull):
                sequence.append(some_rows(16 - count, seed))


def test_no_sequences_reserve_nothing() -> None:
    assert reserve_positions([], 16) == []
