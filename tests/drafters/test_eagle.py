"""EAGLE drafters in the engine: lossless, steered drafts, windows, conversations that go on."""

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from one_draft import extend
from scripted_drafters import Finished, mixture, plain, right_then_wrong, run
from started import started
from steered import Steered, assert_like_fresh, go_on
from test_lossless import SAMPLERS
from tiny_eagles import eagle_config, eagle_tensors, write_eagle
from tiny_models import CONFIGS, tiny_target

from mlx_spec.drafters.base import Committed
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.eagle.load import load_eagle
from mlx_spec.engine import Engine, Request
from mlx_spec.errors import PositionError
from mlx_spec.target import Target

TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 90, 120)]
NEW = 20
# EAGLE-1 with its target's output head; EAGLE-3 with its own, and with a window that texts outgrow.
KINDS: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "EAGLE-1": (1, ("fc bias",), {}),
    "EAGLE-3": (3, ("fc", "fc_norm"), {"norm_before_residual": True}),
    "windowed": (3, ("fc",), {"layer_types": ["sliding_attention"], "sliding_window": 24}),
}

Heads = Callable[[str, str, int | None], ChainDrafter]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    @cache
    def load(kind: str, family: str, bits: int | None) -> ChainDrafter:
        version, parts, changes = KINDS[kind]
        config = eagle_config(family, version, **changes)
        folder = write_eagle(
            tmp_path_factory.mktemp("head"), config, eagle_tensors(config, version, parts, dtype=mx.bfloat16)
        )
        quantization = None if bits is None else {"group_size": 32, "bits": bits}
        return load_eagle(folder, target_of(family, bits), "tiny head", quantization=quantization)

    return load


@cache
def target_of(family: str, bits: int | None) -> Target:
    return tiny_target(family, mx.bfloat16, bits)


@cache
def plain_text(family: str, bits: int | None, sampler: str, prompt: int = 40, new: int = NEW) -> Finished:
    request = Request(TOKENS[:prompt], new, sampling=SAMPLERS[sampler], prefill_step_size=17)
    return plain(target_of(family, bits), request)


def cases() -> list[tuple[str, str, int | None, str, int]]:
    """Every sampler with every kind of head, while families, bits and depths go round beside them."""
    rounds, families = product(SAMPLERS, KINDS), list(CONFIGS)
    chosen = []
    for i, (sampler, kind) in enumerate(rounds):
        family = families[i % len(families)]
        chosen.append((kind, family, 4 if i % 4 == 3 and family == "llama" else None, sampler, 1 + i % 7))
    return [*chosen, ("EAGLE-3", "qwen3", 4, "coupled", 5), ("EAGLE-1", "qwen3_moe", 4, "greedy", 7)]


@pytest.mark.parametrize(("kind", "family", "bits", "sampler", "depth"), cases())
def test_an_eagle_drafter_changes_no_token(
    kind: str, family: str, bits: int | None, sampler: str, depth: int, heads: Heads
) -> None:
    """On its own, and led so that drafts stand as far as they may."""
    target, drafter, expected = (
        target_of(family, bits),
        heads(kind, family, bits),
        plain_text(family, bits, sampler),
    )
    request = Request(TOKENS[:40], NEW, depth, SAMPLERS[sampler], prefill_step_size=17)
    for each in (drafter, Steered(drafter, expected.text, mixture(depth, share=0.8))):
        done = run(Engine(target, each), request)
        assert done.text == expected.text
        assert done.finish_reason == expected.finish_reason == "length"
        assert len(done.statistics.drafted) == depth


def test_the_cases_cover_what_they_should() -> None:
    kinds, families, bits, samplers, depths = (set(column) for column in zip(*cases(), strict=True))
    assert (kinds, families, samplers) == (set(KINDS), set(CONFIGS), set(SAMPLERS))
    assert bits == {None, 4} and depths == set(range(1, 8))


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("wrong", [0, 3, 7])
def test_drafts_that_fail_at_each_position(kind: str, wrong: int, heads: Heads) -> None:
    """Seven drafts a round of which the first ``wrong`` stand. Behind every round the state holds the true rows
    alone, those of refused drafts and of the head's own features are gone."""
    target, drafter = target_of("llama", None), heads(kind, "llama", None)
    text = plain_text("llama", None, "greedy").text
    engine = Engine(target, Steered(drafter, text, right_then_wrong(wrong)))
    generation = started(engine, Request(TOKENS[:40], NEW, 7, prefill_step_size=17))
    rounds = []
    while generation.finish_reason is None:
        rounds.append(len(engine.step(generation).checked().tokens))
        assert_like_fresh(drafter, target, generation.drafter_state, generation.tokens)
    engine.close(generation)
    assert generation.tokens == text
    assert set(rounds[:-1]) == {wrong + 1}


@pytest.mark.parametrize("step", [1, 16, 17, 39, 512])
def test_chunks_of_a_prompt_leave_no_gap_and_no_duplicate(step: int, heads: Heads) -> None:
    target, drafter = target_of("llama", None), heads("EAGLE-3", "llama", None)
    engine = Engine(target, drafter)
    generation = started(engine, Request(TOKENS[:60], 4, 3, prefill_step_size=step))
    assert_like_fresh(drafter, target, generation.drafter_state, TOKENS[:60])
    engine.close(generation)


def test_pending_rows_hold_fused_features_and_no_taps(heads: Heads) -> None:
    """Three hidden states a token would be held for a whole prompt otherwise."""
    target, drafter = target_of("llama", None), heads("EAGLE-3", "llama", None)
    tokens = mx.array(TOKENS[:30], dtype=mx.int32)
    state = drafter.open()
    aux_hidden_states = target.forward([(target.open(), tokens)], drafter.target_layer_ids).aux_hidden_states
    assert aux_hidden_states.shape == (30, 192)
    extend(drafter, state, Committed(0, tokens, aux_hidden_states))
    assert state.hidden.shape == (30, 64)


@pytest.mark.parametrize("kind", ["EAGLE-3", "windowed"])
def test_turns_with_reused_caches(kind: str, heads: Heads) -> None:
    """A window that is lost begins again, a window before the place where the next turn parts."""
    target, drafter = target_of("llama", None), heads(kind, "llama", None)
    prompt, reference = TOKENS[:90], plain_text("llama", None, "greedy", 90, 25).text
    engine = Engine(target, Steered(drafter, reference, mixture(11, 0.7)))
    generation = started(engine, Request(prompt, 25, 4, prefill_step_size=9))
    for turn, cut in enumerate((None, 60, 33, 2, 0)):
        while generation.finish_reason is None:
            engine.step(generation).checked()
        assert generation.tokens == reference
        assert_like_fresh(drafter, target, generation.drafter_state, generation.tokens)
        kept = generation.tokens if cut is None else generation.tokens[:cut]
        prompt = [*kept[:-1], 91 + turn, *TOKENS[turn : turn + 20]] if cut != 0 else TOKENS[5:30]
        generation = go_on(engine, generation, prompt, len(kept) - 1 if cut != 0 else 0, 6)
        assert_like_fresh(drafter, target, generation.drafter_state, prompt)
        reference = plain(target, Request(prompt, 25)).text
        engine.drafter.text = reference
    engine.close(generation)


def test_a_window_forgets_old_rows_and_asks_for_them_again(heads: Heads) -> None:
    """Of 900 rows the window and a page are kept; going back before these needs rows from a window earlier on."""
    drafter = heads("windowed", "llama", None)
    state, done, before = drafter.open(), 0, drafter.pool.pages_in_use
    for size in [50] * 18:
        rows = mx.zeros((size, 192), dtype=mx.bfloat16)
        extend(drafter, state, Committed(done, mx.zeros((size,), dtype=mx.int32), rows))
        done += size
    assert drafter.pool.pages_in_use - before <= 4
    assert drafter.rewind(state, 890) == 890
    assert drafter.rewind(state, 300) == 299 - 24 == state.position
    with pytest.raises(PositionError, match="300.*275"):
        extend(
            drafter, state, Committed(300, mx.array([1], dtype=mx.int32), mx.zeros((1, 192), dtype=mx.bfloat16))
        )
    assert drafter.rewind(state, 0) == 0


def test_a_refused_extension_of_several_sequences_changes_none(heads: Heads) -> None:
    drafter = heads("windowed", "llama", None)
    rows = mx.zeros((2, 192), dtype=mx.bfloat16)
    first, second = drafter.open(), drafter.open()
    with pytest.raises(PositionError, match="Rows begin at position 7, the drafter's at 0"):
        drafter.extend([(s, Committed(at, mx.array([1, 2]), rows)) for s, at in ((first, 0), (second, 7))])
    assert (first.position, second.position) == (0, 0)
