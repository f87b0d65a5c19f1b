"""A round that is interrupted anywhere, by Ctrl-C for example, keeps the generation as it was, to go on."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scripted_drafters import plain, run
from started import started
from tiny_eagles import eagle_config, eagle_tensors, write_eagle
from tiny_models import tiny_target

import mlx_spec
from mlx_spec import load
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.drafters.eagle.load import load_eagle
from mlx_spec.engine import Engine, Generation, Request

# All that changes anything; the rest builds graphs.
FILES = {
    str(Path(mlx_spec.__file__).parent / name)
    for name in (
        "engine/engine.py",
        "engine/round.py",
        "engine/verify.py",
        "engine/drafter_states.py",
        "engine/generation.py",
        "engine/statistics.py",
        "target/pages.py",
        "drafters/siblings.py",
        "drafters/kv.py",
        "drafters/chain.py",
    )
}
TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 90, 65)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))


class Interrupt:
    """Counts the lines of FILES that run inside the block, and raises KeyboardInterrupt before line ``at``.

    Lines of a loop count in its first two turns.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at, self.lines = at, 0
        self.seen = Counter[tuple[Any, int]]()

    def __enter__(self) -> "Interrupt":
        sys.settrace(self._call)
        return self

    def __exit__(self, *raised: Any) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, value: Any) -> Any:
        return self._line if frame.f_code.co_filename in FILES else None

    def _line(self, frame: FrameType, event: str, value: Any) -> Any:
        if event == "line":
            place = frame.f_code, frame.f_lineno
            self.seen[place] += 1
            if self.seen[place] > 2:
                return self._line
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def trained(target: str, head: str | None = None) -> Engine:
    """A target whose head drafts right about half of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_spec.loading.load.kept_costs", lambda *_: None)
        patch.setattr("mlx_spec.loading.load.check_wiring", lambda *_: None)
        folder = Path(__file__).parent.parent
        return load(str(folder / target), drafter=str(folder / head) if head else "auto")[0]


def seen(generation: Generation) -> tuple[Any, ...]:
    """What of a generation must not change."""
    sequence, drafting = generation.sequence, generation.drafter_state
    return (
        list(generation.tokens),
        sequence.length,
        len(sequence.pages),
        generation.finish_reason,
        vars(generation.statistics.copy()),
        drafting.position,
    )


def windowed_eagle(folder: Path) -> Engine:
    config = eagle_config("llama", layer_types=["sliding_attention"], sliding_window=24)
    written = write_eagle(folder, config, eagle_tensors(config, dtype=mx.bfloat16))
    target = tiny_target("llama")
    return Engine(target, load_eagle(written, target, "tiny head"))


@pytest.mark.parametrize(
    ("make", "sampling", "siblings", "is_trained"),
    [
        (lambda folder: trained("tiny_hybrid"), Sampling(temp=0.8, seed=5), 0, True),
        (windowed_eagle, Sampling(), 0, False),
        (lambda folder: trained("tiny_pair/target", "tiny_pair/head"), Sampling(temp=0.8, seed=9), 6, True),
    ],
    ids=["hybrid", "windowed EAGLE", "trees"],
)
def test_a_round_may_be_interrupted_at_any_line(
    make: Callable[[Path], Engine], sampling: Sampling, siblings: int, is_trained: bool, tmp_path: Path
) -> None:
    """The first round after a prompt, whose rows begin a page, and the next, whose page a fork shares.

    Rounds are not only right afterwards: they accept what they would have accepted.
    """
    engine = make(tmp_path)
    request = Request(TOKENS, 30, 3, sampling, num_sibling_drafts=siblings)
    generation, undisturbed = started(engine, request), run(engine, request)
    for _ in range(2):
        fork = generation.sequence.fork()
        for line in range(1, 10000):
            before = seen(generation)
            with Interrupt(line) as interrupt:
                try:
                    done = engine.step(generation)
                    break
                except KeyboardInterrupt:
                    pass
            assert seen(generation) == before, line
        assert interrupt.lines > 150 and done.checked().tokens
        fork.free()
    # Of the trees, one was compacted in these two rounds.
    assert generation.statistics.accepted_sibling_drafts > 0 or not siblings
    while generation.finish_reason is None:
        engine.step(generation).checked()
    assert generation.tokens == undisturbed.text == plain(engine.target, request).text
    assert generation.statistics.accepted == undisturbed.statistics.accepted
    assert generation.statistics.accepted_sibling_drafts == undisturbed.statistics.accepted_sibling_drafts
    assert any(generation.statistics.accepted) or not is_trained
    engine.close(generation)
    assert engine.target.pool.pages_in_use == 0
