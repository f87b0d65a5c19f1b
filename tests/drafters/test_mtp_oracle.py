"""The head's chain against float64 numpy, over many rounds, in every layout that heads are published in.

Our side runs in float32: a wrong mask, position or concatenation (0.01 and more) exceeds rounding by far.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from emulator.run import launcher
from one_draft import extend, propose
from oracles.mtp_numpy import MTPOracle
from tiny_heads import LAYOUTS, Tensors, fused_experts, head_tensors, layer_of, numbered_experts, write_layout
from tiny_models import CONFIGS, tiny_target

from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import launching
from mlx_spec.drafters.base import Committed
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.mtp.load import load_mtp

ROUNDING = 2e-4
COUNT = 5


def watched(seen: list[np.ndarray]) -> object:
    """A greedy choice that keeps the scores it chose from, by token id."""

    def choose(position: int, ids: mx.array, scores: mx.array) -> tuple[mx.array, None]:
        order = np.array(ids)
        seen.append(np.array([np.array(scores)[order == i][0] if i in order else np.nan for i in range(96)]))
        return ids[mx.argmax(scores)], None

    return choose


def run_rounds(drafter: ChainDrafter, oracle: MTPOracle, sizes: list[int]) -> None:
    """Commit rows in pieces of these sizes and compare the chain after each piece."""
    rng, width = np.random.default_rng(7), drafter.forward.norm_embedding.weight.size
    tokens = [int(t) for t in rng.integers(0, 96, sum(sizes) + 1)]
    hidden = rng.standard_normal((sum(sizes), width)).astype(np.float32)
    state, done = drafter.open(), 0
    for size in sizes:
        aux_hidden_states = mx.array(hidden[done : done + size])
        extend(
            drafter,
            state,
            Committed(done, mx.array(tokens[done : done + size], dtype=mx.int32), aux_hidden_states),
        )
        done += size
        seen: list[np.ndarray] = []
        proposal = propose(drafter, state, tokens[done], COUNT, watched(seen))
        expected, logits = oracle.chain(hidden[:done], tokens[1 : done + 1], COUNT)
        assert proposal.tokens.tolist() == expected
        scale = np.abs(logits).max()
        for found, row in zip(seen, logits, strict=True):
            assert np.isfinite(found).sum() == 16
            np.testing.assert_allclose(found[np.isfinite(found)], row[np.isfinite(found)], atol=ROUNDING * scale)


def oracle_for(family: str, tensors: dict[str, mx.array], **options: object) -> MTPOracle:
    target = tiny_target(family, mx.float32)
    embedding = np.array(target.embed(mx.arange(96)))
    config = layer_of(family)
    queries = tensors["layers.0.self_attn.q_proj.weight"].shape[0] // config["num_attention_heads"]
    values = tensors["layers.0.self_attn.v_proj.weight"].shape[0] // config["num_key_value_heads"]
    return MTPOracle(
        config,
        {name: np.array(value) for name, value in tensors.items()},
        embedding,
        np.array(target.logits(mx.eye(64))).T,
        gated=queries == 2 * values,
        **options,
    )


@pytest.mark.parametrize("family", list(CONFIGS))
def test_heads_over_every_family(family: str, tmp_path: Path) -> None:
    tensors = head_tensors(family)
    folder = write_layout(tmp_path, "sidecar", family, tensors)
    drafter = load_mtp(folder, tiny_target(family, mx.float32), "tiny head")
    run_rounds(drafter, oracle_for(family, tensors), [1, 3, 1, 30, 2, 8, 1])


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_heads_in_every_layout(layout: str, tmp_path: Path) -> None:
    tensors = head_tensors("qwen3")
    drafter = load_mtp(write_layout(tmp_path, layout, "qwen3", tensors), tiny_target("qwen3", mx.float32), layout)
    assert drafter.target_layer_ids == ((3,) if layout == "Step" else (4,))
    run_rounds(drafter, oracle_for("qwen3", tensors, hidden_first=layout == "MiMo"), [5, 2])


@pytest.mark.parametrize("packed", [fused_experts, numbered_experts])
def test_experts_in_every_layout(packed: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    tensors = head_tensors("qwen3_moe")
    folder = write_layout(tmp_path, "original", "qwen3_moe", packed(tensors))
    drafter = load_mtp(folder, tiny_target("qwen3_moe", mx.float32), "experts")
    run_rounds(drafter, oracle_for("qwen3_moe", tensors), [5, 2])


def test_a_chain_that_goes_on_with_the_output_before_the_norm(tmp_path: Path) -> None:
    tensors = head_tensors("qwen3")
    drafter = load_mtp(
        write_layout(tmp_path, "sidecar", "qwen3", tensors), tiny_target("qwen3", mx.float32), "head"
    )
    drafter.forward = replace(drafter.forward, spec=replace(drafter.forward.spec, recycles_normed=False))
    run_rounds(drafter, oracle_for("qwen3", tensors, recycles_normed=False), [5, 2])


def test_the_kernels_own_text_drafts_the_same(tmp_path: Path) -> None:
    """What runs on GPUs, compiled for the CPU, against MLX's operations."""
    target, tensors = tiny_target("qwen3"), head_tensors("qwen3", dtype=mx.bfloat16)
    drafter = load_mtp(write_layout(tmp_path, "sidecar", "qwen3", tensors), target, "head")
    tokens = mx.arange(5, 30, dtype=mx.int32)
    aux_hidden_states = target.forward([(target.open(), tokens)], drafter.target_layer_ids).aux_hidden_states

    def drafts() -> list[int]:
        state = drafter.open()
        extend(drafter, state, Committed(0, tokens[:20], aux_hidden_states[:20]))
        mx.eval(propose(drafter, state, 25, 2, watched([])).tokens)
        extend(drafter, state, Committed(20, tokens[20:], aux_hidden_states[20:]))
        return propose(drafter, state, 31, 5, watched([])).tokens.tolist()

    expected = drafts()
    with launching(launcher), using("native"):
        assert drafts() == expected
