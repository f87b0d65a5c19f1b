"""Training an EAGLE head: the forward pass of decoding, and a checkpoint that loads and drafts."""

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
from tiny_eagles import DRAFT_IDS, eagle_config, eagle_tensors, settings, write_eagle
from tiny_models import CONFIGS, tiny_model, tiny_target

from mlx_spec.drafters.base import Committed
from mlx_spec.drafters.eagle.head import EagleHead
from mlx_spec.drafters.eagle.load import load_eagle
from mlx_spec.drafters.eagle.spec import read_head_config, read_spec
from mlx_spec.target import Target
from tools import train_eagle
from tools.chain_loss import every_anchor
from tools.eagle_chains import chains
from tools.teacher import freeze_target, run_target

STEPS, LENGTH = 4, 24


@pytest.mark.parametrize(
    "version, parts, changes",
    [
        (3, ("fc", "fc_norm"), {"norm_before_residual": True}),
        (3, ("fc", "qk_norm"), {"eagle_aux_hidden_state_layer_ids": [1, 4]}),
        (1, ("fc bias",), {}),
    ],
)
def test_the_training_forward_is_the_shipped_forward(
    version: int, parts: tuple[str, ...], changes: dict[str, Any], tmp_path: Path
) -> None:
    """float32, so that only rounding may differ: all chains of a batch against drafting, one chain at a time."""
    target, raw = tiny_target("llama", mx.float32), eagle_config(version=version, **changes)
    tensors = eagle_tensors(raw, version, parts)
    drafter = load_eagle(write_eagle(tmp_path, raw, tensors), target, "tiny")
    config, spec = read_head_config(settings(raw)), read_spec(settings(raw), version == 3, 4)
    head = EagleHead(config, spec, tensors.keys())
    head.load_weights([(n, v) for n, v in tensors.items() if n not in ("d2t", "t2d", "lm_head.weight")])
    tokens = mx.array(np.random.default_rng(2).integers(0, 96, (2, LENGTH)).astype(np.int32))
    layer_ids = tuple(index for index in spec.target_layer_ids if index < 4) or (0,)
    hidden, aux_hidden_states = run_target(target.model, tokens, layer_ids)
    aux_hidden_states = aux_hidden_states if version == 3 else hidden
    frozen = freeze_target(target.model, list(range(96)))
    anchors = every_anchor(tokens)
    outputs = chains(head, spec, config, frozen.embedding, tokens, aux_hidden_states, anchors, STEPS)
    own = tensors["lm_head.weight"] if version == 3 else frozen.head
    logits = np.stack([np.array(output @ own.T) for output in outputs])
    gold, column = np.array(tokens), {token: i for i, token in enumerate(DRAFT_IDS if version == 3 else range(96))}
    for n in range(2):
        for row in (0, 1, 7, LENGTH - STEPS - 2):
            state = drafter.open()
            extend(drafter, state, Committed(0, tokens[n, : row + 1], aux_hidden_states[n, : row + 1]))
            scored: list[tuple[Any, Any]] = []

            def follow(position: int, ids: mx.array, scores: mx.array, n: int = n, into: list = scored) -> Any:
                into.append(([column[int(i)] for i in np.array(ids)], np.array(scores)))
                return mx.array(int(gold[n, position])), None

            propose(drafter, state, int(gold[n, row + 1]), STEPS, follow)
            for step, (ids, scores) in enumerate(scored):
                np.testing.assert_allclose(logits[step, n, row][ids], scores, atol=2e-3)


@pytest.mark.usefixtures("uncompiled")
def test_training_lowers_the_loss_and_writes_a_checkpoint_that_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    tokenizer = SimpleNamespace(eos_token_ids={2})
    monkeypatch.setattr(train_eagle, "load_target", lambda name, dtype: (model, tokenizer))
    replies, path = random_replies(), tmp_path / "replies.npz"
    np.savez(path, **vars(replies))
    parser = train_eagle.setup_arg_parser()
    common = ["--replies", str(path), "--heldout", str(path), "--draft-vocab", "32", "--chain", "2", "--hard", "1"]
    sizes = ["--batch-size", "8", "--max-length", "64", "--group-size", "32", "--bits", "8"]

    def run(*more: str) -> tuple[argparse.Namespace, dict[str, Any]]:
        args = parser.parse_args([*common, *sizes, *more])
        return args, train_eagle.train(args)

    _, first = run("--out", str(tmp_path / "a"), "--steps", "1", "--target-head")
    borrowing = load_eagle(tmp_path / "a", Target(model, CONFIGS["llama"], "tiny"), "head")
    assert borrowing.head.size == 32
    args, result = run("--out", str(tmp_path / "b"), "--steps", "40", "--keep", "3")
    assert result["step_seconds_loss"][-1][2] < 0.8 * first["step_seconds_loss"][-1][2]
    assert result["accepted_length"][2] > first["accepted_length"][2] + 0.5
    monkeypatch.setattr(train_eagle, "frequent_tokens", lambda *_: list(range(60, 92)))
    _, resumed = run("--out", str(tmp_path / "c"), "--steps", "1", "--resume", str(args.out))
    assert resumed["step_seconds_loss"][-1][2] < 0.8 * first["step_seconds_loss"][-1][2]

    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 8}
    written = mx.load(str(tmp_path / "b" / "model.safetensors"))
    assert "lm_head.scales" in written and "fc.scales" in written
    target = Target(model, CONFIGS["llama"], "tiny")
    drafter = load_eagle(tmp_path / "b", target, "trained")
    state, sequence, row = drafter.open(), target.open(), replies.tokens[:20].tolist()
    target.prefill(
        sequence,
        row,
        drafter.target_layer_ids,
        on_rows=lambda p, ids: extend(drafter, state, Committed(0, ids, p.aux_hidden_states)),
    )
    greedy = lambda at, ids, scores: (ids[mx.argmax(scores)], None)  # noqa: E731
    drafted = propose(drafter, state, int(replies.tokens[20]), 2, greedy).tokens.tolist()
    assert drafted == replies.tokens[21:23].tolist()
