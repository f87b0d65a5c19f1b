"""Training runs the modules that are shipped: same forward, and a checkpoint that loads and drafts."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_models import CONFIGS, tiny_model, tiny_target

from mlx_spec.drafters.base import Committed
from mlx_spec.drafters.dflash2.drafter import load_dflash2
from mlx_spec.target import Target
from tools import train_dflash2 as dflash2
from tools import train_drafter
from tools.train_data import Replies, batches, frequent_tokens, make_batch

FULL = {"layer_types": ["full_attention"] * 2}


def random_replies(count: int = 48, length: int = 40, seed: int = 0) -> Replies:
    """Replies that repeat a short phrase, so that something can be learned in a few steps."""
    rng = np.random.default_rng(seed)
    rows = [np.tile(rng.integers(3, 12, 4), length // 4) for _ in range(count)]
    return Replies(
        np.concatenate(rows).astype(np.uint32),
        np.arange(count + 1) * length,
        np.full(count, 8, dtype=np.int32),
        np.ones(count, dtype=bool),
    )


def test_the_training_forward_is_the_shipped_forward(tmp_path: Path) -> None:
    """float32, so that only rounding may differ: blocks of a batch against the drafter's block, one at a time."""
    target = tiny_target("qwen3", mx.float32)
    config = dflash2_config(**FULL)
    drafter = load_dflash2(write_drafter(tmp_path, config, random_tensors(config)), target, "tiny")
    replies = random_replies(2)
    batch = make_batch(replies, np.arange(2), 48, 3, np.random.default_rng(1))
    tokens, anchors = mx.array(batch.tokens), mx.array(batch.anchors)
    frozen = train_drafter.freeze_target(target.model, list(range(96)))
    seen = dflash2.run_target(target.model, tokens, drafter.taps)
    rows = mx.array([[8, 5, 8], [3, 8, 4]])
    hidden = dflash2.block_hidden(drafter.model, drafter.config, frozen, tokens, anchors, rows, seen.taps)
    paths = dflash2.walk_blocks(
        drafter.model,
        drafter.config,
        frozen,
        hidden[0, 0, 1:][None],
        mx.take_along_axis(tokens, anchors, axis=1)[0, :1],
    )
    for n in range(2):
        for a in range(3):
            state, sequence, at = drafter.open(), target.open(), int(batch.anchors[n, a])
            prefix = batch.tokens[n, : at + 1].tolist()
            target.prefill(
                sequence,
                prefix[:-1],
                drafter.taps,
                on_rows=lambda passed, ids, state=state: drafter.extend(state, Committed(0, ids, passed.taps)),
            )
            count = int(rows[n, a].item())
            alone = drafter.block(state, prefix[-1], count)
            np.testing.assert_allclose(np.array(hidden[n, a, :count]), np.array(alone), atol=2e-4)
            if n == a == 0:
                proposal = drafter.propose(state, prefix[-1], 7, lambda at, ids, s: (ids[mx.argmax(s)], None))
                assert proposal.tokens.tolist() == paths[0].tolist()


def test_training_lowers_the_loss_and_writes_a_checkpoint_that_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    tokenizer = SimpleNamespace(eos_token_ids={2}, all_special_ids=[0, 1, 2], bos_token_id=1)
    monkeypatch.setattr(train_drafter, "load_target", lambda name, dtype: (model, tokenizer))
    path = tmp_path / "replies.npz"
    replies = random_replies()
    np.savez(path, **vars(replies))
    common = [
        "--replies",
        str(path),
        "--heldout",
        str(path),
        "--draft-vocab",
        "32",
        "--hard",
        "1",
        "--layers",
        "2",
    ]
    sizes = ["--batch-size", "8", "--anchors", "4", "--max-length", "64", "--selector-rank", "8"]
    parser = train_drafter.setup_arg_parser()

    def run(*more: str) -> tuple[argparse.Namespace, dict]:
        args = parser.parse_args([*common, *sizes, *more])
        return args, train_drafter.train(args)

    _, first = run("--out", str(tmp_path / "a"), "--steps", "1")
    args, result = run("--out", str(tmp_path / "b"), "--steps", "40")
    assert result["step_seconds_loss"][-1][2] < 0.8 * first["step_seconds_loss"][-1][2]
    assert result["teacher_forced_accepted_length"] > first["teacher_forced_accepted_length"] + 0.5
    _, resumed = run("--out", str(tmp_path / "c"), "--steps", "1", "--resume", str(args.out))
    assert resumed["step_seconds_loss"][-1][2] < 0.8 * first["step_seconds_loss"][-1][2]

    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["dflash_config"]["mask_token_id"] == 0
    assert len(config["dflash_config"]["draft_token_ids"]) == 32
    target = Target(model, CONFIGS["llama"], "tiny")
    drafter = load_dflash2(tmp_path / "b", target, "trained")
    state, sequence, row = drafter.open(), target.open(), replies.tokens[:20].tolist()
    target.prefill(
        sequence, row, drafter.taps, on_rows=lambda p, ids: drafter.extend(state, Committed(0, ids, p.taps))
    )
    choose = lambda at, ids, scores: (ids[mx.argmax(scores)], None)  # noqa: E731
    drafted = drafter.propose(state, int(replies.tokens[20]), 7, choose).tokens.tolist()
    assert set(drafted) <= set(config["dflash_config"]["draft_token_ids"])


def test_batches_have_two_shapes_and_anchors_between_prompt_and_end() -> None:
    replies = random_replies(40, 20)
    long = random_replies(40, 60, seed=1)
    both = Replies(
        np.concatenate([replies.tokens, long.tokens]),
        np.concatenate([replies.offsets, replies.offsets[-1] + long.offsets[1:]]),
        np.concatenate([replies.prompt_lengths, long.prompt_lengths]),
        np.concatenate([replies.greedy, long.greedy]),
    )
    source = batches(both, 4, 64, 6, np.random.default_rng(0))
    shapes = set()
    for _ in range(30):
        batch = next(source)
        shapes.add((batch.tokens.shape, batch.anchors.shape))
        assert (batch.anchors >= 7).all()
        assert (batch.anchors < batch.lengths[:, None] - 1).all()
    assert shapes == {((8, 32), (8, 3)), ((4, 64), (4, 6))}


def test_frequent_tokens_are_ascending_and_hold_what_they_must() -> None:
    tokens = np.array([1, 1, 5, 5, 5, 9, 7, 7], dtype=np.uint32)
    replies = Replies(tokens, np.array([0, 8]), np.array([2]), np.array([True]))
    assert frequent_tokens(replies, 3, 12, [2]) == [2, 5, 7]
    assert frequent_tokens(replies, 6, 12, [2]) == [0, 1, 2, 5, 7, 9]


def test_the_rate_warms_up_and_ends_at_zero() -> None:
    rates = [train_drafter.schedule(1.0, step, 1000).item() for step in (1, 30, 500, 1000)]
    assert rates[0] == pytest.approx(1 / 30)
    assert rates[1] == 1.0
    assert 0.4 < rates[2] < 0.6
    assert rates[3] == pytest.approx(0.0, abs=1e-6)
