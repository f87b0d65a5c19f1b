"""The target's hidden states beside mlx-lm's own forward: the same, and another layer or row is named."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_spec.diagnose.capture import captured
from mlx_spec.diagnose.probe import Probe
from mlx_spec.diagnose.text import Text, read_text
from mlx_spec.diagnose.verdict import Verdict, verdict_of
from mlx_spec.loading.load import load_target

TESTS = Path(__file__).parent.parent
EAGLES = TESTS / "tiny_eagles" / "target"


def read(folder: Path) -> tuple[mx.Dtype, Text, list[int]]:
    target, _, _ = load_target(str(folder), {})
    ids = list(range(target.num_layers + 1))
    tokens = [(37 * i + 5) % target.vocab_size for i in range(40)]
    return target.dtype, read_text(target, "x", tokens, 1, ids), ids


@pytest.mark.parametrize("folder", ["tiny_eagles/target", "tiny_pair/target", "tiny_hybrid"])
def test_the_states_are_those_of_mlx_lm(folder: str) -> None:
    """A Llama whose rotary base is not the usual one, a Qwen3, and a hybrid."""
    dtype, text, ids = read(TESTS / folder)
    found = captured(TESTS / folder, dtype, text, ids)
    assert len(found) == len(ids) and not [each for each in found if each.departs]
    assert max(each.difference for each in found) < 0.05


def verdict_on(dtype: mx.Dtype, text: Text, state: mx.array) -> Verdict:
    """Judge a text whose hidden state 1 is another one."""
    wrong = replace(text, states={**text.states, 1: state})
    return verdict_of(Probe(captured=captured(EAGLES, dtype, wrong, [1])))


def test_another_state_is_named() -> None:
    dtype, text, _ = read(EAGLES)
    before = mx.clip(mx.arange(40) - 1, 0, 39)
    for state, named in (
        (text.states[0], "hidden state 1 is that of layer 0"),
        (text.states[1][before], "hidden state 1 is that of layer 1 of the row before"),
        (text.states[1] * 1.5, "hidden state 1 is computed wrongly"),
    ):
        verdict = verdict_on(dtype, text, state)
        assert verdict.status == "broken port" and verdict.cause.endswith(named)


def test_a_folder_that_mlx_lm_cannot_load_is_left_out(tmp_path: Path) -> None:
    dtype, text, ids = read(EAGLES)
    assert captured(tmp_path, dtype, text, ids) == []
