"""Turns of a conversation: what is read again, what is not, and that nobody can tell from the text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scripted_drafters import plain
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_eagles import eagle_config, eagle_tensors, write_eagle
from tiny_heads import head_tensors, write_layout
from tiny_models import tiny_target

from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.drafters.eagle.load import load_eagle
from mlx_spec.drafters.mtp.load import load_mtp
from mlx_spec.engine import Engine, Generation, Request
from mlx_spec.engine.prompt import MAX_MARKS
from mlx_spec.errors import ContextFull, RequestError
from mlx_spec.target import Target

STEP = 16
TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 90, 400)]
Log = list[tuple[list[int], list[float]]]


def dflash2(folder: Path, target: Target) -> Any:
    config = dflash2_config()
    write_drafter(folder, config, random_tensors(config, dtype=mx.bfloat16))
    return load_dflash2(folder, target, "tiny drafter")


def eagle(folder: Path, target: Target) -> Any:
    config = eagle_config("llama")
    return load_eagle(write_eagle(folder, config, eagle_tensors(config, dtype=mx.bfloat16)), target, "tiny head")


def windowed_eagle(folder: Path, target: Target) -> Any:
    config = eagle_config("llama", layer_types=["sliding_attention"], sliding_window=24)
    return load_eagle(write_eagle(folder, config, eagle_tensors(config, dtype=mx.bfloat16)), target, "tiny head")


def mtp(family: str) -> Callable[[Path, Target], Any]:
    def load(folder: Path, target: Target) -> Any:
        write_layout(folder, "sidecar", family, head_tensors(family, dtype=mx.bfloat16))
        return load_mtp(folder, target, "tiny head")

    return load


ENGINES: dict[str, tuple[str, Callable[[Path, Target], Any] | None]] = {
    "llama": ("llama", None),
    "windows": ("llama_sliding", None),
    "experts": ("qwen3_moe", None),
    "hybrid": ("qwen3_5", None),
    "dflash2": ("llama", dflash2),
    "eagle": ("llama", eagle),
    "windowed EAGLE": ("llama", windowed_eagle),
    "mtp": ("qwen3", mtp("qwen3")),
    "hybrid mtp": ("qwen3_5", mtp("qwen3_5")),
}


def engine_of(name: str, folder: Path, **options: Any) -> Engine:
    family, drafter = ENGINES[name]
    target = tiny_target(family)
    return Engine(target, None if drafter is None else drafter(folder, target), **options)


def request(prompt: list[int], max_tokens: int = 9, **options: Any) -> Request:
    return Request(prompt, max_tokens, prefill_step_size=STEP, logprobs=True, **options)


def finish(engine: Engine, generation: Generation) -> list[float]:
    """Run to the end and return the log-probability of each token."""
    found: list[float] = []
    while generation.finish_reason is None:
        found += [each.logprob for each in engine.step(generation).checked().logprobs]
    return found


def conversation(engine: Engine, turns: int, is_continued: bool, render: Callable[[list[int]], list[int]]) -> Log:
    """Return the ids and log-probabilities of each reply; a turn's prompt repeats what came before."""
    history, earlier, log = TOKENS[:37], None, Log()
    for turn in range(turns):
        generation = engine.start(request(history), after=earlier if is_continued else None)
        scores = finish(engine, generation)
        log.append((generation.tokens[len(history) :], scores))
        if earlier is not None:
            engine.close(earlier)
        earlier = generation
        history = [*render(generation.tokens), *TOKENS[50 * turn : 50 * turn + 11 + 9 * turn]]
    assert earlier is not None
    engine.close(earlier)
    return log


RENDERED: dict[str, Callable[[list[int]], list[int]]] = {
    "as it was": lambda tokens: tokens,
    "reply rendered otherwise": lambda tokens: [*tokens[:-5], 7],
    "an earlier turn edited": lambda tokens: [*tokens[:20], (tokens[20] + 1) % 90, *tokens[21:]],
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("rendering", RENDERED)
def test_a_continued_conversation_is_a_cold_one(name: str, rendering: str, tmp_path: Path) -> None:
    """Five turns: the same ids and log-probabilities, bit for bit, and no page is left over."""
    engine = engine_of(name, tmp_path)
    warm, cold = (conversation(engine, 5, is_continued, RENDERED[rendering]) for is_continued in (True, False))
    assert warm == cold
    assert engine.target.pool.pages_in_use == 0
    assert engine.drafter is None or engine.drafter.pool.pages_in_use == 0


@pytest.mark.parametrize("name", ENGINES)
def test_whole_chunks_of_the_earlier_prompt_are_not_read_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read begins and ends at multiples of the step, wherever it begins; the reply is read again."""
    engine = engine_of(name, tmp_path)
    first = engine.start(request(TOKENS[:37]))
    finish(engine, first)
    chunks = list[tuple[int, int]]()
    prefill = Target.prefill

    def recorded(target: Target, sequence: Any, tokens: list[int], *args: Any, **options: Any) -> None:
        chunks.append((sequence.length, sequence.length + len(tokens)))
        prefill(target, sequence, tokens, *args, **options)

    monkeypatch.setattr(Target, "prefill", recorded)
    prompt = [*first.tokens, *TOKENS[:20]]
    second = engine.start(request(prompt), after=first)
    engine.read(second)
    warm, chunks[:] = list(chunks), []
    engine.read(engine.start(request(prompt)))
    assert warm == [(32, 48), (48, 64), (64, 65)] == chunks[2:]
    assert (second.statistics.cached_tokens, second.statistics.as_dict()["cached_tokens"]) == (32, 32)
    assert "66 tokens, 32 of them cached" in str(second.statistics)


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_of_recurrent_layers_some_states_are_kept(is_trimmed: bool) -> None:
    """At a few boundaries that lie evenly: an edit goes on from the one before it, with the text of a cold run."""
    engine = Engine(tiny_target("qwen3_5", max_cached_tokens=1024))
    prompt = TOKENS[:112]
    first = engine.start(request(prompt))
    finish(engine, first)
    assert [kept.length for kept in first.marks] == [32, 48, 64, 80] and len(first.marks) == MAX_MARKS
    if is_trimmed:
        engine.trim(first)
    cached = []
    for at in (20, 70, 104):
        edited = [*prompt[:at], (prompt[at] + 1) % 90, *prompt[at + 1 :]]
        second = engine.start(request(edited), after=first)
        cached.append(second.statistics.cached_tokens)
        cold = engine.start(request(edited))
        finish(engine, second), finish(engine, cold)
        engine.close(cold)
        assert second.tokens == cold.tokens
        third = engine.start(request([*edited, 3]), after=second)
        assert third.statistics.cached_tokens == 96
        assert [kept.length for kept in third.marks] == [kept.length for kept in second.marks]
        for each in (second, third):
            engine.close(each)
    assert cached == [0, 64, 96]
    engine.close(first)
    assert engine.target.pool.pages_in_use == 0


def test_of_other_layers_every_boundary_is_there() -> None:
    edited = [*TOKENS[:20], (TOKENS[20] + 1) % 90, *TOKENS[21:60]]
    dense = Engine(tiny_target("llama"))
    first = dense.start(request(TOKENS[:50]))
    finish(dense, first)
    assert dense.start(request(edited), after=first).statistics.cached_tokens == 16


def test_other_steps_share_nothing() -> None:
    """Their chunks end elsewhere."""
    engine = Engine(tiny_target("llama"))
    first = engine.start(request(TOKENS[:50]))
    finish(engine, first)
    other = Request([*TOKENS[:50], 3], prefill_step_size=32)
    assert engine.start(other, after=first).statistics.cached_tokens == 0


@pytest.mark.parametrize("name", ["llama", "dflash2", "mtp", "hybrid"])
def test_replies_are_reused_where_that_is_wanted(name: str, tmp_path: Path) -> None:
    """All that is cached: the reply but its last token, which no pass has read."""
    engine = engine_of(name, tmp_path, reuse_replies=True)
    first = engine.start(request(TOKENS[:37]))
    finish(engine, first)
    prompt = [*first.tokens, 3, 4, 5]
    second = engine.start(request(prompt), after=first)
    assert second.statistics.cached_tokens == len(first.tokens) - 1
    finish(engine, second)
    assert second.tokens == plain(tiny_target(ENGINES[name][0]), request(prompt)).text


def test_the_drafter_goes_along(tmp_path: Path) -> None:
    """It knows the rows that were not read again."""
    engine = engine_of("eagle", tmp_path)
    first = engine.start(request(TOKENS[:37]))
    finish(engine, first)
    second = engine.start(request([*first.tokens, 3]), after=first)
    assert second.drafter_state.position == 32


def test_what_is_cut_may_be_gone_on_from() -> None:
    """A cancelled reply, a prompt that was read in part, and none of a closed one."""
    engine = Engine(tiny_target("llama"))
    half = engine.start(request(TOKENS[:200]))
    engine.step(half)
    engine.step(half)
    engine.cancel(half)
    assert half.finish_reason == "cancelled" and not half.is_read
    assert engine.step([half]) == [engine.step(half)]
    rest = engine.start(request(TOKENS[:200]), after=half)
    assert rest.statistics.cached_tokens == 32
    engine.close(half)
    finish(engine, rest)
    assert rest.tokens == plain(tiny_target(), request(TOKENS[:200])).text
    with pytest.raises(RequestError, match="closed"):
        engine.start(request(TOKENS[:50]), after=half)
    running = engine.start(request(TOKENS[:5]))
    engine.close(running)
    assert running.finish_reason == "cancelled"
    engine.close(rest)
    assert engine.target.pool.pages_in_use == 0


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    """Between two of their rounds at most one chunk is read, and a generation that waits is read in its turn."""
    engine = Engine(tiny_target("llama"))
    talking = engine.start(request(TOKENS[:10], max_tokens=60))
    engine.step(talking)
    long, later = engine.start(request(TOKENS[:320])), engine.start(request(TOKENS[:3]))
    seen = list[int]()
    while not long.is_read:
        before = long.sequence.length + max(0, later.sequence.length)
        rounds = engine.step([talking, long, later])
        assert rounds[0].tokens
        seen.append(long.sequence.length + later.sequence.length * (not later.is_read) - before)
    assert max(seen) <= STEP + 3
    assert len(later.tokens) > 3


def test_short_prompts_are_read_together() -> None:
    """As many as one chunk holds."""
    engine = Engine(tiny_target("llama"))
    four = [engine.start(request(TOKENS[i : i + 6])) for i in range(4)]
    rounds = engine.step(four)
    assert [bool(done.tokens) for done in rounds] == [True, True, True, False]
    assert bool(engine.step(four)[3].tokens)


def test_a_full_pool_is_said_where_a_prompt_waits_for_pages() -> None:
    """The others go on, and so does the prompt when there is room."""
    engine = Engine(tiny_target("llama", max_cached_tokens=128))
    first, second = engine.start(request(TOKENS[:90])), engine.start(request(TOKENS[:60]))
    engine.read(first)
    while engine.step([first, second])[1].error is None:
        pass
    failed = engine.step([first, second])[1]
    assert isinstance(failed.error, ContextFull) and not second.is_read
    with pytest.raises(ContextFull):
        engine.step(second).checked()
    engine.close(first)
    finish(engine, second)
    assert second.tokens == plain(tiny_target(), request(TOKENS[:60])).text


def test_a_policy_does_not_learn_from_a_round_that_is_taken_back(tmp_path: Path) -> None:
    """An end test that raises comes after drafts were judged."""
    engine = engine_of("eagle", tmp_path)
    armed = [True]

    def is_end(token: int) -> bool:
        if armed[0]:
            raise ValueError("not now")
        return False

    generation = engine.start(request(TOKENS[:20], num_draft_tokens="adaptive", is_end=is_end))
    engine.read(generation)
    policy = str(vars(generation.policy))
    with pytest.raises(ValueError, match="not now"):
        engine.step(generation).checked()
    assert str(vars(generation.policy)) == policy
    armed[0] = False
    finish(engine, generation)
    assert generation.tokens == plain(tiny_target(), request(TOKENS[:20])).text


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("reuse_replies", [False, True])
def test_a_trimmed_generation_shares_as_much_as_before(name: str, reuse_replies: bool, tmp_path: Path) -> None:
    """In fewer pages, where replies are not shared; and how much it shares is known before."""
    engine = engine_of(name, tmp_path, reuse_replies=reuse_replies)
    first = engine.start(request(TOKENS[:101]))
    finish(engine, first)
    again = request([*first.tokens, *TOKENS[:20]])
    before, pages = engine.reusable_tokens(again, first), engine.target.pool.pages_in_use
    engine.trim(first)
    assert first.finish_reason == "length" and engine.reusable_tokens(again, first) == before
    assert reuse_replies or engine.target.pool.pages_in_use < pages
    second = engine.start(again, after=first)
    assert second.statistics.cached_tokens == before == (109 if reuse_replies else 96)
    warm = finish(engine, second)
    if not reuse_replies:
        cold = engine.start(again)
        assert finish(engine, cold) == warm
        engine.close(cold)
    for generation in (first, second):
        engine.close(generation)
    assert engine.target.pool.pages_in_use == 0
