"""The accept rules: what is accepted, what follows, and that draws keep the target's distribution.

Every chi-square test has fixed seeds. The correct rules pass at p > 1e-3; a wrong one is far below.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from choosing import drawn_at
from verified import accept, scores_of

from mlx_spec.decoding import noise
from mlx_spec.decoding.accept import AcceptRule, Coupled, Greedy, Rejection, rule_for
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.drafters.base import Draft

VOCAB = 12
RANDOM = np.random.default_rng(0)
# A model of order one: the logits of the next token by the token before it, for the target and for the draft.
TARGET = mx.array(RANDOM.normal(size=(VOCAB, VOCAB)) * 1.5, dtype=mx.float32)
DRAFT = mx.array(RANDOM.normal(size=(VOCAB, VOCAB)) * 1.5, dtype=mx.float32)
ANCHOR, POSITION = 4, 17


def nothing(count: int = 0) -> Draft:
    return Draft(mx.zeros((count,), dtype=mx.int32), mx.zeros((count, 1), dtype=mx.int32))


@dataclass(frozen=True)
class Judged:
    count: mx.array
    following: mx.array


def judge(rule: AcceptRule, proposal: Draft, scores: mx.array, position: int) -> Judged:
    """Let a rule accept, with two flags, and take its packed answer apart."""
    k = proposal.tokens.size
    flags = [mx.array([True, True]), mx.array([True, False])]
    outcome = accept(rule, proposal, scores, position, flags)
    assert (outcome.shape, outcome.dtype) == ((k + 4,), mx.int32)
    return Judged(outcome[k], outcome[k + 1])


def values(accepted: Judged) -> tuple[int, int]:
    return int(accepted.count.item()), int(accepted.following.item())


def chi_square_p(observed: np.ndarray, expected: np.ndarray) -> float:
    """Probability of a larger chi-square than that of the counts; cells expected below 5 are pooled.

    A count where nothing is expected gives 0.
    """
    if observed[expected == 0].sum():
        return 0.0
    small = expected < 5
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < 1:
        observed, expected = observed[:-1], expected[:-1]
    half, a = ((observed - expected) ** 2 / expected).sum() / 2, (len(expected) - 1) / 2
    if not a or not half:
        return 1.0
    # The series of the regularised lower incomplete gamma function P(a, half).
    term = total = 1 / a
    for n in range(1, 10_000):
        term *= half / (a + n)
        total += term
    return 1 - total * math.exp(a * math.log(half) - half - math.lgamma(a))


def test_the_chi_square_probability_equals_tabled_values() -> None:
    """Critical values of the 5 % and 0.1 % levels for 1, 10 and 100 degrees of freedom."""
    for freedom, five, tenth in ((1, 3.841, 10.828), (10, 18.307, 29.588), (100, 124.342, 149.449)):
        for value, probability in ((five, 0.05), (tenth, 0.001)):
            expected = np.full(freedom + 1, 1e6)
            observed = expected.copy()
            observed[:2] += np.array([1, -1]) * math.sqrt(value * 1e6 / 2)
            assert chi_square_p(observed, expected) == pytest.approx(probability, rel=2e-3)


@pytest.mark.parametrize("rule", [Greedy(), Coupled(5, 1.0, VOCAB), Rejection(5, 1.0)])
def test_the_answer_holds_drafts_and_flags_too(rule: AcceptRule) -> None:
    proposal = Draft(mx.array([7, 3], dtype=mx.int32), nothing(2).candidates)
    flags = [mx.array(True), mx.array([True, False]), mx.array([True, True])]
    outcome = accept(rule, proposal, TARGET[:3], POSITION, flags).tolist()
    assert outcome[:2] == [7, 3]
    assert outcome[4:] == [1, 0, 1]


def test_greedy_takes_the_best_candidate_and_compares_with_the_argmax() -> None:
    ids = mx.array([7, 3, 9])
    token, _, probabilities = drawn_at(Greedy(), 5, ids, mx.array([0.1, 2.0, 1.0]))
    assert (token.item(), probabilities) == (3, None)
    scores = mx.array([[0.0, 1.0, 0.0], [3.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
    assert values(judge(Greedy(), Draft(mx.array([1, 0]), nothing(2).candidates), scores, 0)) == (2, 2)
    assert values(judge(Greedy(), Draft(mx.array([1, 2]), nothing(2).candidates), scores, 0)) == (1, 0)


def test_the_rule_follows_from_the_sampling() -> None:
    assert isinstance(rule_for(Sampling(accept="rejection"), VOCAB), Greedy)
    assert isinstance(rule_for(Sampling(temp=0.5), VOCAB), Coupled)
    assert isinstance(rule_for(Sampling(temp=0.5, accept="rejection"), VOCAB), Rejection)


def scores_after(sampling: Sampling, tokens: mx.array) -> mx.array:
    """The target's scores of the rows of ``tokens``, [R] to [R, V]."""
    return scores_of(sampling, TARGET[tokens], [], tokens[1:])


@cache
def score_table(sampling: Sampling) -> mx.array:
    """The scores after every token: [V, V]."""
    return scores_after(sampling, mx.arange(VOCAB))


@cache
def distribution(sampling: Sampling) -> np.ndarray:
    """p[a, b]: probability of b after a, in float64."""
    scores = np.array(score_table(sampling)).astype(np.float64)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("sampling", [Sampling(temp=0.8), Sampling(temp=1.3, top_k=5, min_p=0.05)])
def test_coupled_draws_follow_the_target(sampling: Sampling) -> None:
    scores, draws = scores_after(sampling, mx.array([ANCHOR])), 2000
    drawn = mx.stack(
        [judge(Coupled(s, sampling.temp, VOCAB), nothing(), scores, POSITION).following for s in range(draws)]
    )
    observed = np.bincount(np.array(drawn), minlength=VOCAB)
    assert chi_square_p(observed, draws * distribution(sampling)[ANCHOR]) > 1e-3


def test_coupled_draws_of_neighbouring_positions_are_independent() -> None:
    sampling, draws = Sampling(temp=1.0), 2000
    scores = scores_after(sampling, mx.array([ANCHOR, ANCHOR]))
    pairs = []
    for seed in range(draws):
        rule = Coupled(seed, 1.0, VOCAB)
        first = judge(rule, nothing(), scores[:1], POSITION).following
        pairs.append(first * VOCAB + judge(rule, nothing(), scores[:1], POSITION + 1).following)
    observed = np.bincount(np.array(mx.stack(pairs)), minlength=VOCAB**2)
    p = distribution(sampling)[ANCHOR]
    assert chi_square_p(observed, draws * np.outer(p, p).reshape(-1)) > 1e-3


def test_coupled_draws_do_not_depend_on_the_draft() -> None:
    """Whatever was drafted, and in how many rounds, position by position the same token is drawn."""
    sampling, length = Sampling(temp=1.0, seed=3), 24
    rows = mx.array(RANDOM.normal(size=(length, VOCAB)), dtype=mx.float32)
    alone = [
        values(
            judge(Coupled(3, 1.0, VOCAB), nothing(), scores_of(sampling, rows[i : i + 1], [], mx.array([])), i)
        )[1]
        for i in range(length)
    ]
    for lot in range(5):
        random, rule, text = np.random.default_rng(lot), Coupled(3, 1.0, VOCAB), []
        while len(text) < length:
            at = len(text)
            k = min(int(random.integers(0, 5)), length - at - 1)
            drafts = [t if random.random() < 0.7 else int(random.integers(VOCAB)) for t in alone[at : at + k]]
            # A drafter draws with the rule, too, at positions ahead; that must have no effect.
            for j in range(k):
                drawn_at(rule, at + 1 + j, mx.arange(VOCAB), rows[0])
            proposal = Draft(mx.array(drafts, dtype=mx.int32), nothing(k).candidates)
            scores = scores_of(sampling, rows[at : at + k + 1], [], proposal.tokens)
            count, following = values(judge(rule, proposal, scores, at))
            text += [*drafts[:count], following]
            # Noise of positions that are decided is dropped: it would be as long as the text, V numbers each.
            assert min(rule._drawn) > at and len(rule._drawn) <= 5
        assert text == alone


def test_coupled_drafts_are_drawn_with_the_targets_noise() -> None:
    """From the target's own logits the draft draws what the target will draw, among a few candidates too."""
    scores = scores_after(Sampling(temp=0.7), mx.array([ANCHOR]))
    for seed in range(50):
        rule = Coupled(seed, 0.7, VOCAB)
        token, _, probabilities = drawn_at(rule, POSITION + 1, mx.arange(VOCAB), TARGET[ANCHOR])
        drawn = values(judge(rule, nothing(), scores, POSITION))[1]
        assert (token.item(), probabilities) == (drawn, None)
        others = [t for t in (0, 3, 8, 11) if t != drawn]
        ids = mx.array([*others, drawn])
        assert drawn_at(rule, POSITION + 1, ids, TARGET[ANCHOR][ids]).token.item() == drawn


def first_two(
    sampling: Sampling, seed: int, k: int, candidates: mx.array, draft: mx.array
) -> tuple[mx.array, ...]:
    """Emit two tokens after the anchor, lazily: a round that drafts k tokens and, if it must, a plain one.

    candidates: [V, K] ids by the token before, draft: [V, V] logits. Returns both tokens and the accepted count.
    """
    rule = Rejection(seed, sampling.temp)
    previous, drafts, ids, drawn_from = mx.array(ANCHOR), [], [], []
    for t in range(k):
        ids.append(candidates[previous])
        previous, _, probabilities = drawn_at(rule, POSITION + 1 + t, ids[-1], draft[previous][ids[-1]])
        drafts.append(previous)
        drawn_from.append(probabilities)
    proposal = Draft(mx.stack(drafts).astype(mx.int32), mx.stack(ids), mx.stack(drawn_from))
    table = score_table(sampling)
    rows = mx.concatenate([mx.array([ANCHOR]), proposal.tokens])
    accepted = judge(rule, proposal, table[rows], POSITION)
    block = mx.concatenate([proposal.tokens, accepted.following[None]])
    block = mx.where(mx.arange(k + 1) == accepted.count, accepted.following, block)
    next_round = judge(rule, nothing(), table[block[:1]], POSITION + 1).following
    return block[0], mx.where(accepted.count > 0, block[1], next_round), accepted.count


# Where first_two draws: the positions from the anchor on, for every purpose.
PLACES = [(POSITION + j, purpose) for j in range(4) for purpose in range(noise.ACCEPT + 1)]
DRAWS = 8000


@cache
def keys_of_all_seeds() -> mx.array:
    """The keys of seeds 0 .. DRAWS - 1 at all places: [DRAWS, places, 2]."""
    return mx.stack([mx.stack([noise.key(seed, *place) for place in PLACES]) for seed in range(DRAWS)])


def first_two_of_all_seeds(monkeypatch: pytest.MonkeyPatch, *case: Any) -> tuple[np.ndarray, ...]:
    """Run ``first_two(sampling, seed, k, candidates, draft)`` for every seed at once, with its own keys."""
    sampling, *rest = case
    table = keys_of_all_seeds()
    mx.eval(table, score_table(sampling))

    def one_seed(keys: mx.array) -> tuple[mx.array, ...]:
        monkeypatch.setattr(noise, "key", lambda seed, position, purpose: keys[PLACES.index((position, purpose))])
        return first_two(sampling, 0, *rest)

    done = mx.vmap(one_seed)(table)
    monkeypatch.undo()
    return tuple(np.array(part) for part in done)


FILTERS = {
    "no filter": Sampling(temp=0.9, accept="rejection"),
    "top_p": Sampling(temp=1.2, top_p=0.8, accept="rejection"),
    "top_k, min_p": Sampling(temp=1.0, top_k=6, min_p=0.05, accept="rejection"),
}


def candidates_of(kind: str, sampling: Sampling) -> tuple[mx.array, mx.array]:
    """Candidate ids [V, K] and draft logits [V, V] of a draft distribution that meets the target's as named."""
    p = distribution(sampling)
    order = np.argsort(-p, axis=1)
    if kind == "equal":
        return mx.broadcast_to(mx.arange(VOCAB), (VOCAB, VOCAB)), score_table(sampling) * sampling.temp
    if kind == "all, other weights":
        return mx.broadcast_to(mx.arange(VOCAB), (VOCAB, VOCAB)), DRAFT
    if kind == "disjoint":
        # The least likely four; without a filter the target gives them some probability, with one none.
        return mx.array(order[:, -4:]), DRAFT
    # Two of the likely tokens and three of the unlikely ones, with other weights than the target's.
    return mx.array(order[:, [0, 2, 5, 8, 10]]), DRAFT


def test_all_seeds_at_once_give_what_each_seed_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = FILTERS["top_p"]
    case = (2, *candidates_of("partly overlapping", sampling))
    at_once = first_two_of_all_seeds(monkeypatch, sampling, *case)
    for seed in range(25):
        alone = [part.item() for part in first_two(sampling, seed, *case)]
        assert alone == [part[seed] for part in at_once]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("kind", ["equal", "disjoint", "partly overlapping", "all, other weights"])
@pytest.mark.parametrize("name", FILTERS)
def test_rejection_keeps_the_joint_distribution_of_two_tokens(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str, k: int
) -> None:
    sampling = FILTERS[name]
    candidates, draft = candidates_of(kind, sampling)
    first, second, count = first_two_of_all_seeds(monkeypatch, sampling, k, candidates, draft)
    p = distribution(sampling)
    assert chi_square_p(np.bincount(first, minlength=VOCAB), DRAWS * p[ANCHOR]) > 1e-3
    joint = p[ANCHOR][:, None] * p
    observed = np.bincount(first * VOCAB + second, minlength=VOCAB**2)
    assert chi_square_p(observed, DRAWS * joint.reshape(-1)) > 1e-3
    if kind == "equal":
        assert (count == k).all()
    else:
        # The overlap of p and q is what gets accepted, no more and no less.
        q = np.zeros(VOCAB)
        logits = np.array(draft[ANCHOR]).astype(np.float64)[np.array(candidates[ANCHOR])] / sampling.temp
        q[np.array(candidates[ANCHOR])] = np.exp(logits) / np.exp(logits).sum()
        overlap = np.minimum(p[ANCHOR], q).sum()
        expected = np.array([1 - overlap, overlap]) * DRAWS
        assert chi_square_p(np.array([(count == 0).sum(), (count > 0).sum()]), expected) > 1e-3
        assert overlap < 0.05 if kind == "disjoint" else 0.1 < overlap < 0.9


def test_rejection_draws_from_the_distribution_that_it_returns() -> None:
    """Of 16-bit scores, too: both sides compute in float32."""
    rule, ids, scores = Rejection(5, 0.7), mx.arange(VOCAB), DRAFT[ANCHOR].astype(mx.bfloat16)
    exact = scores.astype(mx.float32)
    drawn = [drawn_at(rule, 3, ids, each) for each in (scores, exact)]
    assert mx.array_equal(drawn[0].ranks, drawn[1].ranks)
    returned = [each.probabilities for each in drawn]
    assert returned[0] is not None and returned[1] is not None and mx.array_equal(*returned)


def test_rejection_accepts_nothing_that_was_not_drawn_from_a_distribution() -> None:
    """Drafts without probabilities cannot be judged, so the target's own token is drawn."""
    scores = scores_after(Sampling(temp=1.0), mx.array([ANCHOR, 1, 2]))
    counts = {
        values(judge(Rejection(seed, 1.0), Draft(mx.array([1, 2]), nothing(2).candidates), scores, POSITION))[0]
        for seed in range(50)
    }
    assert counts == {0}
