"""The index of copies finds what comparing every place finds, however the text grew, and stays small."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_spec.drafters.lookup.index import MAX_MATCH, MAX_PLACES, TextIndex

Tokens = list[int]


def longest(text: Tokens, tail: Tokens) -> tuple[int, int]:
    """Compare every place, from the newest on."""
    ends = [end for end in range(len(text) - 1, 1, -1) if text[end - 2 : end] == tail[-2:]][:MAX_PLACES]
    best = (0, 0)
    for end in ends if len(tail) > 1 else []:
        most = min(end, len(tail), MAX_MATCH)
        equal = next((n for n in range(most) if text[end - 1 - n] != tail[-1 - n]), most)
        best = max(best, (equal, end), key=lambda found: found[0])
    return best


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[Tokens], Tokens]:
    """A text in parts, of few different tokens, and what may follow it."""
    token = st.integers(0, draw(st.sampled_from([0, 1, 3, 40])))
    parts = draw(st.lists(st.lists(token, max_size=120), max_size=6))
    return parts, draw(st.lists(token, max_size=4))


@settings(deadline=None, max_examples=60)
@given(texts())
def test_the_longest_of_the_newest_places_is_found(drawn: tuple[list[Tokens], Tokens]) -> None:
    parts, forced = drawn
    index, text = TextIndex(), Tokens()
    for part in parts:
        index.extend(part)
        text += part
        assert len(index) == len(text)
        for tail in (text, text + forced, text[-5:]):
            assert index.longest(tail) == longest(text, tail)


@settings(deadline=None, max_examples=60)
@given(texts())
def test_a_fork_goes_on_by_itself(drawn: tuple[list[Tokens], Tokens]) -> None:
    (first, *others), more = [[], *drawn[0]], drawn[1]
    text = sum(others, first)
    index = TextIndex(text)
    fork = index.fork()
    fork.extend(more)
    index.extend([7, 7, 7])
    assert fork.longest(text + more) == longest(text + more, text + more)
    assert index.longest([*text, 7, 7, 7]) == longest([*text, 7, 7, 7], [*text, 7, 7, 7])


def test_what_is_interrupted_is_completed_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    index, text = TextIndex([1, 2, 3] * 20), [1, 2, 3] * 20
    slot, calls = TextIndex._slot, [0]

    def interrupted(*pair: Any) -> int:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt
        return slot(*pair)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(TextIndex, "_slot", interrupted)
        index.extend([4, 5, 6, 7, 8, 9])
    text += [4, 5, 6, 7, 8, 9, 5, 6]
    index.extend([5, 6])
    assert len(index) == len(text) and index.longest(text) == longest(text, text) == (2, 63)


def test_a_table_that_grows_and_chains_that_meet_hide_nothing() -> None:
    """Thousands of pairs in a table that began with 256 entries."""
    random = np.random.default_rng(0)
    text = [int(token) for token in random.integers(0, 60, 3000)]
    index = TextIndex(text[:100])
    for start in range(100, len(text), 50):
        index.extend(text[start : start + 50])
        tail = text[: start + 50]
        assert index.longest(tail) == longest(tail, tail)


def test_what_follows_goes_on_in_its_own_period_where_the_text_grows() -> None:
    index = TextIndex([1, 2, 3, 4, 5])
    assert index.following(1, 3, is_growing=True) == [2, 3, 4]
    assert index.following(3, 7, is_growing=True) == [4, 5, 4, 5, 4, 5, 4]
    assert index.following(3, 7, is_growing=False) == [4, 5]


@pytest.mark.parametrize("count", [32_768, 131_072])
def test_a_long_text_takes_little_memory_and_time(count: int) -> None:
    """Bounds are far above what is measured, so that a busy machine is none of its matters."""
    text = np.random.default_rng(0).zipf(1.3, count).clip(0, 49_000).tolist()
    started = time.perf_counter()
    index = TextIndex(text)
    assert time.perf_counter() - started < 2.0 and index.nbytes <= 24 * count
    started = time.perf_counter()
    for end in range(count - 100, count):
        index.longest(text[end - MAX_MATCH : end])
        index.extend([text[end]])
    assert time.perf_counter() - started < 0.5
