"""Multi-round rejection over a tree keeps the target's distribution, and accepts as much as theory predicts.

Chi-square tests as in test_accept.
"""

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from choosing import drawn_at
from test_accept import (
    ANCHOR,
    FILTERS,
    POSITION,
    VOCAB,
    candidates_of,
    chi_square_p,
    distribution,
    nothing,
    score_table,
)
from verified import accept

import mlx_spec.decoding.accept
from mlx_spec.decoding import noise
from mlx_spec.decoding.accept import Rejection
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.drafters.base import Draft
from mlx_spec.drafters.siblings import with_siblings

DRAWS = 8000
# Where a case draws: the positions from the anchor on, for every purpose and up to four drafts of a position.
PLACES = [(POSITION + j, purpose) for j in range(4) for purpose in range(noise.ACCEPT + 4)]
SHAPES = {
    "a sibling": (1,),
    "three siblings": (3,),
    "two beside the first": (2, 1),
    "one beside the second": (0, 1),
}


def first_two(
    sampling: Sampling, seed: int, siblings: tuple[int, ...], candidates: mx.array, draft: mx.array
) -> tuple[mx.array, ...]:
    """Emit two tokens after the anchor, lazily: a round that verifies a tree and, if it must, a plain one.

    candidates: [V, K] ids by the token before, draft: [V, V] logits. Returns both tokens and the last row.
    """
    rule, table = Rejection(seed, sampling.temp), score_table(sampling)
    previous, drafts, ids, ranks, drawn_from = mx.array(ANCHOR), [], [], [], []
    for t in range(len(siblings)):
        ids.append(candidates[previous])
        previous, rank_values, probabilities = drawn_at(rule, POSITION + 1 + t, ids[-1], draft[previous][ids[-1]])
        ranks.append(rank_values)
        drafts.append(previous)
        drawn_from.append(probabilities)
    chain = Draft(mx.stack(drafts).astype(mx.int32), mx.stack(ids), mx.stack(drawn_from), {}, mx.stack(ranks))
    proposal = with_siblings(chain, siblings)
    tree, k = proposal.tree, proposal.tokens.size
    assert k == len(siblings) + sum(siblings)
    outcome = accept(rule, proposal, table[mx.concatenate([mx.array([ANCHOR]), proposal.tokens])], POSITION)
    last = outcome[k]
    emitted = tree.emitted(last, proposal.tokens, outcome[k + 1])
    second_row = mx.array([path[1] if len(path) > 1 else 0 for path in tree.paths])[last]
    plain = accept(rule, nothing(), table[emitted[:1]], POSITION + 1)[1]
    return emitted[0], mx.where(last > 0, emitted[second_row], plain), last


@cache
def keys_of_all_seeds() -> mx.array:
    """The keys of seeds 0 .. DRAWS - 1 at all places: [DRAWS, places, 2]."""
    return mx.stack([mx.stack([noise.key(seed, *place) for place in PLACES]) for seed in range(DRAWS)])


def of_all_seeds(
    monkeypatch: pytest.MonkeyPatch, sampling: Sampling, siblings: tuple[int, ...], kind: str
) -> tuple[np.ndarray, ...]:
    """Run ``first_two`` for every seed at once, with its own keys."""
    case = (siblings, *candidates_of(kind, sampling))
    table = keys_of_all_seeds()
    mx.eval(table, score_table(sampling))

    def one_seed(keys: mx.array) -> tuple[mx.array, ...]:
        monkeypatch.setattr(noise, "key", lambda seed, position, purpose: keys[PLACES.index((position, purpose))])
        return first_two(sampling, 0, *case)

    done = mx.vmap(one_seed)(table)
    monkeypatch.undo()
    return tuple(np.array(part) for part in done)


def chance(p: np.ndarray, q: np.ndarray, drafts: int) -> float:
    """Probability that one of ``drafts`` tokens, drawn from q without replacement, is accepted for p."""
    left = np.maximum(p - q, 0)
    left = left / left.sum() if left.sum() > 1e-12 else p
    total = 0.0
    for x in np.flatnonzero(q):
        kept = min(1.0, p[x] / q[x])
        total += q[x] * kept
        others = np.where(np.arange(len(q)) == x, 0, q)
        if drafts > 1 and others.sum() > 0:
            total += q[x] * (1 - kept) * chance(left, others / others.sum(), drafts - 1)
    return total


def draft_distribution(sampling: Sampling, kind: str) -> np.ndarray:
    """q of the first drafted token, in float64."""
    candidates, draft = (np.array(x) for x in candidates_of(kind, sampling))
    weights = np.exp(draft[ANCHOR][candidates[ANCHOR]].astype(np.float64) / sampling.temp)
    q = np.zeros(VOCAB)
    q[candidates[ANCHOR]] = weights / weights.sum()
    return q


def test_all_seeds_at_once_give_what_each_seed_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling, siblings, kind = FILTERS["top_p"], (2, 1), "partly overlapping"
    at_once = of_all_seeds(monkeypatch, sampling, siblings, kind)
    for seed in range(20):
        alone = [part.item() for part in first_two(sampling, seed, siblings, *candidates_of(kind, sampling))]
        assert alone == [part[seed] for part in at_once]


@pytest.mark.parametrize("kind", ["disjoint", "partly overlapping", "all, other weights"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("no filter", "a sibling"),
        ("no filter", "two beside the first"),
        ("top_p", "three siblings"),
        ("top_k, min_p", "two beside the first"),
        ("top_k, min_p", "one beside the second"),
    ],
)
def test_a_tree_keeps_the_joint_distribution_of_two_tokens(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: str, kind: str
) -> None:
    sampling, siblings = FILTERS[name], SHAPES[shape]
    first, second, last = of_all_seeds(monkeypatch, sampling, siblings, kind)
    p = distribution(sampling)
    assert chi_square_p(np.bincount(first, minlength=VOCAB), DRAWS * p[ANCHOR]) > 1e-3
    joint = p[ANCHOR][:, None] * p
    observed = np.bincount(first * VOCAB + second, minlength=VOCAB**2)
    assert chi_square_p(observed, DRAWS * joint.reshape(-1)) > 1e-3
    accepted = chance(p[ANCHOR], draft_distribution(sampling, kind), 1 + siblings[0])
    expected = np.array([1 - accepted, accepted]) * DRAWS
    assert chi_square_p(np.array([(last == 0).sum(), (last > 0).sum()]), expected) > 1e-3


def test_a_walk_that_forgets_that_draws_are_without_replacement_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """q is not renormalised when a token is taken from it."""
    sampling, right = FILTERS["no filter"], mlx_spec.decoding.accept.normalised
    monkeypatch.setattr(
        mlx_spec.decoding.accept,
        "normalised",
        lambda weights, otherwise: weights if weights is otherwise else right(weights, otherwise),
    )
    first, _, _ = of_all_seeds(monkeypatch, sampling, (3,), "all, other weights")
    assert chi_square_p(np.bincount(first, minlength=VOCAB), DRAWS * distribution(sampling)[ANCHOR]) < 1e-6


def test_a_sibling_raises_the_chance_that_a_draft_is_accepted() -> None:
    p = distribution(FILTERS["no filter"])[ANCHOR]
    q = draft_distribution(FILTERS["no filter"], "all, other weights")
    chances = [chance(p, q, drafts) for drafts in (1, 2, 3)]
    assert chances == sorted(chances) and chances[1] > chances[0] + 0.1
    assert chances[0] == pytest.approx(np.minimum(p, q).sum())
