"""How a pass judges the drafts of all its generations, lazily: only a grammar waits, for the drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Protocol, TypeVar

import mlx.core as mx
import numpy as np

from metal_kernels import argmax_rows, mask_rows
from mlx_spec.decoding.accept import VerifiedRows
from mlx_spec.decoding.grammar import Run, allowed_tokens
from mlx_spec.decoding.logprobs import RowLogprobs
from mlx_spec.drafters.base import Draft
from mlx_spec.drafters.tree import Tree
from mlx_spec.engine.generation import Generation
from mlx_spec.engine.scheduler import Share
from mlx_spec.errors import DrafterFailure, NonFiniteError


class Part(Protocol):
    """What a step makes of a generation's part of a round."""

    @property
    def generation(self) -> Generation:
        """Whose part it is."""
        ...


Input = TypeVar("Input", bound=Part)
Output = TypeVar("Output")
Errors = dict[Generation, Exception]
"""What went wrong with one generation of a round alone; it takes no further part, the others go on."""


@dataclass(frozen=True)
class Drafted:
    """A generation's part of a pass: its anchor, and the draft that follows it.

    share: what it was drafted for.
    sources: who drafted how many tokens of the chain, in order.
    was_known: whether the drafter remembered the sequence, and so could draft all of it.
    """

    share: Share
    draft: Draft
    sources: tuple[tuple[str, int], ...]
    was_known: bool

    @property
    def generation(self) -> Generation:
        """Whose part it is."""
        return self.share.generation

    @property
    def tree(self) -> Tree:
        """How the rows follow each other."""
        return self.draft.tree

    @cached_property
    def token_ids(self) -> mx.array:
        """The tokens of the rows, the anchor and the drafts: [k + 1] int32."""
        anchor = mx.array(self.generation.tokens[-1:], dtype=mx.int32)
        return mx.concatenate([anchor, self.draft.tokens])


@dataclass(frozen=True)
class Verified:
    """How a pass judged a generation's part, not yet read by the host.

    logits: [k + 1, V], as the target gives them.
    outcome: int32, see ``AcceptRule.accept``.
    answers: int32 [k + 1], the most likely token of each row's full logits, where these have the last word.
    logprobs: of what the rows emit, where they are asked for.
    """

    drafted: Drafted
    logits: mx.array
    outcome: mx.array
    answers: mx.array | None
    logprobs: RowLogprobs | None

    @property
    def generation(self) -> Generation:
        """Whose rows they are."""
        return self.drafted.generation

    @property
    def arrays(self) -> list[mx.array]:
        """All that the host reads."""
        results = [self.outcome] if self.answers is None else [self.outcome, self.answers]
        return results + (self.logprobs.arrays if self.logprobs else [])


@dataclass(frozen=True)
class Rows:
    """The rows of one generation on their way from logits to a choice.

    logits: [k + 1, V], the target's.
    finite: bool [k + 1], whether they are, and leave a token to choose by the grammar.
    processed, scores: [k + 1, V], see Sampling.
    choosable: [k + 1, V], from whose finite rows a token can be taken.
    runs: the rows at which a grammar rules.
    """

    drafted: Drafted
    logits: mx.array
    finite: mx.array
    processed: mx.array
    scores: mx.array
    choosable: mx.array
    runs: Sequence[Run] = ()

    @property
    def generation(self) -> Generation:
        """Whose rows they are."""
        return self.drafted.generation

    @property
    def positions(self) -> list[int]:
        """The positions of the tokens that are drawn from the rows."""
        return [self.generation.anchor_position + 1 + depth for depth in self.drafted.tree.depths]

    @property
    def usable(self) -> mx.array:
        """Whether a token can be taken from each row: bool [k + 1].

        Bias and processors may forbid tokens, by minus infinity, but not all of them.
        """
        if self.scores is self.choosable:
            return self.finite
        # Of nothing but minus infinity it is minus infinity, and NaN and infinity spread to it.
        return self.finite & mx.isfinite(mx.logsumexp(self.scores, axis=-1))


def verify_drafts(parts: Sequence[Drafted], logits: mx.array, answering: bool, errors: Errors) -> list[Verified]:
    """Judge the drafts of all generations by the logits of a pass.

    Operations on whole vocabularies run over the rows of all at once, where these are treated alike.

    parts: of the generations, in the order of their rows.
    logits: [R, V].
    answering: full logits have the last word, see ``Engine.answer_step``.
    errors: what goes wrong with a generation alone is added.
    """
    own, finite = split(parts, logits), split(parts, mx.all(mx.isfinite(logits), axis=-1))
    begun = [Rows(*each, each[1], each[1], each[1]) for each in zip(parts, own, finite, strict=True)]
    processed = for_each(begun, process, errors)
    # The pass's own array serves where no row was changed and none is left out.
    unchanged = len(processed) == len(begun) and all(rows.processed is rows.logits for rows in processed)
    allowed, whole = without_forbidden(processed, logits if unchanged else None)
    scored = filtered(allowed, whole)
    choices = argmax_choices(scored, whole)
    return for_each(scored, lambda rows: judge(rows, choices.get(rows.generation), answering), errors)


def process(rows: Rows) -> Rows:
    """Apply a request's bias, penalties and processors, and find the rows at which its grammar rules."""
    generation, drafted = rows.generation, rows.drafted
    sampling, tree, drafts = generation.request.sampling, drafted.tree, drafted.draft.tokens
    processed = sampling.processed(rows.logits, generation.tokens, drafts, tree)
    place = generation.place
    runs = [] if place is None else place.runs(np.array(drafts).tolist(), tree)
    return replace(rows, processed=processed, scores=processed, runs=runs)


def without_forbidden(every: Sequence[Rows], whole: mx.array | None) -> tuple[Sequence[Rows], mx.array | None]:
    """Forbid the tokens that grammars do not allow, by minus infinity: in one operation where no row was changed.

    whole: [R, V], where it holds the rows of all.
    Returns the rows, and what holds those of all.
    """
    *starts, num_rows = accumulate((rows.drafted.tree.num_rows for rows in every), initial=0)
    runs = [(start + run.row, run) for start, rows in zip(starts, every, strict=True) for run in rows.runs]
    allowed = allowed_tokens(runs, num_rows)
    if allowed is None:
        return every, whole
    drafted, bits = [rows.drafted for rows in every], mx.array(allowed.bits)
    if whole is None:
        parts = zip(every, split(drafted, bits), strict=True)
        masked = [mask_rows(rows.processed, bits) if rows.runs else rows.processed for rows, bits in parts]
    else:
        whole = mask_rows(whole, bits)
        masked = split(drafted, whole)
    usable = None if allowed.leaves_some.all() else split(drafted, mx.array(allowed.leaves_some))
    return [
        replace(
            rows,
            processed=scores,
            scores=scores,
            choosable=scores if rows.processed is rows.choosable else rows.choosable,
            finite=rows.finite if usable is None else rows.finite & usable[index],
        )
        for index, (rows, scores) in enumerate(zip(every, masked, strict=True))
    ], whole


def filtered(every: Sequence[Rows], whole: mx.array | None) -> list[Rows]:
    """Filter the rows of all generations, together where their filters are the same.

    whole: [R, V], where it holds the rows of all.
    """
    samplings = [rows.generation.request.sampling for rows in every]
    if whole is not None and len({sampling.filters for sampling in samplings}) == 1:
        scores = samplings[0].filtered(whole, [position for rows in every for position in rows.positions])
        if scores is whole:
            return list(every)
        parts = split([rows.drafted for rows in every], scores)
    else:
        parts = [s.filtered(rows.processed, rows.positions) for s, rows in zip(samplings, every, strict=True)]
    return [replace(rows, scores=part) for rows, part in zip(every, parts, strict=True)]


def argmax_choices(every: Sequence[Rows], whole: mx.array | None) -> dict[Generation, mx.array]:
    """Return the target's own token of each row, int32 [k + 1], for all rules that take the largest entry.

    whole: [R, V], where it holds the rows of all.
    """
    found = [(rows, scores) for rows in every if (scores := perturbed_scores(rows)) is not None]
    if not found:
        return {}
    unchanged = len(found) == len(every) and all(scores is rows.processed for rows, scores in found)
    if whole is None or not unchanged:
        whole = found[0][1] if len(found) == 1 else mx.concatenate([scores for _, scores in found])
    choices = split([rows.drafted for rows, _ in found], argmax_rows(whole)[0])
    return {rows.generation: part for (rows, _), part in zip(found, choices, strict=True)}


def perturbed_scores(rows: Rows) -> mx.array | None:
    """Return the scores of rows with the noise of their rule, see ``AcceptRule.perturbed_scores``."""
    generation = rows.generation
    return generation.rule.perturbed_scores(rows.scores, generation.anchor_position, rows.drafted.tree.depths)


def judge(rows: Rows, choices: mx.array | None, answering: bool) -> Verified:
    """Let a generation's rule accept what it accepts of the drafts."""
    drafted, generation = rows.drafted, rows.generation
    draft, request = drafted.draft, generation.request
    finite = list(draft.finite.values())
    verified = VerifiedRows(rows.scores, generation.anchor_position, choices, finite, rows.usable)
    outcome = generation.rule.accept(draft, verified)
    answers = mx.argmax(rows.processed, axis=-1).astype(mx.int32) if answering else None
    logprobs = None
    if answering or request.logprobs or request.top_logprobs:
        emitted = emitted_by_rows(outcome, drafted.tree) if answers is None else answers
        logprobs = RowLogprobs.of(rows.processed, emitted, request.top_logprobs)
    return Verified(drafted, rows.logits, outcome, answers, logprobs)


def emitted_by_rows(outcome: mx.array, tree: Tree) -> mx.array:
    """Return the token that each row emits by what was accepted: [k + 1] int32; rejected rows emit any."""
    k = tree.num_rows - 1
    return tree.emitted(outcome[k], outcome[:k], outcome[k + 1])


def split(parts: Sequence[Drafted], of_rows: mx.array) -> list[mx.array]:
    """Cut what was computed of each row, [R, ...], into the parts of the generations."""
    if len(parts) == 1:
        return [of_rows]
    return list(mx.split(of_rows, list(accumulate(part.tree.num_rows for part in parts))[:-1]))


def read_outcome(verified: Verified) -> tuple[list[int], tuple[int, ...]]:
    """Read back what a generation's rows emit, and the row that emits each of these tokens.

    Raises DrafterFailure where the draft pass produced NaN or infinity, NonFiniteError where the target did, or
    where bias and processors leave no token.
    """
    draft, generation = verified.drafted.draft, verified.drafted.generation
    values = [int(v) for v in np.array(verified.outcome)]
    k, position = draft.tokens.size, generation.anchor_position
    *stages, usable = values[k + 2 :]
    for stage, finite in zip(draft.finite, stages, strict=True):
        if not finite:
            raise DrafterFailure(f"the drafter's {stage} at position {position} holds NaN or infinity")
    path = draft.tree.paths[values[k]]
    if not usable:
        raise no_token(verified, path, position)
    return [*(values[row - 1] for row in path[1:]), values[k + 1]], path


def no_token(verified: Verified, path: Sequence[int], position: int) -> NonFiniteError:
    """Return the error of rows from which no token can be taken."""
    if mx.all(mx.isfinite(verified.logits[mx.array(list(path))])):
        what = "Bias" if verified.generation.place is None else "Grammar, bias"
        return NonFiniteError(
            f"{what}, penalties and logits processors leave no token to choose after position {position}: every "
            "score is minus infinity, or one is NaN or infinity. Allow at least one token."
        )
    return NonFiniteError(
        f"The target logits at position {position} hold NaN or infinity, so no token can be taken from them. "
        "Load the model in bfloat16 or float32, and check its weights."
    )


def up_to_difference(emitted: list[int], answers: list[int]) -> list[int]:
    """Return tokens up to the first that is not the row's answer, which takes its place."""
    differs = next(
        (i for i, (token, answer) in enumerate(zip(emitted, answers, strict=False)) if token != answer), None
    )
    return emitted if differs is None else [*emitted[:differs], answers[differs]]


def for_each(parts: Sequence[Input], step: Callable[[Input], Output], errors: Errors) -> list[Output]:
    """Return what a step makes of each generation's part; what it raises is kept as that generation's error."""
    done = []
    for part in parts:
        try:
            done.append(step(part))
        except Exception as error:
            errors[part.generation] = error
    return done
