"""Any thread may make the next call of an engine: load, start, step, fork, close, in a thread of its own."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher
from scripted_drafters import ScriptedDrafter, mixture, plain
from tiny_folders import write_dflash2, write_model
from tiny_models import tiny_target

from metal_kernels.launching.launch import Kernel, Launcher, launching
from mlx_spec import Engine, Grammar, Sampling, generate, load, stream_generate
from mlx_spec.engine import Generation, Request

Result = TypeVar("Result")
TESTS = Path(__file__).parent.parent
TOKENS = [int(t) for t in np.random.default_rng(3).integers(5, 90, 45)]
SAMPLINGS = {
    "greedy": Sampling(),
    "coupled": Sampling(temp=0.8, seed=4, top_p=0.95, repetition_penalty=1.2, logit_bias={7: 2.0}),
    "rejection": Sampling(temp=0.8, seed=4, accept="rejection"),
}
# A target of tests/ and its drafter; the ones without a folder are written.
PAIRS = {
    "plain": ("llama", None),
    "dflash2": ("llama", "dflash2"),
    "mtp": ("tiny_pair/target", "tiny_pair/head"),
    "mtp, hybrid": ("tiny_hybrid", "auto"),
    "eagle1": ("tiny_eagles/target", "tiny_eagles/eagle1"),
    "eagle3": ("tiny_eagles/target", "tiny_eagles/eagle3"),
}


def elsewhere(call: Callable[[], Result]) -> Result:
    """Return what a call gives in a thread of its own."""
    found: list[Result] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Engine, Any]]:
    folder, known = tmp_path_factory.mktemp("threads"), dict[str, tuple[Engine, Any]]()
    written = {"llama": write_model(folder / "llama"), "dflash2": write_dflash2(folder / "dflash2")}

    def place(name: str | None) -> str | None:
        return name if name in (None, "auto") else str(written.get(str(name), TESTS / str(name)))

    def load_pair(pair: str) -> tuple[Engine, Any]:
        if pair not in known:
            target, drafter = PAIRS[pair]
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("MLX_SPEC_CACHE", str(folder / "cache"))
                patch.setattr("mlx_spec.loading.load.check_wiring", lambda *_: None)
                patch.setattr("mlx_spec.loading.load.kept_costs", lambda *_: None)
                known[pair] = elsewhere(lambda: load(str(place(target)), place(drafter)))
        engine, tokenizer = known[pair]
        return Engine(engine.target, engine.drafter), tokenizer

    return load_pair


def finish(engine: Engine, generation: Generation, turn: Callable[[Callable[[], Any]], Any]) -> list[int]:
    """Step a generation to its end, each step by ``turn``, and return its tokens."""
    while generation.finish_reason is None:
        turn(lambda: engine.step(generation).checked())
    return generation.tokens


def here(call: Callable[[], Result]) -> Result:
    return call()


@pytest.mark.parametrize(
    ("pair", "sampling"),
    [*((pair, "coupled") for pair in PAIRS), ("eagle3", "greedy"), ("dflash2", "rejection"), ("mtp", "rejection")],
)
def test_every_call_may_come_from_another_thread(
    pair: str, sampling: str, loaded: Callable[[str], tuple[Engine, Any]]
) -> None:
    engine = loaded(pair)[0]
    depth = 0 if pair == "plain" else 3
    request = Request(TOKENS, 16, num_draft_tokens=depth, sampling=SAMPLINGS[sampling], prefill_step_size=20)
    alone = engine.start(request)
    fork_alone = engine.fork(alone, seed=11)
    texts = finish(engine, alone, here), finish(engine, fork_alone, here)
    passed = elsewhere(lambda: engine.start(request))
    fork = elsewhere(lambda: engine.fork(passed, seed=11))
    assert finish(engine, passed, elsewhere) == texts[0]
    assert finish(engine, fork, elsewhere) == texts[1]
    for generation in (alone, passed, fork):
        elsewhere(lambda generation=generation: engine.close(generation))
    engine.close(fork_alone)
    assert engine.target.pool.pages_in_use == 0


@pytest.mark.parametrize("pair", PAIRS)
def test_threads_take_turns_with_several_sequences(pair: str, loaded: Callable[[str], tuple[Engine, Any]]) -> None:
    engine = loaded(pair)[0]
    requests = [Request(TOKENS[: 9 + 12 * i], 14, sampling=SAMPLINGS["coupled"]) for i in range(3)]

    def texts(turn: Callable[[Callable[[], Any]], Any]) -> list[list[int]]:
        running = [turn(lambda request=request: engine.start(request)) for request in requests]
        while any(generation.finish_reason is None for generation in running):
            # A round with all of them in one thread, and a round of one in another.
            turn(lambda: engine.step(running))
            turn(lambda: engine.step([running[-1]]))
        for generation in running:
            engine.close(generation)
        return [generation.tokens for generation in running]

    assert texts(elsewhere) == texts(here)


@pytest.mark.parametrize("pair", ["dflash2", "eagle3", "mtp, hybrid"])
def test_another_thread_goes_on_after_a_round_that_was_interrupted(
    pair: str, loaded: Callable[[str], tuple[Engine, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loaded(pair)[0]
    request = Request(TOKENS, 20, num_draft_tokens=3)
    whole = finish(engine, engine.start(request), here)
    generation = elsewhere(lambda: engine.start(request))
    elsewhere(lambda: engine.step(generation))
    extend = type(engine.states).extend

    def interrupted(*args: Any) -> None:
        extend(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.states), "extend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            elsewhere(lambda: engine.step(generation))
    assert finish(engine, generation, elsewhere) == whole


def test_a_response_may_be_read_in_another_thread(loaded: Callable[[str], tuple[Engine, Any]]) -> None:
    engine, tokenizer = loaded("dflash2")
    options: dict[str, Any] = dict(max_tokens=10, top_logprobs=2)
    expected = [r.logprobs.tolist() for r in stream_generate(engine, tokenizer, TOKENS, **options)]
    responses = stream_generate(engine, tokenizer, TOKENS, **options)
    found = [elsewhere(lambda: next(responses)) for _ in expected]
    assert [response.logprobs.tolist() for response in found] == expected


@pytest.mark.parametrize("pair", PAIRS)
def test_a_whole_text_in_another_thread(pair: str, loaded: Callable[[str], tuple[Engine, Any]]) -> None:
    engine, tokenizer = loaded(pair)
    text = generate(engine, tokenizer, TOKENS, max_tokens=12)
    assert elsewhere(lambda: generate(engine, tokenizer, TOKENS, max_tokens=12)) == text
    assert generate(engine, tokenizer, TOKENS, max_tokens=12) == text


def test_a_program_ends_well_whose_threads_generated(tmp_path: Path) -> None:
    """MLX 0.32 aborts where a thread gives its compiled functions back to an interpreter that is gone."""
    model, drafter = write_model(tmp_path / "m"), write_dflash2(tmp_path / "d")
    code = f"""
from concurrent.futures import ThreadPoolExecutor
from mlx_spec import generate, load
engine, tokenizer = load({str(model)!r}, {str(drafter)!r})
def text():
    return generate(engine, tokenizer, [70, 71], max_tokens=12)
print(text() == ThreadPoolExecutor(1).submit(text).result())
"""
    line = [sys.executable, "-c", code]
    environment = {**os.environ, "MLX_SPEC_CACHE": str(tmp_path / "cache"), "MLX_SPEC_KERNELS": "stock"}
    for _ in range(2):
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, env=environment)
        assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def at_once(*calls: Callable[[], Result]) -> list[Result]:
    """Return what calls give that begin together, each in a thread of its own."""
    begin = threading.Barrier(len(calls))

    def run(call: Callable[[], Result]) -> Result:
        begin.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(run, call) for call in calls]]


def test_two_engines_load_and_generate_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model twice, and another one, each loaded in its thread; two texts have the same grammar."""
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path))
    monkeypatch.setattr("mlx_spec.loading.load.check_wiring", lambda *_: None)
    monkeypatch.setattr("mlx_spec.loading.load.kept_costs", lambda *_: None)
    word = Grammar.regex("[a-z]{3,9}( [a-z]{2,9}){3}")

    def texts(target: str, drafter: str) -> list[str]:
        engine, tokenizer = load(str(TESTS / target), drafter=str(TESTS / drafter))
        options: dict[str, Any] = dict(max_tokens=24, temp=0.8, num_draft_tokens=3)
        return [
            *(generate(engine, tokenizer, "Return the", seed=seed, **options) for seed in range(3)),
            *generate(engine, tokenizer, "Return the", n=3, grammar=word, **options),
        ]

    eagle, mtp = ("tiny_eagles/target", "tiny_eagles/eagle3"), ("tiny_pair/target", "tiny_pair/head")
    alone = [texts(*eagle), texts(*mtp)]
    assert at_once(*(partial(texts, *pair) for pair in (eagle, mtp, eagle))) == [*alone, alone[0]]


def test_engines_under_the_kernels_run_in_any_thread_and_at_once() -> None:
    """The kernels' own text, in the emulator, which runs one kernel at a time."""
    one_at_a_time = threading.Lock()

    def locked(kernel: Kernel) -> Launcher:
        launch = launcher(kernel, check=False)

        def launched(**arguments: Any) -> list[mx.array]:
            with one_at_a_time:
                return launch(**arguments)

        return launched

    request = Request(TOKENS[:20], 6, num_draft_tokens=3, sampling=SAMPLINGS["coupled"], prefill_step_size=8)
    expected = plain(tiny_target("llama"), request).text

    def text(turn: Callable[[Callable[[], Any]], Any]) -> list[int]:
        target = tiny_target("llama")
        engine = Engine(target, ScriptedDrafter(target, expected, mixture(2)), kernels="native")
        generation = turn(lambda: engine.start(request))
        return finish(engine, generation, turn)

    with launching(locked):
        alone = text(here)
        assert len(alone) == 26 and text(elsewhere) == alone
        assert at_once(lambda: text(here), lambda: text(elsewhere)) == [alone, alone]
