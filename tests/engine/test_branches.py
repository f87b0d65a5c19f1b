"""Several generations in one pass: each emits what it emits alone, whatever the others do.

bfloat16 targets, see test_lossless.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from branch_drafter import BranchDrafter
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from scripted_drafters import plain
from started import started
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_eagles import eagle_config, eagle_tensors, write_eagle
from tiny_heads import head_tensors, write_layout
from tiny_models import tiny_target

from mlx_spec.decoding.sampling import Sampling
from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.drafters.eagle.load import load_eagle
from mlx_spec.drafters.mtp.load import load_mtp
from mlx_spec.engine import Engine, Generation, Request, Round
from mlx_spec.engine.costs import Costs
from mlx_spec.engine.draft_policy import FixedDepth
from mlx_spec.errors import ContextFull, NonFiniteError, RequestError
from mlx_spec.target import Target
from mlx_spec.target.pages import PAGE_SLOTS

TOKENS = [int(t) for t in np.random.default_rng(8).integers(0, 90, 80)]
NEW_TOKENS, STEP, TURN_LIMIT = 14, 16, 90
# Positions of a pool in which a few sequences take all pages, and more wait.
TIGHT = 3 * PAGE_SLOTS
# One token; one that ends in the middle of a page; one that crosses a page's end.
PROMPTS = [TOKENS[:1], TOKENS[:20], TOKENS[:33]]
SAMPLINGS = [
    Sampling(),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.4),
    Sampling(temp=0.8),
    Sampling(temp=1.1, top_p=0.9, top_k=24, presence_penalty=0.5, logit_bias={3: 4.0}),
    # One token is left to draw, so that the draws are those of plain decoding.
    Sampling(temp=0.8, top_k=1, accept="rejection"),
]
COSTS = Costs({1: 10.0, 4: 11.0, 16: 16.0}, {1: 0.5, 7: 1.0})


@cache
def target_of(family: str, max_cached_tokens: int = 4096) -> Target:
    return tiny_target(family, max_cached_tokens=max_cached_tokens)


@cache
def alone(family: str, prompt: tuple[int, ...], sampling: int, seed: int) -> list[int]:
    """What a prompt is continued with by plain decoding."""
    return plain(target_of(family), Request(prompt, NEW_TOKENS, sampling=sampling_of(sampling, seed))).text


def sampling_of(index: int, seed: int) -> Sampling:
    return replace(SAMPLINGS[index], seed=seed)


def drafter_of(kind: str, target: Target, family: str, folder: Path) -> Drafter:
    if kind == "mtp":
        write_layout(folder, "sidecar", family, head_tensors(family, dtype=mx.bfloat16))
        return load_mtp(folder, target, "tiny head")
    if kind == "windowed EAGLE":
        made = eagle_config(family, 3, layer_types=["sliding_attention"], sliding_window=24)
        write_eagle(folder, made, eagle_tensors(made, 3, ("fc",), dtype=mx.bfloat16))
        return load_eagle(folder, target, "tiny head")
    if kind == "dflash2":
        config = dflash2_config()
        write_drafter(folder, config, random_tensors(config, dtype=mx.bfloat16))
        return load_dflash2(folder, target, "tiny drafter")
    return BranchDrafter(target)


@dataclass
class Branch:
    """A generation, its sampling, and the text that it has to emit."""

    generation: Generation
    sampling: int
    expected: list[int]


class Branches(RuleBasedStateMachine):
    """Sequences start, fork, run in any company, and are given up, in any order.

    In a tight pool some of them wait for pages: they are told so, and are as before.
    """

    family: str
    drafter: Drafter
    target: Target
    waits: Counter[bool]

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(self.target, self.drafter, COSTS)
        self.branches: list[Branch] = []

    @property
    def is_tight(self) -> bool:
        return self.target.pool.max_pages * PAGE_SLOTS == TIGHT

    def add(self, generation: Generation, sampling: int, seed: int) -> None:
        expected = alone(self.family, tuple(generation.tokens), sampling, seed)
        if isinstance(self.drafter, BranchDrafter):
            self.drafter.know(generation, expected)
        self.branches.append(Branch(generation, sampling, expected))

    @precondition(lambda self: len(self.branches) < 16)
    @rule(
        prompt=st.sampled_from(PROMPTS),
        sampling=st.integers(0, len(SAMPLINGS) - 1),
        seed=st.integers(0, 1),
        depth=st.sampled_from([None, 0, 1, 3, 7, "adaptive"]),
    )
    def start(self, prompt: list[int], sampling: int, seed: int, depth: Any) -> None:
        request = Request(prompt, NEW_TOKENS, depth, sampling_of(sampling, seed), prefill_step_size=STEP)
        self.add(self.engine.start(request), sampling, seed)

    @precondition(lambda self: 0 < len(self.branches) < 16)
    @rule(data=st.data(), more=st.integers(0, 20), edit=st.none() | st.integers(0, 40), sampling=st.integers(0, 1))
    def next_turn(self, data: st.DataObject, more: int, edit: int | None, sampling: int) -> None:
        """Go on from any generation, whatever its state, or from its text with one token changed."""
        earlier = data.draw(st.sampled_from(self.branches)).generation
        prompt = [*earlier.tokens, *range(more)][:TURN_LIMIT]
        if edit is not None and edit < len(prompt):
            prompt[edit] = (prompt[edit] + 1) % 90
        request = Request(prompt, NEW_TOKENS, None, sampling_of(sampling, 0), prefill_step_size=STEP)
        generation = self.engine.start(request, after=earlier)
        assert generation.statistics.cached_tokens % STEP == 0
        self.add(generation, sampling, 0)

    @precondition(lambda self: self.branches)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A cancelled generation gets nothing more, and may be gone on from."""
        branch = data.draw(st.sampled_from(self.branches))
        self.engine.cancel(branch.generation)
        assert branch.generation.finish_reason in ("cancelled", "length")

    @precondition(lambda self: 0 < len(self.branches) < 16)
    @rule(data=st.data(), seed=st.integers(0, 1), copies=st.integers(1, 4))
    def fork(self, data: st.DataObject, seed: int, copies: int) -> None:
        parent = data.draw(st.sampled_from(self.branches))
        if parent.generation.finish_reason is None:
            for copy in range(min(copies, 16 - len(self.branches))):
                try:
                    fork = self.engine.fork(parent.generation, seed=seed + copy)
                except ContextFull:  # while it reads the prompt
                    assert self.is_tight and not parent.generation.is_read
                    return
                self.add(fork, parent.sampling, seed + copy)

    @precondition(lambda self: self.branches)
    @rule(data=st.data(), rounds=st.integers(1, 3))
    def run_some(self, data: st.DataObject, rounds: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.branches), min_size=1, unique_by=id))
        self.run([branch.generation for branch in chosen], rounds)

    @precondition(lambda self: self.branches)
    @rule(rounds=st.integers(1, 3))
    def run_all(self, rounds: int) -> None:
        self.run([branch.generation for branch in self.branches], rounds)

    @precondition(lambda self: self.branches)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        branch = data.draw(st.sampled_from(self.branches))
        self.branches.remove(branch)
        self.engine.close(branch.generation)

    @precondition(lambda self: self.branches)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """As where the drafter knows too many sequences: this one begins anew."""
        self.engine.states.forget(data.draw(st.sampled_from(self.branches)).generation)

    def run(self, generations: list[Generation], rounds: int) -> None:
        for _ in range(rounds):
            before = {generation: (len(generation.tokens), generation.finish_reason) for generation in generations}
            for generation, done in zip(generations, self.engine.step(generations), strict=True):
                length, finished = before[generation]
                assert done.error is None or (self.is_tight and isinstance(done.error, ContextFull))
                self.waits[done.error is not None] += 1
                assert generation.tokens[length:] == done.tokens
                goes_on = finished is None and generation.is_read and done.error is None
                assert bool(done.tokens) == goes_on
                assert done.finish_reason == (generation.finish_reason if done.tokens else None)

    @invariant()
    def every_text_is_its_own(self) -> None:
        for branch in self.branches:
            if branch.generation.is_closed:
                continue
            tokens = branch.generation.tokens
            assert tokens == branch.expected[: len(tokens)]
            assert branch.generation.sequence.length == len(tokens) - 1 or not branch.generation.is_read

    @invariant()
    def pages_are_those_of_the_branches(self) -> None:
        sequences = [sequence for branch in self.branches for sequence in branch.generation.sequences]
        pages = {page for sequence in sequences for page in sequence.pages}
        assert self.target.pool.pages_in_use == len(pages)

    def teardown(self) -> None:
        generations = [branch.generation for branch in self.branches]
        try:
            while running := [generation for generation in generations if generation.finish_reason is None]:
                before = [(len(generation.tokens), generation.sequence.length) for generation in running]
                self.run(running, 1)
                if before == [(len(generation.tokens), generation.sequence.length) for generation in running]:
                    # All wait for pages: one gives way.
                    assert self.is_tight
                    self.engine.close(running[-1])
            self.every_text_is_its_own()
            for generation in generations:
                assert generation.finish_reason == "cancelled" or generation.statistics.tokens == NEW_TOKENS
        finally:
            for generation in generations:
                self.engine.close(generation)
        assert self.target.pool.pages_in_use == 0 and not self.engine.states._used
        assert isinstance(self.drafter, BranchDrafter) or self.drafter.pool.pages_in_use == 0


def open_pair(engine: Engine, **options: Any) -> list[Generation]:
    requests = [Request(prompt, NEW_TOKENS, **options) for prompt in PROMPTS[1:]]
    return [started(engine, request) for request in requests]


def finish(engine: Engine, generations: list[Generation]) -> None:
    while any(generation.finish_reason is None for generation in generations):
        assert all(done.error is None for done in engine.step(generations))


@pytest.mark.parametrize("order", [(0, 4), (4, 0), (2, 2), (0, 0), (4, 2, 1, 0), (3, 3), (1, 2, 4)])
def test_rules_and_filters_of_one_pass_do_not_mix(order: tuple[int, ...]) -> None:
    target = target_of("llama")
    engine = Engine(target, BranchDrafter(target))
    requests = [Request(PROMPTS[1], NEW_TOKENS, 2, sampling_of(index, seed)) for seed, index in enumerate(order)]
    generations = [started(engine, request) for request in requests]
    finish(engine, generations)
    for seed, (index, generation) in enumerate(zip(order, generations, strict=True)):
        assert generation.tokens == alone("llama", tuple(PROMPTS[1]), index, seed)
        engine.close(generation)


def test_what_fails_in_one_generation_stays_with_it() -> None:
    """An exception of a callback, a processor or a full pool: that generation is as before, the others went on."""
    target = target_of("llama")
    engine, armed = Engine(target, BranchDrafter(target)), [True]

    def fail(*arguments: Any) -> Any:
        if armed[0]:
            raise OSError("on purpose")
        return arguments[-1] if len(arguments) == 2 else False

    good = open_pair(engine)
    processed = Sampling(logits_processors=(fail,))
    bad = [
        *open_pair(engine, is_end=fail),
        *open_pair(engine, sampling=processed),
        *open_pair(engine, on_verified=fail),
    ]
    together = [bad[0], good[0], *bad[1:], good[1]]
    before = [list(generation.tokens) for generation in bad]
    for generation, done in zip(together, engine.step(together), strict=True):
        if generation in good:
            assert done.error is None and done.tokens
        else:
            assert isinstance(done.error, OSError) and not done.tokens
            assert generation.sequence.length == len(generation.tokens) - 1 == generation.drafter_state.position
    assert [generation.tokens for generation in bad] == before
    armed[0] = False
    finish(engine, together)
    for generation in together:
        assert generation.tokens == alone("llama", tuple(generation.request.prompt), 0, 0)
        engine.close(generation)
    assert target.pool.pages_in_use == 0


def test_a_sequence_that_computes_nan_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("llama")
    engine = Engine(target, BranchDrafter(target))
    first, second = open_pair(engine, num_draft_tokens=2)
    logits, rows = target.logits, mx.arange(6)[:, None]
    monkeypatch.setattr(target, "logits", lambda hidden: mx.where(rows == 3, mx.nan, logits(hidden)))
    before = list(second.tokens)
    good, bad = engine.step([first, second])
    monkeypatch.undo()
    assert good.error is None and good.tokens
    assert isinstance(bad.error, NonFiniteError) and "The target logits at position 32" in str(bad.error)
    assert second.tokens == before and second.sequence.length == second.drafter_state.position == 32
    finish(engine, [first, second])
    for generation in (first, second):
        assert generation.tokens == alone("llama", tuple(generation.request.prompt), 0, 0)
        engine.close(generation)


def test_a_full_pool_stops_those_that_have_no_page_and_nobody_else() -> None:
    """Three pages for two sequences that need two each: the second waits until the first is closed."""
    target = tiny_target("llama", max_cached_tokens=96)
    engine = Engine(target, BranchDrafter(target))
    first, second = (started(engine, Request(TOKENS[:30], 20)) for _ in range(2))
    errors = []
    while first.finish_reason is None:
        rounds = engine.step([first, second])
        assert rounds[0].error is None
        errors.append(rounds[1].error)
    assert isinstance(errors[-1], ContextFull)
    assert "close a sequence or load the model with a larger max_cached_tokens" in str(errors[-1])
    assert second.finish_reason is None and len(second.tokens) - 1 == second.sequence.length == 32
    engine.close(first)
    finish(engine, [second])
    assert second.tokens == first.tokens
    engine.close(second)
    assert target.pool.pages_in_use == 0


def test_more_sequences_than_rows_take_turns() -> None:
    target = target_of("llama")
    engine = Engine(target, BranchDrafter(target))
    generations = [started(engine, Request([token], NEW_TOKENS)) for token in range(20)]
    for rounds in range(1, 6):
        emitted = [bool(done.tokens) for done in engine.step(generations)]
        assert sum(emitted) == 16
        counts = [generation.statistics.rounds for generation in generations]
        assert sum(counts) == 16 * rounds and max(counts) - min(counts) <= 1
    finish(engine, generations)
    for token, generation in enumerate(generations):
        assert generation.tokens == alone("llama", (token,), 0, 0)
        engine.close(generation)


def test_a_fork_waits_for_its_turn_as_its_generation_does() -> None:
    target = target_of("llama")
    engine = Engine(target)
    generations = [started(engine, Request([token], 3)) for token in range(17)]
    engine.step(generations)
    generations.append(engine.fork(generations[15]))
    emitted = [bool(done.tokens) for done in engine.step(generations)]
    assert emitted == [True] * 15 + [False, True, False]
    for generation in generations:
        engine.close(generation)


def test_the_drafter_forgets_what_was_not_used_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forgotten generation drafts nothing for one round, which shows the drafter where to begin.

    From that round its policy learns nothing.
    """
    target = target_of("llama")
    engine = Engine(target, BranchDrafter(target), max_drafter_states=16)
    generations = [started(engine, Request([token], NEW_TOKENS, 2)) for token in range(18)]
    assert [generation.drafter_state is None for generation in generations] == [True] * 2 + [False] * 16
    # It is used, so another one is the next to be forgotten.
    engine.step(generations[2])
    updates: list[tuple[Any, ...]] = []
    monkeypatch.setattr(FixedDepth, "update", lambda policy, *learned: updates.append(learned))
    engine.step(generations[0])
    assert generations[0].statistics.undrafted_rounds == 1
    assert generations[0].drafter_state.position == 1
    assert updates == [] and generations[2].drafter_state is not None and generations[3].drafter_state is None
    engine.step(generations[0])
    assert generations[0].statistics.drafted == [1, 1]
    assert [drafted for drafted, _, _ in updates] == [2]
    with pytest.raises(RequestError, match="max_drafter_states must be at least 16, not 3"):
        Engine(target, BranchDrafter(target), max_drafter_states=3)
    for generation in generations:
        engine.close(generation)
    assert not engine.states._used


def test_a_fork_goes_on_after_the_end_of_a_finished_generation() -> None:
    target = target_of("llama")
    engine = Engine(target, BranchDrafter(target))
    short = started(engine, Request(PROMPTS[1], 5))
    finish(engine, [short])
    longer = engine.fork(short, max_tokens=NEW_TOKENS)
    engine.close(short)
    finish(engine, [longer])
    assert longer.tokens == alone("llama", tuple(PROMPTS[1]), 0, 0)
    engine.close(longer)


def test_plain_decoding_does_not_touch_the_drafter_and_a_fork_may_begin_to_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = target_of("llama"), drafter_of("dflash2", target_of("llama"), "llama", tmp_path)
    engine, forward, wanted = Engine(target, drafter), target.forward, list[tuple[int, ...]]()

    def noted(batch: Any, target_layer_ids: Any = (), *more: Any) -> Any:
        wanted.append(tuple(target_layer_ids))
        return forward(batch, target_layer_ids, *more)

    monkeypatch.setattr(target, "forward", noted)
    plainly = started(engine, Request(PROMPTS[1], NEW_TOKENS, 0))
    engine.step(plainly).checked()
    assert set(wanted) == {()}
    assert plainly.drafter_state is None and drafter.pool.pages_in_use == 0
    drafted = engine.fork(plainly, num_draft_tokens=3)
    engine.step([plainly, drafted])
    assert drafted.drafter_state is not None and drafted.statistics.undrafted_rounds == 2
    again = engine.fork(drafted, num_draft_tokens=0)
    assert again.drafter_state is None
    finish(engine, [plainly, drafted, again])
    assert drafted.statistics.drafted and not plainly.statistics.drafted
    for generation in (plainly, drafted, again):
        assert generation.tokens == alone("llama", tuple(PROMPTS[1]), 0, 0)
        engine.close(generation)
    assert target.pool.pages_in_use == drafter.pool.pages_in_use == 0


def test_what_cannot_be_stepped_or_forked_is_refused() -> None:
    target = target_of("llama")
    engine = Engine(target, BranchDrafter(target))
    generation = started(engine, Request(PROMPTS[1], 5))
    with pytest.raises(RequestError, match="A generation is named twice"):
        engine.step([generation, generation])
    assert engine.step([]) == []
    pages = target.pool.pages_in_use
    changes = "it can change max_tokens, num_draft_tokens, "
    for wrong, message in (
        ({"num_draft_tokens": 8}, "num_draft_tokens is 8"),
        ({"max_tokens": 0}, "max_tokens must be positive"),
        ({"top_logprobs": 17}, "top_logprobs must lie between"),
        ({"prompt": [1, 2]}, f"A fork cannot change prompt; {changes}"),
        ({"max_new": 3, "depth": 1, "logprobs": True}, f"A fork cannot change depth, max_new; {changes}"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.fork(generation, **wrong)
        assert target.pool.pages_in_use == pages and generation.request.max_tokens == 5
    engine.close(generation)
    assert target.pool.pages_in_use == 0 < pages
    generation = started(engine, Request(PROMPTS[1], 5))
    finish(engine, [generation])
    assert engine.step(generation).checked().tokens == []
    engine.close(generation)


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[0] * 2, PROMPTS[2]], ids=["one token", "two", "33"])
@pytest.mark.parametrize("rounds", [0, 1])
def test_a_closed_generation_is_refused_and_takes_no_page(prompt: list[int], rounds: int) -> None:
    """A prompt of one token caches nothing before the first round: its sequence is empty although it is open."""
    target = target_of("llama")
    engine = Engine(target, BranchDrafter(target))
    generation, other = started(engine, Request(prompt, 5)), started(engine, Request(prompt, 5, 0))
    for _ in range(rounds):
        engine.step(generation).checked()
    pages = len(other.sequence.pages)
    engine.close(generation)
    tokens = list(generation.tokens)
    for step in (engine.step, engine.answer_step, lambda closed: engine.step([other, closed])):
        with pytest.raises(RequestError, match="was closed and cannot go on"):
            step(generation)
    with pytest.raises(RequestError, match="was closed cannot be forked"):
        engine.fork(generation)
    engine.close(generation)
    assert generation.is_closed and generation.tokens == tokens and generation.drafter_state is None
    assert target.pool.pages_in_use == pages
    engine.close(other)


@pytest.mark.parametrize("depth", [0, 3])
def test_a_fork_ends_by_length_at_its_own_max_tokens(depth: int) -> None:
    """They count from the end of the prompt: where they are reached, the fork is finished when it is made."""
    target = target_of("llama")
    engine, text = Engine(target, BranchDrafter(target)), alone("llama", tuple(PROMPTS[1]), 0, 0)
    parent = started(engine, Request(PROMPTS[1], 5, depth))
    finish(engine, [parent])
    for changes in ({}, {"max_tokens": 5}, {"max_tokens": 2}):
        fork = engine.fork(parent, **changes)
        assert fork.finish_reason == "length"
        assert engine.step(fork) == Round() == engine.step([fork])[0]
        assert fork.tokens == parent.tokens
        # Of such a fork, too, another one may go on.
        again = engine.fork(fork, max_tokens=7)
        finish(engine, [again])
        assert again.tokens == text[: 20 + 7]
        engine.close(fork)
        engine.close(again)
    for most in (6, 7, 11):
        fork = engine.fork(parent, max_tokens=most)
        assert fork.finish_reason is None
        finish(engine, [fork])
        assert fork.finish_reason == "length" and fork.tokens == text[: 20 + most]
        engine.close(fork)
    engine.close(parent)


def test_a_fork_after_an_end_token_goes_on() -> None:
    target = target_of("llama")
    engine, text = Engine(target, BranchDrafter(target)), alone("llama", tuple(PROMPTS[1]), 0, 0)
    end = next(i for i in range(21, 33) if text[i] not in text[20:i] + text[i + 1 :])
    parent = started(engine, Request(PROMPTS[1], -1, 2, eos_token_ids=frozenset(text[end : end + 1])))
    finish(engine, [parent])
    assert parent.finish_reason == "stop" and parent.tokens == text[: end + 1]
    for changes, last in (({"max_tokens": NEW_TOKENS}, len(text)), ({"max_tokens": end - 19}, end + 1)):
        fork = engine.fork(parent, **changes)
        finish(engine, [fork])
        assert fork.finish_reason == "length" and fork.tokens == text[:last]
        engine.close(fork)
    engine.close(parent)


def test_a_fork_learns_its_own_depth() -> None:
    """The acceptance of one of them is no evidence on the other's."""
    target = target_of("llama")
    engine, text = Engine(target, BranchDrafter(target, share=1.0)), alone("llama", tuple(PROMPTS[1]), 0, 0)
    parent = started(engine, Request(PROMPTS[1], NEW_TOKENS, "adaptive"))
    fork = engine.fork(parent)
    for generation in (fork, parent):
        engine.drafter.know(generation, text)
        lengths = []
        while generation.finish_reason is None:
            lengths.append(len(engine.step(generation).checked().tokens))
        assert lengths == [4, 5, 5] and generation.tokens == text
        engine.close(generation)


def test_one_host_synchronisation_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("llama")
    engine = Engine(target, BranchDrafter(target))
    generations = open_pair(engine)
    engine.step(generations)
    evaluate, calls = mx.eval, []
    monkeypatch.setattr(mx, "eval", lambda *arrays: (calls.append(len(arrays)), evaluate(*arrays)))
    engine.step(generations)
    monkeypatch.undo()
    assert len(calls) == 1
    for generation in generations:
        engine.close(generation)


@pytest.mark.parametrize(
    ("family", "kind", "examples", "max_cached_tokens"),
    [
        ("llama_sliding", "scripted", 6, 4096),
        ("llama", "dflash2", 3, 4096),
        ("llama", "mtp", 2, 4096),
        ("llama", "windowed EAGLE", 2, 4096),
        ("qwen3_5", "scripted", 2, 4096),
        ("qwen3_5", "mtp", 4, 4096),
        ("llama_sliding", "scripted", 10, TIGHT),
        ("llama", "mtp", 8, TIGHT),
        ("qwen3_5", "scripted", 8, TIGHT),
    ],
)
def test_any_company_keeps_every_text_as_it_is(
    family: str, kind: str, examples: int, max_cached_tokens: int, tmp_path: Path
) -> None:
    class Machine(Branches):
        pass

    Machine.family, Machine.target = family, target_of(family, max_cached_tokens)
    Machine.drafter, Machine.waits = drafter_of(kind, Machine.target, family, tmp_path), Counter()
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert Machine.waits[False] and bool(Machine.waits[True]) == (max_cached_tokens == TIGHT)
