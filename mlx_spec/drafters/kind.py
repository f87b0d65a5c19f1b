"""What the loader needs to know of a kind of drafter. Each folder beside this file defines one as ``KIND``."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_spec.checkpoints.tensors import tensor_names, weight_files
from mlx_spec.drafters.base import ObservedDrafter
from mlx_spec.drafters.reference import Formula
from mlx_spec.drafters.variants import Variant
from mlx_spec.errors import RequestError
from mlx_spec.target import Target

# Bits a weight that a head may be quantised to at load; the largest means not at all.
BITS, GROUP_SIZE = (2, 3, 4, 5, 6, 8, 16), 64


@dataclass(frozen=True)
class DrafterSource:
    """A drafter's checkpoint.

    place: its folder, or the file that holds an MTP head.
    name: of the folder or repo, for messages.
    config: its ``config.json``; the target's where it has none of its own.
    model_config: the target's ``config.json``.
    """

    place: Path
    name: str
    config: Mapping[str, Any]
    model_config: Mapping[str, Any]

    @cached_property
    def tensors(self) -> set[str]:
        """Names of the tensors in its files, as far as these can be read."""
        place = self.place
        return tensor_names([place] if place.is_file() else weight_files(place, self.name), self.name)


@dataclass(frozen=True)
class DrafterOptions:
    """What a user asks of a drafter at load.

    draft_ids: ascending token ids to draft from; None for all.
    draft_bits: one of BITS, to quantise a head that is not quantised; None for the kind's default.
    dequantize: whether quantised products are slow here.
    """

    draft_ids: Sequence[int] | None = None
    draft_bits: int | None = None
    dequantize: bool = False

    def __post_init__(self) -> None:
        if self.draft_bits is not None and self.draft_bits not in BITS:
            raise RequestError(f"draft_bits takes {', '.join(map(str, BITS))}, not {self.draft_bits}.")

    def quantization(self, default: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return how to quantise a head: as requested, else by ``default``; not at all where that is slow."""
        if self.draft_bits is None:
            return None if self.dequantize else default
        return None if self.draft_bits == max(BITS) else {"group_size": GROUP_SIZE, "bits": self.draft_bits}

    def refuse_for(self, name: str) -> None:
        """Raise RequestError where an option is set that only heads have."""
        bits = None if self.draft_bits == max(BITS) else self.draft_bits
        for option, value in (("draft_vocab", self.draft_ids), ("draft_bits", bits)):
            if value is not None:
                raise RequestError(f"{option} is for MTP and EAGLE heads; {name} is used as it is.")


@dataclass(frozen=True)
class Kind:
    """A kind of drafter.

    name: of its drafters, and what ``--drafter`` takes for the demo's.
    title: for messages, such as "MTP head".
    trainer: the module in tools/ that trains one.
    claims: whether a ``config.json`` and the names of tensors alone identify a checkpoint of this kind.
    matches: whether a checkpoint is of this kind, for a target with a number of layers.
    load: reads a checkpoint and binds it to its target.
    indexed_files: names the files of a repo that hold the drafter, from its ``config.json``, its index (tensor to
        file) and its name; None where all files are needed.
    formulas: the stages of a pass from the checkpoint's own tensors, for a drafter, its target, the steps of the
        pass and the rows that wait before it.
    variants: the contracts that a checkpoint may mean instead, for a drafter and its target.
    lies_in_model: whether a model's own checkpoint may hold one.
    """

    name: str
    title: str
    trainer: str
    claims: Callable[[Mapping[str, Any], Collection[str]], bool]
    matches: Callable[[DrafterSource, int], bool]
    load: Callable[[DrafterSource, Target, DrafterOptions], ObservedDrafter]
    variants: Callable[[Any, Target], list[Variant]]
    formulas: Callable[[DrafterSource, Any, Target, int, int], list[Formula]]
    indexed_files: Callable[[Mapping[str, Any], Mapping[str, str], str], list[str]] | None = None
    lies_in_model: bool = False
