"""The wirings of a chain drafter's checkpoint: the one that it declares, and those that may be meant instead."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx

from mlx_spec.drafters.chain import HeadForward
from mlx_spec.drafters.draft_head import DraftHead


@dataclass(frozen=True)
class Wiring:
    """One way to run a head.

    forward: of the head.
    target_layer_ids: the target layers whose outputs it reads, see Target.
    head: its output head.
    """

    forward: HeadForward
    target_layer_ids: tuple[int, ...]
    head: DraftHead


@dataclass(frozen=True)
class Wirings:
    """The declared wiring of a head, and others.

    declared: the wiring.
    others: by name, wirings that differ from it in one point.
    embed: looks up embeddings, [R] int32 to [R, H].
    steps: how many tokens of a chain have to be compared for every difference to show.
    """

    declared: Wiring
    others: Mapping[str, Wiring]
    embed: Callable[[mx.array], mx.array]
    steps: int
