"""Forced tokens in place of the first ones of a drafted chain."""

import mlx.core as mx
import pytest

from mlx_spec.drafters.base import Draft, nothing_drafted
from mlx_spec.drafters.known import with_known
from mlx_spec.drafters.siblings import with_siblings


def drafted(count: int, is_drawn: bool = True) -> Draft:
    """A chain of tokens 10, 11, ... of four candidates each."""
    candidates = mx.arange(10, 10 + count, dtype=mx.int32)[:, None] + 20 * mx.arange(4, dtype=mx.int32)
    shares = mx.broadcast_to(mx.array([0.4, 0.3, 0.2, 0.1]), (count, 4))
    return Draft(candidates[:, 0], candidates, shares if is_drawn else None, {"a": mx.array(True)}, shares)


@pytest.mark.parametrize("is_drawn", [True, False])
def test_the_first_tokens_are_replaced_and_the_others_kept(is_drawn: bool) -> None:
    draft = drafted(4, is_drawn)
    found = with_known(draft, (7, 8))
    assert found.tokens.tolist() == [7, 8, 12, 13] and found.tokens.dtype == mx.int32
    assert found.candidates.tolist() == [[7] * 4, [8] * 4, *draft.candidates[2:].tolist()]
    assert found.finite is draft.finite and with_siblings(found, (1, 1, 1, 1)) is found
    if not is_drawn:
        assert found.probabilities is None
        return
    # What is drawn from them is certain: the token's share of a vocabulary is 1, all others' 0.
    spread = mx.put_along_axis(mx.zeros((4, 90)), found.candidates, found.probabilities, axis=-1)
    assert spread[:2].tolist() == [[float(token == forced) for token in range(90)] for forced in (7, 8)]
    assert mx.array_equal(found.probabilities[2:], draft.probabilities[2:])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_or_more_forced_tokens_are_the_whole_draft(count: int) -> None:
    draft = drafted(count) if count else nothing_drafted()
    found = with_known(draft, (7, 8, 9))
    assert found.tokens.tolist() == [7, 8, 9] and found.parents is None and found.tree.num_rows == 4
    assert found.probabilities.tolist() == [[1.0] * max(1, count and 4)] * 3
    assert set(map(tuple, found.candidates.tolist())) == {(token,) * max(1, count and 4) for token in (7, 8, 9)}


def test_without_forced_tokens_and_for_trees_nothing_changes() -> None:
    chain = drafted(3)
    tree = with_siblings(chain, (1, 0, 1))
    assert with_known(chain, ()) is chain and with_known(tree, (7,)) is tree
