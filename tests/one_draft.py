"""A drafter's verbs for a single sequence."""

from typing import Any

import mlx.core as mx
import pytest
from choosing import rule_of

from mlx_spec.drafters.base import Committed, Draft, Drafter, DraftRequest
from mlx_spec.drafters.dflash2.drafter import DFlash2Drafter
from mlx_spec.drafters.dflash2.writer import BlockState
from mlx_spec.drafters.kv import packed, unpacked


def propose(drafter: Drafter, state: Any, anchor: int, count: int, choose: Any) -> Draft:
    """Draft ``count`` tokens after the anchor of one sequence. ``choose``: a rule or a function, see choosing."""
    (proposal,) = drafter.propose([DraftRequest(state, anchor, count, rule_of(choose))])
    return proposal


def extend(drafter: Drafter, state: Any, rows: Committed) -> None:
    """Show the drafter committed rows of one sequence."""
    drafter.extend([(state, rows)])


def block(drafter: DFlash2Drafter, state: BlockState, anchor: int, rows: int) -> mx.array:
    """Run the block forward of one sequence: [rows, H]."""
    drafter.writer.write([state])
    numbers = packed([state.context], [anchor], [state.position])
    (anchors, positions), pages = unpacked(numbers, 1, 2)
    return drafter._block(anchors, positions, pages, drafter.pool.data, rows)[0]


def written_rows(drafter: DFlash2Drafter, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of rows of every write to contexts from now on."""
    counts: list[int] = []
    compute = drafter.writer.project

    def counted(features: mx.array, positions: mx.array) -> mx.array:
        counts.append(features.shape[0])
        return compute(features, positions)

    monkeypatch.setattr(drafter.writer, "project", counted)
    return counts
