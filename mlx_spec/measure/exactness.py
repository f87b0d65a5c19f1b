"""Checks once per machine, model and version whether a model's rows are batch-invariant."""

from typing import Any

from tqdm import tqdm

from mlx_spec.diagnose.rows import check_rows, check_tree
from mlx_spec.engine.statistics import Exactness
from mlx_spec.measure import store
from mlx_spec.target import Target

OFF = Exactness(False, "turned off: MLX's own operations run, whose rows may depend on each other")
# How many rows of each pass are computed alone, too.
COMPARED = 4


def checked_exactness(target: Target, most_rows: int, progress: bool = False) -> Exactness:
    """Compare passes of 2 and of ``most_rows`` rows with one row at a time, or return the stored result."""
    exactness = stored_exactness(target, most_rows)
    if exactness is None:
        exactness = check(target, counts_of(most_rows), progress)
        store.write(key_of(target, most_rows), {"exact": exactness.holds, "reason": exactness.reason})
    return exactness


def stored_exactness(target: Target, most_rows: int) -> Exactness | None:
    """Return the result that an earlier process stored, if any."""
    return from_json(store.read().get(key_of(target, most_rows)))


def counts_of(most_rows: int) -> list[int]:
    """Return the rows of the passes that are compared."""
    return sorted({2, most_rows})


def key_of(target: Target, most_rows: int) -> str:
    """Return a key of machine, model and versions."""
    return store.key(target, f"passes of {counts_of(most_rows)} rows and a tree")


def check(target: Target, counts: list[int], progress: bool = False) -> Exactness:
    """Compare passes of ``counts`` rows, and one whose rows form a tree, with one row at a time."""
    found = []
    total = len(counts) + target.takes_trees
    with tqdm(desc="Checking rows, once", total=total, leave=False, disable=not progress) as bar:
        for difference in check_rows(target, counts, COMPARED):
            found.append(difference)
            bar.update()
        if target.takes_trees:
            found.append(check_tree(target, COMPARED))
    differences = [d for d in found if d is not None]
    if differences:
        return Exactness(False, str(differences[0]))
    return Exactness(True, f"passes of {' and '.join(map(str, counts))} rows equal one row at a time")


def from_json(entry: Any) -> Exactness | None:
    """Return the result of a stored entry, or None where it is missing or damaged."""
    if not isinstance(entry, dict):
        return None
    holds, reason = entry.get("exact"), entry.get("reason")
    return Exactness(holds, reason) if isinstance(holds, bool) and isinstance(reason, str) else None
