"""How likely a copy is right, by how many tokens before it were equal: learned from the text at hand."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul

# The shortest match of each class, and the chance of a token after one as long, in edits, code and prose together.
PRIORS = {2: 0.36, 3: 0.5, 4: 0.6, 6: 0.75, 8: 0.8, 16: 0.9}
# The prior counts as so many tokens, and each token's evidence fades by this factor.
WEIGHT, DECAY = 4.0, 0.94


class CopyChances:
    """Decayed (tries, successes) of copied tokens for each class of match lengths.

    A copy whose first tokens are accepted is a match that is longer by as many.
    """

    def __init__(self) -> None:
        """Know the priors only."""
        self._tries = {shortest: (WEIGHT, WEIGHT * prior) for shortest, prior in PRIORS.items()}

    def fork(self) -> "CopyChances":
        """Return an independent copy."""
        copy = CopyChances()
        copy._tries = dict(self._tries)
        return copy

    def reached(self, match: int, count: int) -> tuple[float, ...]:
        """Return the chances that the first 1 to ``count`` tokens after a match are all accepted."""
        return tuple(accumulate(self._each(match, count), mul))

    def update(self, match: int, copied: Sequence[int], came: Sequence[int]) -> None:
        """Learn what came where these tokens were copied after a match."""
        for index, (token, right) in enumerate(zip(copied, came, strict=False)):
            shortest = class_of(match + index)
            tries, successes = self._tries[shortest]
            self._tries[shortest] = DECAY * tries + 1, DECAY * successes + (token == right)
            if token != right:
                return

    def _each(self, match: int, count: int) -> Iterator[float]:
        for index in range(count):
            tries, successes = self._tries[class_of(match + index)]
            yield successes / tries


def class_of(match: int) -> int:
    """Return the class of a match length, by its shortest."""
    return max(shortest for shortest in PRIORS if shortest <= match)
