"""The table of verify passes, on small shapes of the families in it."""

import json

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import tiny_model

from mlx_spec.measure import random_models
from tools import kernel_table

SMALL = dict(
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    vocab_size=512,
)


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3.5-27B"])
def test_a_model_is_timed_both_ways_and_its_rows_compared(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(random_models.CONFIGS, name, random_models.CONFIGS[name] | SMALL)
    options = "--layers 4 --rows 1 3 --context 40 --contexts 50 100 --repeats 2 --json"
    monkeypatch.setattr("sys.argv", ["kernel_table", "--models", name, *options.split()])
    kernel_table.main()
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["equal_rows"] == list(range(1, 17))
    for key in ("stock_ms", "our_ms"):
        assert set(result[key]) == {"1", "3"} and min(result[key].values()) > 0
    assert set(result["rounds"]) == {"50", "100"}
    assert all(each["ms"] > 0 and each["extra_mb"] >= 0 for each in result["rounds"].values())


def test_a_recurrent_cache_is_rewound() -> None:
    """Each timed pass of mlx-lm must start from the same cache."""
    model, tokens = tiny_model("qwen3_5"), mx.array([[5, 6, 7]])
    cache = make_prompt_cache(model)
    model(mx.array([[1, 2, 3, 4]]), cache=cache)
    before = kernel_table.recurrent_states(cache)
    first = model(tokens, cache=cache)
    assert not mx.array_equal(before[0][1], kernel_table.recurrent_states(cache)[0][1])
    kernel_table.rewind(cache, 3, before)
    assert mx.array_equal(model(tokens, cache=cache), first)


def test_random_quantised_weights_are_distributed_around_zero() -> None:
    """In 4 and 3 bits: as wide as weights that keep rows near unit size."""
    for bits in (3, 4):
        model, _ = random_models.random_model("SmolLM2-135M", bits, 64, layers=1)
        layer = model.model.layers[0].mlp.gate_proj
        weights = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=64, bits=bits)
        assert abs(weights.mean().item()) < 1e-3
        assert 0.9 < weights.astype(mx.float32).std().item() * 576**0.5 < 1.1
