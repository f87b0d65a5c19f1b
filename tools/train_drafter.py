"""Train a DFlash 2 drafter for a target, on replies that the target wrote (see ``tools.write_replies``).

Training runs the modules that are shipped. Weights are kept in float32 and rounded to their quantised values in
every step, so that quantising them with ``mlx_spec.quantize_drafter`` afterwards loses nothing. Muon trains the
matrices of the layers, AdamW the rest at a twentieth of the rate. ``mlx.launch`` spreads a run over several GPUs.
Needs a GPU, of Apple or NVIDIA: a CPU is enough for tiny models only.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from mlx_spec.checkpoints.config import read_config as read_config_file
from mlx_spec.checkpoints.tensors import load_tensors, read_tensors
from mlx_spec.cli.quantize_drafter import plain_tensors, published_names
from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.dflash2.config import DFlash2Config, read_config
from mlx_spec.drafters.dflash2.tensors import native_names
from mlx_spec.errors import DrafterMismatch
from tools import dflash2_loss as dflash2
from tools.teacher import Frozen, draw_anchors, expected_head_rows, freeze_target, run_target, watch
from tools.train_data import Batch, Replies, frequent_tokens, make_batch
from tools.training import add_training_arguments, anchor_count, facts, first_process, learn, run, shipped_weights
from tools.write_replies import load_target

# Share of the blocks that have all their rows.
WHOLE_BLOCKS = 0.7


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_drafter",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_training_arguments(parser, anchors=48, resumed=" or of fewer layers")
    add = parser.add_argument
    add("--layers", type=int, default=3, help="decoder layers of the drafter")
    add("--intermediate-size", type=int, help="feed-forward width (default: the target's)")
    add(
        "--target-layer-ids",
        type=int,
        nargs="+",
        help="target layers whose outputs are read (default: 6, evenly spread)",
    )
    add("--block-size", type=int, default=8, help="rows of a block: the anchor and the drafts")
    add("--selector-rank", type=int, default=64, help="rank of the candidate selector")
    add("--conv-group-size", type=int, default=16, help="channels that share a dynamic kernel")
    add("--mask-token", help="token whose embedding the rows of drafts have (default: an unused special token)")
    add(
        "--draft-vocab",
        type=int,
        default=24576,
        help="size of the draft vocabulary: the tokens that the replies use most",
    )
    return parser


def drafter_config(args: argparse.Namespace, target: dict[str, Any], tokenizer: Any, draft_ids: list[int]) -> dict:
    """Return the ``config.json`` of the drafter, in the native layout."""
    depth, heads = target["num_hidden_layers"], target["num_attention_heads"]
    layer_ids = args.target_layer_ids or [round(1 + i * (depth - 3) / 5) for i in range(6)]
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "is_causal": False,
        "hidden_size": target["hidden_size"],
        "intermediate_size": args.intermediate_size or target["intermediate_size"],
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target.get("head_dim") or target["hidden_size"] // heads,
        "layer_types": ["full_attention"] * args.layers,
        "max_position_embeddings": target["max_position_embeddings"],
        "num_target_layers": depth,
        "rms_norm_eps": target["rms_norm_eps"],
        "rope_parameters": {"rope_theta": target["rope_theta"], "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": target["vocab_size"],
        "dflash_config": {
            "block_size": args.block_size,
            "conv_group_size": args.conv_group_size,
            "conv_kernel_size": 2,
            "mask_token_id": mask_token(args.mask_token, tokenizer),
            "selector_rank": args.selector_rank,
            "selector_top_k": 16,
            "target_layer_ids": layer_ids,
            "draft_token_ids": draft_ids,
        },
    }


def mask_token(name: str | None, tokenizer: Any) -> int:
    """Return the id of the mask token: the named one, or the last unused special token."""
    if name is not None:
        return int(tokenizer.convert_tokens_to_ids(name))
    unused = set(tokenizer.all_special_ids) - set(tokenizer.eos_token_ids) - {tokenizer.bos_token_id}
    return max(unused)


def initial_model(config: DFlash2Config, resume: Path | None) -> DraftModel:
    """Return a new drafter in float32, or one with the weights of a checkpoint, quantised or not.

    Layers that the checkpoint lacks are copies of its last one that add nothing until they are trained.
    """
    model = DraftModel(config)
    dflash2.initialise(model)
    if resume is not None:
        name = str(resume)
        start = DraftModel(read_config(read_config_file(resume, name, "drafter", DrafterMismatch), name))
        load_tensors(start, native_names(read_tensors(resume, name)), name)
        model.load_weights([(n, v.astype(mx.float32)) for n, v in plain_tensors(start).items()], strict=False)
        last = model.layers[len(start.layers) - 1]
        for layer in model.layers[len(start.layers) :]:
            layer.update(last.parameters())
            for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
                output.weight = mx.zeros_like(output.weight)
    mx.eval(model.parameters())
    return model


def block_rows(shape: tuple[int, int], block_size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the number of rows of each block: mostly all, sometimes fewer, as decoding runs shorter blocks, too."""
    short = rng.integers(2, block_size, shape)
    return np.where(rng.random(shape) < WHOLE_BLOCKS, block_size, short).astype(np.int32)


def acceptance(
    model: DraftModel,
    config: DFlash2Config,
    frozen: Frozen,
    target: Any,
    heldout: Replies,
    max_length: int,
    limit: int = 512,
) -> tuple[list[float], list[float]]:
    """Return the share of drafts that are accepted at positions 1 .. block size - 1, over held-out greedy replies.

    model: the drafter, with its config.
    frozen, target: what it was trained with.
    heldout: the replies; sampled ones are skipped.
    max_length: tokens of a sequence that are read.
    limit: replies that are read.
    Returns two lists: over the blocks that decoding would start, and over blocks at every position.
    """
    chosen = np.flatnonzero(heldout.greedy & (heldout.lengths - heldout.prompt_lengths >= 2))[:limit]
    steps = np.arange(1, config.block_size)
    # By [decoding, every position] and [accepted, drafted].
    counts = np.zeros((2, 2, config.block_size - 1))
    for i in range(0, len(chosen), 16):
        batch = make_batch(heldout, chosen[i : i + 16], max_length)
        most = int((batch.lengths - batch.firsts).max()) - 1
        positions = np.minimum(batch.firsts[:, None] + np.arange(most), batch.lengths[:, None] - 2)
        tokens, lengths, anchors = (mx.array(a) for a in (batch.tokens, batch.lengths, positions))
        _, aux_hidden_states = run_target(target, tokens, config.target_layer_ids)
        accepted = np.array(
            dflash2.accepted_drafts(model, config, frozen, tokens, lengths, anchors, aux_hidden_states)
        )
        for row, length, first in zip(accepted, batch.lengths, batch.firsts, strict=True):
            left = length - 1 - np.arange(first, length - 1)
            by_step = row[: len(left), None] >= steps, left[:, None] >= steps
            rounds = decoding_rounds(row[: len(left)])
            counts += [[s[rounds].sum(axis=0) for s in by_step], [s.sum(axis=0) for s in by_step]]
    decoding, everywhere = counts[:, 0] / np.maximum(counts[:, 1], 1)
    return decoding.tolist(), everywhere.tolist()


def decoding_rounds(accepted: np.ndarray) -> list[int]:
    """Return the anchors at which decoding would start a round, given how many drafts are accepted after each."""
    rounds, anchor = [], 0
    while anchor < len(accepted):
        rounds.append(anchor)
        anchor += 1 + int(accepted[anchor])
    return rounds


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, save, and return what the model card needs."""
    target, tokenizer = load_target(args.model, "bfloat16")
    replies, heldout = Replies.read(*args.replies), Replies.read(args.heldout)
    vocab = target.args.vocab_size
    draft_ids = frequent_tokens(replies, args.draft_vocab, vocab, list(tokenizer.eos_token_ids))
    raw = drafter_config(args, vars(target.args), tokenizer, draft_ids)
    config, frozen = read_config(raw, "the new drafter"), freeze_target(target, draft_ids)
    mx.random.seed(args.seed)
    model = initial_model(config, args.resume)
    mx.eval(target.parameters(), frozen.head)
    started = time.perf_counter()

    watched = watch(target, frozen, config.target_layer_ids)

    def see(tokens: mx.array) -> tuple[mx.array, ...]:
        shares, hidden, aux_hidden_states = watched(tokens)
        return shares, hidden, expected_head_rows(frozen, frozen.score(hidden)), aux_hidden_states

    def loss(
        tokens: mx.array,
        lengths: mx.array,
        firsts: mx.array,
        shares: mx.array,
        hidden: mx.array,
        expected: mx.array,
        aux_hidden_states: mx.array,
        rows: mx.array,
    ) -> mx.array:
        anchors = draw_anchors(shares, lengths, firsts, rows.shape[1])
        blocks = tokens, lengths, anchors, rows
        return dflash2.loss(model, config, frozen, *blocks, hidden, expected, aux_hidden_states, args.hard)

    def draw(batch: Batch, rng: np.random.Generator) -> tuple[mx.array, ...]:
        shape = len(batch.tokens), anchor_count(args, batch.tokens)
        return (mx.array(block_rows(shape, config.block_size, rng)),)

    history, quantized = learn(args, model, see, loss, replies, draw)
    if first_process():
        save(Path(args.out), raw, model)
    model.update(shipped_weights(model.parameters(), quantized))
    decoding, everywhere = acceptance(model, config, frozen, target, heldout, args.max_length)
    return {
        **facts(history, started, replies, model),
        "accepted_length": round(1 + sum(decoding), 3),
        "acceptance": [round(s, 3) for s in decoding],
        "accepted_length_everywhere": round(1 + sum(everywhere), 3),
        "acceptance_everywhere": [round(s, 3) for s in everywhere],
    }


def save(folder: Path, config: dict[str, Any], model: nn.Module) -> None:
    """Write a checkpoint in the published layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = published_names(dict(tree_flatten(model.parameters())))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def summary(result: dict[str, Any]) -> Iterator[str]:
    """Yield lines with the acceptance by position and the accepted length."""
    for position, share in enumerate(result["acceptance"], 1):
        yield f"position {position}: {share:.3f} of the drafts accepted"
    yield f"accepted length: {result['accepted_length']}"


def main() -> int:
    """Run the command; see ``training.run``."""
    return run(setup_arg_parser().parse_args(), train, summary)


if __name__ == "__main__":
    raise SystemExit(main())
