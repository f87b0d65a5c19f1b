"""An index over a text that grows: where the newest tokens stood before, as hash chains of pairs of tokens."""

from array import array
from collections.abc import Sequence

import numpy as np

# How many of the newest places of a pair are compared, and how many tokens of each at most.
MAX_PLACES, MAX_MATCH = 32, 64
# Odd numbers that spread pairs of ids over 32 bits.
FIRST, BOTH = 0x9E3779B1, 0x85EBCA6B
BITS = 32
MIN_TABLE_BITS = 8
NOWHERE = -1


class TextIndex:
    """Tokens, and for each pair of neighbours that another token follows, the place before with the same hash.

    It takes 8 bytes a token and a table of 8 to 16.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        """Index a text."""
        self._tokens = array("i")
        # For each hash the newest place, and for each place, the one before with its hash. A place is the position
        # of the pair's second token.
        self._newest, self._before = array("i"), array("i")
        self._shift = BITS
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(part.itemsize * len(part) for part in (self._tokens, self._newest, self._before))

    def fork(self) -> "TextIndex":
        """Return an independent copy."""
        copy = TextIndex()
        copy._tokens, copy._newest, copy._before = self._tokens[:], self._newest[:], self._before[:]
        copy._shift = self._shift
        return copy

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. Interrupted anywhere, it is completed by the next call."""
        self._tokens.extend(tokens)
        if len(self._tokens) > len(self._newest):
            self._index_all()
        for place in range(len(self._before), len(self._tokens) - 1):
            slot = self._slot(self._tokens[place - 1], self._tokens[place])
            self._before.append(self._newest[slot])
            self._newest[slot] = place

    def longest(self, tail: Sequence[int]) -> tuple[int, int]:
        """Find where the end of ``tail`` stood before, as much of it as possible.

        The newest 32 places of its last two tokens are compared, up to 64 tokens of each.
        Returns how many tokens are equal, 0 or at least 2, and the position after them, at which there is a token;
        of equally long ones the newest.
        """
        best, found = 0, 0
        if len(tail) < 2 or len(self._tokens) < 3:
            return best, found
        end, tokens, before = array("i", tail[-MAX_MATCH:]), self._tokens, self._before
        place, left = self._newest[self._slot(*end[-2:])], MAX_PLACES
        while place != NOWHERE and left and best < len(end):
            # Pairs of another hash chain share slots: only places of this very pair count.
            if tokens[place] == end[-1] and tokens[place - 1] == end[-2]:
                left -= 1
                # One token more than the best so far, or it is of no interest.
                longer = place >= best and tokens[place - best] == end[-best - 1]
                if longer and tokens[place - best : place] == end[-best - 1 : -1]:
                    best, found = common_end(tokens, place, end, max(2, best + 1)), place + 1
            place = before[place]
        return best, found

    def following(self, position: int, count: int, is_growing: bool) -> list[int]:
        """Return the ``count`` tokens from a position on.

        is_growing: the text goes on after its end as it did from the position on; otherwise there are fewer there.
        """
        found = self._tokens[position : position + count].tolist()
        while is_growing and len(found) < count:
            found += found[: count - len(found)]
        return found

    def _slot(self, one: int, two: int) -> int:
        return ((one * FIRST + two) * BOTH & (1 << BITS) - 1) >> self._shift

    def _index_all(self) -> None:
        """Index the whole text at once, in a table that takes twice as many tokens."""
        count = len(self._tokens)
        bits = max(MIN_TABLE_BITS, (2 * count - 1).bit_length())
        newest, before = np.full(1 << bits, NOWHERE, np.int32), np.full(max(1, count - 1), NOWHERE, np.int32)
        ids = np.array(self._tokens, dtype=np.uint64)
        # Products wrap at 64 bits, of which the lower 32 are right.
        slots = ((ids[:-2] * FIRST + ids[1:-1]) * BOTH & (1 << BITS) - 1) >> BITS - bits
        order = np.argsort(slots, kind="stable")
        places, sorted_slots = order + 1, slots[order]
        follows = sorted_slots[1:] == sorted_slots[:-1]
        before[places[1:][follows]] = places[:-1][follows]
        # In the order of the text, so that the newest place of a hash stays.
        newest[slots] = np.arange(1, len(slots) + 1)
        tables = array("i", newest.tobytes()), array("i", before.tobytes())
        self._shift, (self._newest, self._before) = BITS - bits, tables


def common_end(tokens: "array[int]", place: int, end: "array[int]", known: int) -> int:
    """Return how many tokens up to ``place`` equal the end of another text, of which ``known`` do."""
    length = known
    while length < len(end) and length <= place and tokens[place - length] == end[-1 - length]:
        length += 1
    return length
