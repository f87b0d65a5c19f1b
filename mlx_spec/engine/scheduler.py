"""Who takes part in a round, and with how many rows: host numbers only, no arrays.

A draft is of use only when all drafts before it are accepted, so its chance is a product, and drops along a
sequence: the best rows of all sequences are always whole beginnings of drafts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from metal_kernels import MAX_VERIFY_ROWS
from mlx_spec.engine.costs import ALONE, RoundCosts, Setting, Shape
from mlx_spec.engine.draft_policy import MARGIN, DepthOffer
from mlx_spec.engine.generation import Generation
from mlx_spec.errors import ContextFull
from mlx_spec.target import CachedSequence, reserve_positions


@dataclass(frozen=True)
class Share:
    """What a generation gets of a pass.

    depth: tokens to draft.
    max_rows: the rows that it may have, the anchor's included.
    forced: tokens that its grammar forces, to be drafted first.
    """

    generation: Generation
    depth: int
    max_rows: int
    forced: tuple[int, ...] = ()


class Scheduler:
    """Gives turns, and shares the rows of each pass out."""

    def __init__(self, context: int, costs: RoundCosts | None) -> None:
        """Give no turn yet.

        context: positions of the target.
        costs: this machine's, where they are known.
        """
        self._context = context
        self._costs = costs
        self._turns = 0

    def next(self, generations: Sequence[Generation]) -> list[Generation]:
        """Return those whose turn it is: of more than there are rows, those that waited longest."""
        running = [generation for generation in generations if generation.finish_reason is None]
        if len(running) > MAX_VERIFY_ROWS:
            running = sorted(running, key=lambda generation: generation.last_turn)[:MAX_VERIFY_ROWS]
        for generation in running:
            self._turns += 1
            generation.last_turn = self._turns
        return running

    def to_read(self, generations: Sequence[Generation], chunks: Sequence[int]) -> list[Generation]:
        """Return those of whose prompts the next chunk is read in this round: no more than one chunk together.

        generations: whose prompts are not read; those that waited longest come first.
        chunks: how many tokens each one's next chunk has.
        """
        left, chosen = None, list[Generation]()
        for index in sorted(range(len(generations)), key=lambda i: generations[i].last_turn):
            step = generations[index].request.prefill_step_size
            left = step if left is None else min(left, step)
            if chosen and chunks[index] > left:
                break
            left -= chunks[index]
            chosen.append(generations[index])
        for generation in chosen:
            self._turns += 1
            generation.last_turn = self._turns
        return chosen

    def shares(self, generations: Sequence[Generation]) -> tuple[list[Share], dict[Generation, Exception]]:
        """Return what each generation gets, and the errors of those for which there is no page."""
        positions = reserve_positions([generation.sequence for generation in generations], MAX_VERIFY_ROWS)
        fits = [(generation, free) for generation, free in zip(generations, positions, strict=True) if free]
        errors: dict[Generation, Exception] = {
            generation: out_of_pages(generation.sequence)
            for generation, free in zip(generations, positions, strict=True)
            if not free
        }
        if not fits:
            return [], errors
        limits = [self._max_depth(generation, free) for generation, free in fits]
        if len(fits) == 1:
            generation, free = fits[0]
            depth = generation.policy.depth() if generation.planned is None else generation.planned
            forced = forced_tokens(generation, min(self._positions(generation, free), MAX_VERIFY_ROWS) - 1)
            return [Share(generation, min(depth, limits[0]), free, forced)], errors
        setting = setting_of([g for g, _ in fits])
        depths = share_rows(
            [g.policy.offer(len(fits)) for g, _ in fits], limits, MAX_VERIFY_ROWS, self._costs, setting
        )
        return [
            Share(g, depth, depth + 1, forced_tokens(g, depth)) for (g, _), depth in zip(fits, depths, strict=True)
        ], errors

    def _max_depth(self, generation: Generation, free_positions: int) -> int:
        """Return how deep may be drafted where so many positions are free in the pool."""
        if generation.drafter_state is None:
            return 0
        return max(0, self._positions(generation, free_positions) - 1)

    def _positions(self, generation: Generation, free_positions: int) -> int:
        """Return how many rows can be of use: a round of k drafts emits and caches up to k + 1."""
        return min(generation.remaining_tokens, self._context - generation.sequence.length, free_positions)


def setting_of(generations: Sequence[Generation]) -> Setting:
    """Return what a round of these sequences has to do besides its passes, and after how much."""
    work = "; ".join(sorted({generation.request.work for generation in generations}))
    return Setting(work, len(generations), max(generation.sequence.length for generation in generations))


def forced_tokens(generation: Generation, most: int) -> tuple[int, ...]:
    """Return the tokens that a generation's grammar forces, as many of them as may be drafted."""
    request = generation.request
    if generation.place is None or not request.may_draft or most < 1:
        return ()
    asked = request.num_draft_tokens if isinstance(request.num_draft_tokens, int) else request.max_draft_tokens
    return tuple(generation.place.forced()[: most if asked is None else min(most, asked)])


def share_rows(
    offers: Sequence[DepthOffer],
    limits: Sequence[int],
    rows: int,
    costs: RoundCosts | None,
    setting: Setting = ALONE,
) -> list[int]:
    """Return how many tokens to draft for each sequence of a pass of up to ``rows`` rows.

    Every sequence has a row of its own for its anchor. Drafts that are asked for come first; then those that may
    be left out, as many as make the pass cheapest for each expected token.

    offers: the drafts of each sequence.
    limits: the largest depth of each.
    rows: of the pass, at most.
    costs: of rounds; without them all optional drafts that fit are taken.
    setting: of the round.
    """
    sequences = len(offers)
    asked, further = ranked(offers, limits, optional=False), ranked(offers, limits, optional=True)
    asked = asked[: rows - sequences]
    further = further[: rows - sequences - len(asked)]

    def depths(count: int) -> list[int]:
        taken = Counter(sequence for _, sequence in asked + further[:count])
        return [taken[sequence] for sequence in range(sequences)]

    def ms_per_token(count: int) -> float:
        assert costs is not None
        tokens = sequences + sum(chance for chance, _ in asked + further[:count])
        # One draft pass serves all, as deep as the deepest of them.
        drafted = [depth for depth in depths(count) if depth]
        shape = Shape(max(drafted, default=0), sequences + len(asked) + count, max(1, len(drafted)))
        return costs.round_ms(setting, shape) / tokens

    if costs is None:
        return depths(len(further))
    best = min(range(len(further) + 1), key=ms_per_token)
    ratio = ms_per_token(best) / ms_per_token(0)
    is_look = not asked and costs.wants_plain(setting, ratio)
    return depths(best if ratio < MARGIN and not is_look else 0)


def ranked(offers: Sequence[DepthOffer], limits: Sequence[int], optional: bool) -> list[tuple[float, int]]:
    """Return (chance, sequence) of the drafts offered, the best first; of equals, the first of each."""
    found = [
        (-chance, depth, sequence)
        for sequence, offer in enumerate(offers)
        if offer.optional == optional
        for depth, chance in enumerate(offer.chances[: limits[sequence]])
    ]
    return [(-chance, sequence) for chance, _, sequence in sorted(found)]


def out_of_pages(sequence: CachedSequence) -> ContextFull:
    """Return the error of a sequence that has no page for one more position."""
    try:
        sequence.require(1)
    except ContextFull as error:
        return error
    return ContextFull(
        f"Other sequences of this round take the last of {sequence.pool.max_pages} KV pages; "
        "close a sequence or load the model with a larger max_cached_tokens."
    )
