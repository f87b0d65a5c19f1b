"""The walk of a DFlash 2 selector over host arrays, a second opinion on the one inside the graph."""

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from mlx_spec.drafters.base import Draft, DraftRequest, stack_drawn
from mlx_spec.drafters.dflash2.selector import Candidates, CandidateSelector


def walk_on_host(
    selector: CandidateSelector | None,
    candidates: Candidates,
    requests: Sequence[DraftRequest],
    positions: Sequence[int],
    finite: Mapping[str, mx.array],
) -> list[Draft]:
    """Pick one candidate per row of each block, step by step in numpy; takes and returns what ``walk`` does."""
    ids, unary = np.array(candidates.ids), np.array(candidates.unary)
    gates, successors = np.array(candidates.gates), np.array(candidates.successors)
    proposals = []
    for n, request in enumerate(requests):
        previous, path, drawn_by, drawn_from = request.anchor, [], [], []
        for t in range(request.count):
            scores = unary[n, t]
            if selector is not None:
                row = np.array(selector.predecessor_codebook(mx.array([previous]))[0].astype(mx.float32))
                scores = scores + successors[n, t] @ (row * gates[n, t])
            token, probabilities = request.sample_draft(
                positions[n] + 1 + t, mx.array(ids[n, t]), mx.array(scores)
            )
            previous = int(np.array(token))
            path.append(previous)
            drawn_by.append(mx.array(scores))
            drawn_from.append(probabilities)
        tokens = mx.array(path, dtype=mx.int32)
        flags = {stage: flag[n] for stage, flag in finite.items()}
        drawn = candidates.ids[n, : request.count], stack_drawn(drawn_from)
        proposals.append(Draft(tokens, *drawn, flags, mx.stack(drawn_by)))
    return proposals
