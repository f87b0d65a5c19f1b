"""Who takes part in a round, and with how many rows: host numbers only, no arrays.

A draft is of use only when all drafts before it are accepted, so its chance is a product, and drops along a
sequence: the best rows of all sequences are always whole beginnings of drafts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from metal_kernels import MAX_VERIFY_ROWS
from mlx_spec.decoding.grammar import Place
from mlx_spec.drafters.lookup.lookup import Copy
from mlx_spec.engine.costs import ALONE, RoundCosts, Setting, Shape
from mlx_spec.engine.draft_policy import MARGIN, DepthOffer
from mlx_spec.engine.generation import Generation
from mlx_spec.errors import ContextFull
from mlx_spec.target import CachedSequence, reserve_positions


@dataclass(frozen=True)
class Share:
    """What a generation gets of a pass.

    depth: tokens that the drafter drafts, the first ones of which known tokens replace.
    max_rows: the rows that it may have, the anchor's included.
    forced: tokens that its grammar forces, to be drafted first.
    copied: tokens to be drafted after these, in place of the drafter's.
    """

    generation: Generation
    depth: int
    max_rows: int
    forced: tuple[int, ...] = ()
    copied: Copy | None = None

    @property
    def known(self) -> tuple[int, ...]:
        """The tokens to be drafted first, which the drafter is not asked for."""
        return self.forced if self.copied is None else (*self.forced, *self.copied.tokens)

    @property
    def drafts(self) -> bool:
        """Whether the drafter is asked for tokens."""
        return self.depth > len(self.known)


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
            most = min(self._positions(generation, free), MAX_VERIFY_ROWS) - 1
            forced = forced_tokens(generation, most)
            copied = copied_tokens(generation, forced, most - len(forced))
            return [Share(generation, 0 if copied else min(depth, limits[0]), free, forced, copied)], errors
        most = MAX_VERIFY_ROWS - len(fits)
        copies = [copied_tokens(g, (), min(self._positions(g, free) - 1, most)) for g, free in fits]
        offers = [
            g.policy.offer(len(fits))
            if copy is None
            else DepthOffer(copy.chances, optional=True, is_drafted=False)
            for (g, _), copy in zip(fits, copies, strict=True)
        ]
        limits = [limit if copy is None else len(copy.tokens) for limit, copy in zip(limits, copies, strict=True)]
        depths = share_rows(offers, limits, MAX_VERIFY_ROWS, self._costs, setting_of([g for g, _ in fits]))
        return [
            shared(generation, depth, copy)
            for (generation, _), depth, copy in zip(fits, depths, copies, strict=True)
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


def copied_tokens(generation: Generation, forced: Sequence[int], most: int) -> Copy | None:
    """Return what is worth copying after forced tokens, in place of asking the drafter; None where nothing is."""
    if generation.lookup is None:
        return None
    bound = generation.request.max_draft_tokens
    most = most if bound is None else min(most, bound)
    copy = generation.lookup.propose(generation.tokens, forced, most)
    if copy is not None and generation.place is not None:
        copy = allowed_part(copy, generation.place, forced)
    count = 0 if copy is None else generation.policy.copied(copy.chances)
    return copy.first(count) if copy is not None and count else None


def allowed_part(copy: Copy, place: Place, forced: Sequence[int]) -> Copy:
    """Return the first tokens of a copy, as many as a grammar allows after forced tokens."""
    after = place.after(forced)
    for index, token in enumerate(copy.tokens):
        after = None if after is None else after.after([token])
        if after is None:
            return copy.first(index)
    return copy


def shared(generation: Generation, depth: int, copy: Copy | None) -> Share:
    """Return the share of a generation of a pass with others: so many rows besides its anchor's."""
    forced = forced_tokens(generation, depth)
    if copy is None or forced or not depth:
        return Share(generation, depth, depth + 1, forced)
    return Share(generation, 0, depth + 1, copied=copy.first(depth))


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
        drafted = [depth for depth, offer in zip(depths(count), offers, strict=True) if depth and offer.is_drafted]
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
