"""The candidate selector: a walk through the best 16 tokens of every row that scores neighbours together.

    score_t(a, b) = unary_t(b) + sum_r predecessor[a, r] * gate_t[r] * successor[b, r]

The scores of all neighbours are computed at once; the walk starts at the anchor and picks row by row.
Source: Z Lab's DFlash 2 (``CandidateSelector`` of PyPI ``dflash`` 0.1.0).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
from mlx import nn

from metal_kernels import walk_rows
from mlx_spec.drafters.base import DraftRule
from mlx_spec.drafters.dflash2.config import DFlash2Config


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
    """

    ids: mx.array
    unary: mx.array
    gates: mx.array


class Walked(NamedTuple):
    """The picked candidates of N blocks.

    tokens: [N, k] int32.
    ranks: [N, k, K] float32, see ``Drawn``.
    probabilities: of each block [k, K] float32, see ``Drawn``.
    """

    tokens: mx.array
    ranks: mx.array
    probabilities: list[mx.array | None]


def scores_after_each(selector: CandidateSelector | None, candidates: Candidates, anchors: mx.array) -> mx.array:
    """Return the scores of candidates after each candidate of the row before: float32 [N, k, K, K].

    selector: None in DFlash 1, whose candidates have their unary scores after any.
    anchors: int32 [N], which the first row's candidates follow, whatever the third axis says.
    """
    ids, unary = candidates.ids, candidates.unary[:, :, None]
    if selector is None:
        return mx.broadcast_to(unary, (*ids.shape, ids.shape[-1]))
    first = mx.broadcast_to(anchors[:, None, None], (ids.shape[0], 1, ids.shape[-1]))
    previous = mx.concatenate([first, ids[:, :-1]], axis=1)
    edges = selector.predecessor_codebook(previous).astype(mx.float32) * candidates.gates[:, :, None]
    return unary + edges @ selector.successor_codebook(ids).astype(mx.float32).swapaxes(-1, -2)


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
    ids, scores = candidates.ids, scores_after_each(selector, candidates, anchors)
    ranks = mx.stack(
        [
            rule.ranks(ids[n][:, None], scores[n], None if noise is None else noise[:, None])
            for n, (rule, noise) in enumerate(zip(rules, noises, strict=True))
        ]
    )
    picks = walk_rows(ranks)
    before = mx.pad(picks[:, :-1], [(0, 0), (1, 0)])[:, :, None, None]
    of_path = mx.take_along_axis(scores, before, axis=2).squeeze(2)
    return Walked(
        mx.take_along_axis(ids, picks[:, :, None], axis=-1).squeeze(-1),
        mx.take_along_axis(ranks, before, axis=2).squeeze(2),
        [rule.probabilities(of_path[n]) for n, rule in enumerate(rules)],
    )
