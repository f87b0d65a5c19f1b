"""Bias, penalties and logits processors in a round: what they may forbid, how exact and how pure they are.

bfloat16 targets, see test_lossless.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors
from ranked_drafter import RankedDrafter
from scripted_drafters import ScriptedDrafter, always_right, mixture, plain, run
from started import started
from tiny_models import tiny_target

from mlx_spec.decoding.sampling import Sampling
from mlx_spec.engine import Engine, Generation, Request
from mlx_spec.errors import NonFiniteError
from mlx_spec.target import Target

PROMPT = [int(t) for t in np.random.default_rng(24).integers(0, 90, 20)]
VOCAB = 96
RULES = [Sampling(), Sampling(temp=0.8, seed=5), Sampling(temp=0.8, seed=5, accept="rejection")]
RULE_NAMES = ["greedy", "coupled", "rejection"]
NO_CHOICE = "Bias, penalties and logits processors leave no token to choose after position"


@cache
def target() -> Target:
    return tiny_target("llama")


@pytest.fixture(autouse=True)
def no_page_is_left() -> Iterator[None]:
    yield
    if pages := target().pool.pages_in_use:
        target.cache_clear()
    assert pages == 0


def forbids_all(tokens: mx.array, scores: mx.array) -> mx.array:
    return scores - mx.inf


def forces_by_infinity(tokens: mx.array, scores: mx.array) -> mx.array:
    return mx.where(mx.arange(VOCAB) == 5, mx.inf, scores)


def one_is_nan(tokens: mx.array, scores: mx.array) -> mx.array:
    return mx.where(mx.arange(VOCAB) == 5, mx.nan, scores)


def refused_when_longer_than(most: int, then: Callable[..., mx.array] = forbids_all) -> Any:
    """A processor that breaks the scores of rows that follow more than so many tokens."""
    return lambda tokens, scores: scores if tokens.size <= most else then(tokens, scores)


def scripted(text: list[int], script: Any = always_right) -> Engine:
    return Engine(target(), ScriptedDrafter(target(), text, script, target_layer_ids=(1,)))


def state_of(generation: Generation) -> tuple[Any, ...]:
    return list(generation.tokens), generation.sequence.length, generation.statistics.copy()


@pytest.mark.parametrize("processor", [forbids_all, forces_by_infinity, one_is_nan])
@pytest.mark.parametrize("sampling", RULES, ids=RULE_NAMES)
def test_processors_that_leave_no_token_are_named_and_nothing_is_emitted(
    sampling: Sampling, processor: Callable[..., mx.array]
) -> None:
    """In a round without drafts, with drafts, and for log-probabilities; for one generation and among others."""
    good = Request(PROMPT, 8, 0)
    expected = plain(target(), good).text
    bad = Request(PROMPT, 8, sampling=replace(sampling, logits_processors=(processor,)))
    engine = scripted(expected)
    for request in (replace(bad, num_draft_tokens=0), replace(bad, num_draft_tokens=3, top_logprobs=2)):
        failing, other = started(engine, request), started(engine, good)
        before = state_of(failing)
        with pytest.raises(NonFiniteError, match=f"{NO_CHOICE} 19"):
            engine.step(failing).checked()
        first, second = engine.step([failing, other])
        assert isinstance(first.error, NonFiniteError) and NO_CHOICE in str(first.error)
        assert second.error is None and second.tokens == expected[20 : 20 + len(second.tokens)] != []
        assert state_of(failing) == before and failing.drafter_state is not None or request.num_draft_tokens == 0
        engine.close(failing)
        engine.close(other)


@pytest.mark.parametrize("siblings", [0, 3])
@pytest.mark.parametrize("sampling", RULES, ids=RULE_NAMES)
def test_only_accepted_rows_need_a_token(sampling: Sampling, siblings: int) -> None:
    """Plain decoding never computes the others. The second draft is rejected; in a tree a sibling replaces it."""
    # One token is left to draw, so that rejection gives the text of plain decoding too.
    sampling = replace(sampling, top_k=1)
    text = plain(target(), Request(PROMPT, 30, sampling=sampling)).text
    ranked = RankedDrafter(
        target(), text, lambda proposal, index, position: int(index == 1), target_layer_ids=(1,)
    )
    emitted = 3 if siblings else 2
    # The histories of accepted rows are beginnings of the text; rows with another one are broken in these ways.
    for broken in (forbids_all, forces_by_infinity, one_is_nan):

        def processor(tokens: mx.array, scores: mx.array, broken: Any = broken) -> mx.array:
            return scores if tokens.tolist() == text[: tokens.size] else broken(tokens, scores)

        request = Request(
            PROMPT, 30, 3, replace(sampling, logits_processors=(processor,)), num_sibling_drafts=siblings
        )
        engine = Engine(target(), ranked)
        generation = started(engine, request)
        assert engine.step(generation).checked().tokens == text[20 : 20 + emitted]
        engine.close(generation)
    # The first row after the accepted ones counts: what is emitted last comes from it.
    for last, is_fine in ((19 + emitted, True), (18 + emitted, False)):
        request = replace(request, sampling=replace(sampling, logits_processors=(refused_when_longer_than(last),)))
        generation = started(engine, request)
        if is_fine:
            assert engine.step(generation).checked().tokens == text[20 : 20 + emitted]
        else:
            with pytest.raises(NonFiniteError, match=f"{NO_CHOICE} 19"):
                engine.step(generation).checked()
        engine.close(generation)


@pytest.mark.parametrize("sampling", RULES, ids=RULE_NAMES)
def test_forbidden_tokens_are_never_emitted_and_the_text_stays_that_of_plain_decoding(sampling: Sampling) -> None:
    """Minus infinity for all tokens but seven, of which one may be drafted and rejected at any time."""
    allowed = [2, 3, 11, 40, 41, 60, 90]
    bias = {token: -float("inf") for token in range(VOCAB) if token not in allowed}
    sampling = replace(sampling, logit_bias=bias, repetition_penalty=1.3)
    if sampling.accept == "rejection":
        sampling = replace(sampling, top_k=1)
    request = Request(PROMPT, 16, sampling=sampling, top_logprobs=8)
    expected = plain(target(), request).text
    assert set(expected[20:]) <= set(allowed) and len(set(expected[20:])) > 2
    drafted, alone = (
        logprobs_of(engine, request) for engine in (scripted(expected, mixture(1)), Engine(target()))
    )
    assert drafted == alone
    assert all(np.isfinite(logprob) and top[-1][1] == -np.inf for _, logprob, top in drafted)


def logprobs_of(engine: Engine, request: Request) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """Return each token of a request's text with its log-probability and those of the likeliest tokens."""
    generation, found = started(engine, request), []
    while generation.finish_reason is None:
        done = engine.step(generation).checked()
        found += [(token, p.logprob, p.top) for token, p in zip(done.tokens, done.logprobs, strict=True)]
    engine.close(generation)
    return found


PENALTIES: dict[str, Any] = dict(
    logit_bias={3: 4.13, 50: -30.7},
    repetition_penalty=1.37,
    repetition_context_size=9,
    presence_penalty=0.531,
    presence_context_size=12,
    frequency_penalty=0.417,
    frequency_context_size=33,
)


def penalised(logits: np.ndarray, history: Sequence[int]) -> np.ndarray:
    """PENALTIES in float64, from their definition, of the logits [V] after a history."""
    scores = logits.astype(np.float64)
    for token, bias in PENALTIES["logit_bias"].items():
        scores[token] += bias
    for token in set(history[-9:]):
        scores[token] *= 1.37 if scores[token] < 0 else 1 / 1.37
    for token in set(history[-12:]):
        scores[token] -= 0.531
    for token in history[-33:]:
        scores[token] -= 0.417
    return scores


def test_logprobs_of_penalised_16_bit_logits_are_those_of_float64() -> None:
    """Rounded to bfloat16 after each step they were up to 0.09 away."""
    rows: list[np.ndarray] = []
    request = Request(
        PROMPT,
        24,
        sampling=Sampling(**PENALTIES),
        top_logprobs=5,
        on_verified=lambda sequence, tokens, logits: rows.append(np.array(logits.astype(mx.float32))),
    )
    assert target().dtype == mx.bfloat16
    alone = logprobs_of(Engine(target()), request)
    text = PROMPT + [token for token, _, _ in alone]
    for place, (token, logprob, top) in enumerate(alone):
        scores = penalised(rows[place][0], text[: 20 + place])
        expected = scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())
        assert token == int(expected.argmax())
        for other, found in ((token, logprob), *top):
            assert found == pytest.approx(expected[other], abs=1e-3)
    drafted = logprobs_of(scripted(text, mixture(2)), replace(request, on_verified=None))
    assert drafted == alone


OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {3: 4.0, 50: -30.0}},
    "repetition": {"repetition_penalty": 1.3, "repetition_context_size": 9},
    "presence": {"presence_penalty": 2.5, "presence_context_size": 7},
    "frequency": {"frequency_penalty": 0.4, "frequency_context_size": 33},
    "all": PENALTIES,
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_processors_of_mlx_lm_keep_the_contract(options: dict[str, Any]) -> None:
    """They depend on their arguments alone, whatever rejected branches they are called for in between."""
    processors = make_logits_processors(**options)
    assert len(processors) == (4 if options is PENALTIES else 1)
    random = np.random.default_rng(3)
    for processor in processors:

        def call(tokens: list[int], seed: int, processor: Any = processor) -> list[float]:
            scores = np.random.default_rng(seed).normal(size=(1, VOCAB))
            return processor(mx.array(tokens), mx.array(scores, dtype=mx.float32))[0].tolist()

        first = call(PROMPT, 0)
        for cut in range(4):
            call([*PROMPT[: 20 - cut], *(int(t) for t in random.integers(0, 90, 3))], 1 + cut)
        assert call(PROMPT, 0) == first != call(PROMPT[:-1], 1)
    # Four tokens are so likely that only penalties on what was just drafted keep them from being repeated.
    lifted = {token: 9.0 for token in (7, 9, 30, 61)}
    bias = {**lifted, **options.get("logit_bias", {})}
    own = Sampling(temp=0.7, seed=8, logit_bias=lifted, logits_processors=tuple(processors))
    ours = Sampling(temp=0.7, seed=8, **{**options, "logit_bias": bias})
    expected = plain(target(), Request(PROMPT, 20, sampling=own)).text
    done = run(scripted(expected, mixture(1, share=0.8)), Request(PROMPT, 20, sampling=own))
    assert done.text == expected == plain(target(), Request(PROMPT, 20, sampling=ours)).text
    assert 0 < sum(done.statistics.accepted) < sum(done.statistics.drafted)
