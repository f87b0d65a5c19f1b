"""Training an MTP head: the forward pass of decoding, and a checkpoint that loads and drafts."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from one_draft import extend, propose
from test_train_drafter import random_replies
from tiny_heads import head_tensors, write_layout
from tiny_models import CONFIGS, tiny_model, tiny_target

from mlx_spec.drafters.base import Committed
from mlx_spec.drafters.mtp.head import MTPHead
from mlx_spec.drafters.mtp.load import load_mtp
from mlx_spec.drafters.mtp.spec import QWEN
from mlx_spec.target import Target
from tools import chain_loss, train_mtp
from tools.mtp_chains import chains
from tools.teacher import Frozen, freeze_target

STEPS, LENGTH = 4, 24


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_the_training_forward_is_the_shipped_forward(family: str, tmp_path: Path) -> None:
    """float32, so that only rounding may differ: all chains of a batch against drafting, one chain at a time."""
    target, tensors = tiny_target(family, mx.float32), head_tensors(family)
    drafter = load_mtp(write_layout(tmp_path, "sidecar", family, tensors), target, "tiny")
    head = MTPHead(CONFIGS[family])
    head.load_weights(list(tensors.items()))
    tokens = mx.array(np.random.default_rng(2).integers(0, 96, (2, LENGTH)).astype(np.int32))
    hidden = target.model.model(tokens)
    frozen = freeze_target(target.model, list(range(96)))
    anchors = chain_loss.every_anchor(tokens)
    outputs = chains(head, QWEN, CONFIGS[family], frozen.embedding, tokens, hidden, anchors, STEPS)
    logits = np.stack([np.array(output @ frozen.head.T) for output in outputs])
    gold = np.array(tokens)
    for n in range(2):
        for row in (0, 1, 7, LENGTH - STEPS - 2):
            state = drafter.open()
            extend(drafter, state, Committed(0, tokens[n, : row + 1], hidden[n, : row + 1]))
            seen: list[tuple[Any, Any]] = []

            def follow(position: int, ids: mx.array, scores: mx.array, n: int = n, into: list = seen) -> Any:
                into.append((np.array(ids), np.array(scores)))
                return mx.array(int(gold[n, position])), None

            propose(drafter, state, int(gold[n, row + 1]), STEPS, follow)
            for step, (ids, scores) in enumerate(seen):
                np.testing.assert_allclose(logits[step, n, row][ids], scores, atol=2e-3)


def test_drafts_are_accepted_up_to_the_first_wrong_one() -> None:
    """A head whose outputs are one-hot, so that accepted drafts can be counted by hand."""
    tokens, lengths = mx.array([[3, 1, 4, 1, 5, 2, 0, 0]], dtype=mx.int32), mx.array([6])
    drafted = [[4, 1, 5, 2, 9, 9, 9], [1, 5, 9, 9, 9, 9, 9]]
    outputs = [mx.array(np.eye(10)[np.array([row])].astype(np.float32)) for row in drafted]
    ids = mx.arange(10)
    frozen = Frozen(mx.eye(10), mx.eye(10), ids, ids)
    anchors = chain_loss.every_anchor(tokens)
    accepted = chain_loss.accepted_drafts(outputs, frozen.score, frozen, tokens, lengths, anchors)
    assert accepted.tolist() == [[2, 2, 1, 1, 0, 0, 0]]


def test_steps_after_a_wrong_one_weigh_less_and_steps_after_the_end_nothing() -> None:
    tokens = mx.array([[3, 1, 4, 1, 5, 2]], dtype=mx.int32)
    ids, hidden = mx.arange(10), mx.zeros((1, 6, 10))
    frozen = Frozen(mx.eye(10), mx.eye(10), ids, ids)

    def value(first: list[int], second: list[int], length: int = 6) -> float:
        outputs = [mx.array(9 * np.eye(10)[np.array([row])].astype(np.float32)) for row in (first, second)]
        chains_of = mx.array([length]), chain_loss.every_anchor(tokens)
        return float(np.array(chain_loss.loss(outputs, frozen.score, frozen, tokens, *chains_of, hidden, 1.0)))

    right, second = [4, 1, 5, 2, 0], [1, 5, 2, 0, 0]
    assert value(right, second) < 0.01
    # Chain 2 has token 5 as its first draft and 2 as its second.
    assert value([4, 1, 7, 2, 0], second) > value(right, [1, 5, 7, 0, 0]) > 0.5
    assert value([4, 1, 5, 7, 0], [1, 5, 7, 0, 0], length=5) < 0.01


@pytest.mark.usefixtures("uncompiled")
def test_training_lowers_the_loss_and_writes_a_checkpoint_that_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    tokenizer = SimpleNamespace(eos_token_ids={2})
    monkeypatch.setattr(train_mtp, "load_target", lambda name, dtype: (model, tokenizer))
    replies, path = random_replies(), tmp_path / "replies.npz"
    np.savez(path, **vars(replies))
    parser = train_mtp.setup_arg_parser()
    common = ["--replies", str(path), "--heldout", str(path), "--draft-vocab", "32", "--hard", "1"]
    sizes = ["--batch-size", "8", "--max-length", "64", "--group-size", "32", "--bits", "8"]

    def run(*more: str) -> tuple[argparse.Namespace, dict[str, Any]]:
        args = parser.parse_args([*common, *sizes, *more])
        return args, train_mtp.train(args)

    _, first = run("--out", str(tmp_path / "a"), "--steps", "1")
    args, result = run("--out", str(tmp_path / "b"), "--steps", "40")
    assert result["step_seconds_loss"][-1][2] < 0.8 * first["step_seconds_loss"][-1][2]
    assert result["accepted_length"][3] > first["accepted_length"][3] + 0.5
    _, resumed = run("--out", str(tmp_path / "c"), "--steps", "1", "--resume", str(args.out))
    assert resumed["step_seconds_loss"][-1][2] < 0.8 * first["step_seconds_loss"][-1][2]

    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 8}
    written = mx.load(str(tmp_path / "b" / "model.safetensors"))
    assert all(name.startswith("mtp.") for name in written) and "mtp.fc.scales" in written
    target = Target(model, CONFIGS["llama"], "tiny")
    drafter = load_mtp(tmp_path / "b", target, "trained")
    state, sequence, row = drafter.open(), target.open(), replies.tokens[:20].tolist()
    target.prefill(
        sequence,
        row,
        drafter.target_layer_ids,
        on_rows=lambda p, ids: extend(drafter, state, Committed(0, ids, p.aux_hidden_states)),
    )
    greedy = lambda at, ids, scores: (ids[mx.argmax(scores)], None)  # noqa: E731
    drafted = propose(drafter, state, int(replies.tokens[20]), 3, greedy).tokens.tolist()
    assert drafted == replies.tokens[21:24].tolist()
