"""The candidate selector: a walk through the best 16 tokens of every row that scores neighbours together.

    score_t(a, b) = unary_t(b) + sum_r predecessor[a, r] * gate_t[r] * successor[b, r]

The walk starts at the anchor and picks row by row. It runs inside the graph; ``walk_on_host`` is the same walk
over host arrays. Source: Z Lab's DFlash 2 (``CandidateSelector`` of PyPI ``dflash`` 0.1.0).
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx import nn

from metal_kernels import module_rows
from mlx_spec.drafters.base import Choose, stack_drawn
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
    """The best K tokens of every mask row.

    ids: [k, K] int32, best first. unary: [k, K] float32, their transformed logits. gates: [k, R] float32 and
    successors: [k, K, R] float32, with R = 0 where the drafter has no selector (DFlash 1).
    """

    ids: mx.array
    unary: mx.array
    gates: mx.array
    successors: mx.array


def gather_candidates(
    selector: CandidateSelector | None, hidden: mx.array, ids: mx.array, unary: mx.array
) -> Candidates:
    """Look up what the walk needs. hidden: [k, H], ids and unary: [k, K]. Scores are kept in float32."""
    unary = unary.astype(mx.float32)
    if selector is None:
        return Candidates(ids, unary, mx.zeros((ids.shape[0], 0)), mx.zeros((*ids.shape, 0)))
    gates = module_rows(hidden, selector.hidden_projection).astype(mx.float32)
    return Candidates(ids, unary, gates, selector.successor_codebook(ids).astype(mx.float32))


def walk(
    selector: CandidateSelector | None, candidates: Candidates, anchor: int, position: int, choose: Choose
) -> tuple[mx.array, mx.array | None]:
    """Pick one candidate per row, inside the graph.

    ``position`` is that of the anchor. Returns tokens [k] int32, and the probabilities [k, K] that ``choose`` drew
    from, or None when it drew from none.
    """
    previous, path, drawn_from = mx.array(anchor), [], []
    for t in range(candidates.ids.shape[0]):
        scores = candidates.unary[t]
        if selector is not None:
            edge = selector.predecessor_codebook(previous[None])[0].astype(mx.float32) * candidates.gates[t]
            scores = scores + candidates.successors[t] @ edge
        previous, probabilities = choose(position + 1 + t, candidates.ids[t], scores)
        path.append(previous)
        drawn_from.append(probabilities)
    return mx.stack(path).astype(mx.int32), stack_drawn(drawn_from)


def walk_on_host(
    selector: CandidateSelector | None, candidates: Candidates, anchor: int, position: int, choose: Choose
) -> tuple[mx.array, mx.array | None]:
    """Do what ``walk`` does over host arrays: one synchronisation before it, then 17 short rows a step.

    Slower than ``walk`` wherever the host has to wait for the device, so it is not the default.
    """
    ids, unary = np.array(candidates.ids), np.array(candidates.unary)
    gates, successors = np.array(candidates.gates), np.array(candidates.successors)
    previous, path, drawn_from = anchor, [], []
    for t in range(ids.shape[0]):
        scores = unary[t]
        if selector is not None:
            row = np.array(selector.predecessor_codebook(mx.array([previous]))[0].astype(mx.float32))
            scores = scores + successors[t] @ (row * gates[t])
        token, probabilities = choose(position + 1 + t, mx.array(ids[t]), mx.array(scores))
        previous = int(np.array(token))
        path.append(previous)
        drawn_from.append(probabilities)
    return mx.array(path, dtype=mx.int32), stack_drawn(drawn_from)
