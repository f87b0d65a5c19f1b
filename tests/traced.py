"""What stands in for ``mx.compile``: a function is traced once for each shape, and its trace is run.

MLX on a CPU compiles each fused operation of a graph with the system's compiler, a second or more each. Here
nothing is fused; what a trace holds fast by mistake shows all the same.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of trees of arrays that runs what was traced of it with the same shapes before."""
    known: dict[Any, tuple[Callable[..., list[mx.array]], Any]] = {}

    def call(*trees: Any) -> Any:
        arrays = arrays_of(trees)
        key = tuple((x.shape, x.dtype) for x in arrays)
        if key not in known:
            known[key] = trace(function, trees, arrays)
        run, result = known[key]
        return with_arrays(result, run(*arrays))

    return call


def trace(function: Callable[..., Any], trees: Any, arrays: list[mx.array]) -> tuple[Callable[..., Any], Any]:
    """Return a trace of a function, from its arrays to those of its result, and the tree of the result."""
    results = []

    def flat(*arrays: mx.array) -> list[mx.array]:
        results.append(function(*with_arrays(trees, list(arrays))))
        return arrays_of(results[-1])

    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "trace.mlxfn"))
        mx.export_function(file, flat, *arrays)
        return mx.import_function(file), results[0]


def arrays_of(tree: Any) -> list[mx.array]:
    """Return the arrays of a tree, in order."""
    found: list[mx.array] = []
    tree_map(lambda leaf: found.append(leaf) if isinstance(leaf, mx.array) else None, tree)
    return found


def with_arrays(tree: Any, arrays: list[mx.array]) -> Any:
    """Return a tree with other arrays in place of its own."""
    left = iter(arrays)
    return tree_map(lambda leaf: next(left) if isinstance(leaf, mx.array) else leaf, tree)
