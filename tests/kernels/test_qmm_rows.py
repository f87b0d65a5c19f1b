"""qmm_rows against float64, its reference, and itself with other numbers of rows."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from emulator import launcher
from oracles.products_numpy import as_numpy, assert_rounded_once, dequantised, fused, product

from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import launching
from metal_kernels.qmm_rows import qmm_rows
from metal_kernels.row_products import FLOATS, geometry


@dataclass(frozen=True)
class Case:
    """K that fill no step or no simdgroup, N that fill no threadgroup."""

    rows: int
    depth: int
    outputs: int
    bits: int
    group_size: int
    dtype: mx.Dtype
    bias: bool = False
    residual: bool = False
    gated: bool = False
    scale_dtype: mx.Dtype | None = None


CASES = [
    Case(1, 576, 11, 4, 64, mx.bfloat16, bias=True, residual=True),
    Case(8, 576, 20, 4, 64, mx.bfloat16, bias=True, gated=True),
    Case(16, 1056, 33, 4, 32, mx.float16, residual=True),
    Case(9, 1152, 6, 8, 128, mx.float32, bias=True, residual=True, gated=True),
    Case(5, 1536, 1, 8, 64, mx.bfloat16),
    Case(3, 160, 17, 3, 32, mx.float16, bias=True),
    Case(2, 1216, 18, 5, 64, mx.float32, gated=True, scale_dtype=mx.bfloat16),
    Case(1, 384, 16, 6, 128, mx.float16, gated=True),
    Case(4, 32, 13, 2, 32, mx.bfloat16, residual=True),
    Case(15, 96, 8, 6, 32, mx.float32),
]


def weights_of(case: Case, seed: int = 0) -> dict[str, Any]:
    whole = mx.random.normal((case.outputs, case.depth), key=mx.random.key(seed)) * 0.1 + 0.02
    parts = mx.quantize(whole.astype(case.scale_dtype or case.dtype), case.group_size, case.bits)
    weight, scales, biases = parts
    return {
        "weight": weight,
        "scales": scales,
        "biases": biases,
        "group_size": case.group_size,
        "bits": case.bits,
    }


def inputs_of(case: Case, size: float) -> tuple[mx.array, dict[str, Any]]:
    """Return rows of that magnitude whose mean is not zero, and what is fused into their product."""
    keys = mx.random.split(mx.random.key(1), 3)
    x = (mx.random.normal((case.rows, case.depth), key=keys[0]) * size + size / 4).astype(case.dtype)
    bias = mx.random.normal((case.outputs,), key=keys[1]).astype(case.scale_dtype or case.dtype)
    width = case.outputs // 2 if case.gated else case.outputs
    residual = (mx.random.normal((case.rows, width), key=keys[2]) * size).astype(case.dtype)
    return x, {
        "bias": bias if case.bias else None,
        "residual": residual if case.residual else None,
        "gated": case.gated,
    }


def native(x: mx.array, **arguments: Any) -> mx.array:
    with launching(launcher):
        return qmm_rows(x, **arguments)


def reference(x: mx.array, **arguments: Any) -> mx.array:
    with using("reference"):
        return qmm_rows(x, **arguments)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_formula(case: Case) -> None:
    packed = weights_of(case)
    for size in (13.0, 0.1):
        x, extras = inputs_of(case, size)
        got = native(x, **packed, **extras)
        expected = fused(*product(as_numpy(x), *dequantised(*packed.values())), **extras)
        assert_rounded_once(got, *expected, case.dtype)
        # Two roundings, so twice what one allows.
        by_reference = as_numpy(reference(x, **packed, **extras))
        assert_rounded_once(got, by_reference, 2 * expected[1] + abs(by_reference) * 2**-8, case.dtype)


@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[6]], ids=str)
def test_the_others_take_the_same(case: Case) -> None:
    packed, (x, extras) = weights_of(case), inputs_of(case, 1.0)
    expected = as_numpy(reference(x, **packed, **extras))
    for name in ("stock", "reference", "cpu"):
        with using(name):
            got = qmm_rows(x, **packed, **extras)
        assert (got.shape, got.dtype) == (expected.shape, case.dtype)
        assert abs(as_numpy(got) - expected).max() <= 0.1 * abs(expected).max()


def test_a_row_does_not_depend_on_the_number_of_rows() -> None:
    """Steps that are full and one that is not, both halves of K, rows among others and in other places."""
    case = Case(16, 1120, 9, 4, 32, mx.bfloat16, bias=True)
    packed, (x, extras) = weights_of(case), inputs_of(case, 1.0)
    whole = native(x, **packed, **extras)
    assert len({row.item() for row in whole[:, 0]}) > 10
    for rows in range(1, 16):
        first = rows % 5
        assert mx.array_equal(native(x[first : first + rows], **packed, **extras), whole[first : first + rows]), (
            rows
        )


@pytest.mark.parametrize("rows", [1, 6])
def test_a_column_does_not_depend_on_how_many_a_lane_takes(rows: int) -> None:
    few, many = (Case(rows, 64, outputs, 4, 32, mx.bfloat16) for outputs in (30, 16390))
    cuts = [geometry(rows, case.outputs, 64, case.dtype, False).columns for case in (few, many)]
    assert cuts == [2, 4]
    packed, (x, _) = weights_of(many), inputs_of(many, 1.0)
    with launching(lambda kernel: launcher(kernel, check=False)):
        whole = qmm_rows(x, **packed)
    cut = {name: part[5:35] if isinstance(part, mx.array) else part for name, part in packed.items()}
    assert mx.array_equal(native(x, **cut), whole[:, 5:35])
    assert_rounded_once(whole, *product(as_numpy(x), *dequantised(*packed.values())), mx.bfloat16)


def test_every_cut_fits() -> None:
    for rows in range(1, 17):
        for depth in (32, 576, 1024, 4096, 12288):
            cuts = [geometry(rows, 4096, depth, dtype, gated) for dtype in FLOATS for gated in (False, True)]
            assert {cut.splits for cut in cuts} == {geometry(1, 7, depth, mx.float32, False).splits}
            for cut, dtype in zip(cuts, [dtype for dtype in FLOATS for _ in range(2)], strict=True):
                assert rows * cut.steps * cut.splits * 256 * dtype.size <= 32768
                assert cut.threads <= 256 and cut.groups * cut.teams * cut.columns * 4 >= 4096


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "seventeen rows": ({"x": mx.zeros((17, 64))}, "1 to 16 rows .* not .17, 64."),
    "no rows": ({"x": mx.zeros((0, 64))}, "1 to 16 rows"),
    "three axes": ({"x": mx.zeros((1, 2, 64))}, "R, K"),
    "integers": ({"x": mx.zeros((1, 64), dtype=mx.int32)}, "int32"),
    "bits": ({"bits": 7}, "not 7 in 32"),
    "group": ({"group_size": 16}, "not 4 in 16"),
    "K and the group": ({"x": mx.zeros((1, 96)), "group_size": 64}, "multiple of the group, 64, not 96"),
    "K": ({"x": mx.zeros((1, 128))}, "128 values of 4 bits are 16 words"),
    "bytes": ({"weight": mx.zeros((6, 8), dtype=mx.uint8)}, "uint8"),
    "axes of weights": ({"weight": mx.zeros((2, 6, 8), dtype=mx.uint32)}, "2, 6, 8"),
    "scales": ({"scales": mx.zeros((6, 1))}, "scales and biases .6, 2., not .6, 1."),
    "dtype of scales": (
        {"x": mx.zeros((1, 64), dtype=mx.float16), "scales": mx.zeros((6, 2), dtype=mx.bfloat16)},
        "x's dtype",
    ),
    "a bias": ({"bias": mx.zeros((3,))}, r"bias \[6\]"),
    "a residual": ({"residual": mx.zeros((1, 3))}, r"residual \(1, 6\)"),
    "a gated residual": ({"residual": mx.zeros((1, 6)), "gated": True}, r"residual \(1, 3\)"),
    "odd gates": (
        {
            "gated": True,
            "weight": mx.zeros((5, 8), dtype=mx.uint32),
            "scales": mx.zeros((5, 2)),
            "biases": mx.zeros((5, 2)),
        },
        "5 outputs",
    ),
    "few words": (
        {
            "x": mx.zeros((1, 32)),
            "weight": mx.zeros((1, 4), dtype=mx.uint32),
            "scales": mx.zeros((1, 1)),
            "biases": mx.zeros((1, 1)),
        },
        "at least 8",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_refuses(name: str) -> None:
    changed, message = BROKEN[name]
    good = weights_of(Case(1, 64, 6, 4, 32, mx.float32)) | {"x": mx.zeros((1, 64))}
    with pytest.raises(ValueError, match=message):
        native(**(good | changed))
