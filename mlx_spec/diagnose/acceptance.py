"""Teacher-forced drafts: what a drafter proposes after every position of a text, beside what is right there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.diagnose.text import Text
from mlx_spec.drafters.base import Draft, DraftRequest, Drawn, ObservedDrafter
from mlx_spec.drafters.stages import Record

# Anchors whose drafts are made in one pass.
TOGETHER = 32
# Above every score.
LARGEST = 3e38
# By how much another way of drafting must be better: standard errors of the difference, and share of the drafts.
STANDARD_ERRORS, LEAST_GAIN = 4.0, 0.01
# The same for the likelihood of the right tokens, in nats a draft. It sees what changes few drafts.
LEAST_NATS = 0.02
# Share of right drafts below which likelihood says little but how flat a distribution is.
LEAST_RIGHT = 0.1
# How sharp a drafter's distribution is says nothing of its port, so what is likelier has to be so at several.
TEMPERATURES = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 8.0)
# Parts of the positions in each of which a better way has to be better.
QUARTERS = 4


@dataclass(frozen=True)
class Alignment:
    """One way to line text and drafter up.

    moved: the drafter's newest rows have positions larger by this.
    capped: so many of the newest committed rows are withheld, and the positions stay what they are.
    shift: a row gets the hidden states of the row so many positions later.
    """

    moved: int = 0
    capped: int = 0
    shift: int = 0


OWN = Alignment()


@dataclass(frozen=True)
class Hits:
    """Drafts of k tokens after n anchors, against the target's choices.

    right: [n, k] bool: the draft is the target's choice.
    first: [n, k] bool: the best candidate by its logit alone is the target's choice.
    among: [n, k] bool: the target's choice is among the candidates.
    place: [n, k]: of the target's choice among the candidates by their scores, from 0; their number where it is
        not among them.
    likelihood: [n, k, temperatures]: logarithm of the share that the drafter gives the target's choice among its
        candidates at each of TEMPERATURES, in nats; of one that is not among them, that of the least likely one.
    early, late: [n, k] bool: the draft is the choice one position earlier, or later.
    text: [n], the number of the text of each anchor.
    position: [n], of each anchor.
    """

    right: np.ndarray
    first: np.ndarray
    among: np.ndarray
    place: np.ndarray
    likelihood: np.ndarray
    early: np.ndarray
    late: np.ndarray
    text: np.ndarray
    position: np.ndarray

    @property
    def accepted(self) -> np.ndarray:
        """[n, k] bool: the draft and all before it are right."""
        return np.logical_and.accumulate(self.right, axis=1)

    @property
    def scores(self) -> np.ndarray:
        """[n], the mean of 1 / (1 + place) of the drafts after each anchor: finer than acceptance."""
        return np.mean(1.0 / (1.0 + self.place), axis=1)

    @property
    def score(self) -> float:
        """The mean of ``scores``."""
        return float(self.scores.mean()) if self.scores.size else 0.0

    def only(self, chosen: np.ndarray) -> "Hits":
        """Return some of the anchors."""
        return Hits(**{name: value[chosen] for name, value in vars(self).items()})


def is_better(other: Hits, declared: Hits, errors: float = STANDARD_ERRORS) -> bool:
    """Whether drafts after the same anchors are clearly better in another way.

    By as many standard errors of the mean over anchors, in acceptance or, where that is no lower, in score, and no
    lower in any quarter of the positions. Or in likelihood, where acceptance is no lower, in every quarter of the
    positions, and in the first of them by one standard error. A rotary base that is too large, say, helps a
    drafter at positions beyond those that it was trained with, and only there.
    """
    right = other.right.mean(axis=1) - declared.right.mean(axis=1)
    scores = other.scores - declared.scores
    if is_gain(right, errors) or (is_gain(scores, errors) and right.mean() >= 0):
        return all(bool(scores[part].mean() >= 0) for part in quarters(other.position))
    return bool(right.mean() >= 0) and is_likelier(other, declared, max(errors, STANDARD_ERRORS))


def is_likelier(other: Hits, declared: Hits, errors: float) -> bool:
    """Whether the right tokens are clearly likelier in another way, at any temperature, see ``is_better``."""
    if other.right.size == 0 or other.right.mean() < LEAST_RIGHT:
        return False
    first, *rest = quarters(other.position)
    return all(
        is_gain(nats, errors, LEAST_NATS)
        and is_gain(nats[first], 1.0, 0.0)
        and all(bool(nats[part].mean() > 0) for part in rest)
        for nats in nats_gained(other, declared)
    )


def nats_gained(other: Hits, declared: Hits) -> list[np.ndarray]:
    """Return by how much likelier the right tokens are in another way, in nats a draft.

    Two arrays [n]: at the temperature that suits the one, and at the one that suits the other.
    """
    gains = np.mean(other.likelihood - declared.likelihood, axis=1)
    best = [int(np.argmax(hits.likelihood.mean(axis=(0, 1)))) for hits in (other, declared)]
    return [gains[:, temperature] for temperature in best]


def least_gain(other: Hits, declared: Hits) -> float:
    """Return what another way gains in the quarter of the positions where it gains least, in nats a draft."""
    if not other.position.size:
        return 0.0
    parts = quarters(other.position)
    return min(float(nats[part].mean()) for nats in nats_gained(other, declared) for part in parts)


def quarters(positions: np.ndarray) -> list[np.ndarray]:
    """Return which anchors are in each quarter, by their positions; empty quarters are left out."""
    parts = np.array_split(np.argsort(positions, kind="stable"), QUARTERS)
    return [part for part in parts if part.size]


def is_gain(gains: np.ndarray, errors: float = STANDARD_ERRORS, least: float = LEAST_GAIN) -> bool:
    """Whether the mean of gains [n] is above zero by more than so many standard errors."""
    if gains.size < 2:
        return False
    error = float(gains.std(ddof=1)) / gains.size**0.5
    return bool(gains.mean() > max(least, errors * error))


def measure(
    drafter: ObservedDrafter,
    texts: Sequence[Text],
    depth: int,
    stride: int = 1,
    alignment: Alignment = OWN,
    watch: Callable[[np.ndarray], Record] | None = None,
    on_drafted: Callable[[int], None] = lambda count: None,
) -> Hits:
    """Draft ``depth`` tokens after every ``stride``-th anchor of some texts.

    A chain goes on with the text's tokens, not with its own drafts, so that each of its steps is a measurement.

    watch: returns what takes the stages of a pass, given the target's choices [N, depth] for its anchors.
    on_drafted: gets the number of anchors after each pass.
    """
    parts: list[dict[str, np.ndarray]] = []
    for number, text in enumerate(texts):
        for anchors, drafts in passes(drafter, text, depth, stride, alignment, watch):
            parts.append(compared(text, anchors, drafts, depth) | {"text": np.full(len(anchors), number)})
            on_drafted(len(anchors))
    empty = np.zeros((0, depth), dtype=bool)
    if not parts:
        numbers = np.zeros(0, dtype=np.int64)
        likelihood = np.zeros((0, depth, len(TEMPERATURES)))
        return Hits(empty, empty, empty, empty.astype(np.int64), likelihood, empty, empty, numbers, numbers)
    return Hits(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def passes(
    drafter: ObservedDrafter,
    text: Text,
    depth: int,
    stride: int,
    alignment: Alignment,
    watch: Callable[[np.ndarray], Record] | None,
) -> Iterator[tuple[list[int], list[Draft]]]:
    """Yield the anchors of each pass and their drafts, computed."""
    anchors = list(text.anchors(depth)[::stride])
    state, done, tokens = drafter.open(), 0, [int(token) for token in np.array(text.tokens)]
    try:
        for begin in range(0, len(anchors), TOGETHER):
            chosen = anchors[begin : begin + TOGETHER]
            forks = list[Any]()
            try:
                for anchor in chosen:
                    end = anchor - alignment.capped
                    # In two parts, so that a chain completes all rows but the newest before it is forked.
                    for part in sorted({max(done, end - 1), end}):
                        if part > done:
                            committed = text.committed(done, part, drafter.target_layer_ids, alignment.shift)
                            drafter.extend([(state, committed)])
                            done = part
                    forks.append(aligned(drafter, state, alignment, tokens[anchor]))
                requests = [
                    request(fork, tokens[anchor : anchor + 1 + depth])
                    for fork, anchor in zip(forks, chosen, strict=True)
                ]
                if watch is None:
                    drafts = drafter.propose(requests)
                else:
                    drafts = drafter.observe(requests, watch(expected(text, chosen, depth)))
                mx.eval([(draft.tokens, draft.candidates, draft.probabilities) for draft in drafts])
            finally:
                for fork in forks:
                    fork.free()
            yield chosen, drafts
    finally:
        state.free()


def aligned(drafter: ObservedDrafter, state: Any, alignment: Alignment, anchor: int) -> Any:
    """Return a fork of a state, its newest rows moved."""
    fork, moved = state.fork(), alignment.moved + alignment.capped
    if not moved:
        return fork
    # A draft takes in what waits, so that only newer rows are moved.
    drafted = drafter.propose([request(fork, [anchor, 0])])
    mx.eval(drafted[0].tokens)
    copy = fork.moved(moved)
    fork.free()
    return copy


@dataclass(frozen=True)
class Forced:
    """A rule that draws given tokens, and keeps the scores of the candidates as what they were drawn from.

    A block goes on with the best candidate where the token is not among them, a chain with the token.
    """

    tokens: tuple[int, ...]
    way: str = "forced"

    def noise(self, position: int, count: int, candidates: int) -> mx.array:
        """Return the tokens as what the draws read, int32 [count, 1], with zeros after their end."""
        chosen = [*self.tokens, *[0] * count][:count]
        return mx.array(chosen, dtype=mx.int32)[:, None]

    def ranks(self, ids: mx.array, scores: mx.array, noise: mx.array | None) -> mx.array:
        """Return the scores, but of the token of each position, if it is among the candidates, what is larger."""
        assert noise is not None
        return mx.where(ids == noise, LARGEST, scores.astype(mx.float32))

    def probabilities(self, scores: mx.array) -> mx.array:
        """Keep the scores in the place of what would be drawn from."""
        return scores.astype(mx.float32)

    def draw(self, ids: mx.array, scores: mx.array, noise: mx.array | None) -> Drawn:
        """Draw the token of this position, also where it is none of the candidates."""
        assert noise is not None
        return Drawn(noise[0], self.ranks(ids, scores, noise), self.probabilities(scores))


def request(state: Any, tokens: Sequence[int]) -> DraftRequest:
    """Ask for a draft after an anchor, the first of these tokens, that goes on with the others."""
    anchor, *following = tokens
    return DraftRequest(state, anchor, len(following), Forced(tuple(following)))


def expected(text: Text, anchors: Sequence[int], depth: int) -> np.ndarray:
    """Return the target's choices [n, depth] after each of n anchors."""
    return np.array(text.choices)[np.array(anchors)[:, None] + np.arange(depth)]


def compared(text: Text, anchors: Sequence[int], drafts: Sequence[Draft], depth: int) -> dict[str, np.ndarray]:
    """Compare drafts with the target's choices, see Hits."""
    truth = expected(text, anchors, depth)
    ids = np.stack([np.array(draft.candidates) for draft in drafts])
    scores = np.stack([np.array(draft.probabilities) for draft in drafts])
    drafted = np.take_along_axis(ids, scores.argmax(axis=-1)[..., None], axis=-1)[..., 0]
    among = ids == truth[..., None]
    own = np.take_along_axis(scores, among.argmax(axis=-1)[..., None], axis=-1)
    places = (scores > own).sum(axis=-1)
    # Scores that are no numbers choose nothing.
    right = (drafted == truth) & np.isfinite(scores).all(axis=-1)
    choices = np.concatenate([np.array(text.tokens[:1]), np.array(text.choices), [-1]])
    at = np.array(anchors)[:, None] + np.arange(depth)
    return {
        "right": right,
        "first": ids[..., 0] == truth,
        "among": among.any(axis=-1),
        "place": np.where(among.any(axis=-1), places, ids.shape[-1]),
        "likelihood": likelihoods(scores, own, among.any(axis=-1)),
        "early": drafted == choices[at],
        "late": drafted == choices[at + 2],
        "position": np.array(anchors),
    }


def likelihoods(scores: np.ndarray, own: np.ndarray, is_among: np.ndarray) -> np.ndarray:
    """Return the log-probabilities [n, k, temperatures] among candidates whose scores are [n, k, C].

    own: [n, k, 1], the scores of the right ones; where these are not among the candidates, the least score counts.
    """
    finite = np.where(np.isfinite(scores), scores, np.finfo(np.float32).min).astype(np.float64)
    chosen = np.where(is_among & np.isfinite(own[..., 0]), own[..., 0], finite.min(axis=-1))
    found = []
    for temperature in TEMPERATURES:
        wide = (finite - finite.max(axis=-1, keepdims=True)) / temperature
        total = np.log(np.exp(wide).sum(axis=-1))
        found.append((chosen - finite.max(axis=-1)) / temperature - total)
    return np.stack(found, axis=-1)
