"""What the engine gives an accept rule of a pass, for tests that judge drafts without an engine."""

from collections.abc import Sequence

import mlx.core as mx

from metal_kernels import argmax_rows
from mlx_spec.decoding.accept import AcceptRule, VerifiedRows
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.drafters.base import Draft


def accept(
    rule: AcceptRule,
    proposal: Draft,
    scores: mx.array,
    position: int,
    flags: Sequence[mx.array] = (),
    finite: mx.array | None = None,
) -> mx.array:
    """Judge drafts by the target's scores [k + 1, V], as ``mlx_spec.engine.verify`` does."""
    noisy = rule.perturbed_scores(scores, position, proposal.tree.depths)
    choices = None if noisy is None else argmax_rows(noisy)[0]
    return rule.accept(proposal, VerifiedRows(scores, position, choices, flags, finite))


def scores_of(sampling: Sampling, logits: mx.array, history: Sequence[int], drafts: mx.array) -> mx.array:
    """Return what the engine draws from: logits [R, V], processed and filtered."""
    positions = [len(history) + row for row in range(logits.shape[0])]
    return sampling.filtered(sampling.processed(logits, history, drafts), positions)
