"""Copies: which text they come from, what their chances are, and how these are learned."""

import pytest

from mlx_spec.drafters.lookup.chances import PRIORS, CopyChances
from mlx_spec.drafters.lookup.lookup import MAX_COPY, Copy, Lookup
from mlx_spec.errors import RequestError


def proposed(lookup: Lookup, tokens: list[int], forced: tuple[int, ...] = (), most: int = MAX_COPY) -> Copy | None:
    return lookup.open().propose(tokens, forced, most)


def test_what_followed_the_newest_tokens_is_proposed() -> None:
    copy = proposed(Lookup(), [1, 2, 3, 4, 5, 6, 1, 2, 3], most=4)
    assert copy is not None and copy.tokens == (4, 5, 6, 1) and copy.match == 3
    assert copy.chances == tuple(sorted(copy.chances, reverse=True)) and copy.chances[0] == PRIORS[3]
    assert copy.first(2) == Copy(copy.tokens[:2], copy.chances[:2], 3)


def test_new_tokens_and_a_round_without_rows_propose_nothing() -> None:
    assert proposed(Lookup(), [1, 2, 3, 4]) is None
    assert proposed(Lookup(), [1]) is None
    assert proposed(Lookup(), [1, 2, 3, 1, 2], most=0) is None


def test_forced_tokens_come_before_a_copy() -> None:
    copy = proposed(Lookup(), [1, 2, 3, 4, 9], forced=(2, 3), most=1)
    assert copy is not None and copy.tokens == (4,) and copy.match == 2


def test_further_texts_are_copied_from_where_their_match_is_longer() -> None:
    """They end where they end; the own text goes on as before."""
    lookup = Lookup([[5, 1, 2, 3, 7], [8, 9, 8, 9, 6]])
    copy = proposed(lookup, [0, 1, 2, 3])
    assert copy is not None and copy.tokens == (7,) and copy.match == 3
    # As long in the own text: that one is taken.
    copy = proposed(lookup, [4, 1, 2, 3, 0, 4, 1, 2, 3])
    assert copy is not None and copy.tokens[:2] == (0, 4) and len(copy.tokens) == MAX_COPY
    with pytest.raises(RequestError, match="token 9, but the vocabulary has 9"):
        lookup.check_vocabulary(9)
    lookup.check_vocabulary(10)


def test_a_state_follows_its_sequence_and_its_forks_do_so_by_themselves() -> None:
    state, text = Lookup().open(), [1, 2, 3, 1, 2]
    first = state.propose(text, (), 1)
    fork = state.fork()
    assert first is not None and first.tokens == (3,)
    for each, token in ((state, 4), (fork, 5)):
        own = [*text, token, 1, 2]
        copy = each.propose(own, (), 1)
        assert copy is not None and copy.tokens == (token,)
    assert state.propose([*text, 4, 1, 2], (), 1) == state.fork().propose([*text, 4, 1, 2], (), 1)


def test_chances_follow_what_is_accepted_after_matches_as_long() -> None:
    chances, untouched = CopyChances(), CopyChances()
    for _ in range(60):
        chances.update(2, [5, 6, 7, 8], [5, 9, 7])
    # The first token stood after matches of 2, the second fell after ones that had grown to 3.
    (first,), (second,) = chances.reached(2, 1), chances.reached(3, 1)
    assert first > 0.98 and second < 0.02
    for match in (4, 6, 8, 16, 64):
        assert chances.reached(match, 3) == untouched.reached(match, 3)
    assert chances.reached(2, 3)[1] == pytest.approx(first * second)
    fork = chances.fork()
    fork.update(2, [5], [6])
    assert fork.reached(2, 1) < chances.reached(2, 1) == (first,)


def test_a_state_learns_from_what_came_whether_its_copy_was_drafted_or_not() -> None:
    """The same text, in steps of one token, and with all that a copy brought at once."""
    text = [1, 2, 3, 4, 9, 9, 1, 2, 3, 4, 8, 1, 2, 7]
    chances = []
    for steps in ([8, 9, 10, 11, 13, 14], [8, 11, 13, 14]):
        state = Lookup().open()
        for count in steps:
            copy = state.propose(text[:count], (), 2)
        assert copy is None
        expected = CopyChances()
        # 3 4 was right after 1 2; 9 was not, after matches of 4 or of 2 that grew; then 3 was not.
        expected.update(2, [3, 4], [3, 4] if len(steps) == 4 else [3])
        if len(steps) == 6:
            expected.update(3, [4, 9], [4])
            expected.update(4, [9, 9], [8])
        expected.update(2, [3, 4], [7])
        found = state.propose([*text, 1, 2], (), 1)
        assert found is not None and found.chances == expected.reached(2, 1)
        chances.append(found.chances)
    assert chances[0] == chances[1]


def test_a_round_that_broke_off_teaches_nothing() -> None:
    state, text = Lookup().open(), [1, 2, 3, 1, 2]
    first = state.propose(text, (), 2)
    assert all(state.propose(text, (), 2) == first for _ in range(3))


def test_a_copy_that_is_accepted_to_its_end_teaches_that_much() -> None:
    chances = CopyChances()
    before = chances.reached(16, 1)
    chances.update(15, [5, 6, 7], [5, 6])
    assert chances.reached(15, 1) > CopyChances().reached(15, 1) and chances.reached(16, 1) > before
