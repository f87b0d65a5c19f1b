"""Loading a target with its drafter to diagnose them, with all that is known of the drafter's checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metal_kernels.launching.implementations import Implementation, using
from mlx_spec.engine import Engine
from mlx_spec.engine.costs import Costs
from mlx_spec.errors import DrafterMismatch
from mlx_spec.loading.drafter import AUTO, LoadedDrafter
from mlx_spec.loading.load import chosen_kernels, find_drafter, load_target
from mlx_spec.measure.costs import measured_costs
from mlx_spec.target import Target


@dataclass(frozen=True)
class Pair:
    """A target and its drafter.

    folder: of the target's checkpoint.
    found: the drafter, its kind and its checkpoint.
    costs: of passes on this machine.
    kernels: the implementation of the operations.
    """

    target: Target
    tokenizer: Any
    folder: Path
    found: LoadedDrafter
    costs: Costs
    kernels: Implementation

    def engine(self) -> Engine:
        """Return an engine that generates with both."""
        return Engine(self.target, self.found.drafter, self.costs, kernels=self.kernels)


def load_pair(
    model: str,
    drafter: str = AUTO,
    draft_bits: int | None = None,
    trust_remote_code: bool = False,
    progress: bool = False,
) -> Pair:
    """Load a target with its drafter; arguments, and what is raised, as of ``load``.

    Raises DrafterMismatch, too, where there is no drafter.
    """
    kernels = chosen_kernels(exact=True)
    with using(kernels):
        settings = {"trust_remote_code": trust_remote_code}
        target, tokenizer, source = load_target(model, settings, progress=progress)
        found, label = find_drafter(drafter, target, tokenizer, source, None, draft_bits, progress)
        if found is None:
            raise DrafterMismatch(f"{model} comes with no drafter: give --drafter the folder or repo of one.")
        costs = measured_costs(target, found.drafter, label, progress)
    return Pair(target, tokenizer, source.place, found, costs, kernels)
