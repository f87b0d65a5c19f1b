"""Probes a drafter: how often its drafts are right and where, what its stages hold, and what it would gain."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from mlx_spec.diagnose.acceptance import OWN, Alignment, Hits, measure
from mlx_spec.diagnose.capture import Captured, captured
from mlx_spec.diagnose.stages import ROWS, Departure, StageNumbers, departures, observed
from mlx_spec.diagnose.text import FIRST, LEAST_POSITIONS, Text, own_replies, parts_of, read_text
from mlx_spec.diagnose.variants import SAMPLED, Contract, Found, Search, contracts_of, layer_ids_of
from mlx_spec.diagnose.watch import Watch
from mlx_spec.drafters.base import ObservedDrafter
from mlx_spec.drafters.kind import DrafterSource, Kind
from mlx_spec.engine.costs import Costs
from mlx_spec.target import Target

# Tokens of each of the target's own replies, and of a part of a user's text.
REPLY_TOKENS, PART_TOKENS = 56, 256
# Tokens drafted after each anchor of what is measured many times.
SAMPLED_DEPTH = 2
# Positions before the anchors of the text that shows what a long context does.
LONGEST_CONTEXT = 4096
STEPS_OF_STAGES = 3
# Rows between a row and the one whose hidden states it gets, to see whether a drafter reads them at all.
ELSEWHERE = -29
ALIGNMENTS = {
    "at the anchor's own position": OWN,
    "one position before": Alignment(moved=-1),
    "one position after": Alignment(moved=1),
    "context capped before the anchor": Alignment(capped=1),
}


@dataclass(frozen=True)
class Patient:
    """What is probed.

    kind, source: of the drafter, and its checkpoint.
    costs: of passes on this machine, see Costs; None where they are not known.
    folder: of the target's checkpoint, for mlx-lm's forward; None to leave that out.
    """

    target: Target
    drafter: Any
    kind: Kind
    source: DrafterSource
    tokenizer: Any
    costs: Costs | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class AtPosition:
    """How drafts of one position do.

    accepted: share of drafts that are right with all before them.
    conditional: share of those whose predecessors are all right.
    right: share of right ones when the text's own tokens come before.
    rank: median number of tokens with larger draft logits than the right one.
    in_first, in_16: shares of drafts where that is 0, and below 16.
    candidates: share where the right token is among the candidates.
    walk: how much more often the chosen candidate is right than the one with the largest logit.
    entropy: of the draft distribution, mean, in nats.
    """

    accepted: float
    conditional: float
    right: float
    rank: float
    in_first: float
    in_16: float
    candidates: float
    walk: float
    entropy: float


@dataclass(frozen=True)
class Speed:
    """What a depth gives on this machine by measured costs and acceptance; depth 0 is plain decoding.

    draft_ms, verify_ms: of a round.
    tokens: of a round, expected.
    """

    depth: int
    draft_ms: float
    verify_ms: float
    tokens: float

    @property
    def tokens_per_second(self) -> float:
        """The expected rate."""
        return 1000 * self.tokens / (self.draft_ms + self.verify_ms)


@dataclass
class Probe:
    """What is known of a drafter so far; a part that was not measured is empty or None.

    texts: what it was measured on.
    hits: of all anchors.
    positions: by draft position.
    sampled: of the anchors that contracts and alignments were measured with, as declared.
    contracts: others than the declared one, the clearly better first.
    alignments: by name.
    elsewhere: first drafts with hidden states of other rows.
    contexts: by what was before the anchors.
    captured: the target's hidden states, beside mlx-lm's.
    stages: over all passes.
    departures: of the stages of one pass from their formulas.
    """

    texts: list[Text] = field(default_factory=list)
    hits: Hits | None = None
    positions: list[AtPosition] = field(default_factory=list)
    sampled: Hits | None = None
    contracts: list[Found] = field(default_factory=list)
    alignments: dict[str, Hits] = field(default_factory=dict)
    elsewhere: Hits | None = None
    contexts: dict[str, Hits] = field(default_factory=dict)
    captured: list[Captured] = field(default_factory=list)
    stages: list[StageNumbers] = field(default_factory=list)
    departures: list[Departure] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)

    def of_kinds(self) -> dict[str, Hits]:
        """Return the drafts by the kind of their text."""
        if self.hits is None:
            return {}
        kinds = np.array([text.kind for text in self.texts])[self.hits.text]
        return {str(kind): self.hits.only(kinds == kind) for kind in dict.fromkeys(kinds.tolist())}

    @property
    def best_depth(self) -> int | None:
        """The depth with the highest expected rate; None where costs are not known."""
        return max(self.speeds, key=lambda speed: speed.tokens_per_second).depth if self.speeds else None


Say = Callable[[str], None]
"""Is told what comes next, before each part of a probe."""


def probe(patient: Patient, into: Probe, text: Sequence[int] | None = None, say: Say = lambda what: None) -> None:
    """Probe a drafter, part by part, so that an interruption leaves in ``into`` what is known until then.

    into: its texts are used, where it has some.

    text: tokens of a text to measure on; None for the target's own replies to built-in prompts.
    say: is told what comes next.
    Raises RequestError where the text is too short.
    """
    target, drafter = patient.target, patient.drafter
    variants = patient.kind.variants(drafter, target)
    if not into.texts:
        say("texts")
        into.texts = texts_of(patient, layer_ids_of(drafter, variants), text)
    say("acceptance")
    watch = Watch(drafter.draft_ids)
    into.hits = measure(drafter, into.texts, drafter.max_draft, watch=watch.of_pass)
    into.stages = watch.numbers()
    into.positions = at_positions(into.hits, watch)
    if patient.costs is not None:
        into.speeds = speeds_of(patient.costs, [each.accepted for each in into.positions])
    say("stages")
    if patient.folder is not None and into.texts:
        into.captured = captured(patient.folder, target.dtype, into.texts[0], drafter.target_layer_ids)
    into.departures = departures_of(patient, into.texts)
    say("alignments")
    depth = min(SAMPLED_DEPTH, drafter.max_draft)
    stride = max(1, sum(len(each.anchors(depth)) for each in into.texts) // SAMPLED)
    for name, alignment in ALIGNMENTS.items():
        into.alignments[name] = measure(drafter, into.texts, depth, stride, alignment)
    into.elsewhere = measure(drafter, into.texts, 1, alignment=Alignment(shift=ELSEWHERE))
    say("contexts")
    into.contexts = in_contexts(patient, into.texts, depth, stride)
    contracts = contracts_of(variants)
    say(f"contracts:{len(contracts)}")
    search = Search(drafter, into.texts, depth, say)
    into.contracts = search.run(contracts)
    into.sampled = search.hits(Contract(), SAMPLED)


def texts_of(patient: Patient, layer_ids: Sequence[int], text: Sequence[int] | None) -> list[Text]:
    """Return the texts to measure on."""
    target = patient.target
    if text is None:
        replies = own_replies(target, patient.tokenizer, REPLY_TOKENS)
    else:
        size = min(PART_TOKENS, target.context)
        replies = [("text", part, 1) for part in parts_of(text, size)]
    return [read_text(target, kind, tokens, start, layer_ids) for kind, tokens, start in replies]


def at_positions(hits: Hits, watch: Watch) -> list[AtPosition]:
    """Return how drafts do by position; nothing where there are none."""
    if not len(hits.right):
        return []
    ranks, entropies = np.concatenate(watch.ranks), np.concatenate(watch.entropies)
    accepted = hits.accepted.mean(axis=0)
    reached = np.concatenate([[1.0], accepted[:-1]])
    return [
        AtPosition(
            accepted=float(accepted[i]),
            conditional=float(accepted[i] / reached[i]) if reached[i] else 0.0,
            right=float(hits.right[:, i].mean()),
            rank=float(np.median(ranks[:, i])),
            in_first=float((ranks[:, i] == 0).mean()),
            in_16=float((ranks[:, i] < 16).mean()),
            candidates=float(hits.among[:, i].mean()),
            walk=float(hits.right[:, i].mean() - hits.first[:, i].mean()),
            entropy=float(entropies[:, i].mean()),
        )
        for i in range(hits.right.shape[1])
    ]


def speeds_of(costs: Costs, accepted: Sequence[float]) -> list[Speed]:
    """Return what each depth gives, from 0 to that of the acceptance."""
    tokens = [1.0, *(1.0 + total for total in accumulate(accepted))]
    return [
        Speed(depth, costs.draft_ms(depth), costs.verify_ms(depth + 1), expected)
        for depth, expected in enumerate(tokens)
    ]


def departures_of(patient: Patient, texts: Sequence[Text], begin: int = 0) -> list[Departure]:
    """Return how far the stages of a pass over part of a text are from their formulas, the first text's."""
    drafter, steps = patient.drafter, min(STEPS_OF_STAGES, patient.drafter.max_draft)
    if drafter.is_quantized and not any(name.endswith(".scales") for name in patient.source.tensors):
        # It was quantised at load, so its weights are not the checkpoint's.
        return []
    text = max(texts, key=lambda each: each.tokens.size, default=None)
    rows = 0 if text is None else min(ROWS, text.tokens.size - steps - 1)
    if text is None or rows < 2:
        return []
    stages = observed(drafter, text, steps, begin, rows)
    formulas = patient.kind.formulas(patient.source, drafter, patient.target, steps, rows)
    return list(departures(stages, formulas, patient.target.dtype))


def in_contexts(patient: Patient, texts: Sequence[Text], depth: int, stride: int) -> dict[str, Hits]:
    """Measure texts one after another as one, so that drafts have more and more before them."""
    target, drafter = patient.target, patient.drafter
    window = window_of(drafter)
    total = sum(text.tokens.size for text in texts)
    size = min(target.context, max(total, 2 * window if window and 2 * window <= LONGEST_CONTEXT else 0))
    tokens = [int(token) for text in texts for token in np.array(text.tokens)]
    if len(tokens) < 2 * LEAST_POSITIONS:
        return {}
    repeated = (tokens * (size // len(tokens) + 1))[:size]
    long = read_text(target, "long", repeated, 1, drafter.target_layer_ids)
    if window is not None and window < size:
        bounds = {
            f"before the window of {window}": (1, window * 3 // 4),
            "at the window": (window * 3 // 4, window * 5 // 4),
            "past the window": (window * 5 // 4, size),
        }
    else:
        third = size // 3
        bounds = {
            f"first {third} positions": (1, third),
            f"{third} to {2 * third}": (third, 2 * third),
            f"after {2 * third}": (2 * third, size),
        }
    every = max(1, size // (2 * SAMPLED))
    found = {}
    for name, (begin, end) in bounds.items():
        part = replace(
            long,
            start=max(begin, FIRST),
            tokens=long.tokens[: min(end, size)],
            choices=long.choices[: min(end, size)],
        )
        if part.tokens.size - begin > depth + 1:
            found[name] = measure(drafter, [part], depth, every)
    return found


def window_of(drafter: ObservedDrafter) -> int | None:
    """Return how many positions a drafter's contexts hold; None for all."""
    state = drafter.open()
    try:
        return state.context.keep
    finally:
        state.free()
