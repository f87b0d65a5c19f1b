"""A round that is interrupted anywhere, by Ctrl-C say, leaves a generation as it was, to go on to its text."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scripted_drafters import plain
from tiny_heads import head_tensors, write_layout
from tiny_models import tiny_target

import mlx_spec
from mlx_spec.drafters.mtp.load import load_mtp
from mlx_spec.engine import Engine, Generation, Request
from mlx_spec.sampling import Sampling

# All that changes anything; the rest builds graphs.
FILES = {
    str(Path(mlx_spec.__file__).parent / name)
    for name in ("engine.py", "statistics.py", "target/pages.py", "drafters/context.py", "drafters/mtp/drafter.py")
}
TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 90, 65)]


class Interrupt:
    """Counts the lines of FILES that run inside the block, and raises KeyboardInterrupt before line ``at``."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.lines = at, 0

    def __enter__(self) -> "Interrupt":
        sys.settrace(self._call)
        return self

    def __exit__(self, *raised: Any) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, value: Any) -> Any:
        return self._line if frame.f_code.co_filename in FILES else None

    def _line(self, frame: FrameType, event: str, value: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def seen(generation: Generation) -> tuple[Any, ...]:
    """What of a generation must not change."""
    sequence, drafting = generation.sequence, generation.drafting
    return (
        list(generation.tokens),
        sequence.length,
        len(sequence.pages),
        generation.finish_reason,
        vars(generation.statistics.copy()),
        drafting.position,
    )


@pytest.mark.parametrize(
    ("family", "sampling"),
    [("llama", Sampling()), ("qwen3_5", Sampling(temp=0.8, seed=5))],
    ids=["llama", "qwen3_5"],
)
def test_a_round_may_be_interrupted_at_any_line(family: str, sampling: Sampling, tmp_path: Path) -> None:
    """The first round behind a prompt, whose rows begin a page, and the next, whose page a fork shares."""
    target = tiny_target(family)
    folder = write_layout(tmp_path, "sidecar", family, head_tensors(family, dtype=mx.bfloat16))
    request = Request(TOKENS, 40, 3, sampling)
    expected, engine = plain(target, request).text, Engine(target, load_mtp(folder, target, "tiny head"))
    generation = engine.start(request)
    for _ in range(2):
        fork = generation.sequence.fork()
        for line in range(1, 10000):
            before = seen(generation)
            with Interrupt(line) as interrupt:
                try:
                    engine.step(generation)
                    break
                except KeyboardInterrupt:
                    pass
            assert seen(generation) == before, line
        assert interrupt.lines > 150
        fork.free()
    while generation.finish_reason is None:
        engine.step(generation)
    assert generation.tokens == expected
    engine.close(generation)
    assert target.pool.pages_in_use == 0
