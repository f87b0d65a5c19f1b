"""The costs that an engine learns from its rounds, kept between processes: nothing is timed for them."""

import logging
import math
from typing import Any

from metal_kernels.launching.implementations import Implementation, implementation
from mlx_spec.drafters.base import Drafter
from mlx_spec.engine.costs import Costs, Setting, Shape
from mlx_spec.engine.learned_costs import Known, LearnedCosts
from mlx_spec.measure import store
from mlx_spec.target import Target

# What passes of so many rows take, in passes of one row, until rounds were timed: by tables of an H200 and a CPU.
VERIFY: dict[Implementation, dict[int, float]] = {
    "native": {1: 1.0, 4: 1.1, 8: 1.3, 16: 1.7},
    "cpu": {1: 1.0, 2: 1.0, 8: 1.5, 16: 2.5},
    "stock": {1: 1.0, 2: 1.4, 8: 3.3, 16: 6.0},
    "reference": {1: 1.0, 16: 16.0},
}
# And what drafts of so many tokens take.
DRAFT = {1: 0.3, 7: 0.7, 15: 1.2}
# They are written again after so many more rounds, once a text ends.
ROUNDS = 32


logger = logging.getLogger(__name__)


class KeptCosts:
    """Learned costs, and the entry of the store that they come from and go to."""

    def __init__(self, target: Target, drafter: Drafter | None, drafter_name: str) -> None:
        """Begin with what earlier processes learned of this target and drafter, or with a guess."""
        self._key = store.key(target, drafter_name, str(drafter.max_draft if drafter else 0), "rounds")
        known = from_json(store.read().get(self._key))
        guess = Costs(VERIFY[implementation()], DRAFT)
        self.costs, self._written = LearnedCosts(guess, known, is_guess=True), 0

    def keep(self) -> None:
        """Write what was learned, unless that is hardly more than what was written."""
        if self.costs.num_learned - self._written >= ROUNDS:
            self._written = self.costs.num_learned
            store.write(self._key, as_json(self.costs))


def kept_costs(target: Target, drafter: Drafter | None, drafter_name: str) -> KeptCosts:
    """Return what is known of the costs of a target with a drafter, and where it is kept.

    drafter: None where tokens are only copied.
    drafter_name: identifies the drafter in the store.
    """
    kept = KeptCosts(target, drafter, drafter_name)
    logger.info(
        "Costs of %s with %s are %s.", target.name, drafter_name, "kept" if kept.costs.known() else "guessed"
    )
    return kept


def as_json(costs: LearnedCosts) -> list[list[Any]]:
    """Return a list for each shape: work, sequences, cached tokens, depth, rows, milliseconds, evidence."""
    return [[*each.setting, *each.shape[:2], each.ms, each.evidence] for each in costs.known()]


def from_json(entry: Any) -> list[Known]:
    """Return the shapes of a stored entry, none where it is missing or damaged."""
    try:
        found = [
            Known(
                Setting(str(work), int(sequences), int(cached)), Shape(int(depth), int(rows)), float(ms), float(n)
            )
            for work, sequences, cached, depth, rows, ms, n in entry
        ]
    except (TypeError, ValueError, OverflowError):
        return []
    return found if all(is_possible(each) for each in found) else []


def is_possible(known: Known) -> bool:
    """Whether there can be such a round."""
    (_, sequences, cached), (depth, rows, _), ms, evidence = known
    is_shape = 0 <= depth < rows <= 16 and 0 < sequences <= 16 and cached >= 0
    return is_shape and 0 < ms < math.inf and 0 <= evidence < math.inf
