"""Muon over many matrices at once, against MLX's own, one matrix at a time."""

import mlx.core as mx
import numpy as np
from mlx import optimizers
from mlx.utils import tree_flatten, tree_map

from tools.muon import Muon


def test_steps_are_those_of_mlx() -> None:
    """Wide and tall matrices, several of one shape, over several steps."""
    mx.random.seed(0)
    start = {
        "layers": [{"a": mx.random.normal((12, 20)), "b": mx.random.normal((20, 12))} for _ in range(3)],
        "fc": mx.random.normal((8, 8)),
    }
    ours, theirs = Muon(mx.array(0.02)), optimizers.Muon(mx.array(0.02), weight_decay=0.0)
    got = expected = start
    for rate in (0.02, 0.01, 0.03, 0.0):
        gradients = tree_map(lambda matrix: mx.random.normal(matrix.shape), start)
        ours.learning_rate = theirs.learning_rate = mx.array(rate)
        got, expected = ours.apply_gradients(gradients, got), theirs.apply_gradients(gradients, expected)
    for (path, matrix), (other, reference) in zip(tree_flatten(got), tree_flatten(expected), strict=True):
        assert path == other
        np.testing.assert_allclose(np.array(matrix), np.array(reference), atol=2e-6, err_msg=path)
