"""moe_rows against the mixture's formula in float64, and row by row."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher
from mlx import nn
from tiny_models import tiny_model

from metal_kernels import Experts, moe_rows
from metal_kernels.implementations import using
from metal_kernels.launch import Kernel, launching

TOLERANCE = {mx.float32: 1e-5, mx.float16: 1e-2, mx.bfloat16: 8e-2}
HIDDEN = 64


@pytest.fixture(params=["native", "stock", "reference"])
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    with launching(partial(launcher, check=False)), using(request.param):
        yield request.param


def block_of(dtype: mx.Dtype, bits: int | None, normalise: bool = True) -> Any:
    block = tiny_model("qwen3_moe", dtype, bits).model.layers[1].mlp
    block.norm_topk_prob = normalise
    return block


def weight(linear: Any) -> np.ndarray:
    """Return the dequantised weight in float64."""
    whole = linear.weight
    if "scales" in linear:
        whole = mx.dequantize(whole, linear.scales, linear.biases, linear.group_size, linear.bits)
    return np.array(whole.astype(mx.float32)).astype(np.float64)


def gate(block: Any, x: mx.array) -> np.ndarray:
    scores = np.array(x.astype(mx.float32)).astype(np.float64) @ weight(block.gate).T
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True)


def formula(block: Any, x: mx.array) -> np.ndarray:
    """Sum the chosen experts' gated feed-forwards, weighted by their gates."""
    rows, gates = np.array(x.astype(mx.float32)).astype(np.float64), gate(block, x)
    up, gated, down = (weight(getattr(block.switch_mlp, f"{n}_proj")) for n in ("up", "gate", "down"))
    out = np.zeros_like(rows)
    for r, row in enumerate(rows):
        chosen = np.argsort(-gates[r])[: block.top_k]
        total = gates[r][chosen].sum() if block.norm_topk_prob else 1.0
        for e in chosen:
            z = gated[e] @ row
            out[r] += gates[r][e] / total * (down[e] @ (z / (1 + np.exp(-z)) * (up[e] @ row)))
    return out


def clear_rows(block: Any, count: int, dtype: mx.Dtype) -> mx.array:
    """Random rows whose last chosen and first left-out expert differ most, so that rounding swaps none."""
    x = mx.random.normal((200, HIDDEN), key=mx.random.key(5)).astype(dtype)
    ordered = -np.sort(-gate(block, x), axis=-1)
    return x[mx.array(np.argsort(ordered[:, block.top_k] - ordered[:, block.top_k - 1])[:count])]


def check_formula(block: Any, rows: int, dtype: mx.Dtype) -> None:
    x = clear_rows(block, rows, dtype)
    expected = formula(block, x)
    got = moe_rows(Experts.of(block), x)
    assert (got.shape, got.dtype) == (x.shape, dtype)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(
        np.array(got.astype(mx.float32)) / scale, expected / scale, atol=TOLERANCE[dtype], rtol=0
    )


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_equals_the_formula(rows: int, dtype: mx.Dtype, bits: int | None, normalise: bool) -> None:
    check_formula(block_of(dtype, bits, normalise), rows, dtype)


@pytest.mark.parametrize("bits", [None, 4])
def test_every_implementation_equals_the_formula(bits: int | None, chosen: str) -> None:
    check_formula(block_of(mx.bfloat16, bits), 3, mx.bfloat16)


@pytest.mark.parametrize("bits", [None, 4])
def test_router_and_experts_of_few_rows_run_through_kernels(bits: int | None) -> None:
    launched: list[str] = []

    def recording(kernel: Kernel) -> Any:
        launched.append(kernel.name)
        return launcher(kernel, check=False)

    experts, x = Experts.of(block_of(mx.bfloat16, bits)), mx.zeros((17, HIDDEN), dtype=mx.bfloat16)
    product = "gemm_rows" if bits is None else "qmm_rows"
    with launching(recording):
        moe_rows(experts, x[:16])
        assert launched == [product, *[f"gather_{product}"] * 2]
        moe_rows(experts, x)
    assert len(launched) == 3


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kernels", ["native", "stock"])
def test_a_row_does_not_depend_on_its_neighbours(bits: int | None, kernels: str) -> None:
    """bfloat16: one row and up to 16 rows agree bit for bit; MLX's own, on a CPU, in any number."""
    experts = Experts.of(block_of(mx.bfloat16, bits))
    counts = (3, 16) if kernels == "native" else (2, 3, 8, 15, 16, 32, 48)
    x = mx.random.normal((counts[-1], HIDDEN), key=mx.random.key(6)).astype(mx.bfloat16)
    with launching(partial(launcher, check=False)), using(kernels):
        alone = mx.concatenate([moe_rows(experts, x[row : row + 1]) for row in range(counts[-1])])
        for rows in counts:
            assert mx.array_equal(moe_rows(experts, x[:rows]), alone[:rows]), rows


def test_joining_gates_and_ups_leaves_the_modules_as_they_were() -> None:
    block = block_of(mx.float32, None)
    gate, up = (block.switch_mlp[name].weight for name in ("gate_proj", "up_proj"))
    (joined,) = Experts.of(block).gate_up
    assert joined.size == 2 * gate.shape[1]
    for name, before in (("gate_proj", gate), ("up_proj", up)):
        assert mx.array_equal(block.switch_mlp[name].weight, before)


@pytest.mark.parametrize("rows", [2, 40])
def test_gates_and_ups_that_are_packed_unlike_each_other(rows: int) -> None:
    block = block_of(mx.float32, None)
    block.switch_mlp.up_proj = block.switch_mlp.up_proj.to_quantized(32, 8)
    assert len(Experts.of(block).gate_up) == 2
    check_formula(block, rows, mx.float32)


def test_a_packing_that_our_kernels_do_not_know_runs_through_mlx() -> None:
    block = block_of(mx.bfloat16, None)
    x = clear_rows(block, 3, mx.bfloat16)
    nn.quantize(block.switch_mlp, group_size=32, bits=4, mode="mxfp4")
    expected = block(x)
    with launching(partial(launcher, check=False)):
        got = moe_rows(Experts.of(block), x)
    np.testing.assert_allclose(
        np.array(got.astype(mx.float32)), np.array(expected.astype(mx.float32)), atol=0.02, rtol=0.02
    )


def test_experts_with_biases_are_refused() -> None:
    block = block_of(mx.float32, None)
    block.switch_mlp.down_proj.bias = mx.zeros((8, HIDDEN))
    with pytest.raises(TypeError, match="experts without biases are needed; down_proj have them"):
        Experts.of(block)
