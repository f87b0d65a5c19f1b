"""moe_rows against the mixture's formula in float64, and row by row."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_model

from metal_kernels import moe_rows

TOLERANCE = {mx.float32: 1e-5, mx.float16: 1e-2, mx.bfloat16: 8e-2}
HIDDEN = 64


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


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_equals_the_formula(rows: int, dtype: mx.Dtype, bits: int | None, normalise: bool) -> None:
    block = block_of(dtype, bits, normalise)
    x = clear_rows(block, rows, dtype)
    got, expected = moe_rows(block, x), formula(block, x)
    assert (got.shape, got.dtype) == (x.shape, dtype)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(
        np.array(got.astype(mx.float32)) / scale, expected / scale, atol=TOLERANCE[dtype], rtol=0
    )


@pytest.mark.parametrize("bits", [None, 4])
def test_a_row_does_not_depend_on_its_neighbours(bits: int | None) -> None:
    """bfloat16: one row, up to 16 rows, and more rows than mlx-lm sorts, agree bit for bit."""
    block = block_of(mx.bfloat16, bits)
    x = mx.random.normal((48, HIDDEN), key=mx.random.key(6)).astype(mx.bfloat16)
    alone = mx.concatenate([moe_rows(block, x[row : row + 1]) for row in range(48)])
    for rows in (2, 3, 8, 15, 16, 32, 48):
        assert mx.array_equal(moe_rows(block, x[:rows]), alone[:rows]), rows
