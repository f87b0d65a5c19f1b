"""stack_rows against numpy's stack."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher

from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import launching, noting_launches
from metal_kernels.stack_rows import stack_rows


@pytest.fixture(params=["native", "stock", "cpu"], autouse=True)
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    with launching(launcher), using(request.param):
        yield request.param


@pytest.mark.parametrize(
    ("layers", "rows", "kv_heads", "dim"),
    [(1, 1, 1, 64), (2, 3, 2, 64), (19, 2, 1, 8), (20, 1, 5, 64), (21, 2, 3, 96), (45, 1, 1, 16)],
)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_equals_a_stack(layers: int, rows: int, kv_heads: int, dim: int, dtype: mx.Dtype) -> None:
    lots = np.random.default_rng(layers).integers(-9, 9, (layers, 2, rows, kv_heads, dim))
    stacked = stack_rows([mx.array(part).astype(dtype) for part in lots])
    assert (stacked.dtype, stacked.shape) == (dtype, (rows, layers, 2, kv_heads, dim))
    expected = lots.transpose(2, 0, 1, 3, 4)
    np.testing.assert_array_equal(np.array(stacked.astype(mx.float32)), expected)


def test_launches_are_few(chosen: str) -> None:
    parts = [mx.zeros((2, 4, 1, 8))] * 36
    with noting_launches() as noted:
        mx.eval(stack_rows(parts))
    assert len(noted) == (2 if chosen == "native" else 0)


def test_parts_that_differ_are_refused() -> None:
    part = mx.zeros((2, 3, 1, 8))
    for other in (mx.zeros((2, 4, 1, 8)), part.astype(mx.float16), part[0]):
        with pytest.raises(ValueError, match="stack_rows takes equal parts"):
            stack_rows([part, other])
    with pytest.raises(ValueError, match="not \\(3, 8\\)"):
        stack_rows([mx.zeros((3, 8))])
