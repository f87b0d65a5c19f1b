"""The MTP drafter in the engine: lossless, steered drafts, conversations that go on, rounds that break off."""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from choosing import GREEDY
from one_draft import extend, propose
from scripted_drafters import mixture, plain, right_then_wrong, run
from started import started
from steered import Steered, assert_like_fresh, fresh_state, go_on
from tiny_heads import head_tensors, write_layout
from tiny_models import CONFIGS, HYBRIDS, tiny_target

from mlx_spec.decoding.accept import rule_for
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.drafters.base import Committed, DraftRequest
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.mtp.load import load_mtp
from mlx_spec.engine import Engine, Request
from mlx_spec.errors import PositionError, RequestError
from mlx_spec.target import Target

TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 90, 80)]
SAMPLERS = {"greedy": Sampling(), "coupled": Sampling(temp=0.8, seed=5, top_k=40)}
# One token is left to draw, so rejection must give the plain text too.
REJECTION = Sampling(temp=0.8, seed=5, top_k=1, accept="rejection")
TARGETS = [("llama", None), ("llama", 4), ("qwen3_moe", None), ("qwen3_moe", 4)]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int | None], ChainDrafter]:
    @cache
    def load(family: str, bits: int | None) -> ChainDrafter:
        tensors = head_tensors(family, dtype=mx.bfloat16)
        folder = tmp_path_factory.mktemp("head")
        write_layout(folder, "sidecar", family, tensors)
        return load_mtp(folder, target_of(family, bits), "tiny head")

    return load


@cache
def target_of(family: str, bits: int | None) -> Target:
    return tiny_target(family, mx.bfloat16, bits)


@cache
def plain_text(family: str, bits: int | None, sampler: str, prompt: int = 40, new: int = 40) -> list[int]:
    request = Request(TOKENS[:prompt], new, sampling=SAMPLERS[sampler], prefill_step_size=17)
    return plain(target_of(family, bits), request).text


def cases() -> list[tuple[str, int | None, str, int]]:
    """Four targets at every depth with both samplers, others at one depth, of them hybrids quantised as well."""
    whole = [(*TARGETS[(i + i // 4) % 4], sampler, 1 + i % 7) for sampler in SAMPLERS for i in range(8)]
    known = {family for family, _ in TARGETS}
    others = [(family, None, "coupled", 3) for family in CONFIGS if family not in known]
    return (
        whole + others + [(family, 4, "greedy", depth) for family, depth in zip(HYBRIDS, (7, 2, 5), strict=True)]
    )


@pytest.mark.parametrize(("family", "bits", "sampler", "depth"), cases())
def test_an_mtp_drafter_changes_no_token(
    family: str, bits: int | None, sampler: str, depth: int, heads: Any
) -> None:
    target, drafter = target_of(family, bits), heads(family, bits)
    expected = plain_text(family, bits, sampler)
    request = Request(TOKENS[:40], 40, depth, SAMPLERS[sampler], prefill_step_size=17)
    assert run(Engine(target, drafter), request).text == expected
    steered = Steered(drafter, expected, mixture(depth, share=0.8))
    assert run(Engine(target, steered), request).text == expected


@pytest.mark.parametrize("wrong", range(8))
def test_drafts_that_fail_at_each_position(wrong: int, heads: Any) -> None:
    """Seven drafts a round of which the first ``wrong`` are accepted, and the state after every round."""
    target, drafter = target_of("llama", None), heads("llama", None)
    text = plain_text("llama", None, "greedy")
    engine = Engine(target, Steered(drafter, text, right_then_wrong(wrong)))
    generation = started(engine, Request(TOKENS[:40], 40, 7, prefill_step_size=17))
    rounds = []
    while generation.finish_reason is None:
        rounds.append(len(engine.step(generation).checked().tokens))
        assert_like_fresh(drafter, target, generation.drafter_state, generation.tokens)
    engine.close(generation)
    assert generation.tokens == text
    assert set(rounds[:-1]) == {wrong + 1}


def test_a_prompt_of_one_token_is_drafted_from_the_second_round_on(heads: Any) -> None:
    """Without a committed row there is no hidden state to draft from."""
    target, drafter = target_of("llama", None), heads("llama", None)
    expected = plain_text("llama", None, "greedy", prompt=1)
    engine = Engine(target, drafter)
    generation = started(engine, Request(TOKENS[:1], 40, 5))
    drafted = []
    while generation.finish_reason is None:
        engine.step(generation).checked()
        drafted.append(generation.statistics.rounds - generation.statistics.undrafted_rounds)
    engine.close(generation)
    assert generation.tokens == expected
    assert drafted[:3] == [0, 1, 2]


@pytest.mark.parametrize("step", [1, 7, 16, 17, 18, 39, 512])
def test_chunks_of_a_prompt_leave_no_gap_and_no_duplicate(step: int, heads: Any) -> None:
    target, drafter = target_of("llama", None), heads("llama", None)
    engine = Engine(target, drafter)
    generation = started(engine, Request(TOKENS[:60], 4, 3, prefill_step_size=step))
    assert_like_fresh(drafter, target, generation.drafter_state, TOKENS[:60])
    engine.close(generation)


@pytest.mark.parametrize("sampler", list(SAMPLERS))
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_three_turns_with_reused_caches(share: float, sampler: str, heads: Any) -> None:
    """The second turn follows the whole of the first, whose last token was never processed; the third keeps less,
    at a place that lies anywhere."""
    target, drafter = target_of("llama", None), heads("llama", None)
    prompt, reference = TOKENS[:30], plain_text("llama", None, sampler, 30, 25)
    engine = Engine(target, Steered(drafter, reference, mixture(11, share)))
    request = Request(prompt, 25, 4, SAMPLERS[sampler], prefill_step_size=9)
    generation = started(engine, request)
    for turn, cut in enumerate((None, 41, 33, 1, 0)):
        while generation.finish_reason is None:
            engine.step(generation).checked()
        assert generation.tokens == reference
        assert_like_fresh(drafter, target, generation.drafter_state, generation.tokens)
        kept = generation.tokens if cut is None else generation.tokens[:cut]
        # Another token takes the place of the unprocessed one: nothing of it may have been cached.
        prompt = [*kept[:-1], 91 + turn, *TOKENS[turn : turn + 20]] if cut != 0 else TOKENS[5:30]
        generation = go_on(engine, generation, prompt, len(kept) - 1 if cut != 0 else 0, 6)
        assert_like_fresh(drafter, target, generation.drafter_state, prompt)
        reference = plain(target, Request(prompt, 25, sampling=SAMPLERS[sampler])).text
        engine.drafter.text = reference
    engine.close(generation)


@pytest.mark.parametrize("rewound", [0, 1, 5, 19, 20, 21, 22, 25, 26, 90])
def test_rewinding_asks_for_a_row_again_only_where_its_hidden_state_is_gone(rewound: int, heads: Any) -> None:
    """20 rows are in the cache once 26 were committed and drafted from in between."""
    target, drafter = target_of("llama", None), heads("llama", None)
    aux_hidden_states = target.forward(
        [(target.open(), mx.array(TOKENS[:26], dtype=mx.int32))], drafter.target_layer_ids
    ).aux_hidden_states
    state = drafter.open()
    extend(drafter, state, Committed(0, mx.array(TOKENS[:21], dtype=mx.int32), aux_hidden_states[:21]))
    propose(drafter, state, TOKENS[21], 2, GREEDY)
    extend(drafter, state, Committed(21, mx.array(TOKENS[21:26], dtype=mx.int32), aux_hidden_states[21:]))
    assert state.context.cursor == 20
    again = drafter.rewind(state, rewound)
    assert again == (min(rewound, 26) if rewound > 20 or rewound == 0 else rewound - 1)
    assert drafter.rewind(state, rewound) == again == state.position
    text = [*TOKENS[: min(rewound, 26)], 17, 18, 19]
    rows = target.forward([(target.open(), mx.array(text[:-1], dtype=mx.int32))], drafter.target_layer_ids)
    extend(
        drafter, state, Committed(again, mx.array(text[again:-1], dtype=mx.int32), rows.aux_hidden_states[again:])
    )
    assert_like_fresh(drafter, target, state, text)


def test_gaps_overlaps_and_depths_are_refused(heads: Any) -> None:
    drafter, target = heads("llama", None), target_of("llama", None)
    state = fresh_state(drafter, target, TOKENS[:5])
    rows = mx.zeros((1, 64), dtype=mx.bfloat16)
    for position in (0, 4, 6):
        with pytest.raises(PositionError, match=f"{position}.*5"):
            extend(drafter, state, Committed(position, mx.array([1], dtype=mx.int32), rows))
    for count in (0, 16):
        with pytest.raises(RequestError, match="1 to 15"):
            propose(drafter, state, 3, count, GREEDY)
    assert_like_fresh(drafter, target, state, TOKENS[:6])


def test_a_fork_goes_its_own_way(heads: Any) -> None:
    drafter, target = heads("llama", None), target_of("llama", None)
    first = fresh_state(drafter, target, TOKENS[:30])
    second = first.fork()
    for state, token in ((first, 3), (second, 4)):
        text = [*TOKENS[:30], token, 5]
        rows = target.forward([(target.open(), mx.array(text[:-1], dtype=mx.int32))], drafter.target_layer_ids)
        extend(drafter, state, Committed(30, mx.array([token], dtype=mx.int32), rows.aux_hidden_states[30:]))
        propose(drafter, state, 5, 3, GREEDY)
    assert_like_fresh(drafter, target, first, [*TOKENS[:30], 3, 5])
    assert_like_fresh(drafter, target, second, [*TOKENS[:30], 4, 5])


def test_sampled_drafts_come_with_their_distribution(heads: Any) -> None:
    target, drafter = target_of("llama", None), heads("llama", None)
    expected = plain(target, Request(TOKENS[:40], 30, sampling=REJECTION)).text
    assert run(Engine(target, drafter), Request(TOKENS[:40], 30, 4, REJECTION)).text == expected
    proposal = propose(
        drafter,
        fresh_state(drafter, target, TOKENS[:20]),
        TOKENS[20],
        5,
        rule_for(REJECTION, target.vocab_size),
    )
    assert proposal.probabilities is not None
    assert proposal.candidates.shape == proposal.probabilities.shape == (5, 16)
    assert mx.allclose(mx.sum(proposal.probabilities, axis=-1), mx.ones(5), atol=1e-5)
    assert mx.all(mx.any(proposal.candidates == proposal.tokens[:, None], axis=-1))


def test_a_round_waits_for_the_device_once(heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = target_of("llama", None), heads("llama", None)
    engine, request = Engine(target, drafter), Request(TOKENS[:40], 40, 3)
    # Constants of its shapes are evaluated when they are first made, once in a process.
    run(engine, request)
    generation = started(engine, request)
    engine.step(generation)  # the first round is timed, so it waits twice
    calls, evaluate = 0, mx.eval

    def counted(*arrays: Any) -> None:
        nonlocal calls
        calls += 1
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", counted)
    for rounds in range(1, 5):
        engine.step(generation).checked()
        assert calls == rounds
    monkeypatch.undo()
    engine.close(generation)


def test_drafts_that_are_not_finite_end_drafting(heads: Any) -> None:
    target, drafter = target_of("llama", None), heads("llama", None)
    engine = Engine(target, drafter)
    generation = started(engine, Request(TOKENS[:40], 10, 3))
    generation.drafter_state.hidden = generation.drafter_state.hidden * mx.nan
    engine.step(generation).checked()
    assert "draft logits at position 39" in generation.statistics.drafter_failure
    engine.close(generation)


STEPS = ["propose", "forward", "logits", "commit_all", "extend", "extended"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_round_that_breaks_off_anywhere_can_be_run_again(
    step: str, at: int, heads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = target_of("llama", None), heads("llama", None)
    text = plain_text("llama", None, "greedy")
    engine = Engine(target, Steered(drafter, text, mixture(at, share=0.8)))
    generation = started(engine, Request(TOKENS[:40], 40, 5, prefill_step_size=17))
    calls, in_step = 0, False

    def stopped(real: Callable[..., Any], after: bool = False) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += in_step
            stop = in_step and calls == at
            result = None if stop and not after else real(*args)
            if stop:
                raise KeyboardInterrupt
            return result

        return call

    owner = target if step in ("forward", "logits", "commit_all") else engine.drafter
    name = "extend" if step == "extended" else step
    monkeypatch.setattr(owner, name, stopped(getattr(owner, name), after=step == "extended"))
    stops = 0
    while generation.finish_reason is None:
        in_step = True
        try:
            engine.step(generation).checked()
        except KeyboardInterrupt:
            stops += 1
        in_step = False
        assert_like_fresh(drafter, target, generation.drafter_state, generation.tokens)
    engine.close(generation)
    assert generation.tokens == text
    assert stops == 1
    assert target.pool.pages_in_use == 0


def test_chains_of_one_pass_do_not_see_each_other(heads: Any) -> None:
    """Sequences of other lengths and depths, one without rows and one forked: each drafts what it drafts alone."""
    target, drafter = target_of("llama", None), heads("llama", None)
    states = [fresh_state(drafter, target, TOKENS[:count]) for count in (40, 3, 1, 25)]
    propose(drafter, states[3], TOKENS[25], 2, GREEDY)
    rows = target.forward([(target.open(), mx.array(TOKENS[:28], dtype=mx.int32))], drafter.target_layer_ids)
    extend(drafter, states[3], Committed(25, mx.array(TOKENS[25:28], dtype=mx.int32), rows.aux_hidden_states[25:]))
    states += [states[0].fork(), drafter.open()]
    requests = [
        DraftRequest(state, TOKENS[60 + n], count, GREEDY)
        for n, (state, count) in enumerate(zip(states, (5, 1, 2, 3, 7, 4), strict=True))
    ]
    alone = [propose(drafter, request.state.fork(), request.anchor, request.count, GREEDY) for request in requests]
    for together, single in zip(drafter.propose(requests), alone, strict=True):
        assert together.tokens.tolist() == single.tokens.tolist()
        assert together.candidates.tolist() == single.candidates.tolist()
    assert alone[-1].tokens.size == 0 and alone[0].tokens.size == 5
