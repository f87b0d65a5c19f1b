"""Training a DFlash 2 drafter: the forward pass of decoding, and a checkpoint that loads and drafts."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from choosing import GREEDY
from mlx import nn
from mlx.utils import tree_flatten
from one_draft import block, extend, propose
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_models import CONFIGS, tiny_model, tiny_target

from metal_kernels.launching.implementations import using
from mlx_spec.cli.quantize_drafter import plain_tensors, quantization
from mlx_spec.drafters.base import Committed
from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.dflash2.config import read_config
from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.target import Target
from tools import dflash2_loss as dflash2
from tools import train_drafter, training
from tools.teacher import Frozen, draw_anchors, freeze_target, run_target, token_shares
from tools.train_data import Replies, epoch, frequent_tokens, make_batch
from tools.train_prompts import opening, own_prompts

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
    tokens, anchors = mx.array(make_batch(replies, np.arange(2), 48).tokens), mx.array([[9, 30, 12], [38, 8, 20]])
    frozen = freeze_target(target.model, list(range(96)))
    _, aux_hidden_states = run_target(target.model, tokens, drafter.target_layer_ids)
    rows = mx.array([[8, 5, 8], [3, 8, 4]])
    hidden = dflash2.block_hidden(drafter.model, drafter.config, frozen, tokens, anchors, rows, aux_hidden_states)
    paths = dflash2.walk_blocks(
        drafter.model,
        drafter.config,
        frozen,
        hidden[0, 0, 1:][None],
        mx.take_along_axis(tokens, anchors, axis=1)[0, :1],
    )
    for n in range(2):
        for a in range(3):
            state, sequence, at = drafter.open(), target.open(), int(anchors[n, a].item())
            prefix = tokens[n, : at + 1].tolist()
            target.prefill(
                sequence,
                prefix[:-1],
                drafter.target_layer_ids,
                on_rows=lambda passed, ids, state=state: extend(
                    drafter, state, Committed(0, ids, passed.aux_hidden_states)
                ),
            )
            count = int(rows[n, a].item())
            alone = block(drafter, state, prefix[-1], count)
            np.testing.assert_allclose(np.array(hidden[n, a, :count]), np.array(alone), atol=2e-4)
            if n == a == 0:
                draft = propose(drafter, state, prefix[-1], 7, GREEDY)
                assert draft.tokens.tolist() == paths[0].tolist()


@pytest.mark.usefixtures("uncompiled")
def test_training_lowers_the_loss_and_writes_a_checkpoint_that_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    tokenizer = SimpleNamespace(eos_token_ids={2}, all_special_ids=[0, 1, 2], bos_token_id=1)
    monkeypatch.setattr(train_drafter, "load_target", lambda name, dtype: (model, tokenizer))
    path = tmp_path / "replies.npz"
    replies = random_replies()
    np.savez(path, **vars(replies))
    common = ["--replies", str(path), "--heldout", str(path), "--draft-vocab", "32", "--hard", "1"]
    sizes = ["--layers", "2", "--batch-size", "8", "--anchors", "4", "--max-length", "64", "--selector-rank", "8"]
    parser = train_drafter.setup_arg_parser()

    def run(*more: str) -> tuple[argparse.Namespace, dict]:
        args = parser.parse_args([*common, *sizes, *more])
        with using("stock"):
            return args, train_drafter.train(args)

    _, first = run("--out", str(tmp_path / "a"), "--steps", "1")
    args, result = run("--out", str(tmp_path / "b"), "--steps", "40")
    assert result["step_seconds_loss"][-1][2] < 0.8 * first["step_seconds_loss"][-1][2]
    assert result["accepted_length"] > first["accepted_length"] + 0.5
    _, resumed = run("--out", str(tmp_path / "c"), "--steps", "1", "--resume", str(args.out))
    assert resumed["step_seconds_loss"][-1][2] < 0.8 * first["step_seconds_loss"][-1][2]

    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["dflash_config"]["mask_token_id"] == 0
    assert len(config["dflash_config"]["draft_token_ids"]) == 32
    target = Target(model, CONFIGS["llama"], "tiny")
    drafter = load_dflash2(tmp_path / "b", target, "trained")
    state, sequence, row = drafter.open(), target.open(), replies.tokens[:20].tolist()
    target.prefill(
        sequence,
        row,
        drafter.target_layer_ids,
        on_rows=lambda p, ids: extend(drafter, state, Committed(0, ids, p.aux_hidden_states)),
    )
    drafted = propose(drafter, state, int(replies.tokens[20]), 7, GREEDY).tokens.tolist()
    assert set(drafted) <= set(config["dflash_config"]["draft_token_ids"])


def test_batches_have_three_shapes_and_as_many_positions() -> None:
    parts = [random_replies(40, length, seed=length) for length in (20, 44, 60)]
    lengths = np.concatenate([part.lengths for part in parts])
    replies = Replies(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([[0], np.cumsum(lengths)]),
        np.concatenate([part.prompt_lengths for part in parts]),
        np.concatenate([part.greedy for part in parts]),
    )
    found = epoch(replies, 4, 64, np.random.default_rng(0))
    assert {batch.tokens.shape for batch in found} == {(8, 32), (5, 48), (4, 64)}
    assert sum(len(batch.lengths) for batch in found) == 3 * 40
    assert all((batch.firsts == 8).all() for batch in found)


def test_anchors_lie_in_the_reply_and_prefer_improbable_tokens() -> None:
    """A target that gives token 5 probability 1 everywhere; half of the tokens are 5."""
    head = mx.zeros((8, 4))
    head[5, 0] = 9.0
    ids = list(range(8))
    frozen = Frozen(head, head, mx.array(ids), mx.array(ids))
    tokens = mx.array(np.tile([5, 3], (2, 32)).astype(np.int32))
    hidden = mx.broadcast_to(mx.array([1.0, 0, 0, 0]), (2, 64, 4))
    mx.random.seed(0)
    lengths, firsts = mx.array([60, 12]), mx.array([10, 8])
    shares = token_shares(frozen, tokens, hidden)
    drawn = [draw_anchors(shares, lengths, firsts, 6) for _ in range(20)]
    anchors = np.array(mx.stack(drawn))
    assert anchors[:, 0].min() >= 10 and anchors[:, 0].max() <= 58
    assert set(anchors[:, 1].flatten()) <= {8, 9, 10}
    assert all(len(set(row)) == 6 for row in anchors[:, 0])
    assert (anchors[:, 0] % 2 == 1).mean() > 0.8


def test_best_tokens_are_the_largest() -> None:
    logits = mx.array(np.random.default_rng(0).permuted(np.arange(3 * 1024.0).reshape(3, 1024), axis=1))
    for size in (1024, 512, 500):
        part = np.array(logits[:, :size])
        found = np.sort(np.array(dflash2.best_tokens(mx.array(part), 16)))
        assert (found == np.sort(np.argsort(part)[:, -16:])).all()


def test_decoding_starts_each_round_after_the_one_before() -> None:
    assert train_drafter.decoding_rounds(np.array([2, 7, 7, 0, 1, 5])) == [0, 3, 4]


def test_trained_weights_are_the_quantised_ones_and_gradients_pass() -> None:
    args = train_drafter.setup_arg_parser().parse_args(["--replies", "r", "--heldout", "h", "--out", "o"])
    model = DraftModel(read_config(dflash2_config(**FULL, hidden_size=64, selector_rank=64), "tiny"))
    quantized = quantization(model, args)
    assert {how["bits"] for path, how in quantized.items() if path.endswith("codebook")} == {3}
    weights = model.trainable_parameters()
    shipped = dict(tree_flatten(training.shipped_weights(weights, quantized)))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, class_predicate=lambda path, _: quantized.get(path, False))
    kept = plain_tensors(model)
    assert len(quantized) > 10
    for path in quantized:
        assert mx.array_equal(shipped[f"{path}.weight"].astype(mx.bfloat16), kept[f"{path}.weight"])

    def total(weights: Any) -> mx.array:
        return mx.sum(training.shipped_weights(weights, quantized)["fc"]["weight"] * 2)

    assert (mx.grad(total)(weights)["fc"]["weight"] == 2).all()


def test_a_checkpoint_of_fewer_layers_is_resumed_as_it_was(tmp_path: Path) -> None:
    small = dflash2_config(**FULL)
    folder = write_drafter(tmp_path, small, random_tensors(small))
    large = {**small, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    outputs = []
    for raw in (small, large):
        config = read_config(raw, "tiny")
        model = train_drafter.initial_model(config, folder)
        x = mx.random.normal((1, 4, config.hidden_size), key=mx.random.key(0))
        outputs.append(np.array(model(x, 0, lambda layer, queries, keys, values: queries)))
    np.testing.assert_array_equal(*outputs)


def test_frequent_tokens_are_ascending_and_hold_what_they_must() -> None:
    tokens = np.array([1, 1, 5, 5, 5, 9, 7, 7], dtype=np.uint32)
    replies = Replies(tokens, np.array([0, 8]), np.array([2]), np.array([True]))
    assert frequent_tokens(replies, 3, 12, [2]) == [2, 5, 7]
    assert frequent_tokens(replies, 6, 12, [2]) == [0, 1, 2, 5, 7, 9]


def test_the_rate_warms_up_and_ends_at_zero() -> None:
    rates = [training.schedule(1.0, step, 1000).item() for step in (1, 30, 500, 1000)]
    assert rates[0] == pytest.approx(1 / 30)
    assert rates[1] == 1.0
    assert 0.4 < rates[2] < 0.6
    assert rates[3] == pytest.approx(0.0, abs=1e-6)


class LetterTokenizer:
    """One id a letter, 0 for the end of a turn."""

    eos_token_ids = {0}

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        return "".join(f"<{m['role']}>{m['content']}</>" for m in messages)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_own_prompts_are_the_user_turns_that_ended() -> None:
    tokenizer = LetterTokenizer()
    assert tokenizer.decode(opening(tokenizer)) == "<user>"
    texts = ["What is a comet?\0", "Tell me about the\n", "Hi\0", " Name three rivers. \0"]
    written = own_prompts(tokenizer, [[ord(letter) for letter in text] for text in texts])
    assert [prompt.prompt for prompt in written] == ["What is a comet?", "Name three rivers."]
    assert {prompt.kind for prompt in written} == {"own"}


def run_steps(model: nn.Module, step: Callable[..., mx.array]) -> training.History:
    """Fit with a step that does what the test wants."""
    args = train_drafter.setup_arg_parser().parse_args(
        ["--replies", "r", "--heldout", "h", "--out", "o", "--batch-size", "8", "--max-length", "64"]
    )
    optimizer, replies = training.make_optimizer(), random_replies()
    return training.fit(args, model, step, optimizer, replies, lambda tokens: (), lambda batch, rng: ())


@pytest.mark.parametrize("done", [0, 3])
def test_ctrl_c_keeps_what_is_trained(done: int) -> None:
    steps: list[int] = []

    def step(*inputs: Any) -> mx.array:
        if len(steps) == done:
            raise KeyboardInterrupt
        steps.append(1)
        return mx.array(2.5)

    if not done:
        with pytest.raises(SystemExit, match="nothing is saved"):
            run_steps(nn.Linear(1, 1), step)
    else:
        ((last, _, loss),) = run_steps(nn.Linear(1, 1), step)
        assert (last, loss) == (done, 2.5)


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_a_device_that_fails_leaves_the_weights_of_the_last_step_that_ended(
    failing: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step changes the weights before it fails; the step before it runs until its loss is read."""
    model, steps = nn.Linear(1, 1, bias=False), list[int]()
    model.weight = mx.zeros((1, 1))

    def step(*inputs: Any) -> mx.array:
        model.weight = model.weight + 1
        steps.append(1)
        if len(steps) == failing:
            raise RuntimeError("out of memory")
        return mx.array(2.5)

    if failing <= 2:
        with pytest.raises(RuntimeError, match="out of memory"):
            run_steps(model, step)
    else:
        ((last, _, _),) = run_steps(model, step)
        assert last == model.weight.item() == failing - 2
        assert "out of memory\nstopped after 2 steps" in capsys.readouterr().out
