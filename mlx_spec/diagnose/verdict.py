"""What a probe shows: whether a drafter is healthy, weak, or a broken port, and why."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mlx_spec.diagnose.acceptance import Hits, is_better, is_gain
from mlx_spec.diagnose.probe import ALIGNMENTS, Probe
from mlx_spec.diagnose.variants import better_contract

Status = Literal["healthy", "weak drafter", "broken port", "not enough evidence"]
LEAST_ANCHORS = 48
# Acceptance of first drafts below which a drafter is weak, over all texts and on one kind of text.
WEAK, WEAK_ON_KIND = 0.6, 0.35
# Share of drafts that are the choice of the next position, from which on rows are off by one.
OFF_BY_ONE = 0.15
# How much more a row's hidden states help than others': standard errors, score. More positions than texts have.
SIGNAL, LEAST_SIGNAL, POSITIONS = 1.5, 0.02, 1 << 24
# Share of the acceptance of a short context below which a long one is too long.
FALLS = 0.6


@dataclass(frozen=True)
class Verdict:
    """What a drafter is.

    cause: what is wrong and where, in words; empty for a healthy one.
    evidence: the figures that show it.
    fixes: what would state it rightly, where that is known.
    """

    status: Status
    cause: str
    evidence: str
    fixes: tuple[str, ...] = ()

    def __str__(self) -> str:
        cause = f", {self.cause}" if self.cause else ""
        return f"{self.status}{cause}: {self.evidence}"


def verdict_of(probe: Probe) -> Verdict:
    """Judge a probe, also one that was interrupted."""
    for look in LOOKS:
        if (found := look(probe)) is not None:
            return found
    if probe.hits is None or len(probe.hits.right) < LEAST_ANCHORS:
        count = 0 if probe.hits is None else len(probe.hits.right)
        return Verdict(
            "not enough evidence", "", f"drafts after {count} positions; at least {LEAST_ANCHORS} are needed"
        )
    if probe.sampled is None:
        return Verdict("not enough evidence", "", "not all parts of the probe were run")
    return strength(probe)


def not_finite(probe: Probe) -> Verdict | None:
    """Name the first stage that holds NaN or infinity."""
    for stage in probe.stages:
        if stage.not_finite and stage.stage.endswith("logits") is False:
            evidence = (
                f"{stage.not_finite} of its numbers are NaN or infinite, the finite ones reach {stage.most:.3g}"
            )
            return Verdict("broken port", f"{stage.stage} overflows", evidence)
    return None


def all_zero(probe: Probe) -> Verdict | None:
    """Name the first stage that is zero everywhere."""
    for stage in probe.stages:
        if not stage.rms and not stage.not_finite:
            return Verdict("broken port", f"{stage.stage} is zero everywhere", "no drafter was trained to that")
    return None


def other_capture(probe: Probe) -> Verdict | None:
    """Name a hidden state of the target that is not mlx-lm's: then the drafter is not to blame."""
    for found in probe.captured:
        if not found.departs:
            continue
        layer, by = found.nearest
        evidence = (
            f"it differs from mlx-lm's by {found.difference:.2g} of its size; rounding explains {found.bound:.2g}"
        )
        cause = f"the target's hidden state {found.layer} is computed wrongly"
        if found.nearest != (found.layer, 0):
            row = {0: "", -1: " of the row before", 1: " of the row after"}[by]
            cause = f"the target's hidden state {found.layer} is that of layer {layer}{row}"
        return Verdict("broken port", cause, evidence)
    return None


def departs(probe: Probe) -> Verdict | None:
    """Name the first stage that is not what its formula and the checkpoint's tensors give."""
    for departure in probe.departures:
        if departure.departs:
            evidence = (
                f"{departure.units:.0f} units of expected rounding from the formula; the stages before agree"
            )
            if departure.shift:
                side, other = ("before", "after") if departure.shift < 0 else ("after", "before")
                cause = f"{departure.stage} has the rows {side}: it needs those of the row {other}"
                fix = f"give each row what belongs to the row {other} the one that it gets"
                return Verdict("broken port", cause, f"{evidence}, and so do its rows but for the place", (fix,))
            return Verdict("broken port", f"{departure.stage} is computed wrongly", evidence)
    return None


def off_by_one(probe: Probe) -> Verdict | None:
    """Find drafts that are right for the next position, or the one before."""
    if probe.hits is None or len(probe.hits.right) < LEAST_ANCHORS:
        return None
    right = probe.hits.right[:, 0].mean()
    late = "drafts are one position late: its first row predicts the token after the anchor"
    early = "drafts are one position early: they repeat the token before"
    for side, hits, cause, fix in (
        ("after", probe.hits.late, late, "draft from the anchor's own row on"),
        ("before", probe.hits.early, early, "draft from the row after the anchor's on"),
    ):
        share = hits[:, 0].mean()
        if share > max(OFF_BY_ONE, 2 * right):
            evidence = f"{share:.0%} of first drafts are right for the position {side}, {right:.0%} for their own"
            return Verdict("broken port", cause, evidence, (fix,))
    return None


def other_contract(probe: Probe) -> Verdict | None:
    """Name a contract that fits clearly better."""
    if (best := better_contract(probe.contracts)) is None:
        return None
    return Verdict("broken port", best.contract.name, gain(best.other, best.hits), tuple(best.contract.fixes))


def other_alignment(probe: Probe) -> Verdict | None:
    """Name an alignment that fits clearly better."""
    own, *names = ALIGNMENTS
    if own not in probe.alignments:
        return None
    for name in names:
        if name in probe.alignments and is_better(probe.alignments[name], probe.alignments[own]):
            fix = "shift the positions of the rows that draft"
            return Verdict(
                "broken port", f"drafts fit {name}", gain(probe.alignments[own], probe.alignments[name]), (fix,)
            )
    return None


def reads_nothing(probe: Probe) -> Verdict | None:
    """Find a drafter to which the target's hidden states say nothing."""
    own, other = probe.hits, probe.elsewhere
    if own is None or other is None or len(own.right) < LEAST_ANCHORS:
        return None
    # Fewer tokens have to follow a first draft, so that there are more anchors.
    among = np.isin(other.text * POSITIONS + other.position, own.text * POSITIONS + own.position)
    gains = 1 / (1.0 + own.place[:, 0]) - 1 / (1.0 + other.place[among, 0])
    if gains.mean() > max(LEAST_SIGNAL, SIGNAL * gains.std() / len(gains) ** 0.5):
        return None
    return Verdict(
        "broken port",
        "the target's hidden states say nothing to it",
        f"first drafts are right at {own.right[:, 0].mean():.0%} of the positions with them, and at "
        f"{other.right.mean():.0%} with those of other rows: it was trained with another target, or "
        "with another revision of it, or the tensors that read them are not its own",
    )


def walk_harms(probe: Probe) -> Verdict | None:
    """Find a selector whose walk chooses worse than the logits alone."""
    if probe.hits is None or len(probe.hits.right) < LEAST_ANCHORS:
        return None
    first, right = probe.hits.first.mean(axis=1), probe.hits.right.mean(axis=1)
    if not is_gain(first - right):
        return None
    evidence = (
        f"its walk is right at {right.mean():.0%} of the positions, the largest logit alone at {first.mean():.0%}"
    )
    return Verdict("broken port", "the candidate selector chooses worse than the logits alone", evidence)


def gain(declared: Hits, other: Hits) -> str:
    """Say how much better drafts are."""
    return (
        f"drafts are right at {declared.right.mean():.0%} of {declared.right.size} positions as declared, and at "
        f"{other.right.mean():.0%} so"
    )


LOOKS: tuple[Callable[[Probe], Verdict | None], ...] = (
    not_finite,
    all_zero,
    other_capture,
    departs,
    other_contract,
    other_alignment,
    off_by_one,
    walk_harms,
    reads_nothing,
)


def strength(probe: Probe) -> Verdict:
    """Judge a drafter in which nothing is inconsistent by its acceptance alone."""
    assert probe.hits is not None
    first = float(probe.hits.accepted[:, 0].mean())
    tokens = 1.0 + float(probe.hits.accepted.sum(axis=1).mean())
    by_kind = {kind: float(hits.accepted[:, 0].mean()) for kind, hits in probe.of_kinds().items()}
    evidence = f"{first:.0%} of first drafts are right, {tokens:.2f} tokens a round; every stage is consistent"
    low = [kind for kind, share in by_kind.items() if share < WEAK_ON_KIND]
    if first < WEAK or low:
        where = ", ".join(f"{kind} {by_kind[kind]:.0%}" for kind in low or by_kind)
        return Verdict(
            "weak drafter", f"weakest on {min(by_kind, key=lambda kind: by_kind[kind])}", f"{evidence} ({where})"
        )
    if (falls := falls_with_context(probe)) is not None:
        return Verdict("weak drafter", *falls)
    return Verdict("healthy", "", evidence)


def falls_with_context(probe: Probe) -> tuple[str, str] | None:
    """Return the cause and evidence of acceptance that falls in long contexts, or None."""
    if len(probe.contexts) < 2:
        return None
    name, last = list(probe.contexts.items())[-1]
    first = next(iter(probe.contexts.values()))
    shares = first.accepted[:, 0], last.accepted[:, 0]
    error = float(np.sqrt(sum(x.var() / max(len(x), 1) for x in shares)))
    if shares[1].mean() < FALLS * shares[0].mean() and shares[0].mean() - shares[1].mean() > 4 * error:
        return (
            f"in long contexts, {name}",
            f"{shares[1].mean():.0%} of first drafts are right there, {shares[0].mean():.0%} before",
        )
    return None
