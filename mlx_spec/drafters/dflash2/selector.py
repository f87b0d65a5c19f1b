"""The candidate selector: a walk through the best 16 tokens of every row that scores neighbours together.

    score_t(a, b) = unary_t(b) + sum_r predecessor[a, r] * gate_t[r] * successor[b, r]

The walk starts at the anchor and picks row by row, inside the graph.
Source: Z Lab's DFlash 2 (``CandidateSelector`` of PyPI ``dflash`` 0.1.0).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx import nn

from mlx_spec.drafters.base import Draft, DraftRequest, stack_drawn
from mlx_spec.drafters.dflash2.config import DFlash2Config
from mlx_spec.target.linears import module_rows


class CandidateSelector(nn.Module):
    """The low-rank table of how well one token follows another, gated by the row's hidden state."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)
        self.successor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)


@dataclass(frozen=True)
class Candidates:
    """The best K tokens of every mask row of N blocks.

    ids: [N, k, K] int32, best first.
    unary: [N, k, K] float32, their transformed logits.
    gates: [N, k, R] float32, with R = 0 where the drafter has no selector (DFlash 1).
    successors: [N, k, K, R] float32.
    """

    ids: mx.array
    unary: mx.array
    gates: mx.array
    successors: mx.array


def gather_candidates(
    selector: CandidateSelector | None, hidden: mx.array, ids: mx.array, unary: mx.array
) -> Candidates:
    """Look up what the walk needs; scores are kept in float32.

    selector: None in DFlash 1.
    hidden: [N, k, H], of the mask rows.
    ids: [N, k, K] int32, of the candidates, best first.
    unary: [N, k, K], their transformed logits.
    """
    unary = unary.astype(mx.float32)
    if selector is None:
        return Candidates(ids, unary, mx.zeros((*ids.shape[:2], 0)), mx.zeros((*ids.shape, 0)))
    gates = module_rows(hidden, selector.hidden_projection).astype(mx.float32)
    return Candidates(ids, unary, gates, selector.successor_codebook(ids).astype(mx.float32))


def walk(
    selector: CandidateSelector | None,
    candidates: Candidates,
    requests: Sequence[DraftRequest],
    positions: Sequence[int],
    finite: Mapping[str, mx.array],
) -> list[Draft]:
    """Pick one candidate per row of each block, inside the graph.

    selector: None in DFlash 1.
    candidates: of the mask rows of N blocks.
    requests: of N sequences.
    positions: of their anchors.
    finite: by stage of the pass, bool [N], see Draft.
    """
    previous = mx.array([request.anchor for request in requests])
    paths: list[list[mx.array]] = [[] for _ in requests]
    drawn_by: list[list[mx.array]] = [[] for _ in requests]
    drawn_from: list[list[mx.array | None]] = [[] for _ in requests]
    for t in range(candidates.ids.shape[1]):
        scores = candidates.unary[:, t]
        if selector is not None:
            edge = selector.predecessor_codebook(previous).astype(mx.float32) * candidates.gates[:, t]
            scores = scores + (candidates.successors[:, t] @ edge[..., None])[..., 0]
        for n, request in enumerate(requests):
            if t < request.count:
                token, probabilities = request.sample_draft(positions[n] + 1 + t, candidates.ids[n, t], scores[n])
                paths[n].append(token)
                drawn_by[n].append(scores[n])
                drawn_from[n].append(probabilities)
        previous = mx.stack([path[-1] for path in paths])
    return [
        Draft(
            mx.stack(path).astype(mx.int32),
            candidates.ids[n, : len(path)],
            stack_drawn(drawn),
            {stage: flags[n] for stage, flags in finite.items()},
            mx.stack(drawn_by[n]),
        )
        for n, (path, drawn) in enumerate(zip(paths, drawn_from, strict=True))
    ]
