"""Which drafted tokens stand, and which token follows them.

Each rule has two sides that belong together: ``choose`` draws a drafted token, ``accept`` compares drafts with the
target. Everything stays in the graph; nothing here waits for the device. What ``accept`` returns is all that the
host reads of a round: int32 [k + 2 + flags], the drafts, how many of them stand, the token behind those, and
whether all entries of each flag are true.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from metal_kernels import accept_rows, argmax_rows
from mlx_spec import noise
from mlx_spec.drafters.base import Proposal
from mlx_spec.sampling import Sampling


class AcceptRule(Protocol):
    """How drafts are drawn and judged."""

    def choose(self, position: int, ids: mx.array, scores: mx.array) -> tuple[mx.array, mx.array | None]:
        """Draw the token for ``position`` among candidates ids [K] with scores [K]; see drafters.base.Choose."""
        ...

    def noisy(self, scores: mx.array, position: int) -> mx.array | None:
        """Return [k + 1, V] whose largest entries are what the target itself says, or None where it takes more."""
        ...

    def accept(
        self,
        proposal: Proposal,
        scores: mx.array,
        position: int,
        flags: Sequence[mx.array] = (),
        choices: mx.array | None = None,
    ) -> mx.array:
        """Judge k drafts by the target's scores [k + 1, V]; the anchor stands at ``position``.

        choices: int32 [k + 1], the largest entries of ``noisy``, where they are known already.
        """
        ...


def rule_for(sampling: Sampling, vocab_size: int) -> AcceptRule:
    """Return the rule of a request against a target with ``vocab_size`` tokens."""
    if sampling.temp == 0:
        return Greedy()
    if sampling.accept == "coupled":
        return Coupled(sampling.seed, sampling.temp, vocab_size)
    return Rejection(sampling.seed, sampling.temp)


def leading(stands: mx.array) -> mx.array:
    """Count the true entries of ``stands`` [k] before the first false one, as a scalar int32."""
    if not stands.size:
        return mx.array(0, dtype=mx.int32)
    return mx.sum(mx.cumprod(stands.astype(mx.int32))).astype(mx.int32)


@dataclass(frozen=True)
class Greedy:
    """The most likely token on both sides."""

    def choose(self, position: int, ids: mx.array, scores: mx.array) -> tuple[mx.array, mx.array | None]:
        """Return the best candidate."""
        return ids[mx.argmax(scores)], None

    def noisy(self, scores: mx.array, position: int) -> mx.array:
        """Return the scores: there is no noise."""
        return scores

    def accept(
        self,
        proposal: Proposal,
        scores: mx.array,
        position: int,
        flags: Sequence[mx.array] = (),
        choices: mx.array | None = None,
    ) -> mx.array:
        """Accept what equals the target's argmax."""
        return accept_rows(proposal.tokens, argmax_rows(scores)[0] if choices is None else choices, flags)


class Coupled:
    """Sampling in which draft and target share the noise of (seed, position, token).

    The target's token at a position is the one that plain decoding with this seed draws, whatever was drafted.
    """

    def __init__(self, seed: int, temp: float, vocab_size: int) -> None:
        self.seed = seed
        self.temp = temp
        self.vocab_size = vocab_size
        self._drawn: dict[int, mx.array] = {}

    def choose(self, position: int, ids: mx.array, scores: mx.array) -> tuple[mx.array, mx.array | None]:
        """Draw with the target's noise at the candidates: likely the token that the target will draw."""
        shared = self._noise(position)[ids]
        return ids[mx.argmax(scores / self.temp + shared)], None

    def noisy(self, scores: mx.array, position: int) -> mx.array:
        """Add the noise of each row's position."""
        self._drawn = {at: drawn for at, drawn in self._drawn.items() if at > position}
        return scores + mx.stack([self._noise(position + 1 + j) for j in range(scores.shape[0])])

    def accept(
        self,
        proposal: Proposal,
        scores: mx.array,
        position: int,
        flags: Sequence[mx.array] = (),
        choices: mx.array | None = None,
    ) -> mx.array:
        """Accept what equals the target's own draw."""
        if choices is None:
            choices = argmax_rows(self.noisy(scores, position))[0]
        return accept_rows(proposal.tokens, choices, flags)

    def _noise(self, position: int) -> mx.array:
        if position not in self._drawn:
            self._drawn[position] = noise.gumbel(self.seed, position, noise.TOKEN, self.vocab_size)
        return self._drawn[position]


@dataclass(frozen=True)
class Rejection:
    """Speculative sampling: accept with min(1, p / q), else draw from max(0, p - q).

    Source: Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318).
    """

    seed: int
    temp: float

    def choose(self, position: int, ids: mx.array, scores: mx.array) -> tuple[mx.array, mx.array | None]:
        """Draw from the draft distribution and return it."""
        scores = scores.astype(mx.float32) / self.temp
        drawn = mx.argmax(scores + noise.gumbel(self.seed, position, noise.DRAFT, ids.size))
        return ids[drawn], mx.softmax(scores)

    def noisy(self, scores: mx.array, position: int) -> mx.array | None:
        """Return nothing: what is said depends on what was drafted."""
        return None

    def accept(
        self,
        proposal: Proposal,
        scores: mx.array,
        position: int,
        flags: Sequence[mx.array] = (),
        choices: mx.array | None = None,
    ) -> mx.array:
        """Accept each draft with min(1, p / q); behind the last one draw from what q did not cover."""
        drafts, k = proposal.tokens, proposal.tokens.size
        p = remaining = mx.softmax(scores, axis=-1)
        count = mx.array(0, dtype=mx.int32)
        if proposal.probabilities is not None:
            q_of_draft = mx.sum(proposal.probabilities * (proposal.candidates == drafts[:, None]), axis=-1)
            p_of_draft = mx.take_along_axis(p[:k], drafts[:, None], axis=-1)[:, 0]
            chance = mx.stack(
                [mx.random.uniform(key=noise.key(self.seed, position + 1 + t, noise.ACCEPT)) for t in range(k)]
            )
            count = leading(chance * q_of_draft < p_of_draft)
            q = mx.put_along_axis(mx.zeros_like(p[:k]), proposal.candidates, proposal.probabilities, axis=-1)
            remaining = mx.concatenate([mx.maximum(p[:k] - q, 0), p[k:]])
        row = remaining[count]
        # Where q covers p to rounding there is nothing left to draw from, and p itself is as good.
        row = mx.where(mx.sum(row) > 0, row, p[count])
        drawn = mx.log(row) + noise.gumbel(self.seed, position, noise.RESIDUAL, row.size)
        following = mx.argmax(drawn).astype(mx.int32)
        good = [mx.all(flag).astype(mx.int32)[None] for flag in flags]
        return mx.concatenate([drafts, count[None], following[None], *good])
