"""Functions of arrays, compiled into one graph for each shape where MLX can trace our kernels."""

from collections.abc import Callable, Hashable
from typing import Any

import mlx.core as mx

from metal_kernels import is_traceable

Graph = Callable[..., Any]


class Graphs:
    """Compiled functions by a key: all that they read besides their arrays. MLX tells shapes apart by itself."""

    def __init__(self) -> None:
        self._compiled: dict[Hashable, Graph] = {}

    def of(self, key: Hashable, function: Graph) -> Graph:
        """Return a function, or what was compiled of one with this key before.

        function: of arrays, and of tuples, lists and dictionaries of such, to the same.
        """
        if not is_traceable():
            return function
        if key not in self._compiled:
            self._compiled[key] = mx.compile(function)
        return self._compiled[key]
