"""How the rows of one pass are shared out: drafts get them in the order of their chance to stand.

A draft is of use only when all drafts before it stand, so its chance is a product, and falls along a sequence: the
best rows of all sequences are always whole beginnings of drafts.
"""

from collections import Counter
from collections.abc import Sequence

from mlx_spec.engine.draft_policy import Costs, Offer


def share_rows(offers: Sequence[Offer], most: Sequence[int], rows: int, costs: Costs | None) -> list[int]:
    """Return how many tokens to draft for each sequence of a pass of up to ``rows`` rows.

    most: the largest depth of each. Every sequence has a row of its own for its anchor. Drafts that are asked for
    come first; then those that may be left out, as many as make the pass cheapest for each expected token by
    ``costs``, all that fit without.
    """
    sequences = len(offers)
    asked, further = ranked(offers, most, optional=False), ranked(offers, most, optional=True)
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
        drafting = costs.draft_ms(max(drafted, default=0), len(drafted))
        return (drafting + costs.verify_ms(sequences + len(asked) + count)) / tokens

    return depths(len(further) if costs is None else min(range(len(further) + 1), key=ms_per_token))


def ranked(offers: Sequence[Offer], most: Sequence[int], optional: bool) -> list[tuple[float, int]]:
    """Return (chance, sequence) of the drafts offered, the best first; of equals, the first of each."""
    found = [
        (-chance, place, sequence)
        for sequence, offer in enumerate(offers)
        if offer.optional == optional
        for place, chance in enumerate(offer.chances[: most[sequence]])
    ]
    return [(-chance, sequence) for chance, _, sequence in sorted(found)]
