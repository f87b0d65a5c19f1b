"""The law through the kernels: whole generations whose every pass runs the ``.metal`` text."""

from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher
from ranked_drafter import RankedDrafter
from scripted_drafters import Finished, ScriptedDrafter, always_right, plain, right_then_wrong, run
from started import started
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_models import tiny_target

import mlx_spec.target.target
from metal_kernels.launching.launch import Kernel, Launcher, launching, noting_launches
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.engine import Engine, Request
from mlx_spec.target import Target

EMULATED = partial(launcher, check=False)
# Prefilled by MLX's own operations; the text after it leaves the windows of 24 and 40, and a page of 32.
PROMPT = [int(t) for t in np.random.default_rng(4).integers(0, 90, 52)]
NEW_TOKENS, DRAFTED_TOKENS = 16, 8
SAMPLERS = {
    "greedy": Sampling(),
    "coupled": Sampling(temp=0.9, seed=5),
    "coupled, penalties": Sampling(temp=0.8, seed=7, repetition_penalty=1.3, presence_penalty=0.5, top_k=40),
}
FAMILIES = ("llama", "llama_sliding", "qwen2", "qwen3", "qwen3_moe", "qwen3_next")
TARGETS = [(family, bits) for family in FAMILIES for bits in (None, 4)]
# Every target with a sampler in turn, at a depth whose passes of 8 rows all families share.
CASES = [(*target, list(SAMPLERS)[i % 3], 7) for i, target in enumerate(TARGETS)]
CASES += [("llama", None, "coupled", 3), ("llama", 4, "greedy", 2)]


@cache
def target_of(family: str, bits: int | None) -> Target:
    return tiny_target(family, mx.bfloat16, bits)


@cache
def plain_text(family: str, bits: int | None, sampler: str) -> Finished:
    with launching(EMULATED):
        return plain(target_of(family, bits), request_of(sampler))


def request_of(sampler: str, depth: int = 0, tokens: int = NEW_TOKENS) -> Request:
    """Return a request that ends by itself: before ``max_tokens`` depths shrink, and every depth compiles anew."""
    emitted = count(1)
    ends = {"max_tokens": -1, "is_end": lambda token: next(emitted) == tokens}
    return Request(PROMPT, num_draft_tokens=depth, sampling=SAMPLERS[sampler], **ends)


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = dflash2_config()
    return write_drafter(tmp_path_factory.mktemp("drafter"), config, random_tensors(config, dtype=mx.bfloat16))


@pytest.mark.parametrize(("family", "bits", "sampler", "depth"), CASES)
def test_drafting_changes_no_token(
    family: str, bits: int | None, sampler: str, depth: int, drafter_folder: Path
) -> None:
    target, expected = target_of(family, bits), plain_text(family, bits, sampler)
    assert len(set(expected.text[len(PROMPT) :])) >= 4
    scripted = ScriptedDrafter(target, expected.text, right_then_wrong(depth // 2))
    with launching(EMULATED), noting_launches() as launched:
        dflash2 = load_dflash2(drafter_folder, target, "tiny drafter")
        done = run(Engine(target, scripted), request_of(sampler, depth))
        drafted = run(Engine(target, dflash2), request_of(sampler, depth, DRAFTED_TOKENS))
    assert done.text == expected.text
    assert [len(tokens) for tokens in done.rounds[:-1]] == [depth // 2 + 1] * (len(done.rounds) - 1)
    assert drafted.text == expected.text[: len(PROMPT) + DRAFTED_TOKENS]
    assert len(drafted.statistics.drafted) == depth
    product = "gemm_rows" if bits is None else "qmm_rows"
    expected_kernels = {product, "attention_rows", "attention_combine", "norm_rope", "topk_rows", "dynamic_conv"}
    if family in ("qwen3_moe", "qwen3_next"):
        expected_kernels.add(f"gather_{product}")
    if family == "qwen3_next":
        expected_kernels |= {"causal_conv_advance", "gated_delta_advance"}
    assert {kernel.name for kernel in launched} >= expected_kernels


@pytest.mark.parametrize("family", ["llama_sliding", "qwen3_next"])
def test_branches_change_no_token(family: str, drafter_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks in one draft pass and one verify pass, in the graph that serves however rows are shared out."""
    monkeypatch.setattr(mlx_spec.target.target, "is_traceable", lambda: True)
    monkeypatch.setattr(mx, "compile", lambda graph: graph)
    target, seeds = target_of(family, None), [5, 6]
    request = Request(PROMPT, 8, 3, Sampling(temp=0.9, seed=seeds[0]))
    with launching(EMULATED):
        alone = [plain(target, replace(request, sampling=Sampling(temp=0.9, seed=seed))).text for seed in seeds]
        engine = Engine(target, load_dflash2(drafter_folder, target, "tiny drafter"))
        first = started(engine, request)
        branches = [first, engine.fork(first, seed=seeds[1])]
        # Further rounds draft less, and every number of rows compiles anew.
        for _ in range(2):
            assert all(done.error is None for done in engine.step(branches))
    for branch, text in zip(branches, alone, strict=True):
        assert branch.tokens == text[: len(branch.tokens)]
        engine.close(branch)
    assert alone[0] != alone[1]


@pytest.mark.parametrize(
    ("family", "bits", "sampler"),
    [("llama_sliding", None, "greedy"), ("qwen3", 4, "coupled"), ("qwen3_moe", None, "coupled, penalties")],
)
def test_siblings_change_no_token(
    family: str, bits: int | None, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three drafts and four siblings: passes of the 8 rows that all families share, in the graph of a device."""
    monkeypatch.setattr(mlx_spec.target.target, "is_traceable", lambda: True)
    monkeypatch.setattr(mx, "compile", lambda graph: graph)
    target, expected = tiny_target(family, mx.bfloat16, bits), plain_text(family, bits, sampler)
    drafter = RankedDrafter(target, expected.text, lambda proposal, index, position: int(index == proposal % 3))
    with launching(EMULATED), noting_launches() as launched:
        done = run(Engine(target, drafter), replace(request_of(sampler, 3), num_sibling_drafts=4))
    assert done.text == expected.text
    assert [len(tokens) for tokens in done.rounds[:-1]] == [2 + n % 3 for n in range(1, len(done.rounds))]
    assert done.statistics.accepted_sibling_drafts >= len(done.rounds) - 1
    assert "attention_rows" in {kernel.name for kernel in launched}


@pytest.mark.parametrize(("family", "bits"), TARGETS)
def test_rows_of_a_pass_equal_one_row_at_a_time(family: str, bits: int | None) -> None:
    target, aux_hidden_states = target_of(family, bits), [0, 2, 4]
    sequence = target.open()
    with launching(EMULATED):
        target.prefill(sequence, PROMPT)
        tokens = mx.array(PROMPT[:8], dtype=mx.int32)
        block, alone = target.forward([(sequence, tokens)], aux_hidden_states), sequence.fork()
        logits = target.logits(block.hidden)
        for row in range(8):
            one = target.forward([(alone, tokens[row : row + 1])], aux_hidden_states)
            assert mx.array_equal(block.hidden[row], one.hidden[0]), row
            assert mx.array_equal(block.aux_hidden_states[row], one.aux_hidden_states[0]), row
            assert mx.array_equal(block.kv[row], one.kv[0]), row
            assert mx.array_equal(logits[row], target.logits(one.hidden)[0]), row
            target.commit(alone, one)
    alone.free()
    sequence.free()


def test_a_kernel_that_is_not_batch_invariant_is_noticed(drafter_folder: Path) -> None:
    """Products of several rows that are a little too large."""

    def faulty(kernel: Kernel) -> Launcher:
        def launch(**settings: object) -> list[mx.array]:
            outputs = EMULATED(kernel)(**settings)
            several = kernel.name == "gemm_rows" and outputs[0].shape[0] > 1
            return [x * 1.5 for x in outputs] if several else outputs

        return launch

    target, expected = target_of("llama", None), plain_text("llama", None, "greedy")
    with launching(faulty):
        with pytest.raises(AssertionError, match="not the text"):
            run(Engine(target, ScriptedDrafter(target, expected.text, always_right)), request_of("greedy", 7))
        dflash2 = load_dflash2(drafter_folder, target, "tiny drafter")
        assert run(Engine(target, dflash2), request_of("greedy", 7)).text != expected.text
