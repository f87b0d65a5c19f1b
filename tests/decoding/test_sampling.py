"""Sampling settings: mlx-lm's filters and penalties in its order, row by row, and refusals."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import apply_min_p, make_logits_processors, make_sampler
from verified import scores_of

from mlx_spec.decoding.sampling import Sampling
from mlx_spec.errors import RequestError

VOCAB = 40
LOGITS = mx.array(np.random.default_rng(2).normal(size=(5, VOCAB)) * 2, dtype=mx.float32)
NO_DRAFT = mx.zeros((LOGITS.shape[0] - 1,), dtype=mx.int32)


def softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def oracle(logits: np.ndarray, temp: float, top_p: float = 0.0, min_p: float = 0.0, top_k: int = 0) -> np.ndarray:
    """The distribution of one row in float64: top-p, min-p, top-k on the untempered one, then the temperature."""
    probabilities = softmax(logits.astype(np.float64))
    order = np.argsort(-probabilities)
    keep = np.ones(len(order), dtype=bool)
    if 0 < top_p < 1:
        # A token stays while the mass before it is below top_p; the most likely one always stays.
        before = np.cumsum(probabilities[order]) - probabilities[order]
        keep[order[before >= top_p]] = False
    if min_p:
        # Relative to the most likely token that top-p left, which is the most likely one.
        keep &= probabilities >= min_p * probabilities.max()
    if top_k:
        left = [t for t in order if keep[t]]
        keep[left[top_k:]] = False
    return softmax(np.where(keep, np.log(probabilities) / temp, -np.inf))


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 5},
        {"top_k": 30},
        {"top_p": 0.9, "min_p": 0.05, "top_k": 4},
        {"top_p": 0.5, "top_k": 30},
        {"top_p": 1.0},
        {"top_k": 1},
        {"min_p": 1.0},
        {"top_p": 1e-6},
    ],
)
@pytest.mark.parametrize("temp", [0.6, 1.0, 1.7])
def test_filters_keep_what_a_float64_oracle_keeps(filters: dict[str, Any], temp: float) -> None:
    got = softmax(np.array(scores_of(Sampling(temp=temp, **filters), LOGITS, [1], NO_DRAFT)).astype(np.float64))
    expected = np.stack([oracle(row, temp, **filters) for row in np.array(LOGITS)])
    assert ((got > 0) == (expected > 0)).all()
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_the_oracle_tells_the_orders_apart() -> None:
    """Were the temperature first, top-p would keep other tokens: then the comparison above would fail."""
    row = np.array(LOGITS[0])
    untempered, tempered = oracle(row, 1.7, top_p=0.7), oracle(row / 1.7, 1.0, top_p=0.7)
    assert ((untempered > 0) != (tempered > 0)).any()


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8, "min_p": 0.02, "top_k": 7}, {"top_k": 3}])
def test_scores_equal_what_mlx_lm_draws_from(filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's own sampler, caught just before it draws."""
    seen = []
    monkeypatch.setattr("mlx_lm.sample_utils.categorical_sampling", lambda x, temp: seen.append(x * (1 / temp)))
    make_sampler(temp=0.7, **filters)(LOGITS - mx.logsumexp(LOGITS, axis=-1, keepdims=True))
    assert mx.array_equal(scores_of(Sampling(temp=0.7, **filters), LOGITS, [1], NO_DRAFT), seen[0])


XTC = {"xtc_probability": 1.0, "xtc_threshold": 0.05}


@pytest.mark.parametrize("special", [(), (int(np.argmax(np.array(LOGITS[1]))), 7)])
@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8, "min_p": 0.02, "top_k": 7}])
def test_xtc_excludes_what_mlx_lm_excludes(
    filters: dict[str, Any], threshold: float, special: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With probability 1 nothing is drawn in either; the order of the filters is its own."""
    options = {**filters, "xtc_probability": 1.0, "xtc_threshold": threshold}
    seen = []
    monkeypatch.setattr("mlx_lm.sample_utils.categorical_sampling", lambda x, temp: seen.append(x * (1 / temp)))
    sampler = make_sampler(temp=0.7, xtc_special_tokens=list(special), **options)
    sampler(LOGITS - mx.logsumexp(LOGITS, axis=-1, keepdims=True))
    got = scores_of(Sampling(temp=0.7, xtc_special_tokens=special, **options), LOGITS, [1], NO_DRAFT)
    assert mx.array_equal(got, seen[0])
    assert (got == -math.inf).any() or threshold == 0.5


def test_xtc_draws_by_seed_and_position_whatever_else_is_in_the_pass() -> None:
    sampling = Sampling(temp=1.0, xtc_probability=0.5, xtc_threshold=0.02, seed=3)
    row = LOGITS[:1]

    def is_cut(seed: int, position: int) -> bool:
        own = Sampling(temp=1.0, xtc_probability=0.5, xtc_threshold=0.02, seed=seed)
        return bool((own.filtered(row, [position]) == -math.inf).any())

    alone = [is_cut(3, position) for position in range(200)]
    together = sampling.filtered(mx.broadcast_to(row, (200, VOCAB)), list(range(200)))
    assert (together == -math.inf).any(axis=-1).tolist() == alone
    assert 70 < sum(alone) < 130
    assert alone != [is_cut(4, position) for position in range(200)]
    state = [mx.array(part) for part in mx.random.state]
    is_cut(3, 5)
    assert all(mx.array_equal(*pair) for pair in zip(state, mx.random.state, strict=True))


@pytest.mark.parametrize("probability", [0.1, 0.8])
def test_xtc_comes_as_often_as_asked(probability: float) -> None:
    sampling = Sampling(temp=1.0, xtc_probability=probability, xtc_threshold=0.02)
    rows = sampling.filtered(mx.broadcast_to(LOGITS[:1], (1000, VOCAB)), list(range(1000)))
    assert abs((rows == -math.inf).any(axis=-1).sum().item() / 1000 - probability) < 0.05


@pytest.mark.parametrize("keep", [1, 3, VOCAB, 1000])
def test_min_tokens_to_keep_is_mlx_lms(keep: int) -> None:
    scores = scores_of(Sampling(temp=1.0, min_p=0.9, min_tokens_to_keep=keep), LOGITS, [1], NO_DRAFT)
    log_probabilities = LOGITS - mx.logsumexp(LOGITS, axis=-1, keepdims=True)
    assert mx.array_equal(scores, apply_min_p(log_probabilities, 0.9, min(keep, VOCAB)))
    assert ((scores > -math.inf).sum(axis=-1) >= min(keep, VOCAB)).all()


def test_rows_share_a_call_where_their_filters_are_equal() -> None:
    base = Sampling(temp=1.0, top_p=0.9)
    assert base.filters == Sampling(temp=1.0, top_p=0.9, seed=5, logit_bias={3: 1.0}, xtc_threshold=0.3).filters
    assert base.filters != Sampling(temp=1.0, top_p=0.8).filters
    assert Sampling(**XTC, seed=1).filters == Sampling(**XTC, seed=1, accept="rejection").filters
    assert Sampling(**XTC, seed=1).filters != Sampling(**XTC, seed=2).filters


def test_top_k_of_the_whole_vocabulary_or_more_keeps_everything() -> None:
    free = scores_of(Sampling(temp=1.0), LOGITS, [1], NO_DRAFT)
    for top_k in (VOCAB, VOCAB + 1, 10_000):
        assert mx.array_equal(scores_of(Sampling(temp=1.0, top_k=top_k), LOGITS, [1], NO_DRAFT), free)


def test_greedy_scores_are_the_logits_and_filters_do_not_matter() -> None:
    scores = scores_of(Sampling(top_k=3, top_p=0.1), LOGITS.astype(mx.bfloat16), [1], NO_DRAFT)
    assert scores.dtype == mx.bfloat16
    assert mx.array_equal(scores, LOGITS.astype(mx.bfloat16))


def test_sampled_scores_are_float32() -> None:
    assert scores_of(Sampling(temp=0.5, top_p=0.9), LOGITS.astype(mx.bfloat16), [1], NO_DRAFT).dtype == mx.float32


PENALTIES = {
    "bias": {"logit_bias": {3: 5.0, 7: -4.0}},
    "repetition": {"repetition_penalty": 1.4, "repetition_context_size": 4},
    "presence": {"presence_penalty": 0.7, "presence_context_size": 3},
    "frequency": {"frequency_penalty": 0.6, "frequency_context_size": 6},
    "all": {
        "logit_bias": {3: 5.0, 7: -4.0},
        "repetition_penalty": 1.4,
        "presence_penalty": -0.7,
        "frequency_penalty": 0.6,
    },
}


@pytest.mark.parametrize("penalties", PENALTIES.values(), ids=PENALTIES)
def test_each_row_is_penalised_with_the_history_it_would_have(penalties: dict[str, Any]) -> None:
    history, drafts = [3, 9, 3, 1, 7, 7], [7, 20, 3, 20]
    got = scores_of(Sampling(**penalties), LOGITS, history, mx.array(drafts, dtype=mx.int32))
    for row in range(5):
        tokens, expected = mx.array(history + drafts[:row]), mx.array(np.array(LOGITS[row : row + 1]))
        for processor in make_logits_processors(**penalties):
            expected = processor(tokens, expected)
        assert mx.array_equal(got[row], expected[0]), row
        assert not mx.array_equal(got[row], LOGITS[row])


def test_penalties_leave_the_given_logits_alone() -> None:
    """The engine keeps the raw logits for its checks."""
    for rows in (1, 5):
        logits = mx.array(np.array(LOGITS[:rows]))
        scores = scores_of(Sampling(**PENALTIES["all"]), logits, [3, 9], NO_DRAFT[: rows - 1])
        assert not mx.array_equal(scores, logits)
        assert mx.array_equal(logits, LOGITS[:rows])


def test_own_processors_run_last_and_see_prompt_and_drafts_of_their_row() -> None:
    seen = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append((tokens.tolist(), logits[0, 3].item()))
        return logits + 1

    sampling = Sampling(logit_bias={3: 5.0}, logits_processors=(processor, lambda tokens, logits: logits * 2))
    got = scores_of(sampling, LOGITS[:3], [8, 9], mx.array([4, 5], dtype=mx.int32))
    biased = [LOGITS[row, 3].item() + 5 for row in range(3)]
    assert [tokens for tokens, _ in seen] == [[8, 9], [8, 9, 4], [8, 9, 4, 5]]
    assert [value for _, value in seen] == pytest.approx(biased)
    assert got[:, 3].tolist() == pytest.approx([2 * (b + 1) for b in biased])


def test_penalties_come_before_the_filters() -> None:
    """A token that the bias lifts survives top-k; one that it sinks does not."""
    lifted, sunk = 5, int(mx.argmax(LOGITS[0]))
    scores = scores_of(Sampling(temp=1.0, top_k=2, logit_bias={lifted: 50.0, sunk: -50.0}), LOGITS, [1], NO_DRAFT)
    assert scores[0, lifted].item() == pytest.approx(0.0, abs=1e-5)
    assert scores[0, sunk].item() == -math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temp": -0.1}, r"temp must lie between 0.0 and inf, not -0.1"),
        ({"temp": math.inf}, r"temp must lie between .* not inf"),
        ({"temp": math.nan}, r"temp must lie between .* not nan"),
        (
            {"logit_bias": {3: math.nan}},
            r"logit_bias of token 3 must be a finite number, or minus infinity .*, not nan",
        ),
        (
            {"logit_bias": {3: math.inf}},
            r"logit_bias of token 3 must be a finite number, or minus infinity .*, not inf",
        ),
        ({"frequency_penalty": math.nan}, r"frequency_penalty must be a finite number, not nan"),
        ({"presence_penalty": math.inf}, r"presence_penalty must be a finite number, not inf"),
        ({"temp": 1e-40}, r"temp must be 0, for greedy decoding, or at least 1e-30, not 1e-40"),
        ({"temp": 1.0, "top_k": 2.5}, r"top_k must be a whole number, not 2.5"),
        ({"top_p": 1.5}, r"top_p must lie between 0.0 and 1.0, not 1.5"),
        ({"top_p": -0.5}, r"top_p must lie between 0.0 and 1.0, not -0.5"),
        ({"min_p": 1.01}, r"min_p must lie between 0.0 and 1.0, not 1.01"),
        ({"min_p": math.nan}, r"min_p must lie between .* not nan"),
        ({"top_k": -1}, r"top_k must lie between 0 and inf, not -1"),
        ({"repetition_penalty": -1.0}, r"repetition_penalty must lie between 0.0 and inf, not -1.0"),
        ({"repetition_context_size": 0}, r"repetition_context_size must be at least 1, not 0"),
        ({"presence_context_size": -2}, r"presence_context_size must be at least 1, not -2"),
        ({"frequency_context_size": 0}, r"frequency_context_size must be at least 1, not 0"),
        ({"accept": "always"}, r"accept must be 'coupled' or 'rejection', not 'always'"),
    ],
)
def test_a_meaningless_value_is_refused_with_its_name_and_bounds(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Sampling(**options)


def test_the_bounds_themselves_are_accepted() -> None:
    for options in ({"top_p": 0.0}, {"top_p": 1.0}, {"min_p": 1.0}, {"top_k": 0}, {"repetition_penalty": 0.0}):
        scores = scores_of(Sampling(temp=1.0, **options), LOGITS, [1], NO_DRAFT)
        assert np.isfinite(softmax(np.array(scores))).all()


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    Sampling(logit_bias={0: 1.0, VOCAB - 1: 1.0}).check_vocabulary(VOCAB)
    Sampling().check_vocabulary(VOCAB)
    with pytest.raises(RequestError, match=rf"logit_bias names tokens \[{VOCAB}\]; the vocabulary has 40"):
        Sampling(logit_bias={3: 1.0, VOCAB: 1.0}).check_vocabulary(VOCAB)
    with pytest.raises(RequestError, match="logit_bias names token -1; token ids begin at 0"):
        Sampling(logit_bias={3: 1.0, -1: 1.0})
