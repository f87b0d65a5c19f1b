"""A probe as JSON values, and as text for people."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from mlx_spec.diagnose.acceptance import Hits
from mlx_spec.diagnose.probe import Probe
from mlx_spec.diagnose.verdict import Verdict

# Contracts that are shown to people; the JSON has all.
SHOWN = 6


def as_json(probe: Probe, verdict: Verdict) -> dict[str, Any]:
    """Return all that is known."""
    return {
        "verdict": asdict(verdict),
        "anchors": 0 if probe.hits is None else len(probe.hits.right),
        "positions": [asdict(each) for each in probe.positions],
        "kinds": {kind: of_hits(hits) for kind, hits in probe.of_kinds().items()},
        "contexts": {name: of_hits(hits) for name, hits in probe.contexts.items()},
        "alignments": {name: of_hits(hits) for name, hits in probe.alignments.items()},
        "one_position_late": None if probe.hits is None else rounded(probe.hits.late.mean(axis=0)),
        "one_position_early": None if probe.hits is None else rounded(probe.hits.early.mean(axis=0)),
        "hidden_states_of_other_rows": None if probe.elsewhere is None else of_hits(probe.elsewhere),
        "contracts": [
            {
                "name": found.contract.name,
                "fixes": found.contract.fixes,
                "clearly_better": found.is_better,
                **of_hits(found.hits),
            }
            for found in probe.contracts
        ],
        "as_declared": None if probe.sampled is None else of_hits(probe.sampled),
        "captured": [asdict(each) | {"departs": each.departs} for each in probe.captured],
        "stages": [asdict(stage) for stage in probe.stages],
        "departures": [
            {"stage": each.stage, "units": float(f"{each.units:.3g}") if np.isfinite(each.units) else None}
            for each in probe.departures
        ],
        "speeds": [{**asdict(each), "tokens_per_second": each.tokens_per_second} for each in probe.speeds],
        "best_depth": probe.best_depth,
    }


def of_hits(hits: Hits) -> dict[str, Any]:
    """Return the shares of drafts that are right, and accepted, by position."""
    if not len(hits.right):
        return {"anchors": 0, "right": [], "accepted": [], "score": 0.0}
    return {
        "anchors": len(hits.right),
        "right": rounded(hits.right.mean(axis=0)),
        "accepted": rounded(hits.accepted.mean(axis=0)),
        "score": round(hits.score, 4),
    }


def rounded(values: np.ndarray) -> list[float]:
    """Return numbers for a report."""
    return [round(float(value), 4) for value in values]


def as_text(probe: Probe, verdict: Verdict) -> str:
    """Lay a probe out for people, the verdict last."""
    parts = [positions(probe), kinds(probe), alignments(probe), contracts(probe), stages(probe), speeds(probe)]
    ends = [str(verdict), *(f"  fix: {fix}" for fix in verdict.fixes)]
    return "\n\n".join([*(part for part in parts if part), "\n".join(ends)])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out rows under the names of the columns: the first to the left, the others to the right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )


def share(value: float) -> str:
    """Return a share in per cent."""
    return f"{value:.0%}"


def positions(probe: Probe) -> str:
    """Lay out acceptance, ranks and candidates by draft position."""
    if not probe.positions or probe.hits is None:
        return ""
    head = ("draft", "accepted", "conditional", "median rank", "top 1", "top 16", "candidates", "walk", "entropy")
    rows = [
        (
            str(i + 1),
            *map(share, (each.accepted, each.conditional)),
            f"{each.rank:.0f}",
            *map(share, (each.in_first, each.in_16, each.candidates)),
            f"{each.walk:+.0%}",
            f"{each.entropy:.2f}",
        )
        for i, each in enumerate(probe.positions)
    ]
    return f"After {len(probe.hits.right)} positions of {len(probe.texts)} texts:\n" + table(head, rows)


def kinds(probe: Probe) -> str:
    """Lay out acceptance by kind of text and by context."""
    parts = {**probe.of_kinds(), **{f"context: {name}": hits for name, hits in probe.contexts.items()}}
    rows = [
        (
            name,
            str(len(hits.right)),
            share(hits.accepted[:, 0].mean()),
            f"{1 + hits.accepted.sum(axis=1).mean():.2f}",
        )
        for name, hits in parts.items()
        if len(hits.right)
    ]
    return table(("text", "positions", "first draft", "tokens a round"), rows) if rows else ""


def alignments(probe: Probe) -> str:
    """Lay out the alignments."""
    if probe.hits is None or not probe.alignments:
        return ""
    rows = [(name, share(hits.right.mean()), f"{hits.score:.3f}") for name, hits in probe.alignments.items()]
    rows += [
        ("the same, right for the position after", share(probe.hits.late.mean()), ""),
        ("the same, right for the position before", share(probe.hits.early.mean()), ""),
    ]
    if probe.elsewhere is not None:
        hits = probe.elsewhere
        rows.append(("hidden states of other rows", share(hits.right.mean()), f"{hits.score:.3f}"))
    return table(("drafting", "right", "score"), rows)


def contracts(probe: Probe) -> str:
    """Lay out the best contracts."""
    if probe.sampled is None:
        return ""
    rows = [("as declared", share(probe.sampled.right.mean()), f"{probe.sampled.score:.3f}", "")]
    for found in probe.contracts[:SHOWN]:
        hits = found.hits
        rows.append(
            (
                found.contract.name,
                share(hits.right.mean()),
                f"{hits.score:.3f}",
                "clearly better" if found.is_better else "",
            )
        )
    return f"The best of {len(probe.contracts)} other contracts:\n" + table(
        ("contract", "right", "score", ""), rows
    )


def stages(probe: Probe) -> str:
    """Say how the stages are: those with numbers that are not finite or that depart, or that there are none."""
    if not probe.stages:
        return ""
    wrong = [each for each in probe.stages if each.not_finite]
    lines = [f"{len(probe.stages)} stages, " + (f"{len(wrong)} with NaN or infinity" if wrong else "all finite")]
    lines += [
        f"  {each.stage}: {each.not_finite} not finite, {each.least:.3g} to {each.most:.3g}"
        for each in wrong[:SHOWN]
    ]
    if probe.departures:
        most = max(probe.departures, key=lambda each: each.units)
        departing = [each for each in probe.departures if each.departs]
        lines.append(
            f"{len(probe.departures)} compared with formulas in float64: {len(departing)} depart, "
            f"at most {most.units:.1f} units of rounding ({most.stage})"
        )
        lines += [f"  {each.stage}: {each.units:.3g} units" for each in departing[:SHOWN]]
    else:
        lines.append(
            "not compared with formulas, because the head was quantised at load: see bisect --only stages"
        )
    return "\n".join(lines)


def speeds(probe: Probe) -> str:
    """Lay out what each depth gives on this machine."""
    if not probe.speeds:
        return ""
    plain = probe.speeds[0].tokens_per_second
    rows = [
        (
            str(each.depth),
            f"{each.draft_ms:.1f}",
            f"{each.verify_ms:.1f}",
            f"{each.tokens:.2f}",
            f"{each.tokens_per_second:.1f}",
            f"{each.tokens_per_second / plain:.2f}" + (" *" if each.depth == probe.best_depth else "  "),
        )
        for each in probe.speeds
    ]
    head = ("depth", "draft ms", "verify ms", "tokens a round", "tokens/s", "ratio  ")
    return table(head, rows) + "\n* the depth to choose on this machine"
