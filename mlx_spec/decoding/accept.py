"""Which drafted tokens are accepted, and which token follows them.

Each rule has two sides that belong together: it says how drafted tokens are drawn, see ``DraftRule``, and
``accept`` compares them with the target. Everything stays in the graph; nothing here waits for the device. What
``accept`` returns is all that the host reads of a round: int32 [k + 2 + flags], the drafts, the last accepted row
(of a chain: how many drafts are), the token after it, and whether all entries of each flag are true.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from metal_kernels import accept_rows, ints
from mlx_spec.decoding import noise
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.drafters.base import Draft, DraftRule, Drawn
from mlx_spec.drafters.tree import Tree


@dataclass(frozen=True)
class VerifiedRows:
    """The target's view of an anchor and the k drafts after it.

    scores: [k + 1, V], the target's.
    anchor_position: of the anchor.
    choices: int32 [k + 1], the largest entries of ``AcceptRule.perturbed_scores``, or None where that is.
    flags: what else the host is to read, each true or false.
    usable: bool [k + 1], one flag more, to which only accepted rows count.
    """

    scores: mx.array
    anchor_position: int
    choices: mx.array | None
    flags: Sequence[mx.array] = ()
    usable: mx.array | None = None


class AcceptRule(DraftRule, Protocol):
    """How drafts are drawn and judged."""

    def perturbed_scores(self, scores: mx.array, anchor_position: int, depths: Sequence[int]) -> mx.array | None:
        """Return [k + 1, V] whose largest entries are the target's own tokens, or None where it takes more.

        Row j comes ``depths[j]`` positions after the anchor.
        """
        ...

    def accept(self, draft: Draft, verified: VerifiedRows) -> mx.array:
        """Judge the drafts by the target's view of them."""
        ...


def rule_for(sampling: Sampling, vocab_size: int) -> AcceptRule:
    """Return the rule of a request against a target with ``vocab_size`` tokens."""
    if sampling.temp == 0:
        return Greedy()
    if sampling.accept == "coupled":
        return Coupled(sampling.seed, sampling.temp, vocab_size)
    return Rejection(sampling.seed, sampling.temp)


@dataclass(frozen=True)
class Greedy:
    """The most likely token on both sides."""

    way: Hashable = "greedy"

    def noise(self, position: int, count: int, candidates: int) -> None:
        """Return nothing."""

    def ranks(self, ids: mx.array, scores: mx.array, noise: mx.array | None) -> mx.array:
        """Rank by score."""
        return scores.astype(mx.float32)

    def probabilities(self, scores: mx.array) -> None:
        """Return nothing: nothing is drawn."""

    def draw(self, ids: mx.array, scores: mx.array, noise: mx.array | None) -> Drawn:
        """Take the best candidate."""
        return drawn_by(self, ids, scores, noise)

    def perturbed_scores(self, scores: mx.array, anchor_position: int, depths: Sequence[int]) -> mx.array:
        """Return the scores: there is no noise."""
        return scores

    def accept(self, draft: Draft, verified: VerifiedRows) -> mx.array:
        """Accept what equals the target's argmax."""
        return equal_drafts(draft, verified)


class Coupled:
    """Sampling in which draft and target share the noise of (seed, position, token).

    The target's token at a position is the one that plain decoding with this seed draws, whatever was drafted.
    """

    def __init__(self, seed: int, temp: float, vocab_size: int) -> None:
        self.seed = seed
        self.temp = temp
        self.vocab_size = vocab_size
        self.way = "coupled", temp
        self._drawn: dict[int, mx.array] = {}

    def noise(self, position: int, count: int, candidates: int) -> mx.array:
        """Return the target's noise."""
        return mx.stack([self._noise(position + i) for i in range(count)])

    def ranks(self, ids: mx.array, scores: mx.array, noise: mx.array | None) -> mx.array:
        """Rank with the target's noise at the candidates."""
        assert noise is not None
        return scores.astype(mx.float32) / self.temp + mx.take_along_axis(noise, ids, axis=-1)

    def probabilities(self, scores: mx.array) -> None:
        """Return nothing: the noise decides, whatever was drafted."""

    def draw(self, ids: mx.array, scores: mx.array, noise: mx.array | None) -> Drawn:
        """Draw with the target's noise: likely the token that the target will draw."""
        return drawn_by(self, ids, scores, noise)

    def perturbed_scores(self, scores: mx.array, anchor_position: int, depths: Sequence[int]) -> mx.array:
        """Add the noise of each row's position."""
        self._drawn = {at: drawn for at, drawn in self._drawn.items() if at > anchor_position}
        return scores + mx.stack([self._noise(anchor_position + 1 + depth) for depth in depths])

    def accept(self, draft: Draft, verified: VerifiedRows) -> mx.array:
        """Accept what equals the target's own draw."""
        return equal_drafts(draft, verified)

    def _noise(self, position: int) -> mx.array:
        if position not in self._drawn:
            self._drawn[position] = noise.gumbel(self.seed, position, noise.TOKEN, self.vocab_size)
        return self._drawn[position]


@dataclass(frozen=True)
class Rejection:
    """Speculative sampling: accept with min(1, p / q), else draw from max(0, p - q).

    Of several drafts for one position, drawn without replacement, the next is judged in the same way, by what p
    and q are then. Sources: Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318); of
    several: Jeon et al. 2024 (arXiv:2402.14160).
    """

    seed: int
    temp: float

    @property
    def way(self) -> Hashable:
        """Tell temperatures apart."""
        return "rejection", self.temp

    def noise(self, position: int, count: int, candidates: int) -> mx.array:
        """Return noise of the draft's own."""
        positions = range(position, position + count)
        return mx.stack([noise.gumbel(self.seed, at, noise.DRAFT, candidates) for at in positions])

    def ranks(self, ids: mx.array, scores: mx.array, noise: mx.array | None) -> mx.array:
        """Rank with noise of the draft's own: next in rank are draws without replacement."""
        assert noise is not None
        return scores.astype(mx.float32) / self.temp + noise

    def probabilities(self, scores: mx.array) -> mx.array:
        """Return the draft distribution."""
        return mx.softmax(scores.astype(mx.float32) / self.temp, axis=-1)

    def draw(self, ids: mx.array, scores: mx.array, noise: mx.array | None) -> Drawn:
        """Draw from the draft distribution."""
        return drawn_by(self, ids, scores, noise)

    def perturbed_scores(self, scores: mx.array, anchor_position: int, depths: Sequence[int]) -> mx.array | None:
        """Return nothing: what is emitted depends on what was drafted."""
        return None

    def accept(self, draft: Draft, verified: VerifiedRows) -> mx.array:
        """Accept each draft with min(1, p / q); after the last one draw from what q did not cover."""
        tree, position, p = draft.tree, verified.anchor_position, mx.softmax(verified.scores, axis=-1)
        if draft.probabilities is None:
            last, left = mx.array(0, dtype=mx.int32), p[0]
        else:
            last, left = self._walk(draft, tree, p, position)
        drawn = mx.log(left) + noise.gumbel(self.seed, position, noise.RESIDUAL, left.size)
        return outcome(draft, last, mx.argmax(drawn), verified)

    def _walk(self, draft: Draft, tree: Tree, p: mx.array, position: int) -> tuple[mx.array, mx.array]:
        """Return the last accepted row, and the distribution [V] of the token after it.

        Turn by turn the next draft after each row is judged by what is left of p [k + 1, V] there.
        """
        assert draft.probabilities is not None
        # Rows with most drafts after them first: those that have one more in a turn are then the first ones.
        inner = sorted(
            (row for row in range(tree.num_rows) if tree.children[row]), key=lambda r: -len(tree.children[r])
        )
        first = ints(*(tree.children[row][0] - 1 for row in inner))
        left, q = p[ints(*inner)], mx.zeros((len(inner), p.shape[1]), dtype=p.dtype)
        q = mx.put_along_axis(q, draft.candidates[first], draft.probabilities[first], axis=-1)
        judged, accepted, none_yet = list[int](), list[mx.array](), mx.ones((len(inner),), dtype=mx.bool_)
        for turn in range(len(tree.children[inner[0]])):
            children = [tree.children[row][turn] for row in inner if len(tree.children[row]) > turn]
            count = len(children)
            tokens = draft.tokens[ints(*(row - 1 for row in children))][:, None]
            now, q = left[:count], q[:count]
            p_of_draft, q_of_draft = (mx.take_along_axis(x, tokens, axis=-1)[:, 0] for x in (now, q))
            chance = mx.stack([self._chance(position + tree.depths[row], turn) for row in children])
            is_accepted = mx.logical_and(chance * q_of_draft < p_of_draft, none_yet[:count])
            judged += children
            accepted.append(is_accepted)
            none_yet = mx.logical_and(none_yet[:count], mx.logical_not(is_accepted))
            left = mx.concatenate([normalised(mx.maximum(now - q, 0), now), left[count:]])
            q = mx.put_along_axis(q, tokens, mx.zeros(tokens.shape, dtype=q.dtype), axis=-1)
            q = normalised(q, q)
        in_order = ints(*(judged.index(row) for row in range(1, tree.num_rows)))
        last = tree.last_accepted(mx.concatenate(accepted)[in_order])
        indices = [inner.index(row) if row in inner else -1 for row in range(tree.num_rows)]
        index = ints(*indices)[last]
        return last, mx.where(index < 0, p[last], left[mx.maximum(index, 0)])

    def _chance(self, position: int, turn: int) -> mx.array:
        """Return a number from 0 to 1 for the draft that is judged at ``position`` in a turn."""
        return mx.random.uniform(key=noise.key(self.seed, position, noise.ACCEPT + turn))


def drawn_by(rule: DraftRule, ids: mx.array, scores: mx.array, noise: mx.array | None) -> Drawn:
    """Return the candidate that ranks first by a rule."""
    ranks = rule.ranks(ids, scores, noise)
    return Drawn(ids[mx.argmax(ranks)].astype(mx.int32), ranks, rule.probabilities(scores))


def equal_drafts(draft: Draft, verified: VerifiedRows) -> mx.array:
    """Accept the drafts that equal the choices of the rows that they follow."""
    choices = verified.choices
    assert choices is not None
    if draft.parents is None:
        return accept_rows(draft.tokens, choices, verified.flags, verified.usable)
    tree = draft.tree
    last = tree.last_accepted(draft.tokens == choices[ints(*tree.parents)])
    return outcome(draft, last, choices[last], verified)


def outcome(draft: Draft, last: mx.array, following: mx.array, verified: VerifiedRows) -> mx.array:
    """Lay out what ``accept`` returns; ``last`` and ``following`` are scalars."""
    good = [mx.all(flag) for flag in verified.flags]
    if verified.usable is not None:
        good.append(draft.tree.on_path(last, verified.usable))
    read = mx.stack([value.astype(mx.int32) for value in (last, following, *good)])
    return mx.concatenate([draft.tokens, read])


def normalised(weights: mx.array, otherwise: mx.array) -> mx.array:
    """Scale rows [n, V] to add up to 1; where q covers p to rounding nothing is left, and p is as good."""
    total = mx.sum(weights, axis=-1, keepdims=True)
    return mx.where(total > 0, weights / mx.where(total > 0, total, 1), otherwise)
