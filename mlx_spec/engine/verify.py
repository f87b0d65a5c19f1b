"""What stands of the drafts of a pass, and what the target says behind it, for all lanes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx

from metal_kernels import argmax_rows
from mlx_spec.decoding.accept import Verified
from mlx_spec.engine.slot import Lane
from mlx_spec.decoding.logprobs import RowLogprobs
from mlx_spec.drafters.tree import Tree


@dataclass
class Judged:
    """What a lane's rows are judged by.

    processed, scores: [k + 1, V], see Sampling. noisy: see AcceptRule. finite: bool [k + 1], whether the logits of
    a row are. choices: int32 [k + 1], the largest entries of noisy.
    """

    processed: mx.array
    finite: mx.array
    scores: mx.array
    noisy: mx.array | None = None
    choices: mx.array | None = None


def judge(lanes: Sequence[Lane], logits: mx.array, answering: bool) -> None:
    """Let each lane's rule judge its drafts by the logits [R, V] of all rows, lane behind lane.

    Operations on whole vocabularies run over the rows of all lanes at once, where these are treated alike.
    """
    parts, finite = split(lanes, logits), split(lanes, mx.all(mx.isfinite(logits), axis=-1))
    found: dict[Lane, Judged] = {}
    for lane, part, flags in zip(lanes, parts, finite, strict=True):
        with lane.keeping_errors():
            generation = lane.generation
            proposal = lane.proposal
            part = generation.request.sampling.processed(part, generation.tokens, proposal.tokens, proposal.tree)
            found[lane] = Judged(part, flags, part)
    untouched = len(found) == len(lanes) and all(
        judged.processed is part for judged, part in zip(found.values(), parts, strict=True)
    )
    whole = logits if untouched else None
    score(found, whole)
    choose(found, whole)
    for lane, judged in found.items():
        with lane.keeping_errors():
            decide(lane, judged, answering)


def score(found: Mapping[Lane, Judged], logits: mx.array | None) -> None:
    """Filter the rows of all lanes, together where their filters are the same.

    logits: [R, V], where they hold the rows of all lanes.
    """
    samplings = [lane.generation.request.sampling for lane in found]
    if logits is not None and len({(s.temp, s.top_p, s.min_p, s.top_k) for s in samplings}) == 1:
        scores = samplings[0].filtered(logits)
        if scores is not logits:
            for judged, part in zip(found.values(), split(list(found), scores), strict=True):
                judged.scores = part
        return
    for lane, judged in found.items():
        judged.scores = lane.generation.request.sampling.filtered(judged.processed)


def choose(found: Mapping[Lane, Judged], logits: mx.array | None) -> None:
    """Find what the target says in each row, for all rules that take the largest entry.

    logits: [R, V], where they hold the rows of all lanes.
    """
    for lane, judged in found.items():
        judged.noisy = lane.generation.rule.noisy(judged.scores, lane.count - 1, lane.tree.depths)
    chosen = {lane: judged.noisy for lane, judged in found.items() if judged.noisy is not None}
    if not chosen:
        return
    untouched = len(chosen) == len(found) and all(found[lane].processed is rows for lane, rows in chosen.items())
    if logits is None or not untouched:
        rows = list(chosen.values())
        logits = rows[0] if len(rows) == 1 else mx.concatenate(rows)
    for lane, choices in zip(chosen, split(list(chosen), argmax_rows(logits)[0]), strict=True):
        found[lane].choices = choices


def decide(lane: Lane, judged: Judged, answering: bool) -> None:
    """Accept what stands of a lane's drafts."""
    request, rule = lane.generation.request, lane.generation.rule
    flags = list(lane.proposal.finite.values())
    verified = Verified(judged.scores, lane.count - 1, judged.choices, flags, judged.finite)
    lane.outcome = rule.accept(lane.proposal, verified)
    if answering:
        lane.answers = mx.argmax(judged.processed, axis=-1).astype(mx.int32)
    if answering or request.logprobs or request.top_logprobs:
        said = said_by_rows(lane.outcome, lane.tree) if lane.answers is None else lane.answers
        lane.logprobs = RowLogprobs.of(judged.processed, said, request.top_logprobs)


def said_by_rows(outcome: mx.array, tree: Tree) -> mx.array:
    """Return the token of each row by what was accepted: [k + 1] int32; rows that do not stand say anything."""
    k = tree.rows - 1
    return tree.said(outcome[k], outcome[:k], outcome[k + 1])


def split(lanes: Sequence[Lane], of_rows: mx.array) -> list[mx.array]:
    """Cut what was computed of each row, [R, ...], into the parts of the lanes."""
    if len(lanes) == 1:
        return [of_rows]
    return list(mx.split(of_rows, list(accumulate(lane.tree.rows for lane in lanes))[:-1]))
