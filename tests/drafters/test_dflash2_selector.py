"""The walk through the candidates, and what a proposal reports of stages that are not finite."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import one_draft
import pytest
from choosing import GREEDY
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from oracles.walk_on_host import walk_on_host
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_models import tiny_target

from mlx_spec.decoding.accept import Coupled, Rejection
from mlx_spec.drafters.base import Committed, Draft, DraftRequest, DraftRule
from mlx_spec.drafters.dflash2.config import read_config
from mlx_spec.drafters.dflash2.drafter import DFlash2Drafter
from mlx_spec.drafters.dflash2.forward import BlockForward
from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.drafters.dflash2.selector import (
    Candidates,
    CandidateSelector,
    Walked,
    walk,
)
from mlx_spec.errors import DrafterMismatch, RequestError
from mlx_spec.target.linears import module_rows

POSITION = 30


RULES: dict[str, DraftRule] = {"greedy": GREEDY, "coupled": Coupled(3, 2.0, 96), "rejection": Rejection(3, 2.0)}


def random_walk(seed: int, has_selector: bool = True) -> tuple[CandidateSelector | None, Candidates]:
    """Random codebooks, and candidates of the 7 rows of one block."""
    keys = iter(mx.random.split(mx.random.key(seed), 8))
    selector = CandidateSelector(read_config(dflash2_config(), "tiny"))
    for name in ("predecessor_codebook", "successor_codebook"):
        selector[name].weight = mx.random.normal((96, 8), key=next(keys))
    selector.hidden_projection.weight = mx.random.normal((8, 64), key=next(keys)) * 0.2
    hidden, logits = mx.random.normal((1, 7, 64), key=next(keys)), 2 * mx.random.normal((1, 7, 96), key=next(keys))
    ids = mx.argsort(-logits, axis=-1)[..., :16].astype(mx.int32)
    unary = mx.take_along_axis(logits, ids, axis=-1)
    if not has_selector:
        return None, Candidates(ids, unary, mx.zeros((1, 7, 0)))
    return selector, Candidates(ids, unary, module_rows(hidden, selector.hidden_projection))


def one_walk(step: Any, selector: Any, candidates: Candidates, anchor: int, rule: DraftRule) -> Walked:
    """Walk through the candidates of one block."""
    anchors = mx.array([anchor], dtype=mx.int32)
    return step(selector, candidates, anchors, [rule], [rule.noise(POSITION + 1, 7, 16)])


def load(folder: Path, tensors: dict[str, mx.array] | None = None, **changes: Any) -> DFlash2Drafter:
    folder = write_drafter(folder, dflash2_config(**changes), tensors)
    return load_dflash2(folder, tiny_target("qwen3", mx.float32), "tiny")


def propose(drafter: DFlash2Drafter, anchor: int = 7, count: int = 7, rule: DraftRule = GREEDY) -> Draft:
    """Draft after a random prompt."""
    state = drafter.open()
    features = mx.random.normal((POSITION, 192), key=mx.random.key(1))
    one_draft.extend(drafter, state, Committed(0, mx.zeros(POSITION, dtype=mx.int32), features))
    return one_draft.propose(drafter, state, anchor, count, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("has_selector", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_the_walk_on_the_host_is_the_walk_in_the_graph(seed: int, has_selector: bool, rule: str) -> None:
    selector, candidates = random_walk(seed, has_selector)
    in_graph, on_host = (one_walk(step, selector, candidates, 5, RULES[rule]) for step in (walk, walk_on_host))
    tokens, probabilities = in_graph.tokens, in_graph.probabilities[0]
    host_tokens, host_probabilities = on_host.tokens, on_host.probabilities[0]
    assert tokens.dtype == host_tokens.dtype == mx.int32
    assert tokens.tolist() == host_tokens.tolist()
    if rule != "rejection":
        assert probabilities is None
        assert host_probabilities is None
    else:
        assert probabilities.shape == (7, 16)
        np.testing.assert_allclose(np.array(probabilities), np.array(host_probabilities), atol=1e-6, rtol=0)


def scores_by_formula(selector: CandidateSelector, candidates: Candidates, t: int, previous: int) -> np.ndarray:
    """Return unary(b) + sum over r of A[previous, r] * gate[r] * B[b, r], in float64."""
    before = np.array(selector.predecessor_codebook.weight).astype(np.float64)
    after = np.array(selector.successor_codebook.weight).astype(np.float64)
    gate, unary = np.array(candidates.gates[0, t]).astype(np.float64), np.array(candidates.unary[0, t])
    edges = [np.sum(before[previous] * gate * after[b]) for b in candidates.ids[0, t].tolist()]
    return unary + np.array(edges)


@pytest.mark.parametrize("step", [walk, walk_on_host])
@pytest.mark.parametrize("seed", range(4))
def test_scores_positions_and_predecessors_of_the_walk(seed: int, step: Any) -> None:
    """A token is scored after the one picked before it, the first after the anchor, a candidate or not."""
    selector, candidates = random_walk(seed)
    first = set(candidates.ids[0, 0].tolist())
    outside = next(i for i in range(96) if i not in first)
    # Noise that leaves no choice.
    path = np.random.default_rng(seed).integers(0, 16, 7)
    led = 1000 * np.eye(16)[path]
    for anchor in (outside, min(first)):
        walked = step(
            selector, candidates, mx.array([anchor], dtype=mx.int32), [RULES["rejection"]], [mx.array(led)]
        )
        previous = anchor
        for t, (token, ranks) in enumerate(zip(walked.tokens[0].tolist(), np.array(walked.ranks[0]), strict=True)):
            expected = scores_by_formula(selector, candidates, t, previous) / 2.0
            np.testing.assert_allclose(ranks - led[t], expected, atol=2e-4, rtol=0)
            assert token == candidates.ids[0, t, int(path[t])].item()
            previous = token


def test_an_anchor_outside_the_candidates_changes_the_path() -> None:
    selector, candidates = random_walk(0)
    first = set(candidates.ids[0, 0].tolist())
    outside = [i for i in range(96) if i not in first]
    picked = {one_walk(walk, selector, candidates, anchor, GREEDY).tokens[0, 0].item() for anchor in outside}
    assert len(picked) > 1
    assert picked <= first


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_may_walk_on_the_host(rule: str, quantised: bool, tmp_path: Path) -> None:
    drafter = load(tmp_path, selector_rank=32)
    if quantised:
        nn.quantize(drafter.model.candidate_selector, group_size=32, bits=4)
    in_graph = propose(drafter, rule=RULES[rule])
    drafter.walk = walk_on_host
    on_host = propose(drafter, rule=RULES[rule])
    assert in_graph.tokens.tolist() == on_host.tokens.tolist()
    if rule == "rejection":
        np.testing.assert_allclose(
            np.array(in_graph.probabilities), np.array(on_host.probabilities), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("top_k", [4, 16])
@pytest.mark.parametrize("architecture", ["DFlash2DraftModel", "DFlashDraftModel"])
def test_candidates_are_the_first_of_a_sort(architecture: str, top_k: int, tmp_path: Path) -> None:
    drafter = load(tmp_path, architectures=[architecture], selector_top_k=top_k)
    target, state = tiny_target("qwen3", mx.float32), drafter.open()
    features = mx.random.normal((POSITION, 192), key=mx.random.key(1))
    one_draft.extend(drafter, state, Committed(0, mx.zeros(POSITION, dtype=mx.int32), features))
    logits = np.array(target.logits(one_draft.block(drafter, state, 7, 8)[1:]))
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, : drafter.config.selector_top_k]
    proposal = one_draft.propose(drafter, state, 7, 7, GREEDY)
    np.testing.assert_array_equal(np.array(proposal.candidates), expected)
    assert all(t in row for t, row in zip(proposal.tokens.tolist(), expected.tolist(), strict=True))
    if architecture == "DFlashDraftModel":
        assert proposal.tokens.tolist() == logits.argmax(-1).tolist()


def test_restricted_ids_are_the_only_candidates(tmp_path: Path) -> None:
    ids = list(range(3, 93, 4))
    drafter, whole = load(tmp_path / "some", draft_token_ids=ids), load(tmp_path / "all", selector_top_k=96)
    ranked, proposal = propose(whole).candidates.tolist(), propose(drafter)
    assert proposal.candidates.tolist() == [[i for i in row if i in ids][:16] for row in ranked]
    assert set(proposal.tokens.tolist()) <= set(ids)


@pytest.mark.parametrize("count", [0, 8])
def test_a_count_that_the_block_does_not_hold_is_refused(count: int, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"drafts 1 to 7 tokens a round, not {count}"):
        propose(load(tmp_path), count=count)


def stages(drafter: DFlash2Drafter) -> dict[str, bool]:
    return {name: bool(ok.item()) for name, ok in propose(drafter).finite.items()}


def corrupted(tensors: dict[str, mx.array], name: str, value: float) -> mx.array:
    flat = np.array(tensors[name]).reshape(-1)
    flat[5] = value
    return mx.array(flat.reshape(tensors[name].shape))


def corrupt(drafter: DFlash2Drafter, name: str, value: float) -> DFlash2Drafter:
    """Break one loaded weight, as an overflow in a lower precision would."""
    weights = dict(tree_flatten(drafter.model.parameters()))
    drafter.model.update(tree_unflatten([(name, corrupted(weights, name, value))]))
    drafter.forward = BlockForward.of(drafter.model, drafter.config)
    return drafter


@pytest.mark.parametrize("name", ["fc.weight", "candidate_selector.successor_codebook"])
def test_a_checkpoint_that_is_not_finite_is_refused_by_name(name: str, tmp_path: Path) -> None:
    tensors = random_tensors(dflash2_config())
    with pytest.raises(DrafterMismatch, match=f"NaN or infinity in {name}"):
        load(tmp_path, tensors | {name: corrupted(tensors, name, float("nan"))})


def test_a_healthy_drafter_reports_every_stage_as_finite(tmp_path: Path) -> None:
    assert stages(load(tmp_path)) == {"block forward": True, "draft logits": True, "candidate selector": True}
    version_1 = load(tmp_path / "1", architectures=["DFlashDraftModel"])
    assert stages(version_1) == {"block forward": True, "draft logits": True}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["fc.weight", "layers.0.self_attn.v_proj.weight", "layers.1.mlp.down_proj.weight", "norm.weight"]
)
def test_the_block_forward_is_the_first_stage_that_is_not_finite(name: str, value: float, tmp_path: Path) -> None:
    report = stages(corrupt(load(tmp_path), name, value))
    assert next(stage for stage, ok in report.items() if not ok) == "block forward"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_draft_logits_that_are_not_finite_are_reported(value: float, tmp_path: Path) -> None:
    target = tiny_target("qwen3", mx.float32)
    target.model.lm_head.weight[50, 3] = value
    drafter = load_dflash2(write_drafter(tmp_path, dflash2_config()), target, "tiny")
    report = stages(drafter)
    assert (report["block forward"], report["draft logits"]) == (True, False)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_selector_that_is_not_finite_is_reported_alone(value: float, tmp_path: Path) -> None:
    report = stages(corrupt(load(tmp_path), "candidate_selector.hidden_projection.weight", value))
    assert report == {"block forward": True, "draft logits": True, "candidate selector": False}


@pytest.mark.parametrize("changes", [{}, {"architectures": ["DFlashDraftModel"]}, {"is_causal": True}])
def test_blocks_of_one_pass_do_not_see_each_other(changes: dict[str, Any], tmp_path: Path) -> None:
    """Sequences of other lengths, one of them empty and one forked, give what each gives alone."""
    drafter = load(tmp_path, **changes)
    states = [drafter.open() for _ in range(3)]
    for state, count in zip(states, (40, 70, 0), strict=True):
        features = mx.random.normal((count, 192), key=mx.random.key(count))
        if count:
            one_draft.extend(drafter, state, Committed(0, mx.zeros(count, dtype=mx.int32), features))
    states.append(states[0].fork())
    one_draft.extend(drafter, states[3], Committed(40, mx.zeros(2, dtype=mx.int32), mx.ones((2, 192))))
    anchors, counts = [3, 4, 5, 6], [5, 2, 1, 3]
    together = drafter.propose(
        [DraftRequest(*each, GREEDY) for each in zip(states, anchors, counts, strict=True)],
    )
    for state, anchor, count, proposal in zip(states, anchors, counts, together, strict=True):
        alone = one_draft.propose(drafter, state, anchor, 5, GREEDY)
        assert proposal.tokens.tolist() == alone.tokens.tolist()[:count]
        assert proposal.candidates.tolist() == alone.candidates.tolist()[:count]


def test_flags_name_the_sequence_that_is_broken(tmp_path: Path) -> None:
    drafter = load(tmp_path)
    good, bad = drafter.open(), drafter.open()
    for state, features in ((good, mx.ones((5, 192))), (bad, mx.full((5, 192), mx.nan))):
        one_draft.extend(drafter, state, Committed(0, mx.zeros(5, dtype=mx.int32), features))
    proposals = drafter.propose([DraftRequest(state, 3, 2, GREEDY) for state in (good, bad)])
    assert [[flag.item() for flag in proposal.finite.values()] for proposal in proposals] == [
        [True] * 3,
        [False] * 3,
    ]
