"""EAGLE heads against the speculators library, and against float64 numpy in every layout that heads come in.

Our side runs in float32: a wrong mask, position, norm or concatenation (0.01 and more) exceeds rounding by far.
``oracles/write_speculators.py`` shows how the library's heads and logits were made.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator.run import launcher
from one_draft import extend, propose
from oracles.eagle_numpy import EagleOracle
from tiny_eagles import DRAFT_IDS, eagle_config, eagle_tensors, midlayer, speculators, write_eagle
from tiny_models import CONFIGS, tiny_target

from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import launching
from mlx_spec.drafters.base import Committed
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.eagle.load import load_eagle

ROUNDING = 2e-4
COUNT = 5
FOLDERS = sorted((Path(__file__).parent.parent / "oracles" / "speculators").iterdir())
# What a head has, what its config states, and what that means for the formulas.
VARIANTS: dict[str, tuple[int, tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "EAGLE-1": (1, ("fc bias",), {}, {}),
    "EAGLE-1 without bias": (1, (), {"bias": False, "rope_theta": 500000.0}, {}),
    "EAGLE-3": (3, ("fc",), {}, {}),
    "normed residual": (3, ("fc",), {"norm_before_residual": True}, {"normed_residual": True}),
    "one hidden state": (3, (), {"eagle_config": {"use_aux_hidden_state": False}}, {}),
    "all states normed": (3, ("fc", "input_norm"), {"eagle_config": {"norm_before_fc": True}}, {}),
    "each state normed": (3, ("fc", "fc_norm"), {"fc_norm": True}, {}),
    "Qwen2's biases": (3, ("fc", "q bias", "k bias", "v bias"), {}, {}),
    "Qwen3's norms": (3, ("fc", "qk_norm"), {"rope_theta": 1e6}, {}),
    "no norm before the output head": (3, ("fc",), {"norm_output": False}, {}),
}


def watched(seen: list[np.ndarray], forced: list[int] | None = None) -> Any:
    """SampleDraft greedily, or what is forced, and keep the scores that there were to choose from, by token id."""

    def choose(position: int, ids: mx.array, scores: mx.array) -> tuple[mx.array, None]:
        order, row = np.array(ids), np.full(96, np.nan)
        row[order] = np.array(scores)
        seen.append(row)
        return ids[mx.argmax(scores)] if forced is None else mx.array(forced[len(seen) - 1]), None

    return choose


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_draft_logits_equal_those_of_speculators(folder: Path) -> None:
    """Chains with the tokens that came, after every row, as rows are committed a few at a time."""
    expected = np.load(folder / "expected.npz")
    drafter = load_eagle(folder, tiny_target("llama", mx.float32), folder.name)
    tokens, steps = expected["tokens"].tolist(), len(expected["logits"])
    hidden, ids = mx.array(expected["hidden"]).astype(mx.float32), np.array(drafter.head.ids)
    # The library's window stays while a chain goes on; in decoding it moves, so only first drafts agree.
    agreeing = 1 if folder.name == "windowed" else steps
    state, done, compared = drafter.open(), 0, 0
    for size in (1, 2, 20, 3, 1, 4, 1, 5):
        rows = slice(done, done + size)
        extend(drafter, state, Committed(done, mx.array(tokens[rows], dtype=mx.int32), hidden[rows]))
        done += size
        seen: list[np.ndarray] = []
        # The library ends its texts with zeros, which are no token that came.
        forced = [*tokens[done + 1 :], *[0] * steps][:steps]
        propose(drafter, state, tokens[done], steps, watched(seen, forced))
        for step, row in enumerate(seen[:agreeing]):
            kept = np.isfinite(row[ids])
            assert kept.sum() == 16
            np.testing.assert_allclose(row[ids][kept], expected["logits"][step, done - 1][kept], atol=2e-3)
            compared += 1
    assert compared == 8 * agreeing


def run_rounds(drafter: ChainDrafter, oracle: EagleOracle, sizes: list[int]) -> None:
    """Commit rows in pieces of these sizes and compare the chain after each piece."""
    rng, width = np.random.default_rng(7), 64 * len(drafter.target_layer_ids)
    tokens = [int(t) for t in rng.integers(0, 96, sum(sizes) + 1)]
    aux_hidden_states = rng.standard_normal((sum(sizes), width)).astype(np.float32)
    state, done = drafter.open(), 0
    for size in sizes:
        piece = mx.array(tokens[done : done + size], dtype=mx.int32)
        extend(drafter, state, Committed(done, piece, mx.array(aux_hidden_states[done : done + size])))
        done += size
        seen: list[np.ndarray] = []
        proposal = propose(drafter, state, tokens[done], COUNT, watched(seen))
        expected, logits = oracle.chain(aux_hidden_states[:done], tokens[1 : done + 1], COUNT)
        assert proposal.tokens.tolist() == expected
        scale = np.abs(logits).max()
        for found, row in zip(seen, logits, strict=True):
            kept = np.isfinite(found[oracle.ids])
            assert kept.sum() == 16
            np.testing.assert_allclose(found[oracle.ids][kept], row[kept], atol=ROUNDING * scale)


def oracle_for(version: int, config: dict[str, Any], tensors: dict[str, mx.array], **options: Any) -> EagleOracle:
    """The oracle of a head for the tiny Llama, whose embedding and, in EAGLE-1, output head it uses."""
    target = tiny_target("llama", mx.float32)
    arrays = {name: np.array(value) for name, value in tensors.items()}
    head = arrays["lm_head.weight"] if version == 3 else np.array(target.logits(mx.eye(64))).T
    embedding = arrays.get("embed_tokens.weight", np.array(target.embed(mx.arange(96))))
    return EagleOracle(config, arrays, embedding, head, DRAFT_IDS if version == 3 else list(range(96)), **options)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_heads_of_every_kind(variant: str, tmp_path: Path) -> None:
    version, parts, changes, options = VARIANTS[variant]
    config = eagle_config(version=version, **changes)
    tensors = eagle_tensors(config, version, parts)
    drafter = load_eagle(
        write_eagle(tmp_path, config, midlayer(tensors)), tiny_target("llama", mx.float32), variant
    )
    assert drafter.target_layer_ids == ((4,) if version == 1 or variant == "one hidden state" else (1, 1, 0))
    run_rounds(drafter, oracle_for(version, config, tensors, **options), [1, 3, 1, 30, 2, 8, 1])


def test_a_head_of_eagle_3_1(tmp_path: Path) -> None:
    config = speculators(eagle_config(fc_norm=True, norm_output=True, norm_before_residual=False))
    tensors = eagle_tensors(config, 3, ("fc", "fc_norm"))
    drafter = load_eagle(write_eagle(tmp_path, config, tensors), tiny_target("llama", mx.float32), "3.1")
    layer = config["transformer_layer_config"]
    run_rounds(drafter, oracle_for(3, layer, tensors, normed_feedback=True), [1, 3, 1, 30, 2, 8, 1])


def test_a_window_over_many_pages(tmp_path: Path) -> None:
    """Rows that no window sees any more leave the cache, and nothing changes."""
    config = eagle_config(layer_types=["sliding_attention"], sliding_window=40)
    tensors = eagle_tensors(config)
    drafter = load_eagle(write_eagle(tmp_path, config, tensors), tiny_target("llama", mx.float32), "windowed")
    state = drafter.open()
    run_rounds(drafter, oracle_for(3, config, tensors, window=40), [100, 3, 1, 30, 8, 150, 5])
    assert state.context.keep == 40


def test_an_embedding_and_a_width_of_the_heads_own(tmp_path: Path) -> None:
    config = eagle_config(hidden_size=32, target_hidden_size=64)
    own = {"embed_tokens.weight": mx.random.normal((96, 32), key=mx.random.key(1))}
    tensors = eagle_tensors(config) | own
    drafter = load_eagle(write_eagle(tmp_path, config, tensors), tiny_target("llama", mx.float32), "narrow")
    run_rounds(drafter, oracle_for(3, config, tensors), [5, 2, 20])


@pytest.mark.parametrize("family", list(CONFIGS))
def test_heads_over_every_family(family: str, tmp_path: Path) -> None:
    """From the target's own hidden states: what layers put out, counted from 0."""
    config, target = eagle_config(family), tiny_target(family, mx.float32)
    tensors = eagle_tensors(config)
    drafter = load_eagle(write_eagle(tmp_path, config, tensors), target, "head")
    tokens = list(range(5, 30))
    ids = mx.array(tokens, dtype=mx.int32)
    rows = target.forward([(target.open(), ids)], (0, 1)).aux_hidden_states
    aux_hidden_states = mx.concatenate([rows[:, 64:], rows[:, 64:], rows[:, :64]], axis=-1)
    state, seen = drafter.open(), list[np.ndarray]()
    extend(
        drafter,
        state,
        Committed(0, ids, target.forward([(target.open(), ids)], drafter.target_layer_ids).aux_hidden_states),
    )
    proposal = propose(drafter, state, 30, COUNT, watched(seen))
    arrays = {name: np.array(value) for name, value in tensors.items()}
    embedding = np.array(target.embed(mx.arange(96)))
    oracle = EagleOracle(config, arrays, embedding, arrays["lm_head.weight"], DRAFT_IDS)
    assert proposal.tokens.tolist() == oracle.chain(np.array(aux_hidden_states), [*tokens[1:], 30], COUNT)[0]


def test_the_kernels_own_text_drafts_the_same(tmp_path: Path) -> None:
    """What runs on GPUs, compiled for the CPU, against MLX's operations."""
    target, config = tiny_target("qwen3"), eagle_config("qwen3", head_dim=32)
    tensors = eagle_tensors(config, dtype=mx.bfloat16)
    drafter = load_eagle(write_eagle(tmp_path, config, tensors), target, "head")
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
