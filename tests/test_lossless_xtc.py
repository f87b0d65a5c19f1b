"""XTC is drawn by position: it gives one text with chains, with trees, in company, and without drafts."""

from dataclasses import replace
from functools import cache

import mlx.core as mx
import pytest
from branch_drafter import BranchDrafter
from ranked_drafter import RankedDrafter
from scripted_drafters import Finished, ScriptedDrafter, always_right, mixture, plain, run
from started import started
from test_lossless_trees import lots
from tiny_models import tiny_target

from mlx_spec.decoding.sampling import Sampling
from mlx_spec.engine import Engine, Request
from mlx_spec.target import Target

PROMPT = [5, 17, 3, 60, 42]
TOKENS = 40
SAMPLERS = {
    "XTC": Sampling(temp=0.9, seed=4, xtc_probability=0.5, xtc_threshold=0.02),
    "XTC and filters": Sampling(
        temp=0.9,
        seed=5,
        top_p=0.95,
        min_p=0.01,
        min_tokens_to_keep=3,
        xtc_probability=0.4,
        xtc_threshold=0.03,
        xtc_special_tokens=(3, 8),
        top_k=30,
    ),
    "XTC and rejection, one token left": Sampling(
        temp=0.9, seed=6, xtc_probability=0.5, xtc_threshold=0.02, top_k=1, accept="rejection"
    ),
}


@cache
def target() -> Target:
    return tiny_target("llama", mx.bfloat16)


@cache
def plain_text(sampling: Sampling) -> Finished:
    return plain(target(), Request(PROMPT, TOKENS, sampling=sampling))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_xtc_has_an_effect(sampler: str) -> None:
    sampling = SAMPLERS[sampler]
    assert plain_text(sampling).text != plain_text(replace(sampling, xtc_probability=0.0)).text
    # Drawn for some positions and not for others.
    assert plain_text(sampling).text != plain_text(replace(sampling, xtc_probability=1.0)).text


def test_greedy_text_is_unaffected() -> None:
    assert plain_text(Sampling(xtc_probability=1.0)).text == plain_text(Sampling()).text


@pytest.mark.parametrize("script", [always_right, mixture(1)])
@pytest.mark.parametrize("depth", [1, 3, 7])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_chain_changes_no_token(sampler: str, depth: int, script: object) -> None:
    expected = plain_text(SAMPLERS[sampler])
    drafter = ScriptedDrafter(target(), expected.text, script)  # type: ignore[arg-type]
    done = run(Engine(target(), drafter), Request(PROMPT, TOKENS, depth, SAMPLERS[sampler]))
    assert done.text == expected.text
    assert sum(done.statistics.accepted) > 0


@pytest.mark.parametrize("shape", [(3, 3), (1, 14), (7, 8)])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_tree_changes_no_token(sampler: str, shape: tuple[int, int]) -> None:
    expected = plain_text(SAMPLERS[sampler])
    request = Request(PROMPT, TOKENS, shape[0], SAMPLERS[sampler], num_sibling_drafts=shape[1])
    done = run(Engine(target(), RankedDrafter(target(), expected.text, lots(1))), request)
    assert done.text == expected.text
    assert done.statistics.accepted_sibling_drafts > 0


@pytest.mark.parametrize("seeds", [(4, 4), (4, 5, 6)])
def test_company_changes_no_token(seeds: tuple[int, ...]) -> None:
    """Rows of equal seeds are filtered in one call, those of others are not."""
    samplings = [replace(SAMPLERS["XTC"], seed=seed) for seed in seeds]
    engine = Engine(target(), BranchDrafter(target()))
    running = [started(engine, Request(PROMPT, TOKENS, 3, sampling)) for sampling in samplings]
    for generation, sampling in zip(running, samplings, strict=True):
        generation.drafter_state.text = plain_text(sampling).text
    while any(generation.finish_reason is None for generation in running):
        engine.step(running)
    for generation, sampling in zip(running, samplings, strict=True):
        assert generation.tokens == plain_text(sampling).text
        assert sum(generation.statistics.accepted) > 0
        engine.close(generation)
