"""The target's hidden states beside mlx-lm's: the same for every family, and another layer or row is named."""

from dataclasses import replace

import mlx.core as mx
import pytest
from tiny_models import CONFIGS, tiny_target

from mlx_spec.diagnose.capture import captured
from mlx_spec.diagnose.probe import Probe
from mlx_spec.diagnose.text import Text, read_text
from mlx_spec.diagnose.verdict import verdict_of
from mlx_spec.target import Target


def read(family: str, dtype: mx.Dtype) -> tuple[Target, Text, list[int]]:
    target = tiny_target(family, dtype=dtype)
    ids = list(range(target.num_layers + 1))
    return target, read_text(target, "x", [(37 * i + 5) % target.vocab_size for i in range(40)], 1, ids), ids


@pytest.mark.parametrize("family", CONFIGS)
def test_the_states_are_those_of_mlx_lm(family: str) -> None:
    target, text, ids = read(family, mx.float32)
    found = captured(target, text, ids)
    assert len(found) == len(ids) and not [each for each in found if each.departs]


@pytest.mark.parametrize(
    ("layer", "shift", "named"),
    [(0, 0, "hidden state 1 is that of layer 0"), (1, -1, "hidden state 1 is that of layer 1 of the row before")],
)
def test_another_state_is_named(layer: int, shift: int, named: str) -> None:
    target, text, _ = read("llama", mx.bfloat16)
    other = text.states[layer][mx.clip(mx.arange(40) + shift, 0, 39)]
    wrong = replace(text, states={**text.states, 1: other})
    verdict = verdict_of(Probe(captured=captured(target, wrong, [1])))
    assert verdict.status == "broken port" and verdict.cause.endswith(named)


def test_a_state_that_is_computed_wrongly_is_named() -> None:
    target, text, _ = read("llama", mx.bfloat16)
    wrong = replace(text, states={**text.states, 1: text.states[1] * 1.5})
    verdict = verdict_of(Probe(captured=captured(target, wrong, [1])))
    assert verdict.cause == "the target's hidden state 1 is computed wrongly"
