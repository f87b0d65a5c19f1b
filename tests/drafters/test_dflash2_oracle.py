"""Our block forward and walk against Z Lab's own MLX code and against a float64 oracle, over many rounds.

Everything runs in float32. The three implementations order their sums differently, so they can agree only to
rounding, and float32 rounding is small enough that a wrong mask, position or kernel (0.01 and more) shows.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from choosing import GREEDY
from one_draft import block, extend, propose
from oracles.dflash2_numpy import DFlash2Oracle
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_models import tiny_target

from mlx_spec.drafters.base import Committed
from mlx_spec.drafters.dflash2.load import load_dflash2

ROUNDING = 1e-4
CLEAR = 1e-4
SEEDS = [8, 26]  # No choice of any walk is nearer to a tie than CLEAR.
SLIDING, FULL = "sliding_attention", "full_attention"


def dflash1_config(**changes: Any) -> dict[str, Any]:
    """A DFlash 1 configuration: no convolution and no selector."""
    config = dflash2_config(architectures=["DFlashDraftModel"], **changes)
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        del config["dflash_config"][key]
    return config


# (configuration, prompt length). A window of 24 binds from 16 cached rows on, one of 200 never.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "full attention": (dflash2_config(layer_types=[FULL] * 2), 30),
    "no layer types": (dflash2_config(layer_types=...), 30),
    "window not binding": (dflash2_config(sliding_window=200), 30),
    "window binding": (dflash2_config(), 30),
    "window filled while decoding": (dflash2_config(), 3),
    "causal, full": (dflash2_config(layer_types=[FULL] * 2, is_causal=True), 30),
    "causal, window binding": (dflash2_config(is_causal=True), 30),
    "causal by default": (dflash2_config(is_causal=...), 30),
    "mixed layers": (dflash2_config(layer_types=[SLIDING, FULL]), 30),
    "mixed layers, causal by default": (dflash2_config(layer_types=[FULL, SLIDING], is_causal=...), 30),
    "three taps, groups of 8": (dflash2_config(conv_kernel_size=3, conv_group_size=8), 30),
    "head transform": (
        dflash2_config(
            layer_types=[FULL] * 2,
            final_logit_softcapping=5.0,
            output_multiplier=0.5,
            input_embedding_scale=2.0,
        ),
        30,
    ),
    "DFlash 1, full attention": (dflash1_config(layer_types=[FULL] * 2, is_causal=...), 30),
    "DFlash 1, causal by default": (dflash1_config(is_causal=...), 30),
    "DFlash 1, bidirectional": (dflash1_config(sliding_window=200), 30),
}


def features_of_rounds(prompt: int, accepted: list[int], width: int) -> list[mx.array]:
    """Random target features: the prompt's, then those of each round's accepted rows and its anchor."""
    sizes = [prompt, *(a + 1 for a in accepted)]
    return [mx.random.normal((n, width), key=mx.random.key(i)) for i, n in enumerate(sizes)]


def run_ours(folder: Path, rounds: list[mx.array], anchors: list[int]) -> list[tuple[np.ndarray, list[int]]]:
    """Return hidden states and the greedy path of every round."""
    drafter = load_dflash2(folder, tiny_target("qwen3", mx.float32), "tiny")
    state, position, results = drafter.open(), 0, []
    for features, anchor in zip(rounds, anchors, strict=True):
        extend(drafter, state, Committed(position, mx.zeros(features.shape[0], dtype=mx.int32), features))
        position += features.shape[0]
        hidden = block(drafter, state, anchor, drafter.config.block_size)
        proposal = propose(drafter, state, anchor, drafter.max_draft, GREEDY)
        results.append((np.array(hidden), proposal.tokens.tolist()))
    return results


def run_oracle(
    config: dict[str, Any], rounds: list[mx.array], anchors: list[int]
) -> list[tuple[np.ndarray, list[int]]]:
    """Do the same with the float64 oracle."""
    model = tiny_target("qwen3", mx.float32).model
    tensors = {name: np.array(value) for name, value in random_tensors(config).items()}
    oracle = DFlash2Oracle(
        config, tensors, np.array(model.model.embed_tokens.weight), np.array(model.lm_head.weight)
    )
    results = []
    for features, anchor in zip(rounds, anchors, strict=True):
        oracle.commit(np.array(features))
        hidden = oracle.hidden(anchor, 8)
        results.append((hidden, oracle.path(hidden, anchor)))
        assert oracle.margin > CLEAR, "These inputs have a near tie that rounding may decide: take another seed."
    return results


def run_official(
    folder: Path, rounds: list[mx.array], anchors: list[int], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[np.ndarray, list[int]]]:
    """Do the same with PyPI ``dflash``; skips where it is not installed."""
    official = pytest.importorskip("dflash.model_mlx", reason="needs `pip install --no-deps dflash==0.1.0`")
    monkeypatch.setattr(official, "snapshot_download", lambda path, **_: path)
    model = official.load_draft(str(folder))
    model.bind(tiny_target("qwen3", mx.float32).model)
    cache, results = model.make_cache(), []
    for features, anchor in zip(rounds, anchors, strict=True):
        block = mx.array([[anchor] + [95] * 7])
        hidden = model.hidden_states(block, features[None], cache)
        logits = model.compute_logits(hidden[:, 1:])
        if hasattr(model, "candidate_selector"):
            path = model.candidate_selector.select(hidden[:, 1:], logits, mx.array([anchor]), 0)[0]
        else:
            path = mx.argmax(logits, axis=-1)
        results.append((np.array(hidden[0]), path[0].tolist()))
    return results


def random_rounds(config: dict[str, Any], prompt: int, seed: int) -> tuple[list[mx.array], list[int], list[bool]]:
    """Every accept count 0 .. 7 once, in random order: features, anchors, and whether the official ring fails."""
    rng = np.random.default_rng(seed)
    accepted = [int(a) for a in rng.permutation(8)]
    rounds = features_of_rounds(prompt, accepted, 3 * config["hidden_size"])
    anchors = [int(a) for a in rng.integers(0, 95, len(rounds))]
    held, meets_defect = 0, []
    for features in rounds:
        slides = SLIDING in (config.get("layer_types") or [])
        # Its ring of window - 1 rows writes one appended row at the front and masks as if it were at the end.
        meets_defect.append(slides and features.shape[0] == 1 and held >= config["sliding_window"] - 1)
        held += features.shape[0]
    return rounds, anchors, meets_defect


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_float64_oracle(case: str, seed: int, tmp_path: Path) -> None:
    config, prompt = CASES[case]
    rounds, anchors, _ = random_rounds(config, prompt, seed)
    ours = run_ours(write_drafter(tmp_path, config), rounds, anchors)
    for number, (got, expected) in enumerate(zip(ours, run_oracle(config, rounds, anchors), strict=True)):
        assert difference(got[0], expected[0]) < ROUNDING, number
        assert got[1] == expected[1], number


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_official_code(case: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal in every round but those where the official context ring is in the wrong order."""
    config, prompt = CASES[case]
    rounds, anchors, meets_defect = random_rounds(config, prompt, seed)
    ours = run_ours(write_drafter(tmp_path, config), rounds, anchors)
    official = run_official(tmp_path, rounds, anchors, monkeypatch)
    for number, (got, expected) in enumerate(zip(ours, official, strict=True)):
        if meets_defect[number]:
            assert difference(got[0], expected[0]) > 100 * ROUNDING, number
        else:
            assert difference(got[0], expected[0]) < ROUNDING, number
            assert got[1] == expected[1], number


def test_one_row_on_a_full_window_equals_the_oracle_where_the_official_ring_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds in a row that accept nothing: the newest context row must be seen, the oldest must not."""
    config = dflash2_config()
    rounds = features_of_rounds(40, [0, 0, 0, 4, 0], 192)
    anchors = [3, 14, 15, 92, 65, 35]
    ours = run_ours(write_drafter(tmp_path, config), rounds, anchors)
    oracle = run_oracle(config, rounds, anchors)
    for got, expected in zip(ours, oracle, strict=True):
        assert difference(got[0], expected[0]) < ROUNDING
        assert got[1] == expected[1]
    official = run_official(tmp_path, rounds, anchors, monkeypatch)
    agrees = [difference(o[0], e[0]) < ROUNDING for o, e in zip(official, oracle, strict=True)]
    assert agrees == [True, False, False, False, True, False]


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_fewer_rows_than_the_block_are_a_shorter_block(rows: int, tmp_path: Path) -> None:
    config = dflash2_config()
    drafter = load_dflash2(write_drafter(tmp_path, config), tiny_target("qwen3", mx.float32), "tiny")
    features, model = features_of_rounds(30, [], 192)[0], tiny_target("qwen3", mx.float32).model
    state = drafter.open()
    extend(drafter, state, Committed(0, mx.zeros(30, dtype=mx.int32), features))
    oracle = DFlash2Oracle(
        config,
        {name: np.array(value) for name, value in random_tensors(config).items()},
        np.array(model.model.embed_tokens.weight),
        np.array(model.lm_head.weight),
    )
    oracle.commit(np.array(features))
    expected = oracle.hidden(7, rows)
    assert difference(np.array(block(drafter, state, 7, rows)), expected) < ROUNDING
    assert propose(drafter, state, 7, rows - 1, GREEDY).tokens.tolist() == oracle.path(expected, 7)


def test_a_block_before_any_context_sees_only_itself(tmp_path: Path) -> None:
    config, model = dflash2_config(), tiny_target("qwen3", mx.float32).model
    drafter = load_dflash2(write_drafter(tmp_path, config), tiny_target("qwen3", mx.float32), "tiny")
    oracle = DFlash2Oracle(
        config,
        {name: np.array(value) for name, value in random_tensors(config).items()},
        np.array(model.model.embed_tokens.weight),
        np.array(model.lm_head.weight),
    )
    assert difference(np.array(block(drafter, drafter.open(), 7, 8)), oracle.hidden(7, 8)) < ROUNDING
