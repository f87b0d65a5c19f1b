"""Thinking in branches: the answer is what a seed gives alone, the branch is the one that was scored best."""

import re
from typing import Any

import numpy as np
import pytest
from tiny_folders import write_dflash2, write_model

from mlx_spec import Branch, Engine, Grammar, best_branch, generate, load, stream_generate
from mlx_spec.errors import RequestError

PROMPT = "then the other"
OPTIONS: dict[str, Any] = dict(temp=0.9, top_p=0.95, max_tokens=24)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_SPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        drafter = write_dflash2(tmp_path_factory.mktemp("drafters") / "dflash2")
        engine, tokenizer = load(str(write_model(tmp_path_factory.mktemp("models") / "llama")), str(drafter))
    return Engine(engine.target, engine.drafter), tokenizer


def test_the_branch_with_the_likeliest_tokens_goes_on(loaded: tuple[Engine, Any]) -> None:
    found = best_branch(*loaded, PROMPT, branches=4, branch_tokens=9, seed=3, **OPTIONS)
    means = []
    for index, branch in enumerate(found.branches):
        alone = list(stream_generate(*loaded, PROMPT, seed=3 + index, logprobs=True, **OPTIONS))[:9]
        assert branch.tokens == [response.token for response in alone]
        means.append(np.mean([response.logprob for response in alone]))
        assert branch.score == branch.mean_logprob == pytest.approx(means[-1])
    assert found.best == int(np.argmax(means))
    assert found.text == generate(*loaded, PROMPT, seed=3 + found.best, **OPTIONS)
    assert len(found.text) > len(found.branches[found.best].text)
    assert loaded[0].target.pool.pages_in_use == 0


@pytest.mark.parametrize("chosen", range(3))
def test_a_score_of_ones_own_chooses(chosen: int, loaded: tuple[Engine, Any]) -> None:
    seen: list[Branch] = []

    def score(branch: Branch) -> float:
        seen.append(branch)
        return float(len(seen) == chosen + 1)

    found = best_branch(*loaded, PROMPT, branches=3, branch_tokens=5, score=score, **OPTIONS)
    assert found.best == chosen and seen == found.branches
    assert found.text == generate(*loaded, PROMPT, seed=chosen, **OPTIONS)


def test_a_branch_ends_where_its_thinking_does_and_the_answer_goes_on(loaded: tuple[Engine, Any]) -> None:
    whole = generate(*loaded, PROMPT, **OPTIONS)
    until = whole[len(whole) // 2]
    found = best_branch(*loaded, PROMPT, branches=1, branch_tokens=24, until=until, **OPTIONS)
    assert until in found.branches[0].text
    assert until not in found.branches[0].text[:-1]
    assert found.text == whole


def test_a_branch_that_came_to_its_end_does_not_go_on(loaded: tuple[Engine, Any]) -> None:
    whole = generate(*loaded, PROMPT, **OPTIONS)
    stop = whole[len(whole) // 2]
    found = best_branch(*loaded, PROMPT, branches=1, branch_tokens=24, stop=stop, **OPTIONS)
    assert found.text == generate(*loaded, PROMPT, stop=stop, **OPTIONS) == whole[: whole.index(stop)]
    all_said = best_branch(*loaded, PROMPT, branches=1, branch_tokens=24, **OPTIONS)
    assert all_said.text == whole


@pytest.mark.parametrize("branch_tokens", [4, 24])
def test_branches_and_the_answer_match_a_grammar(branch_tokens: int, loaded: tuple[Engine, Any]) -> None:
    options: dict[str, Any] = dict(OPTIONS, grammar=Grammar.regex("[a-f]{6,12}(one|two)"))
    found = best_branch(*loaded, PROMPT, branches=3, branch_tokens=branch_tokens, seed=3, **options)
    assert found.text == generate(*loaded, PROMPT, seed=3 + found.best, **options)
    assert re.fullmatch("[a-f]{6,12}(one|two)", found.text)
    for branch in found.branches:
        assert set(branch.text) <= set("abcdefonetw")
    with pytest.raises(RequestError, match=r"takes a mlx_spec\.Grammar"):
        best_branch(*loaded, PROMPT, branch_tokens=4, **{**options, "grammar": "[a-f]"})


def test_a_full_cache_ends_every_branch(
    loaded: tuple[Engine, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_model(tmp_path_factory.mktemp("models") / "llama")
    small = load(str(folder), None, max_cached_tokens=96)[0]
    found = best_branch(small, loaded[1], PROMPT, branches=2, branch_tokens=20, **{**OPTIONS, "max_tokens": 300})
    whole = generate(*loaded, PROMPT, seed=found.best, **{**OPTIONS, "max_tokens": 300})
    assert found.text and whole.startswith(found.text) and len(found.text) < len(whole)
    assert small.target.pool.pages_in_use == 0


def test_an_exception_of_the_score_gives_the_pages_back(loaded: tuple[Engine, Any]) -> None:
    def score(branch: Branch) -> float:
        raise OSError("on purpose")

    with pytest.raises(OSError, match="on purpose"):
        best_branch(*loaded, PROMPT, score=score, branch_tokens=3, **OPTIONS)
    assert loaded[0].target.pool.pages_in_use == 0


@pytest.mark.parametrize("wrong", [{"branches": 0}, {"branch_tokens": 0}, {"branch_tokens": 25}])
def test_no_branches_and_no_tokens_are_refused(wrong: dict[str, int], loaded: tuple[Engine, Any]) -> None:
    with pytest.raises(RequestError, match=r"at least 1 branch of 1 to max_tokens \(24\) tokens, not "):
        best_branch(*loaded, PROMPT, **wrong, **OPTIONS)
