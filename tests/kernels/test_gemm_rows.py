"""gemm_rows against float64, its reference, and itself with other numbers of rows."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from emulator import launcher
from oracles.products_numpy import as_numpy, assert_rounded_once, fused, product

from metal_kernels.gemm_rows import gemm_rows
from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import launching


@dataclass(frozen=True)
class Case:
    """K that fill no step or no simdgroup, N that fill no threadgroup."""

    rows: int
    depth: int
    outputs: int
    dtype: mx.Dtype
    bias: bool = False
    residual: bool = False
    gated: bool = False


CASES = [
    Case(1, 576, 11, mx.bfloat16, bias=True, residual=True),
    Case(8, 1288, 20, mx.bfloat16, bias=True, gated=True),
    Case(16, 1032, 33, mx.float32, residual=True),
    Case(9, 520, 6, mx.float16, bias=True, residual=True, gated=True),
    Case(1, 24, 1, mx.float32),
    Case(3, 8, 17, mx.float16, bias=True),
    Case(2, 1536, 18, mx.float32, gated=True),
    Case(1, 1064, 16, mx.float16, gated=True),
]


def inputs_of(case: Case, size: float) -> tuple[mx.array, mx.array, dict[str, Any]]:
    """Return rows of that magnitude whose mean is not zero, weights, and what is fused into their product."""
    keys = mx.random.split(mx.random.key(1), 4)
    x = (mx.random.normal((case.rows, case.depth), key=keys[0]) * size + size / 4).astype(case.dtype)
    weight = (mx.random.normal((case.outputs, case.depth), key=keys[1]) * 0.1 + 0.02).astype(case.dtype)
    bias = mx.random.normal((case.outputs,), key=keys[2]).astype(case.dtype)
    width = case.outputs // 2 if case.gated else case.outputs
    residual = (mx.random.normal((case.rows, width), key=keys[3]) * size).astype(case.dtype)
    return (
        x,
        weight,
        {
            "bias": bias if case.bias else None,
            "residual": residual if case.residual else None,
            "gated": case.gated,
        },
    )


def native(x: mx.array, weight: mx.array, **extras: Any) -> mx.array:
    with launching(launcher):
        return gemm_rows(x, weight, **extras)


def reference(x: mx.array, weight: mx.array, **extras: Any) -> mx.array:
    with using("reference"):
        return gemm_rows(x, weight, **extras)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_formula(case: Case) -> None:
    for size in (13.0, 0.1):
        x, weight, extras = inputs_of(case, size)
        got = native(x, weight, **extras)
        expected = fused(*product(as_numpy(x), as_numpy(weight)), **extras)
        assert_rounded_once(got, *expected, case.dtype)
        # Two roundings, so twice what one allows.
        by_reference = as_numpy(reference(x, weight, **extras))
        assert_rounded_once(got, by_reference, 2 * expected[1] + abs(by_reference) * 2**-8, case.dtype)


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_the_others_take_the_same(case: Case) -> None:
    x, weight, extras = inputs_of(case, 1.0)
    expected = as_numpy(reference(x, weight, **extras))
    for name in ("stock", "reference", "cpu"):
        with using(name):
            got = gemm_rows(x, weight, **extras)
        assert (got.shape, got.dtype) == (expected.shape, case.dtype)
        assert abs(as_numpy(got) - expected).max() <= 0.1 * abs(expected).max()


def test_a_row_does_not_depend_on_the_number_of_rows() -> None:
    """A step that is not full, both halves of K, rows among others and in other places."""
    x, weight, extras = inputs_of(Case(16, 1112, 9, mx.bfloat16, bias=True), 1.0)
    whole = native(x, weight, **extras)
    assert len({row.item() for row in whole[:, 0]}) > 10
    for rows in (1, 2, 5, 8, 9, 15):
        first = rows % 2
        assert mx.array_equal(native(x[first : first + rows], weight, **extras), whole[first : first + rows]), rows


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "seventeen rows": ({"x": mx.zeros((17, 64))}, "1 to 16 rows .* not .17, 64."),
    "K": ({"x": mx.zeros((1, 128))}, "weights of 128 values"),
    "odd K": ({"x": mx.zeros((1, 60)), "weight": mx.zeros((6, 60))}, "multiple of 8"),
    "axes of weights": ({"weight": mx.zeros((2, 6, 64))}, "2, 6, 64"),
    "no weights": ({"weight": mx.zeros((0, 64))}, "0, 64"),
    "dtypes": ({"weight": mx.zeros((6, 64), dtype=mx.bfloat16)}, "float32, like x, not .*bfloat16"),
    "a bias": ({"bias": mx.zeros((3,))}, r"bias \[6\]"),
    "a residual": ({"residual": mx.zeros((1, 6), dtype=mx.float16)}, r"residual \(1, 6\) .*float16"),
    "odd gates": ({"weight": mx.zeros((5, 64)), "gated": True}, "5 outputs"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_refuses(name: str) -> None:
    changed, message = BROKEN[name]
    good: dict[str, Any] = {"x": mx.zeros((1, 64)), "weight": mx.zeros((6, 64))}
    with pytest.raises(ValueError, match=message):
        native(**(good | changed))
