"""One round: draft, verify, accept, commit. Each step returns what it found; generations change in commit alone.

shares   -> draft  -> [Drafted]      lazy
         -> verify -> [Verified]     lazy, then the round's one host synchronisation
         -> accept -> [Accepted]     host numbers
         -> commit -> {generation: Round}

Of a single generation, ``draft_ahead`` queues the next round's draft before the host waits for this one's outcome.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from metal_kernels.launching.implementations import is_eager
from mlx_spec.decoding.grammar import Place
from mlx_spec.decoding.logprobs import TokenLogprobs
from mlx_spec.drafters.base import Draft, Unread, nothing_drafted
from mlx_spec.drafters.known import with_known
from mlx_spec.drafters.lookup.lookup import Lookup
from mlx_spec.drafters.siblings import with_siblings
from mlx_spec.drafters.tree import Tree, rows_of_path
from mlx_spec.engine.at_rest import compute
from mlx_spec.engine.costs import Setting, Shape
from mlx_spec.engine.drafter_states import DrafterStates
from mlx_spec.engine.generation import Generation, Round
from mlx_spec.engine.scheduler import Share, setting_of
from mlx_spec.engine.statistics import Statistics
from mlx_spec.engine.verify import (
    Drafted,
    Errors,
    Verified,
    for_each,
    read_outcome,
    up_to_difference,
    verify_drafts,
)
from mlx_spec.errors import RequestError
from mlx_spec.target import Pass, Target

# Every so many rounds the device is awaited between draft and verify, to know what each of them takes.
TIMED_EVERY = 16


@dataclass(frozen=True)
class Snapshot:
    """A generation before a round, to which an interrupted round goes back."""

    generation: Generation
    num_tokens: int
    statistics: Statistics
    place: Place | None

    @staticmethod
    def of(generation: Generation) -> "Snapshot":
        """Remember what a round may change."""
        return Snapshot(generation, len(generation.tokens), generation.statistics.copy(), generation.place)

    def restore(self, states: DrafterStates) -> None:
        """Forget what a round that broke off left of itself."""
        generation = self.generation
        del generation.tokens[self.num_tokens :]
        generation.finish_reason = None
        generation.place, generation.planned = self.place, None
        # The same object, which responses hold.
        vars(generation.statistics).update(vars(self.statistics))
        generation.sequence.rewind(generation.anchor_position)
        states.rewind(generation, generation.anchor_position)


@dataclass(frozen=True)
class VerifiedPass:
    """A pass that the host has waited for.

    passed: its rows.
    indices: the number of each generation in it.
    parts: how it judged their drafts.
    is_timed: the device was awaited before the pass, too.
    draft_seconds, seconds: what the host waited for drafts, where it did, and for the pass.
    """

    passed: Pass
    indices: dict[Generation, int]
    parts: list[Verified]
    is_timed: bool
    draft_seconds: float
    seconds: float


@dataclass(frozen=True)
class Accepted:
    """What a generation gets of a pass.

    path: the rows that emit tokens.
    tokens: what is emitted, up to the end of the text.
    finish_reason: why the text ends with these tokens, if it does.
    rows: the rows that become part of the sequence.
    logprobs: of each token, where they are asked for.
    place: after these tokens, in the grammar.
    """

    drafted: Drafted
    path: tuple[int, ...]
    tokens: list[int]
    finish_reason: str | None
    rows: Pass
    logprobs: list[TokenLogprobs]
    place: Place | None

    @property
    def generation(self) -> Generation:
        """Whose round it is."""
        return self.drafted.generation

    @property
    def token_ids(self) -> mx.array:
        """The tokens of ``rows``, int32: the anchor, and all that is emitted but the last."""
        return rows_of_path(self.drafted.token_ids, self.path[: len(self.tokens)])


@dataclass(frozen=True)
class Taught:
    """What a round teaches: acceptance, and what rounds of such a shape take, in milliseconds."""

    accepted: list[Accepted] = field(default_factory=list)
    times: list[tuple[Setting, Shape, float]] = field(default_factory=list)


def run_round(
    target: Target,
    states: DrafterStates,
    shares: Sequence[Share],
    errors: Errors,
    taught: Taught,
    answering: bool = False,
) -> dict[Generation, Round]:
    """Run one pass for these generations, and return what each of them got.

    target, states: what runs, and what the drafter remembers.
    shares: what each generation gets of the pass.
    errors: what goes wrong with a generation alone is added; it is as before, and the others go on.
    taught: what the round teaches is added, for ``learn``, once nothing can break the round off any more.
    answering: full logits have the last word, see ``Engine.answer_step``.
    """
    started = time.perf_counter()
    drafted = draft(states, shares, errors)
    if not drafted:
        return {}
    verified = verify(target, states, drafted, started, answering, errors)
    accepted = accept(target, verified, errors)
    for generation in errors:
        generation.ahead = generation.planned = None
    time_of_round = None if answering or verified.is_timed else setting_and_shape(drafted)
    rounds = commit(target, states, accepted, started)
    taught.accepted.extend(accepted)
    if time_of_round is not None and not errors:
        taught.times.append((*time_of_round, (time.perf_counter() - started) * 1e3))
    if verified.is_timed and (timed := drafted[0].generation) in rounds:
        passes = verified.draft_seconds, verified.seconds
        timed.statistics.count_timed(*passes, time.perf_counter() - started - sum(passes))
    return rounds


def draft(states: DrafterStates, shares: Sequence[Share], errors: Errors) -> list[Drafted]:
    """Draft for all generations in one draft pass; some may get nothing."""
    drafts = made_ahead(shares)
    drafting = [share for share in shares if share.drafts and share.generation not in drafts]
    proposed = states.propose([(share.generation, share.depth) for share in drafting])
    drafts |= {share.generation: found for share, found in zip(drafting, proposed, strict=True)}

    def of_share(share: Share) -> Drafted:
        generation = share.generation
        found = with_known(checked(drafts.get(generation, nothing_drafted()), share.max_rows), share.known)
        # Several generations need the rows, and a known token has no runner-up.
        if len(shares) == 1 and not share.known:
            siblings = generation.policy.siblings(len(found.tree.chain) - 1)
            found = with_siblings(found, siblings)
        was_known = generation.drafter_state is not None and not share.known
        return Drafted(share, found, sources_of(share, len(found.tree.chain) - 1, states.name), was_known)

    return for_each(shares, of_share, errors)


def sources_of(share: Share, drafted: int, drafter: str) -> tuple[tuple[str, int], ...]:
    """Return who drafted how many tokens of a chain of ``drafted``, in order."""
    known = [("grammar", len(share.forced)), (Lookup.name, len(share.known) - len(share.forced))]
    return tuple((name, count) for name, count in (*known, (drafter, drafted - len(share.known))) if count > 0)


def made_ahead(shares: Sequence[Share]) -> dict[Generation, Draft]:
    """Return the drafts that were made in the round before, as long as they may be now; none are left after."""
    found = {
        share.generation: share.generation.ahead.draft.first(share.depth)
        for share in shares
        if share.generation.ahead is not None and share.depth
    }
    for share in shares:
        share.generation.ahead = share.generation.planned = None
    return found


def draft_ahead(target: Target, states: DrafterStates, part: Verified, passed: Pass) -> None:
    """Let the device draft for the next round of a single generation, while the host reads this one.

    How many tokens is decided by what the rounds before this one taught. Where the text ends in this round, or the
    next one is to be timed, nothing is drafted; nor where this one copies, because the next one likely does, too.
    """
    generation, drafted = part.generation, part.drafted
    is_next_timed = (generation.statistics.rounds + 1) % TIMED_EVERY == 0
    if not states.drafts_ahead or not generation.may_draft or is_next_timed or drafted.share.copied:
        return
    left = min(generation.remaining_tokens, target.context - generation.sequence.length)
    generation.planned = max(0, min(generation.policy.depth(), left - 2))
    unread = Unread(
        generation.anchor_position, drafted.tree, drafted.token_ids, passed.aux_hidden_states, part.outcome
    )
    states.propose_ahead(generation, generation.planned, unread)
    compute(generation.ahead)


def checked(found: Draft, max_rows: int) -> Draft:
    """Return a draft. Raises RequestError where anchor and drafts are more than ``max_rows``."""
    if found.tree.num_rows > max_rows:
        raise RequestError(
            f"The drafter proposed {found.tree.num_rows - 1} tokens, but beside the anchor this pass has "
            f"{max_rows - 1} rows for them."
        )
    return found


def verify(
    target: Target,
    states: DrafterStates,
    drafted: Sequence[Drafted],
    drafting_since: float,
    answering: bool,
    errors: Errors,
) -> VerifiedPass:
    """Run the pass over the rows of all generations, judge the drafts, and wait for both."""
    drafting = seconds_of_calls(drafting_since)
    drafts = [part.draft.tokens for part in drafted if part.draft.tokens.size]
    is_timed = bool(drafts) and drafted[0].generation.statistics.rounds % TIMED_EVERY == 0
    draft_seconds = drafting + wait(*drafts) if is_timed else 0.0
    mx.async_eval(*drafts)
    verifying_since = time.perf_counter()
    passed = target.forward(
        [(part.generation.sequence, part.token_ids) for part in drafted],
        states.target_layer_ids([part.generation for part in drafted]),
        paths_of([part.tree for part in drafted]),
    )
    logits = target.logits(passed.hidden)
    if any(part.generation.place is not None for part in drafted):
        # The device goes on with this while the host waits for drafts, and finds what may follow them.
        mx.async_eval(logits)
    parts = verify_drafts(drafted, logits, answering, errors)
    results = [array for part in parts for array in part.arrays]
    if len(parts) == 1 and not answering:
        mx.async_eval(*results, *passed.arrays)
        draft_ahead(target, states, parts[0], passed)
    verifying = seconds_of_calls(verifying_since)
    seconds = verifying + wait(*results, *passed.arrays)  # the round's one host synchronisation
    indices = {part.generation: index for index, part in enumerate(drafted)}
    return VerifiedPass(passed, indices, parts, is_timed, draft_seconds, seconds)


def accept(target: Target, verified: VerifiedPass, errors: Errors) -> list[Accepted]:
    """Read back what each generation emits, and where it ends."""

    def of_part(part: Verified) -> Accepted:
        generation = part.generation
        emitted, path = read_outcome(part)
        if generation.request.on_verified is not None:
            rows = [part.drafted.token_ids, part.logits]
            seen = rows if part.drafted.tree.is_chain else [rows_of_path(x, path) for x in rows]
            generation.request.on_verified(generation.sequence, *seen)
        if part.answers is not None:
            answers = np.array(part.answers)
            emitted = up_to_difference(emitted, [int(answers[row]) for row in path])
            path = path[: len(emitted)]
        tokens, finish_reason = generation.cut(emitted, target.context)
        return Accepted(
            part.drafted,
            path,
            tokens,
            finish_reason,
            verified.passed.path(verified.indices[generation], path[: len(tokens)]),
            part.logprobs.read(path[: len(tokens)]) if part.logprobs else [],
            place_after(generation, tokens),
        )

    return for_each(verified.parts, of_part, errors)


def place_after(generation: Generation, tokens: Sequence[int]) -> Place | None:
    """Return where a text stands in its grammar after new tokens. Raises RequestError where that breaks off."""
    if generation.place is None:
        return None
    place = generation.place.after(tokens)
    if place is None:
        raise RequestError(
            f"The grammar got too complex after position {generation.anchor_position}: llguidance does not follow "
            "the text any further. Simplify the grammar."
        )
    return place


def commit(
    target: Target, states: DrafterStates, accepted: Sequence[Accepted], started: float
) -> dict[Generation, Round]:
    """Make accepted rows part of their sequences, show them to the drafter, and append the emitted tokens."""
    target.commit_all([(each.generation.sequence, each.rows) for each in accepted])
    states.extend([(each.generation, each.rows, each.token_ids) for each in accepted])
    seconds = time.perf_counter() - started
    return {each.generation: emit(each, seconds) for each in accepted}


def emit(accepted: Accepted, seconds: float) -> Round:
    """Append committed tokens to their generation, and count them."""
    generation, tree = accepted.generation, accepted.drafted.tree
    generation.tokens.extend(accepted.tokens)
    generation.finish_reason = accepted.finish_reason
    generation.place = accepted.place
    if accepted.finish_reason is not None:
        generation.ahead = None
    from_draft, along_chain = len(accepted.path) - 1, tree.along_chain(accepted.path)
    drafted = len(tree.chain) - 1
    generation.statistics.count_round(
        drafted=drafted,
        accepted=along_chain,
        emitted=len(accepted.tokens),
        sources=accepted.drafted.sources,
        siblings=tree.num_rows - 1 - drafted,
        accepted_siblings=from_draft - along_chain,
        seconds=seconds,
    )
    from_draft = min(from_draft, len(accepted.tokens))
    return Round(accepted.tokens, from_draft, accepted.logprobs, accepted.finish_reason)


def setting_and_shape(drafted: Sequence[Drafted]) -> tuple[Setting, Shape] | None:
    """Return what the time of a round is the time of; None where it waits for a prompt, or a grammar drafted."""
    generations = [part.generation for part in drafted]
    if not all(part.was_known or part.share.copied for part in drafted if part.draft.tokens.size):
        return None
    if not all(generation.statistics.rounds for generation in generations):
        return None
    depths = [0 if part.share.copied else len(part.tree.chain) - 1 for part in drafted]
    rows = sum(part.tree.num_rows for part in drafted)
    return setting_of(generations), Shape(max(depths), rows, max(1, sum(depth > 0 for depth in depths)))


def learn(accepted: Accepted) -> None:
    """Let a generation's policy learn from a round that stays."""
    tree, path, policy = accepted.drafted.tree, accepted.path, accepted.generation.policy
    if accepted.drafted.was_known:
        policy.update(len(tree.chain) - 1, tree.along_chain(path), tree.runner_up(path))
    elif accepted.drafted.share.known:
        policy.update(0, tree.along_chain(path), None)


def paths_of(trees: Sequence[Tree]) -> list[Sequence[int]] | None:
    """Return the path to each row of a pass, or None where no generation's rows branch."""
    if all(tree.is_chain for tree in trees):
        return None
    return [path for tree in trees for path in tree.paths]


def seconds_of_calls(since: float) -> float:
    """Return the time in which operations were called, where that computes them; elsewhere it is the host's."""
    return time.perf_counter() - since if is_eager() else 0.0


def wait(*arrays: mx.array) -> float:
    """Wait until arrays are computed and return the seconds that took."""
    started = time.perf_counter()
    mx.eval(*arrays)
    return time.perf_counter() - started
