"""What is kept of the stages of many draft passes: their numbers, and ranks of the right tokens."""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_spec.diagnose.stages import StageNumbers
from mlx_spec.drafters.stages import Record


@dataclass
class Watch:
    """Sums over passes.

    draft_ids: the tokens that draft logits are of, see ObservedDrafter.
    ranks, entropies: [N, depth] of each pass: how many tokens have larger logits than the right one, which is the
        number of all tokens where the drafter cannot draft it; and the entropy of the draft distribution in nats.
    """

    draft_ids: mx.array | None
    ranks: list[np.ndarray] = field(default_factory=list)
    entropies: list[np.ndarray] = field(default_factory=list)
    _sums: dict[str, list[tuple[mx.array, ...]]] = field(default_factory=dict)
    _logits: dict[str, mx.array] = field(default_factory=dict)
    _truth: np.ndarray | None = None
    _order: np.ndarray | None = None

    def of_pass(self, truth: np.ndarray) -> Record:
        """Return what takes the stages of the next pass, whose right tokens are ``truth`` [N, depth]."""
        self.finish()
        self._truth, self._logits = truth, {}
        return self._take

    def _take(self, stage: str, value: mx.array) -> None:
        if stage.endswith("logits"):
            self._logits[stage] = value
        if not stage.endswith("positions"):
            self._sums.setdefault(stage, []).append(sums_of(value))

    def finish(self) -> None:
        """Compute what the last pass left lazy."""
        mx.eval([sums[-1] for sums in self._sums.values()])
        if self._truth is None or not self._logits:
            return
        count, depth = self._truth.shape
        # A block has all its rows in one stage, a chain one stage a step.
        steps = [logits.reshape(count, -1, logits.shape[-1]) for logits in self._logits.values()]
        logits = mx.concatenate(steps, axis=1)[:, :depth].astype(mx.float32)
        places = mx.array(self._places(self._truth, logits.shape[-1]))
        own = mx.take_along_axis(logits, mx.maximum(places, 0)[..., None], axis=-1)
        ranks = mx.where(places < 0, logits.shape[-1], mx.sum(logits > own, axis=-1))
        share = mx.softmax(logits, axis=-1)
        entropy = -mx.sum(mx.where(share > 0, share * mx.log(share), 0), axis=-1)
        self.ranks.append(np.array(ranks))
        self.entropies.append(np.array(entropy))
        self._truth = None

    def _places(self, truth: np.ndarray, size: int) -> np.ndarray:
        """Return where the right tokens are among the draft logits, -1 for those that are not."""
        if self.draft_ids is None:
            return np.where(truth < size, truth, -1)
        if self._order is None:
            self._order = np.argsort(np.array(self.draft_ids))
        ids = np.array(self.draft_ids)
        found = self._order[np.minimum(np.searchsorted(ids, truth, sorter=self._order), len(ids) - 1)]
        return np.where(ids[found] == truth, found, -1)

    def numbers(self) -> list[StageNumbers]:
        """Return what was in each stage, over all passes."""
        self.finish()
        return [joined(stage, sums) for stage, sums in self._sums.items()]


def sums_of(value: mx.array) -> tuple[mx.array, ...]:
    """Return size, number that is not finite, least, most and sum of squares of what is."""
    wide = value.astype(mx.float32)
    finite = mx.isfinite(wide)
    zero = mx.where(finite, wide, 0)
    least, most = mx.where(finite, wide, mx.inf).min(), mx.where(finite, wide, -mx.inf).max()
    return mx.array(value.size), mx.sum(~finite), least, most, mx.sum(mx.square(zero))


def joined(stage: str, sums: list[tuple[mx.array, ...]]) -> StageNumbers:
    """Add up what was in a stage in several passes."""
    sizes, wrong, least, most, squares = (
        np.array([float(part.item()) for part in each]) for each in zip(*sums, strict=True)
    )
    finite = sizes.sum() - wrong.sum()
    if not finite:
        return StageNumbers(stage, int(wrong.sum()), 0.0, 0.0, 0.0)
    return StageNumbers(stage, int(wrong.sum()), least.min(), most.max(), float((squares.sum() / finite) ** 0.5))
