"""The forward pass against mlx-lm's own models, and batch invariance."""

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import CONFIGS, tiny_model, tiny_target

import mlx_spec.target.graphs
import mlx_spec.target.target
from metal_kernels.launching.launch import launching
from mlx_spec.errors import ContextFull, RequestError, UnsupportedModel
from mlx_spec.target import Target

TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 96, 90)]


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_equal_mlx_lm(family: str, bits: int | None) -> None:
    """Prefill in chunks, then rows of several sizes, in float32: equal to rounding at every position."""
    model = tiny_model(family, mx.float32, bits)
    target = Target(model, CONFIGS[family], family)
    cache = make_prompt_cache(model)
    expected = mx.concatenate(
        [model(mx.array([TOKENS[:50]]), cache=cache)[0]]
        + [model(mx.array([[t]]), cache=cache)[0] for t in TOKENS[50:]]
    )
    sequence, got = target.open(), []
    target.prefill(sequence, TOKENS[:50], step_size=23, on_rows=lambda p, _: got.append(target.logits(p.hidden)))
    at = 50
    for count in (1, 2, 7, 16, 14):
        rows = target.forward([(sequence, mx.array(TOKENS[at : at + count]))])
        got.append(target.logits(rows.hidden))
        target.commit(sequence, rows)
        at += count
    np.testing.assert_allclose(np.array(mx.concatenate(got)), np.array(expected), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_row_does_not_depend_on_its_neighbours(family: str, bits: int | None) -> None:
    """In bfloat16 the CPU's matmul sums each row alike: passes of 1 and of up to 16 rows are equal bit for bit."""
    target = tiny_target(family, mx.bfloat16, bits)
    one, target_layer_ids = target.open(), [0, 2, target.num_layers]
    target.prefill(one, TOKENS[:45])
    single = []
    many = one.fork()
    for token in TOKENS[45:61]:
        single.append(target.forward([(one, mx.array([token]))], target_layer_ids))
        target.commit(one, single[-1])
    for count in (2, 3, 8, 16):
        block = target.forward([(many, mx.array(TOKENS[45 : 45 + count]))], target_layer_ids)
        for row in range(count):
            assert mx.array_equal(block.hidden[row], single[row].hidden[0]), (count, row)
            assert mx.array_equal(block.aux_hidden_states[row], single[row].aux_hidden_states[0]), (count, row)
            assert mx.array_equal(block.kv[row], single[row].kv[0]), (count, row)
        assert mx.array_equal(target.logits(block.hidden)[1], target.logits(single[1].hidden)[0])


def test_sequences_of_one_pass_do_not_see_each_other() -> None:
    target = tiny_target()
    a, b = target.open(), target.open()
    target.prefill(a, TOKENS[:40])
    target.prefill(b, TOKENS[40:47])
    both = target.forward([(a, mx.array([1, 2, 3])), (b, mx.array([4, 5]))], target_layer_ids=[1])
    for index, (sequence, tokens) in enumerate([(a, [1, 2, 3]), (b, [4, 5])]):
        alone = target.forward([(sequence, mx.array(tokens))], target_layer_ids=[1])
        part = both.prefix(index, len(tokens))
        assert mx.array_equal(part.hidden, alone.hidden)
        assert mx.array_equal(part.kv, alone.kv)
        assert mx.array_equal(part.aux_hidden_states, alone.aux_hidden_states)


@pytest.mark.parametrize("family", ["llama_sliding", "qwen3_next"])
def test_one_graph_serves_every_split_of_its_rows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: kernels read from arrays which rows a sequence has; each row equals the row computed alone."""
    for module in (mlx_spec.target.target, mlx_spec.target.graphs):
        monkeypatch.setattr(module, "is_traceable", lambda: True)
    monkeypatch.setattr(mx, "compile", lambda graph: graph)
    target = tiny_target(family, mx.bfloat16)
    sequences = [target.open() for _ in range(3)]
    for i, sequence in enumerate(sequences):
        target.prefill(sequence, TOKENS[i : 2 + 38 * (i % 2) + i])
    with launching(lambda kernel: launcher(kernel, check=False)):
        for counts in ((3, 1, 1), (1, 3, 1)):
            rows = [mx.array(TOKENS[50 + count : 50 + 2 * count]) for count in counts]
            alone = [target.forward([pair], target_layer_ids=[1]) for pair in zip(sequences, rows, strict=True)]
            graphs = len(target._graphs._compiled)
            together = target.forward(list(zip(sequences, rows, strict=True)), target_layer_ids=[1])
            for index, (sequence, count, own) in enumerate(zip(sequences, counts, alone, strict=True)):
                part = together.prefix(index, count)
                assert mx.array_equal(part.hidden, own.hidden) and mx.array_equal(part.kv, own.kv)
                assert mx.array_equal(part.aux_hidden_states, own.aux_hidden_states)
                target.commit(sequence, together.prefix(index, (count + 1) // 2))
    assert len(target._graphs._compiled) == graphs


def test_aux_hidden_states_are_layer_outputs_and_the_final_norm() -> None:
    model = tiny_model("qwen3", mx.float32)
    target = Target(model, CONFIGS["qwen3"], "tiny")
    rows = target.forward([(target.open(), mx.array(TOKENS[:9]))], target_layer_ids=[2, 0, 4])
    hidden, outputs = model.model.embed_tokens(mx.array([TOKENS[:9]])), []
    for layer in model.layers:
        hidden = layer(hidden, "causal")
        outputs.append(hidden[0])
    expected = mx.concatenate([outputs[2], outputs[0], model.model.norm(outputs[3])], axis=-1)
    np.testing.assert_allclose(np.array(rows.aux_hidden_states), np.array(expected), rtol=1e-4, atol=1e-4)


def test_restricted_head_equals_the_columns_of_the_whole_head() -> None:
    ids = mx.array([3, 5, 90])
    for family, bits in (("llama", None), ("llama", 4), ("mistral", None), ("mistral", 4)):
        target = tiny_target(family, mx.float32, bits)
        hidden = mx.random.normal((4, target.hidden_size))
        expected = target.logits(hidden)[:, ids]
        np.testing.assert_allclose(np.array(target.head_for(ids)(hidden)), np.array(expected), atol=1e-5)


def test_the_end_of_the_context_is_an_error_with_the_numbers() -> None:
    target = tiny_target()
    with pytest.raises(ContextFull, match="600 tokens after 0 cached ones; tiny llama has 512"):
        target.prefill(target.open(), [1] * 600)
    sequence = target.open()
    target.prefill(sequence, [1] * 510)
    with pytest.raises(ContextFull, match="3 tokens after 510"):
        target.forward([(sequence, mx.array([1, 2, 3]))])


def test_an_unknown_architecture_is_refused_in_one_sentence() -> None:
    with pytest.raises(UnsupportedModel, match="'mamba'.*supported are llama, mimo, mistral, qwen2, qwen3, "):
        Target(tiny_model("llama"), {"model_type": "mamba"}, "some/model")


def test_heads_that_the_kernels_do_not_take_are_refused_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "qwen3_next", CONFIGS["qwen3_next"] | {"linear_key_head_dim": 48})
    with pytest.raises(UnsupportedModel, match="tiny qwen3_next has a layer .* Dk must be a multiple of 32"):
        tiny_target("qwen3_next")


@pytest.mark.parametrize("size", [0, -5])
def test_a_cache_without_positions_is_refused(size: int) -> None:
    with pytest.raises(RequestError, match=f"max_cached_tokens must be at least 1, not {size}"):
        tiny_target(max_cached_tokens=size)
