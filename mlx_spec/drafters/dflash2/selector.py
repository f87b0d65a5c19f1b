"""The candidate selector: a walk through the best 16 tokens of every row that scores neighbours together.

    score_t(a, b) = unary_t(b) + sum_r predecessor[a, r] * gate_t[r] * successor[b, r]

The walk starts at the anchor and picks row by row, inside the graph.
Source: Z Lab's DFlash 2 (``CandidateSelector`` of PyPI ``dflash`` 0.1.0).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
from mlx import nn

from mlx_spec.drafters.base import DraftRule, Drawn, stacked
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


class Walked(NamedTuple):
    """The picked candidates of N blocks.

    tokens: [N, k] int32.
    ranks: [N, k, K] float32, see ``Drawn``.
    probabilities: [N, k, K] float32 or None, see ``Drawn``.
    """

    tokens: mx.array
    ranks: mx.array
    probabilities: list[mx.array | None]


def walk(
    selector: CandidateSelector | None,
    candidates: Candidates,
    anchors: mx.array,
    rules: Sequence[DraftRule],
    noises: Sequence[mx.array | None],
) -> Walked:
    """Pick one candidate per row of each block, inside the graph.

    selector: None in DFlash 1.
    candidates: of the k mask rows of N blocks.
    anchors: int32 [N].
    rules: of N requests.
    noises: of each for its k rows, see ``DraftRule.noise``.
    """
    previous, steps = anchors, list[list[Drawn]]()
    for t in range(candidates.ids.shape[1]):
        scores = candidates.unary[:, t]
        if selector is not None:
            edge = selector.predecessor_codebook(previous).astype(mx.float32) * candidates.gates[:, t]
            scores = scores + (candidates.successors[:, t] @ edge[..., None])[..., 0]
        drawn = [
            rule.draw(candidates.ids[n, t], scores[n], None if noise is None else noise[t])
            for n, (rule, noise) in enumerate(zip(rules, noises, strict=True))
        ]
        previous = mx.stack([each.token for each in drawn])
        steps.append(drawn)
    paths = list(zip(*steps, strict=True))
    return Walked(
        mx.stack([mx.stack([each.token for each in path]) for path in paths]),
        mx.stack([mx.stack([each.ranks for each in path]) for path in paths]),
        [stacked([each.probabilities for each in path]) for path in paths],
    )
