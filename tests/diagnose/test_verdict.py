"""Verdicts on probes that are put together by hand: what each finding is called, and what comes before what."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_spec.diagnose.acceptance import TEMPERATURES, Hits, likelihoods
from mlx_spec.diagnose.probe import ALIGNMENTS, Probe, speeds_of
from mlx_spec.diagnose.report import as_json, as_text
from mlx_spec.diagnose.stages import Departure, StageNumbers
from mlx_spec.diagnose.text import Text
from mlx_spec.diagnose.variants import Contract, Found
from mlx_spec.diagnose.verdict import Verdict, verdict_of
from mlx_spec.drafters.variants import Variant
from mlx_spec.engine.costs import Costs


def hits(share: float, anchors: int = 200, seed: int = 0, texts: int = 2, **changes: Any) -> Hits:
    """Drafts of two tokens of which a share are right, the others among the candidates or not."""
    rng = np.random.default_rng(seed)
    right = rng.random((anchors, 2)) < share
    no = np.zeros_like(right)
    place = np.where(right, 0, 16)
    at, among = np.arange(anchors), right | (rng.random(right.shape) < 0.5)
    likelihood = np.repeat(-place[..., None] / 16.0, len(TEMPERATURES), axis=-1)
    found = Hits(right, right, among, place, likelihood, no, no, at % texts, at // texts)
    return replace(found, **changes)


def text(kind: str) -> Text:
    nothing = mx.zeros((0,), dtype=mx.int32)
    return Text(kind, nothing, 2, {}, nothing)


def probe(share: float = 0.8, **changes: Any) -> Probe:
    """A probe of a drafter in which nothing is wrong."""
    own = hits(share)
    found = Probe(
        texts=[text("prose"), text("code")],
        hits=own,
        sampled=own,
        alignments={name: own for name in ALIGNMENTS},
        elsewhere=hits(share * 0.2, seed=1),
        stages=[StageNumbers("ctx_combined", 0, -1.0, 1.0, 0.5)],
        departures=[Departure("ctx_combined", 0.5)],
    )
    return replace(found, **changes)


VARIANT = Variant("norms one larger", "norms", "add 1", lambda drafter: drafter)


def other(share: float) -> list[Found]:
    own = hits(0.3)
    return [Found(Contract((VARIANT,)), hits(share), own)]


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "not finite": ({"stages": [StageNumbers("layers.0.x", 3, 0.0, 6e4, 1.0)]}, "layers.0.x overflows"),
    "zero": ({"stages": [StageNumbers("steps.0.out", 0, 0.0, 0.0, 0.0)]}, "steps.0.out is zero"),
    "departs": (
        {"departures": [Departure("q", 0.4), Departure("attended", 90.0)]},
        "attended is computed wrongly",
    ),
    "late": ({"hits": hits(0.05, late=hits(0.7).right)}, "one position late"),
    "early": ({"hits": hits(0.05, early=hits(0.7).right)}, "one position early"),
    "contract": ({"contracts": other(0.8)}, "norms one larger"),
    "alignment": (
        {"alignments": {name: hits(0.3 if i == 0 else 0.8) for i, name in enumerate(ALIGNMENTS)}},
        "one position before",
    ),
    "walk": ({"hits": hits(0.4, first=hits(0.9).right)}, "chooses worse than the logits"),
    "nothing read": ({"elsewhere": hits(0.8)}, "say nothing"),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_port_is_named(name: str) -> None:
    changes, cause = BROKEN[name]
    verdict = verdict_of(probe(**changes))
    assert verdict.status == "broken port" and cause in verdict.cause and verdict.evidence
    assert str(verdict).startswith(f"broken port, {verdict.cause}: ")


def test_a_healthy_drafter_is_healthy() -> None:
    for seed in range(20):
        own = hits(0.7, seed=seed)
        found = probe(
            hits=own, sampled=own, contracts=[Found(Contract((VARIANT,)), hits(0.7, seed=99 + seed), own)]
        )
        assert verdict_of(found).status == "healthy"


def test_low_acceptance_is_a_weak_drafter_and_says_where() -> None:
    verdict = verdict_of(probe(0.3))
    assert verdict.status == "weak drafter"
    own = hits(0.9)
    own.right[own.text == 1] = False
    verdict = verdict_of(probe(hits=own, elsewhere=hits(0.1)))
    assert verdict.status == "weak drafter" and "code" in verdict.cause


def test_acceptance_that_falls_with_the_context_is_weakness_there() -> None:
    contexts = {"before the window of 64": hits(0.9), "at the window": hits(0.8), "past the window": hits(0.2)}
    verdict = verdict_of(probe(contexts=contexts))
    assert verdict.status == "weak drafter" and "past the window" in verdict.cause


def test_an_interrupted_probe_has_not_enough_evidence_unless_it_has() -> None:
    assert verdict_of(Probe()).status == "not enough evidence"
    assert verdict_of(probe(hits=hits(0.8, anchors=10))).status == "not enough evidence"
    assert verdict_of(probe(sampled=None)).status == "not enough evidence"
    assert verdict_of(probe(sampled=None, **BROKEN["not finite"][0])).status == "broken port"


def test_a_gain_at_late_positions_alone_is_no_other_contract() -> None:
    own = hits(0.5)
    right = own.right.copy()
    right[own.position > np.median(own.position)] = True
    right[own.position <= np.median(own.position)] &= (
        np.random.default_rng(5).random((101, 2))[: (own.position <= np.median(own.position)).sum()] < 0.9
    )
    late = replace(own, right=right, place=np.where(right, 0, 16))
    assert not Found(Contract((VARIANT,)), late, own).is_better
    assert Found(Contract((VARIANT,)), hits(1.0), own).is_better


def likelier(own: Hits, gains: np.ndarray) -> Found:
    """A contract with the same drafts, whose right tokens are likelier by so many nats after each anchor."""
    other = replace(own, likelihood=own.likelihood + gains[:, None, None])
    return Found(Contract((VARIANT,)), other, own)


def test_likelihood_shows_what_changes_few_drafts() -> None:
    """At all positions, that is: not at the late ones alone, nor by a sharper or flatter distribution."""
    own, rng = hits(0.7), np.random.default_rng(3)
    spread = 0.1 * rng.normal(size=200)
    assert likelier(own, 0.1 + spread).is_better
    assert not likelier(own, spread).is_better and not likelier(own, spread - 0.1).is_better
    assert not likelier(own, np.where(own.position > np.median(own.position), 0.3, -0.02) + 0.1 * spread).is_better
    flatter = np.stack([own.likelihood[..., 0] + 0.1 * i for i in range(len(TEMPERATURES))], axis=-1)
    moved = replace(own, likelihood=np.roll(flatter, 1, axis=-1))
    assert not Found(Contract((VARIANT,)), moved, replace(own, likelihood=flatter)).is_better


def test_likelihoods_at_every_temperature() -> None:
    scores = np.array([[[3.0, 1.0, -2.0]], [[0.5, 0.25, np.inf]]])
    found = likelihoods(scores, np.array([[[1.0]], [[0.5]]]), np.array([[True], [False]]))
    for i, temperature in enumerate(TEMPERATURES):
        share = np.exp(scores[0, 0] / temperature)
        assert found[0, 0, i] == pytest.approx(np.log(share[1] / share.sum()))
    assert np.isfinite(found).all()


def test_rows_of_another_place_are_named() -> None:
    verdict = verdict_of(probe(departures=[Departure("ctx_combined", 900.0, -1)]))
    assert verdict.cause == "ctx_combined has the rows before: it needs those of the row after" and verdict.fixes


def test_the_depth_to_choose_is_the_fastest() -> None:
    costs = Costs({1: 10.0, 8: 17.0}, {1: 1.0, 7: 7.0})
    speeds = speeds_of(costs, [0.8, 0.6, 0.1])
    assert [each.depth for each in speeds] == [0, 1, 2, 3]
    assert speeds[0].tokens_per_second == pytest.approx(100)
    assert speeds[2].tokens == pytest.approx(2.4)
    assert probe(speeds=speeds).best_depth == 2
    assert Probe().best_depth is None


def test_reports_hold_what_is_known_and_nothing_else() -> None:
    for found in (Probe(), probe(), probe(sampled=None), probe(contracts=other(0.8))):
        verdict = verdict_of(found)
        values = as_json(found, verdict)
        assert values["verdict"]["status"] == verdict.status
        assert as_text(found, verdict).endswith(tuple([str(verdict), *(f"  fix: {fix}" for fix in verdict.fixes)]))
    assert "norms one larger" in as_text(probe(contracts=other(0.8)), Verdict("healthy", "", "x"))
