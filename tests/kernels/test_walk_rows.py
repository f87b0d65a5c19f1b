"""walk_rows against a loop on the host."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher

from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import launching
from metal_kernels.walk_rows import walk_rows


@pytest.fixture(params=["native", "stock", "cpu"], autouse=True)
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    with launching(launcher), using(request.param):
        yield request.param


def loop(ranks: np.ndarray) -> list[list[int]]:
    found = []
    for block in ranks:
        picked, path = 0, []
        for step in block:
            picked = int(np.argmax(step[picked]))
            path.append(picked)
        found.append(path)
    return found


@pytest.mark.parametrize("candidates", [1, 4, 16, 31, 32, 40])
@pytest.mark.parametrize(("blocks", "count"), [(1, 1), (1, 7), (3, 15)])
def test_equals_a_loop(blocks: int, count: int, candidates: int) -> None:
    """Of few different numbers, so that equal ones are frequent."""
    for seed in range(4):
        lots = np.random.default_rng(seed).integers(-3, 3, (blocks, count, candidates, candidates))
        ranks = lots.astype(np.float32) * (1.0 if seed % 2 else 0.25)
        picks = walk_rows(mx.array(ranks))
        assert (picks.dtype, picks.tolist()) == (mx.int32, loop(ranks))


def test_minus_infinity_and_nan_pick_a_candidate() -> None:
    ranks = np.full((1, 3, 4, 4), -np.inf, dtype=np.float32)
    ranks[0, 1, :, 2] = 1.0
    assert walk_rows(mx.array(ranks)).tolist() == [[0, 2, 0]]
    picks = walk_rows(mx.array(np.full((1, 3, 4, 4), np.nan, dtype=np.float32)))
    assert all(0 <= pick < 4 for pick in picks.tolist()[0])


@pytest.mark.parametrize(
    "ranks", [mx.zeros((2, 3, 4)), mx.zeros((1, 2, 3, 4)), mx.zeros((1, 2, 4, 4), mx.float16)]
)
def test_other_shapes_and_dtypes_are_refused(ranks: mx.array) -> None:
    with pytest.raises(ValueError, match="walk_rows takes ranks"):
        walk_rows(ranks)
