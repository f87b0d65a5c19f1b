"""moe_rows against the mixture's formula in float64, and row by row."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher
from oracles.products_numpy import as_numpy

from metal_kernels import Experts, Linear, Quantization, moe_rows
from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import Kernel, launching

TOLERANCE = {mx.float32: 1e-5, mx.float16: 1e-2, mx.bfloat16: 8e-2}
HIDDEN, INNER, COUNT = 64, 32, 8
HALVES = (slice(0, INNER), slice(INNER, None))


@pytest.fixture(params=["native", "stock", "reference", "cpu"])
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    with launching(partial(launcher, check=False)), using(request.param):
        yield request.param


def linear(seed: int, *shape: int, dtype: mx.Dtype, bits: int | None, mode: str = "affine") -> Linear:
    """Make random weights, quantised in groups of 32 unless ``bits`` is None."""
    weight = (mx.random.normal(shape, key=mx.random.key(seed)) * shape[-1] ** -0.5).astype(dtype)
    if bits is None:
        return Linear(weight)
    weight, scales, *biases = mx.quantize(weight, 32, bits, mode)
    return Linear(weight, scales, biases[0] if biases else None, quantization=Quantization(32, bits, mode))


@dataclass(frozen=True)
class Mixture:
    """Experts, and the same weights apart: gates, ups and downs [E, N, K] in float64."""

    experts: Experts
    dtype: mx.Dtype
    gates: np.ndarray
    ups: np.ndarray
    downs: np.ndarray

    @staticmethod
    def random(
        dtype: mx.Dtype,
        bits: int | None,
        normalised: bool = True,
        mode: str = "affine",
        up_bits: int | None = None,
    ) -> "Mixture":
        """``up_bits``: quantise ups to other bits than gates, so that the two stay apart."""
        make = partial(linear, dtype=dtype, mode=mode)
        gate, up = make(1, COUNT, INNER, HIDDEN, bits=bits), make(2, COUNT, INNER, HIDDEN, bits=up_bits or bits)
        down = make(3, COUNT, HIDDEN, INNER, bits=bits)
        gate_up: tuple[Linear, ...] = (gate, up)
        if up_bits is None:
            both = {name: mx.concatenate([x, up.tensors[name]], axis=1) for name, x in gate.tensors.items()}
            gate_up = (Linear(**both, quantization=gate.quantization),)
        router = linear(4, COUNT, HIDDEN, dtype=dtype, bits=None if mode != "affine" else bits)
        whole = [dequantised(part) for part in (gate, up, down)]
        return Mixture(Experts(router, gate_up, down, 2, normalised), dtype, *whole)

    def scores(self, x: mx.array) -> np.ndarray:
        scores = as_numpy(x) @ dequantised(self.experts.router).T
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        return scores / scores.sum(-1, keepdims=True)

    def formula(self, x: mx.array) -> np.ndarray:
        """Sum the chosen experts' gated feed-forwards, weighted by their gates."""
        rows, scores, top_k = as_numpy(x), self.scores(x), self.experts.top_k
        out = np.zeros_like(rows)
        for r, row in enumerate(rows):
            chosen = np.argsort(-scores[r])[:top_k]
            total = scores[r][chosen].sum() if self.experts.normalised else 1.0
            for e in chosen:
                z = self.gates[e] @ row
                out[r] += scores[r][e] / total * (self.downs[e] @ (z / (1 + np.exp(-z)) * (self.ups[e] @ row)))
        return out

    def clear_rows(self, count: int) -> mx.array:
        """Random rows whose last chosen and first left-out expert differ most, so that rounding swaps none."""
        x = mx.random.normal((200, HIDDEN), key=mx.random.key(5)).astype(self.dtype)
        ordered, top_k = -np.sort(-self.scores(x), axis=-1), self.experts.top_k
        return x[mx.array(np.argsort(ordered[:, top_k] - ordered[:, top_k - 1])[:count])]

    def check(self, rows: int) -> None:
        x = self.clear_rows(rows)
        expected, got = self.formula(x), moe_rows(self.experts, x)
        assert (got.shape, got.dtype) == (x.shape, self.dtype)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(as_numpy(got) / scale, expected / scale, atol=TOLERANCE[self.dtype], rtol=0)


def dequantised(linear: Linear) -> np.ndarray:
    quantization = linear.quantization
    if quantization is None:
        return as_numpy(linear.weight)
    settings = (quantization.group_size, quantization.bits, quantization.mode)
    return as_numpy(mx.dequantize(linear.weight, linear.scales, linear.biases, *settings))


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equals_the_formula(dtype: mx.Dtype, bits: int | None, normalised: bool) -> None:
    mixture = Mixture.random(dtype, bits, normalised)
    for rows in (1, 3, 16, 40):
        mixture.check(rows)


@pytest.mark.parametrize("bits", [None, 4])
def test_every_implementation_equals_the_formula(bits: int | None, chosen: str) -> None:
    Mixture.random(mx.bfloat16, bits).check(3)


@pytest.mark.parametrize("bits", [None, 4])
def test_router_and_experts_of_few_rows_run_through_kernels(bits: int | None) -> None:
    launched: list[str] = []

    def recording(kernel: Kernel) -> Any:
        launched.append(kernel.name)
        return launcher(kernel, check=False)

    experts, x = Mixture.random(mx.bfloat16, bits).experts, mx.zeros((17, HIDDEN), dtype=mx.bfloat16)
    product = "gemm_rows" if bits is None else "qmm_rows"
    with launching(recording):
        moe_rows(experts, x[:16])
        assert launched == [product, *[f"gather_{product}"] * 2]
        moe_rows(experts, x)
    assert len(launched) == 3


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kernels", ["native", "stock", "cpu"])
def test_a_row_does_not_depend_on_its_neighbours(bits: int | None, kernels: str) -> None:
    """bfloat16: one row and up to 16 rows agree bit for bit; MLX's own, on a CPU, in any number."""
    experts = Mixture.random(mx.bfloat16, bits).experts
    counts = (3, 16) if kernels == "native" else (2, 3, 8, 15, 16, 32, 48)
    x = mx.random.normal((counts[-1], HIDDEN), key=mx.random.key(6)).astype(mx.bfloat16)
    with launching(partial(launcher, check=False)), using(kernels):
        alone = mx.concatenate([moe_rows(experts, x[row : row + 1]) for row in range(counts[-1])])
        for rows in counts:
            assert mx.array_equal(moe_rows(experts, x[:rows]), alone[:rows]), rows


@pytest.mark.parametrize("rows", [2, 40])
def test_gates_and_ups_that_are_quantised_differently(rows: int, chosen: str) -> None:
    mixture = Mixture.random(mx.float32, 4, up_bits=8)
    assert len(mixture.experts.gate_up) == 2
    mixture.check(rows)


@pytest.mark.parametrize("joined", [True, False])
def test_a_quantization_that_our_kernels_do_not_know_runs_through_mlx(joined: bool) -> None:
    mixture = Mixture.random(mx.bfloat16, 4, mode="mxfp4")
    if not joined:
        (both,) = mixture.experts.gate_up
        halves = [{n: x[:, part] for n, x in both.tensors.items()} for part in HALVES]
        gate_up = tuple(Linear(**half, quantization=both.quantization) for half in halves)
        mixture = replace(mixture, experts=replace(mixture.experts, gate_up=gate_up))
    with launching(partial(launcher, check=False)):
        mixture.check(3)
