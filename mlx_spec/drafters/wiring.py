"""The readings of a chain drafter's checkpoint: the one that it declares, and those that may be meant instead."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx

from mlx_spec.drafters.chain import HeadForward
from mlx_spec.drafters.draft_head import DraftHead


@dataclass(frozen=True)
class Wiring:
    """One reading: the head's forward, the hidden states of the target that it reads, and its output head."""

    forward: HeadForward
    target_layer_ids: tuple[int, ...]
    head: DraftHead


@dataclass(frozen=True)
class Wirings:
    """The declared reading of a head, and by name those that differ from it in one point.

    embed: looks up embeddings, [R] to [R, H].
    steps: how many tokens of a chain have to be compared for every difference to show.
    """

    declared: Wiring
    others: Mapping[str, Wiring]
    embed: Callable[[mx.array], mx.array]
    steps: int
