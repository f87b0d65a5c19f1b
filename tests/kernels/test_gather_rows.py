"""gather_rows against float64, its reference, and the products of single rows."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher
from oracles.products_numpy import as_numpy, assert_rounded_once, dequantised, fused, product

from metal_kernels.gather_rows import gather_rows
from metal_kernels.gemm_rows import gemm_rows
from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import Kernel, Launcher, launching
from metal_kernels.qmm_rows import qmm_rows


@dataclass(frozen=True)
class Case:
    """bits None: plain weights. own_rows: each expert of a row has a row of its own."""

    rows: int
    depth: int
    outputs: int
    bits: int | None
    dtype: mx.Dtype
    gated: bool = False
    own_rows: bool = False
    experts: int = 5
    chosen: int = 3


CASES = [
    Case(4, 128, 22, 4, mx.bfloat16, gated=True),
    Case(3, 1056, 7, 4, mx.float16, own_rows=True),
    Case(1, 96, 9, 8, mx.float32, chosen=1),
    Case(2, 64, 10, 3, mx.bfloat16),
    Case(17, 72, 9, None, mx.bfloat16),
    Case(2, 1032, 6, None, mx.float32, gated=True, own_rows=True),
    Case(2, 136, 5, None, mx.float16),
]


def inputs_of(case: Case, size: float) -> tuple[mx.array, dict[str, Any]]:
    keys = mx.random.split(mx.random.key(3), 3)
    shape = (case.rows, case.chosen, case.depth) if case.own_rows else (case.rows, case.depth)
    x = (mx.random.normal(shape, key=keys[0]) * size).astype(case.dtype)
    weight = mx.random.normal((case.experts, case.outputs, case.depth), key=keys[1]).astype(case.dtype)
    experts = mx.random.randint(0, case.experts, (case.rows, case.chosen), key=keys[2]).astype(mx.int32)
    packed = (weight, None, None) if case.bits is None else mx.quantize(weight, 32, case.bits)
    arguments = dict(zip(("weight", "scales", "biases"), packed, strict=True), experts=experts, gated=case.gated)
    return x, arguments | ({} if case.bits is None else {"group_size": 32, "bits": case.bits})


def native(x: mx.array, **arguments: Any) -> mx.array:
    with launching(launcher):
        return gather_rows(x, **arguments)


def reference(x: mx.array, **arguments: Any) -> mx.array:
    with using("reference"):
        return gather_rows(x, **arguments)


def formula(case: Case, x: mx.array, arguments: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the products of every row with every expert that it chose, and their noise."""
    weights = as_numpy(arguments["weight"]), None
    if case.bits is not None:
        weights = dequantised(arguments["weight"], arguments["scales"], arguments["biases"], 32, case.bits)
    found = np.zeros((2, case.rows, case.chosen, case.outputs // 2 if case.gated else case.outputs))
    for r, chosen in enumerate(arguments["experts"].tolist()):
        for t, e in enumerate(chosen):
            row = as_numpy(x[r, t] if case.own_rows else x[r])
            sums = product(row, *(None if part is None else part[e] for part in weights))
            found[:, r, t] = fused(*sums, None, None, case.gated)
    return found[0], found[1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_formula(case: Case) -> None:
    for size in (13.0, 0.1):
        x, arguments = inputs_of(case, size)
        got, expected = native(x, **arguments), formula(case, x, arguments)
        assert_rounded_once(got, *expected, case.dtype)
        by_reference = as_numpy(reference(x, **arguments))
        assert_rounded_once(got, by_reference, 2 * expected[1] + abs(by_reference) * 2**-8, case.dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_others_take_the_same(case: Case) -> None:
    x, arguments = inputs_of(case, 1.0)
    expected = formula(case, x, arguments)[0]
    for name in ("stock", "reference", "cpu"):
        with using(name):
            got = gather_rows(x, **arguments)
        assert (got.shape, got.dtype) == (expected.shape, case.dtype)
        assert abs(as_numpy(got) - expected).max() <= 0.1 * abs(expected).max()


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4], CASES[5]], ids=str)
def test_a_pair_has_the_bits_of_its_row_alone(case: Case) -> None:
    x, arguments = inputs_of(case, 1.0)
    got, experts = native(x, **arguments), arguments["experts"].tolist()
    for r, t in ((0, 0), (case.rows - 1, case.chosen - 1)):
        row = (x[r, t] if case.own_rows else x[r])[None]
        weight, scales, biases = (arguments[name] for name in ("weight", "scales", "biases"))
        e = experts[r][t]
        with launching(launcher):
            if case.bits is None:
                alone = gemm_rows(row, weight[e], gated=case.gated)
            else:
                triple = (weight[e], scales[e], biases[e])
                alone = qmm_rows(row, *triple, group_size=32, bits=case.bits, gated=case.gated)
        assert mx.array_equal(got[r, t], alone[0]), (r, t)


def test_the_kernel_takes_as_many_pairs_as_a_launch_grid() -> None:
    def launch(kernel: Kernel) -> Launcher:
        return lambda **given: [mx.zeros(given["output_shapes"][0])]

    def gather(pairs: int) -> mx.array:
        experts = mx.zeros((pairs, 1), dtype=mx.int32)
        return gather_rows(mx.zeros((pairs, 8)), mx.zeros((1, 1, 8)), None, None, experts)

    with launching(launch):
        assert gather(65535).shape == (65535, 1, 1)
        with pytest.raises(ValueError, match="1 to 65535 pairs of a row and an expert, not 65536"):
            gather(65536)
    assert gather(65536).shape == (65536, 1, 1)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "integers": ({"x": mx.zeros((2, 64), dtype=mx.int32)}, "int32"),
    "one expert's weights": ({"weight": mx.zeros((6, 64))}, "E, N"),
    "experts of other rows": ({"experts": mx.zeros((3, 2), dtype=mx.int32)}, r"\(3, 2\)"),
    "experts' dtype": ({"experts": mx.zeros((2, 2), dtype=mx.uint32)}, "uint32"),
    "rows of other experts": ({"x": mx.zeros((2, 3, 64))}, r"beside \(2, 3, 64\)"),
    "no experts": ({"experts": mx.zeros((2, 0), dtype=mx.int32)}, "1 to 65535"),
    "odd gates": ({"weight": mx.zeros((4, 5, 64)), "gated": True}, "5 outputs"),
    "scales alone": ({"scales": mx.zeros((4, 6, 2))}, "together"),
    "K": ({"x": mx.zeros((2, 72))}, "weights of 72 values"),
    "dtypes": ({"x": mx.zeros((2, 64), dtype=mx.float16)}, "float16, like x"),
    "packed words": (
        {
            "weight": mx.zeros((4, 6, 9), dtype=mx.uint32),
            "scales": mx.zeros((4, 6, 2)),
            "biases": mx.zeros((4, 6, 2)),
            "group_size": 32,
        },
        "64 values of 4 bits are 8 words",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_refuses(name: str) -> None:
    changed, message = BROKEN[name]
    good: dict[str, Any] = {
        "x": mx.zeros((2, 64)),
        "weight": mx.zeros((4, 6, 64)),
        "scales": None,
        "biases": None,
        "experts": mx.zeros((2, 2), dtype=mx.int32),
    }
    with pytest.raises(ValueError, match=message):
        native(**(good | changed))
