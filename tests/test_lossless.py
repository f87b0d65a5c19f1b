"""Lossless: drafting never changes a token. Every family, depth, sampler setting and kind of drafter.

The targets are bfloat16 because on the CPU MLX's bfloat16 product reduces every row alike, whatever the number of
rows; its float32 product does not. So here the text must be equal token for token.
"""

from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from choosing import drawn_at
from scripted_drafters import (
    Finished,
    Script,
    ScriptedDrafter,
    always_right,
    always_wrong,
    mixture,
    plain,
    right_then_wrong,
    run,
    wrong_at,
)
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_models import CONFIGS, tiny_target

from mlx_spec.decoding.sampling import Sampling
from mlx_spec.drafters.base import Draft, DraftRule
from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.engine import Engine, Request
from mlx_spec.engine.costs import Costs
from mlx_spec.target import Target

NEW_TOKENS = 50
TOKENS = [int(t) for t in np.random.default_rng(1).integers(0, 90, 110)]
# A single token; a text that crosses a page of 32 at once; one beyond the drafter's window of 24 and the sliding
# targets' of 40; several chunks of prefill, the last of them one token.
PROMPTS = {"one token": (TOKENS[:1], 512), "page": (TOKENS[:31], 512), "windows": (TOKENS[:62], 512)} | {
    "chunks": (TOKENS[:110], 27)
}


def even_tokens_cost_more(tokens: mx.array, logits: mx.array) -> mx.array:
    """A logits processor that depends on the whole history: its sum and its length."""
    shift = (mx.sum(tokens) + tokens.size) % 2
    return logits - 3 * ((mx.arange(logits.shape[-1]) + shift) % 2 == 0)


SAMPLERS = {
    "greedy": Sampling(),
    "greedy, penalties": Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    "coupled": Sampling(temp=0.8, seed=5),
    "coupled, filters": Sampling(temp=1.1, seed=6, top_p=0.9, top_k=24, min_p=0.02),
    "coupled, penalties": Sampling(
        temp=0.8,
        seed=7,
        repetition_penalty=1.3,
        repetition_context_size=9,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        frequency_context_size=33,
        logit_bias={3: 4.0, 50: -30.0},
    ),
    "coupled, processor": Sampling(temp=0.7, seed=8, logits_processors=(even_tokens_cost_more,)),
    # top_k 1 leaves one token to draw, so even rejection must give the plain text.
    "rejection, one token left": Sampling(temp=0.8, seed=9, top_k=1, accept="rejection"),
}
SCRIPTS: dict[str, Script] = {
    "always right": always_right,
    "always wrong": always_wrong,
    **{f"right for {j}": right_then_wrong(j) for j in range(1, 7)},
    "wrong at position 70": wrong_at(70),
    "mixture 1": mixture(1),
    "mixture 2": mixture(2, share=0.9),
}
# Recurrent layers are the slowest on a CPU: quantised, qwen3_next represents the three families that have them.
LEFT_OUT = [("qwen3_5", 4), ("qwen3_5_moe", 4)]
TARGETS = [target for target in product(CONFIGS, (None, 4)) if target not in LEFT_OUT]


@cache
def target_of(family: str, bits: int | None) -> Target:
    return tiny_target(family, mx.bfloat16, bits)


@cache
def request_of(prompt: str, sampler: str) -> Request:
    tokens, step_size = PROMPTS[prompt]
    return Request(tokens, NEW_TOKENS, sampling=SAMPLERS[sampler], prefill_step_size=step_size)


@cache
def plain_text(family: str, bits: int | None, prompt: str, sampler: str) -> Finished:
    return plain(target_of(family, bits), request_of(prompt, sampler))


def with_depth(request: Request, depth: int | None) -> Request:
    return Request(**{**vars(request), "num_draft_tokens": depth})


def check_counters(done: Finished, request: Request) -> None:
    """Check that the statistics agree with the tokens."""
    statistics = done.statistics
    assert statistics.prompt_tokens == len(request.prompt)
    assert statistics.tokens == len(done.text) - len(request.prompt) == sum(map(len, done.rounds)) == NEW_TOKENS
    assert statistics.rounds == len(done.rounds)
    assert len(statistics.accepted) == len(statistics.drafted)
    assert all(a <= d for a, d in zip(statistics.accepted, statistics.drafted, strict=True))
    assert statistics.accepted == sorted(statistics.accepted, reverse=True)
    # Every round emits one token of the target's own; only the last round may be cut, here by max_tokens.
    assert statistics.tokens == statistics.rounds + sum(statistics.accepted)


def cases() -> list[tuple[str, int | None, str, str, int]]:
    """Every target with every sampler, while prompts and depths go round beside them."""
    depths, prompts = [7, 1, 4, 2, 6, 3, 5], list(PROMPTS)
    return [
        (*target, sampler, prompts[(i + j + j // 2) % len(prompts)], depths[(i + 13 * j) % len(depths)])
        for j, sampler in enumerate(SAMPLERS)
        for i, target in enumerate(TARGETS)
    ]


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = dflash2_config()
    return write_drafter(tmp_path_factory.mktemp("drafter"), config, random_tensors(config, dtype=mx.bfloat16))


# Every second case, shifted from sampler to sampler so that quantised and unquantised targets take turns.
WITH_DFLASH2 = [case for i, case in enumerate(cases()) if (i + i // len(TARGETS)) % 2 == 0]
OTHERS = [case for case in cases() if case not in WITH_DFLASH2]
SCRIPTED = [(*case, script) for case, script in zip(OTHERS, cycle(SCRIPTS), strict=False)]


@pytest.mark.parametrize(("family", "bits", "sampler", "prompt", "depth", "script"), SCRIPTED)
def test_a_scripted_drafter_changes_no_token(
    family: str, bits: int | None, sampler: str, prompt: str, depth: int, script: str
) -> None:
    target, request = target_of(family, bits), request_of(prompt, sampler)
    expected = plain_text(family, bits, prompt, sampler)
    drafter = ScriptedDrafter(target, expected.text, SCRIPTS[script], target_layer_ids=(1, 4) if depth % 2 else ())
    done = run(Engine(target, drafter), with_depth(request, depth))
    assert done.text == expected.text
    assert done.finish_reason == expected.finish_reason == "length"
    check_counters(done, request)
    right = {"always right": depth, "always wrong": 0}.get(script)
    if script.startswith("right for"):
        right = min(int(script.split()[-1]), depth)
    if right is not None:
        assert all(len(tokens) == right + 1 for tokens in done.rounds[:-1])


@pytest.mark.parametrize(("family", "bits", "sampler", "prompt", "depth"), WITH_DFLASH2)
def test_a_dflash2_drafter_changes_no_token(
    family: str, bits: int | None, sampler: str, prompt: str, depth: int, drafter_folder: Path
) -> None:
    target, request = target_of(family, bits), request_of(prompt, sampler)
    expected = plain_text(family, bits, prompt, sampler)
    engine = Engine(target, load_dflash2(drafter_folder, target, "tiny drafter"))
    done = run(engine, with_depth(request, depth))
    assert done.text == expected.text
    assert done.finish_reason == "length"
    check_counters(done, request)
    assert len(done.statistics.drafted) == depth


def test_the_cases_cover_what_they_should() -> None:
    """Each test above sees every family, sampler, prompt and depth; the scripted one also every script."""
    for chosen in (SCRIPTED, WITH_DFLASH2):
        assert {case[0] for case in chosen} == set(CONFIGS)
        assert {case[2] for case in chosen} == set(SAMPLERS)
        assert {case[3] for case in chosen} == set(PROMPTS)
        assert {case[4] for case in chosen} == set(range(1, 8))
        assert {(case[0], case[1]) for case in chosen} >= {(family, None) for family in CONFIGS}
    assert {case[:2] for case in SCRIPTED} == set(TARGETS)
    assert {case[5] for case in SCRIPTED} == set(SCRIPTS)


def test_the_texts_are_worth_comparing() -> None:
    """A text of one repeated token would agree with itself however positions are mixed up."""
    for case in cases():
        family, bits, sampler, prompt, _ = case
        done = plain_text(family, bits, prompt, sampler)
        assert len(set(done.text[len(PROMPTS[prompt][0]) :])) >= 4, case


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    target, prompt = target_of("llama", None), TOKENS[:9]
    texts = [plain(target, Request(prompt, 30, sampling=Sampling(temp=0.8, seed=s))).text for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("sampler", ["greedy", "coupled, penalties"])
def test_a_depth_that_varies_from_round_to_round_changes_no_token(sampler: str, drafter_folder: Path) -> None:
    class Varying:
        """Any depth from 0 to 7, drawn anew for each round."""

        reason = "drawn by lot"

        def __init__(self) -> None:
            self.random = np.random.default_rng(3)

        def depth(self) -> int:
            return int(self.random.integers(0, 8))

        def siblings(self, depth: int) -> tuple[int, ...]:
            return (0,) * depth

        def update(self, drafted: int, accepted: int, runner_up: bool | None) -> None:
            assert runner_up is None
            assert 0 <= accepted <= drafted <= 7

    target, request = target_of("llama_sliding", None), request_of("windows", sampler)
    expected = plain_text("llama_sliding", None, "windows", sampler)
    scripted = ScriptedDrafter(target, expected.text, mixture(4), target_layer_ids=(0,))
    for drafter in (scripted, load_dflash2(drafter_folder, target, "tiny drafter")):
        done = run(Engine(target, drafter), with_depth(request, 7), policy=Varying())
        assert done.text == expected.text
        assert 0 < done.statistics.undrafted_rounds < done.statistics.rounds
        assert len(set(done.statistics.drafted)) > 3
        check_counters(done, request)


def test_measured_costs_change_the_depth_but_no_token() -> None:
    """Drafts are accepted at first, then rejected: the depth goes down until drafting is paused."""
    target, request = target_of("llama", None), request_of("windows", "coupled")
    expected = plain_text("llama", None, "windows", "coupled")
    drafter = ScriptedDrafter(target, expected.text, lambda proposal, index, position: position < 80)
    costs = Costs({1: 10.0, 8: 17.0}, {1: 2.0, 7: 5.0})
    done = run(Engine(target, drafter, costs), request)
    assert done.text == expected.text
    assert len(done.rounds[0]) > 4
    assert done.statistics.undrafted_rounds > 8
    assert len(set(done.statistics.drafted)) > 1
    assert done.statistics.depth_reason.startswith("paused")
    check_counters(done, request)


def test_a_drafter_with_the_targets_own_scores_draws_the_targets_tokens() -> None:
    """Coupled sampling gives draft and target the noise of the same position: equal scores, equal draws."""
    target, request = target_of("llama", None), request_of("page", "coupled")
    logits: list[mx.array] = []
    expected = plain(
        target, Request(**{**vars(request), "on_verified": lambda sequence, tokens, row: logits.append(row[0])})
    )

    class Twin(ScriptedDrafter):
        """Draws from the target's scores instead of knowing the text."""

        def draft(self, state: Any, anchor: int, count: int, rule: DraftRule) -> Draft:
            first = len(state.tokens) + 1
            scores = [
                logits[at - len(request.prompt)].astype(mx.float32) if at < len(self.text) else mx.zeros((96,))
                for at in range(first, first + count)
            ]
            ids = mx.arange(96)
            tokens = mx.stack([drawn_at(rule, first + j, ids, row).token for j, row in enumerate(scores)])
            return Draft(tokens.astype(mx.int32), mx.stack([ids] * count))

    done = run(Engine(target, Twin(target, expected.text, always_right)), with_depth(request, 6))
    assert done.text == expected.text
    assert [len(tokens) for tokens in done.rounds] == [7] * 7 + [1]
