"""accept_rows against a loop over the drafts."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher

from metal_kernels.accept_rows import accept_rows
from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import launching


@pytest.fixture(params=["native", "stock", "reference", "cpu"], autouse=True)
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    with launching(launcher), using(request.param):
        yield request.param


def int32(values: list[int]) -> mx.array:
    return mx.array(values, dtype=mx.int32)


def loop(drafts: list[int], choices: list[int]) -> list[int]:
    count = 0
    while count < len(drafts) and drafts[count] == choices[count]:
        count += 1
    return [*drafts, count, choices[count]]


@pytest.mark.parametrize("k", [0, 7, 40])
def test_equals_a_loop(k: int) -> None:
    """Two kinds of tokens: matches after the first difference are frequent."""
    for seed in range(12):
        draws = np.random.default_rng(seed).integers(0, 2, (2, k + 1)).tolist()
        drafts, choices = draws[0][:k], draws[1]
        assert accept_rows(int32(drafts), int32(choices)).tolist() == loop(drafts, choices)


@pytest.mark.parametrize("k", [1, 32, 33])
def test_every_count_of_accepted_drafts(k: int) -> None:
    drafts = list(range(100, 100 + k))
    for count in range(k + 1):
        choices = [*drafts[:count], 7, *drafts[count + 1 :], 9][: k + 1]
        outcome = accept_rows(int32(drafts), int32(choices))
        assert (outcome.dtype, outcome.tolist()) == (mx.int32, [*drafts, count, choices[count]])


def test_flags_tell_whether_all_their_entries_are_true() -> None:
    long = np.full(70, True)
    flags = [mx.array(True), mx.array([True, False]), mx.array(long), mx.array([[True], [True]])]
    assert accept_rows(int32([3]), int32([3, 4]), flags).tolist() == [3, 1, 4, 1, 0, 1, 1]
    for place in (0, 31, 32, 69):
        flags[2] = mx.array(np.arange(70) != place)
        assert accept_rows(int32([3]), int32([3, 4]), flags).tolist() == [3, 1, 4, 1, 0, 0, 1]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_any_number_of_flags_in_their_order(count: int) -> None:
    flags = [mx.array(i % 2 == 0) for i in range(count)]
    outcome = accept_rows(int32([]), int32([5]), flags)
    assert outcome.tolist() == [0, 5, *(int(i % 2 == 0) for i in range(count))]


@pytest.mark.parametrize(("k", "flags"), [(0, 0), (7, 4), (40, 2)])
def test_of_the_flags_of_rows_those_of_accepted_drafts_count(k: int, flags: int) -> None:
    drafts, others = list(range(k)), [mx.array([True, False])] * flags
    for count in range(k + 1):
        choices = int32([*drafts[:count], *[99] * (k + 1 - count)])
        for wrong in {0, 1, count - 1, count, count + 1, k} & {*range(k + 1)}:
            rows = mx.array([row != wrong for row in range(k + 1)])
            outcome = accept_rows(int32(drafts), choices, others, rows)
            assert outcome.tolist() == [*drafts, count, 99, *[0] * flags, int(wrong > count)]


def test_a_row_without_a_choice_accepts_nothing_after_it() -> None:
    assert accept_rows(int32([4, 5]), int32([4, -1, 6])).tolist() == [4, 5, 1, -1]


@pytest.mark.parametrize(
    ("drafts", "choices"),
    [
        (int32([1, 2]), int32([1, 2])),
        (int32([1]), int32([1, 2, 3])),
        (mx.array([1], dtype=mx.uint32), int32([1, 2])),
        (int32([1]), mx.array([1, 2], dtype=mx.uint32)),
        (mx.zeros((1, 2), dtype=mx.int32), int32([1, 2, 3])),
    ],
)
def test_what_does_not_fit_is_refused(drafts: mx.array, choices: mx.array) -> None:
    with pytest.raises(ValueError, match=r"drafts \[k\] and choices \[k \+ 1\] in int32"):
        accept_rows(drafts, choices)


@pytest.mark.parametrize(
    "flags", [[mx.array(True)] * 5, [mx.array(1)], [mx.zeros((0,), dtype=mx.bool_)]], ids=["five", "int", "empty"]
)
def test_other_flags_are_refused(flags: list[mx.array]) -> None:
    with pytest.raises(ValueError, match="at most 4 flags, bool and not empty"):
        accept_rows(int32([1]), int32([1, 2]), flags)


@pytest.mark.parametrize("rows", [mx.array([True]), mx.array([1, 1]), mx.array([[True, True]])])
def test_other_flags_of_rows_are_refused(rows: mx.array) -> None:
    with pytest.raises(ValueError, match=r"flags of rows in bool \[2\]"):
        accept_rows(int32([1]), int32([1, 2]), rows=rows)
