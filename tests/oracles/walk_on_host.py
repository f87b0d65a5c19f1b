"""The walk of a DFlash 2 selector in numpy on the host, as an oracle of the walk in the graph."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_spec.drafters.base import DraftRule, Drawn, stacked
from mlx_spec.drafters.dflash2.selector import Candidates, CandidateSelector, Walked


def walk_on_host(
    selector: CandidateSelector | None,
    candidates: Candidates,
    anchors: mx.array,
    rules: Sequence[DraftRule],
    noises: Sequence[mx.array | None],
) -> Walked:
    """Choose a candidate for each row of each block; arguments and result are those of ``walk``."""
    ids, unary, gates = np.array(candidates.ids), np.array(candidates.unary), np.array(candidates.gates)
    paths: list[list[Drawn]] = []
    for n, rule in enumerate(rules):
        previous, path = int(anchors[n].item()), list[Drawn]()
        for t in range(ids.shape[1]):
            scores, noise = unary[n, t], noises[n]
            if selector is not None:
                row = np.array(selector.predecessor_codebook(mx.array([previous]))[0].astype(mx.float32))
                successors = np.array(selector.successor_codebook(mx.array(ids[n, t])).astype(mx.float32))
                scores = scores + successors @ (row * gates[n, t])
            path.append(rule.draw(mx.array(ids[n, t]), mx.array(scores), None if noise is None else noise[t]))
            previous = int(path[-1].token.item())
        paths.append(path)
    return Walked(
        mx.stack([mx.stack([each.token for each in path]) for path in paths]),
        mx.stack([mx.stack([each.ranks for each in path]) for path in paths]),
        [stacked([each.probabilities for each in path]) for path in paths],
    )
