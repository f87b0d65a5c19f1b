"""The weights that kernels take, read out of modules of MLX and mlx-lm."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.qwen3_moe import ModelArgs, Qwen3MoeSparseMoeBlock
from mlx_lm.tuner.lora import LoRALinear

from metal_kernels import linear_rows, moe_rows
from mlx_spec.target.linears import experts_of, joined_linears, linear_of, module_rows


def block_of(bits: int | None = None, dtype: mx.Dtype = mx.bfloat16, **changes: Any) -> Any:
    """Build a mixture of 8 experts, of which a row takes 2."""
    args = ModelArgs(
        **dict(
            model_type="qwen3_moe",
            hidden_size=64,
            num_hidden_layers=1,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rms_norm_eps=1e-5,
            vocab_size=96,
            max_position_embeddings=512,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            num_experts=8,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            moe_intermediate_size=64,
            norm_topk_prob=True,
        )
        | changes
    )
    mx.random.seed(3)
    block = Qwen3MoeSparseMoeBlock(args)
    block.set_dtype(dtype)
    if bits:
        nn.quantize(block, group_size=32, bits=bits)
    return block


def float32(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32))


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_a_module_is_read_as_it_is(bias: bool, bits: int | None) -> None:
    module = nn.Linear(64, 9, bias=bias)
    module = module if bits is None else module.to_quantized(32, bits)
    linear = linear_of(module)
    assert linear.tensors.keys() == dict(module.parameters()).keys()
    assert all(linear.tensors[name] is value for name, value in module.parameters().items())
    quantization = linear.quantization
    found = None if quantization is None else (quantization.group_size, quantization.bits, quantization.mode)
    assert found == (None if bits is None else (32, 4, "affine"))
    x = mx.random.normal((3, 64), key=mx.random.key(1))
    assert mx.array_equal(module_rows(x, module), linear_rows(x, linear))
    np.testing.assert_allclose(np.array(module_rows(x, module)), np.array(module(x)), atol=1e-5)


def test_an_embedding_is_a_linear_map_and_a_lora_layer_is_not() -> None:
    assert linear_of(nn.Embedding(9, 64)).size == 9
    for module in (nn.RoPE(64), LoRALinear.from_base(nn.Linear(64, 8))):
        with pytest.raises(TypeError, match=f"{type(module).__name__} with .* is no plain or quantised linear"):
            linear_of(module)


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("bias", [True, False])
def test_joined_modules_keep_their_weights_as_views(bias: bool, bits: int | None) -> None:
    modules = [nn.Linear(64, outputs, bias=bias) for outputs in (8, 16, 24)]
    if bits is not None:
        modules = [module.to_quantized(32, bits) for module in modules]
    before = [dict(module.parameters()) for module in modules]
    (joined,) = joined_linears(modules)
    assert joined.size == 48 and joined.tensors.keys() == before[0].keys()
    for module, old in zip(modules, before, strict=True):
        assert all(mx.array_equal(value, old[name]) for name, value in module.parameters().items())
    for name, whole in joined.tensors.items():
        assert mx.array_equal(whole, mx.concatenate([old[name] for old in before]))


def test_modules_that_differ_in_more_than_their_outputs_are_not_joined() -> None:
    plain = nn.Linear(64, 8, bias=False)
    others = [
        nn.Linear(64, 8, bias=False).to_quantized(32, 4),
        nn.Linear(32, 8, bias=False),
        nn.Linear(64, 8, bias=True),
    ]
    half = nn.Linear(64, 8, bias=False)
    half.set_dtype(mx.bfloat16)
    for other in (*others, half):
        assert [linear.size for linear in joined_linears([plain, other])] == [8, 8]
    quantized = [nn.Linear(64, 8, bias=False).to_quantized(*settings) for settings in ((32, 4), (64, 4), (32, 8))]
    assert len(joined_linears(quantized)) == 3


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("normalised", [True, False])
def test_experts_compute_what_their_block_computes(normalised: bool, bits: int | None) -> None:
    # MLX's gather_mm takes only float32 on the CPU.
    dtype = mx.float32 if bits is None else mx.bfloat16
    block = block_of(bits, dtype, norm_topk_prob=normalised)
    x = mx.random.normal((3, 64), key=mx.random.key(5)).astype(dtype)
    expected = block(x)
    np.testing.assert_allclose(float32(moe_rows(experts_of(block), x)), float32(expected), atol=0.02, rtol=0.02)


def test_joining_gates_and_ups_does_not_change_the_modules() -> None:
    block = block_of()
    gate, up = (block.switch_mlp[name].weight for name in ("gate_proj", "up_proj"))
    (joined,) = experts_of(block).gate_up
    assert joined.size == 2 * gate.shape[1]
    for name, before in (("gate_proj", gate), ("up_proj", up)):
        assert mx.array_equal(block.switch_mlp[name].weight, before)


def test_gates_and_ups_that_are_quantised_differently_are_not_joined() -> None:
    block = block_of()
    block.switch_mlp.up_proj = block.switch_mlp.up_proj.to_quantized(32, 8)
    assert len(experts_of(block).gate_up) == 2


def test_a_quantization_without_biases_is_read() -> None:
    block = block_of()
    nn.quantize(block.switch_mlp, group_size=32, bits=4, mode="mxfp4")
    x = mx.random.normal((3, 64), key=mx.random.key(5)).astype(mx.bfloat16)
    expected, experts = block(x), experts_of(block)
    assert experts.down.biases is None and experts.down.quantization.mode == "mxfp4"
    np.testing.assert_allclose(float32(moe_rows(experts, x)), float32(expected), atol=0.02, rtol=0.02)


def test_experts_with_biases_are_refused() -> None:
    block = block_of()
    block.switch_mlp.down_proj.bias = mx.zeros((8, 64))
    with pytest.raises(TypeError, match="experts without biases are needed; down_proj have them"):
        experts_of(block)
