"""A trained head over a trained hybrid, whose recurrent layers follow every accepted row: lossless, and turns."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from one_draft import extend
from scripted_drafters import plain, right_then_wrong, run
from started import started
from test_mtp import Steered, assert_like_fresh

from mlx_spec import load
from mlx_spec.decoding.accept import rule_for
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.drafters.base import Committed
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.engine import Engine, Generation, Request
from mlx_spec.engine.draft_policy import FixedDepth

FOLDER = Path(__file__).parent.parent / "tiny_hybrid"
SAMPLERS = {"greedy": Sampling(), "coupled": Sampling(temp=0.8, seed=5, top_k=40)}
PROMPT = "The drafter reads hidden states of rows that the target has committed"
TURNS = (" and then", "\n\ndef forward(self, x", " Raises RequestError for")

samplers = pytest.mark.parametrize("sampler", list(SAMPLERS))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))


@cache
def loaded() -> tuple[Engine, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_spec.loading.load.kept_costs", lambda *_: None)
        patch.setattr("mlx_spec.loading.load.check_wiring", lambda *_: None)
        return load(str(FOLDER))


def tokens(text: str) -> list[int]:
    return list(loaded()[1].encode(text))


def head() -> ChainDrafter:
    drafter = loaded()[0].drafter
    assert isinstance(drafter, ChainDrafter)
    return drafter


@cache
def plain_text(sampler: str) -> list[int]:
    request = Request(tokens(PROMPT), 40, sampling=SAMPLERS[sampler], prefill_step_size=17)
    return plain(loaded()[0].target, request).text


@samplers
@pytest.mark.parametrize("depth", range(1, 8))
def test_a_trained_head_changes_no_token(depth: int, sampler: str) -> None:
    request = Request(tokens(PROMPT), 40, depth, SAMPLERS[sampler], prefill_step_size=17)
    done = run(loaded()[0], request)
    assert done.text == plain_text(sampler)
    statistics = done.statistics
    assert len(statistics.acceptance) == depth
    assert 0 < sum(statistics.accepted) < sum(statistics.drafted)
    assert statistics.timed_rounds and min(statistics.draft_seconds, statistics.verify_seconds) > 0


@pytest.mark.parametrize("wrong", range(8))
def test_drafts_that_fail_at_each_position(wrong: int) -> None:
    """Seven drafts a round of which the first ``wrong`` stand: so many rows are replayed."""
    target, text = loaded()[0].target, plain_text("greedy")
    engine = Engine(target, Steered(head(), text, right_then_wrong(wrong)))
    done = run(engine, Request(tokens(PROMPT), 40, 7, prefill_step_size=17))
    assert done.text == text
    assert {len(each) for each in done.rounds[:-1]} == {wrong + 1}


def go_on(old: Generation, more: list[int]) -> Generation:
    """Read more tokens after all that was said, of which the last was not processed yet."""
    target, sequence, drafting, drafter = loaded()[0].target, old.sequence, old.drafter_state, head()
    prompt = [*old.tokens, *more]

    def show(rows: Any, ids: mx.array) -> None:
        extend(drafter, drafting, Committed(sequence.length - ids.size, ids, rows.aux_hidden_states))

    target.prefill(sequence, prompt[sequence.length : -1], drafter.target_layer_ids, 9, on_rows=show)
    request = Request(prompt, 12, 4, old.request.sampling)
    rule = rule_for(request.sampling, target.vocab_size)
    return Generation(
        request, sequence, rule, FixedDepth(4), list(prompt), drafter_state=drafting, boundary=old.boundary
    )


def finish(generation: Generation) -> None:
    """Run a turn to its end and compare its text, and what the drafter holds then."""
    engine, request = loaded()[0], generation.request
    expected = plain(engine.target, Request(list(request.prompt), 12, sampling=request.sampling)).text
    while generation.finish_reason is None:
        engine.step(generation).checked()
    assert generation.tokens == expected
    assert_like_fresh(head(), engine.target, generation.drafter_state, generation.tokens)


@samplers
def test_three_turns_with_reused_caches(sampler: str) -> None:
    """Each is said twice: with other words, from a fork that was taken before it."""
    engine = loaded()[0]
    generation = started(engine, Request(tokens(PROMPT), 12, 4, SAMPLERS[sampler]))
    finish(generation)
    for more in map(tokens, TURNS):
        fork = replace(
            generation, sequence=generation.sequence.fork(), drafter_state=generation.drafter_state.fork()
        )
        other = go_on(fork, more[:-1])
        finish(other)
        engine.close(other)
        generation = go_on(generation, more)
        finish(generation)
    engine.close(generation)
    assert engine.target.pool.pages_in_use == 0
