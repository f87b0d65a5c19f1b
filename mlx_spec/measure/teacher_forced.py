"""A rule under which a target says a given text: real passes, and drafts that are judged by that text."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_spec.decoding.accept import Greedy, VerifiedRows, equal_drafts
from mlx_spec.drafters.base import Draft, Drawn


@dataclass(frozen=True)
class TeacherForced:
    """Accepts the drafts that are the text's tokens; the target's own choices are computed, and left unused.

    text: prompt and reply, which ends with an end token.
    """

    text: Sequence[int]
    greedy: Greedy = Greedy()

    @property
    def way(self) -> Hashable:
        """Draw as the greedy rule does."""
        return self.greedy.way

    def noise(self, position: int, count: int, candidates: int) -> None:
        """Return nothing."""

    def ranks(self, ids: mx.array, scores: mx.array, noise: mx.array | None) -> mx.array:
        """Rank by score."""
        return self.greedy.ranks(ids, scores, noise)

    def probabilities(self, scores: mx.array) -> None:
        """Return nothing: nothing is drawn."""

    def draw(self, ids: mx.array, scores: mx.array, noise: mx.array | None) -> Drawn:
        """Take the best candidate."""
        return self.greedy.draw(ids, scores, noise)

    def perturbed_scores(self, scores: mx.array, anchor_position: int, depths: Sequence[int]) -> mx.array:
        """Return the scores, whose largest are found as in any round."""
        return self.greedy.perturbed_scores(scores, anchor_position, depths)

    def accept(self, draft: Draft, verified: VerifiedRows) -> mx.array:
        """Accept what equals the text; after its end everything is the end token."""
        assert verified.choices is not None
        first, end = verified.anchor_position + 1, self.text[-1]
        right = [self.text[at] if (at := first + depth) < len(self.text) else end for depth in draft.tree.depths]
        # The text's tokens wait for the target's, so that no kernel is left out of the graph.
        choices = mx.where(verified.choices >= 0, mx.array(right, dtype=mx.int32), verified.choices)
        return equal_drafts(draft, replace(verified, choices=choices))
