"""Drafts without a drafter: what followed the newest tokens where they stood before.

No weights, no hidden states, and nothing on the device: a copy is known to the host before a round begins.
Source of the idea: prompt lookup decoding, Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from metal_kernels import MAX_VERIFY_ROWS
from mlx_spec.drafters.lookup.chances import CopyChances
from mlx_spec.drafters.lookup.index import MAX_MATCH, TextIndex
from mlx_spec.errors import RequestError

MAX_COPY = MAX_VERIFY_ROWS - 1


@dataclass(frozen=True)
class Copy:
    """Tokens that followed a match.

    tokens: at least one.
    chances[i]: that the first i + 1 of them are all accepted.
    match: how many tokens before them were equal.
    """

    tokens: tuple[int, ...]
    chances: tuple[float, ...]
    match: int

    def first(self, count: int) -> "Copy":
        """Return the first ``count`` tokens at most."""
        return replace(self, tokens=self.tokens[:count], chances=self.chances[:count])


class Lookup:
    """What all sequences may copy from besides their own text, and the states of sequences."""

    name = "lookup"
    max_draft = MAX_COPY

    def __init__(self, texts: Sequence[Sequence[int]] = ()) -> None:
        """Index further texts, as token ids; each is read by all sequences, so it is no place for secrets."""
        self._texts = [TextIndex(text) for text in texts]
        self._most_id = max((max(text, default=0) for text in texts), default=0)

    def check_vocabulary(self, size: int) -> None:
        """Raise RequestError where a further text holds a token that a target with ``size`` tokens has not."""
        if self._most_id >= size:
            raise RequestError(
                f"A lookup text holds token {self._most_id}, but the vocabulary has {size}: encode it with the "
                "tokenizer of the model."
            )

    def open(self) -> "LookupState":
        """Return the state of a sequence, of which it has seen nothing."""
        return LookupState(self._texts)


class LookupState:
    """What is known of one sequence. It follows the sequence by itself, whenever a copy is asked for.

    So it learns from each copy that it proposed, whether that was drafted or not.
    """

    def __init__(self, texts: Sequence[TextIndex]) -> None:
        """Know further texts, which do not change."""
        self._texts = texts
        self._own = TextIndex()
        self._chances = CopyChances()
        # The last copy, and the position that it was for.
        self._proposed: tuple[int, Copy] | None = None

    def fork(self) -> "LookupState":
        """Return an independent copy."""
        copy = LookupState(self._texts)
        copy._own, copy._chances, copy._proposed = self._own.fork(), self._chances.fork(), self._proposed
        return copy

    def propose(self, tokens: Sequence[int], forced: Sequence[int], most: int) -> Copy | None:
        """Return up to ``most`` tokens that are likely to follow, or None where the last tokens are new.

        tokens: of the sequence, which begins with those of the calls before.
        forced: tokens that are to come first.
        The longest match is taken: of equally long ones that in the sequence's own text, and there the newest.
        """
        self._own.extend(tokens[len(self._own) :])
        if self._proposed is not None:
            position, copy = self._proposed
            self._chances.update(copy.match, copy.tokens, tokens[position : position + len(copy.tokens)])
            self._proposed = None
        tail = [*tokens[-MAX_MATCH:], *forced]
        found = [(index.longest(tail), index) for index in (self._own, *self._texts)]
        (match, position), index = max(found, key=lambda each: each[0][0])
        if not match or most < 1:
            return None
        following = index.following(position, most, is_growing=index is self._own)
        copy = Copy(tuple(following), self._chances.reached(match, len(following)), match)
        self._proposed = len(tokens) + len(forced), copy
        return copy
