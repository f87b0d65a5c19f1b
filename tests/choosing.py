"""Draft rules for tests: by a function, and as scripted drafters use the rule of a request."""

from collections.abc import Callable, Hashable
from typing import Any

import mlx.core as mx

from mlx_spec.decoding.accept import Greedy
from mlx_spec.drafters.base import DraftRule, Drawn

Choose = Callable[[int, mx.array, mx.array], tuple[mx.array, mx.array | None]]
"""Draws a drafted token: (position, candidate ids [K], scores [K]) to (token, probabilities [K] or None)."""

GREEDY = Greedy()


class Choosing:
    """Draws by a function, eagerly; its noise is the positions."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose

    @property
    def way(self) -> Hashable:
        return id(self)

    def noise(self, position: int, count: int, candidates: int) -> mx.array:
        return mx.arange(position, position + count)

    def draw(self, ids: mx.array, scores: mx.array, noise: mx.array | None) -> Drawn:
        assert noise is not None
        token, probabilities = self.choose(int(noise.item()), ids, scores.astype(mx.float32))
        return Drawn(token.astype(mx.int32), scores.astype(mx.float32), probabilities)


def rule_of(choose: Any) -> DraftRule:
    """Return a rule as it is, or that of a function."""
    return Choosing(choose) if callable(choose) else choose


def drawn_at(rule: DraftRule, position: int, ids: mx.array, scores: mx.array) -> Drawn:
    """Draw the token of one position."""
    noise = rule.noise(position, 1, ids.size)
    return rule.draw(ids, scores, None if noise is None else noise[0])
