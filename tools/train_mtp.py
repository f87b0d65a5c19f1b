"""Train an MTP head for a target, on replies that the target wrote (see ``tools.write_replies``).

Training runs the modules that are shipped: one Qwen3 layer over the target's final hidden state and the embedding
of the next token, wired as Qwen3.5's head, which drafts from the tokens that the replies use most. Weights are
rounded to their quantised values in every step. ``mlx.launch`` spreads a run over several GPUs. Needs a GPU, of
Apple or NVIDIA: a CPU is enough for tiny models only.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from mlx_spec.checkpoints.tensors import load_tensors, read_tensors
from mlx_spec.drafters.mtp.head import MTPHead
from mlx_spec.drafters.mtp.spec import QWEN
from mlx_spec.drafters.mtp.tensors import head_tensors, norms_lack_one, shift_norms
from tools import chain_loss
from tools.chain_acceptance import accepted_at_anchors, accepted_length, summary
from tools.chain_loss import accepted_drafts, every_anchor
from tools.mtp_chains import chains
from tools.teacher import draw_anchors, freeze_target, token_shares
from tools.train_data import Replies, frequent_tokens
from tools.training import add_training_arguments, anchor_count, facts, first_process, learn, run, shipped_weights
from tools.write_replies import load_target

# Drafts of a chain when acceptance is measured.
DEPTH = 7


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_mtp",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_training_arguments(parser, anchors=96, resumed="")
    add = parser.add_argument
    add("--chain", type=int, default=3, help="drafts of each chain in training")
    add("--intermediate-size", type=int, help="feed-forward width (default: the target's)")
    add("--heads", type=int, help="query heads (default: the target's)")
    add(
        "--draft-vocab",
        type=int,
        default=12288,
        help="size of the draft vocabulary: the tokens that the replies use most",
    )
    return parser


def layer_config(args: argparse.Namespace, target: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the head's layer: Qwen3's, with the target's sizes."""
    heads = target["num_attention_heads"]
    return {
        "model_type": "qwen3",
        "hidden_size": target["hidden_size"],
        "intermediate_size": args.intermediate_size or target["intermediate_size"],
        "num_hidden_layers": target["num_hidden_layers"],
        "num_attention_heads": args.heads or heads,
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target.get("head_dim") or target["hidden_size"] // heads,
        "rms_norm_eps": target["rms_norm_eps"],
        "vocab_size": target["vocab_size"],
        "max_position_embeddings": target["max_position_embeddings"],
        "rope_theta": target["rope_theta"],
        "rope_scaling": target.get("rope_scaling"),
        "tie_word_embeddings": False,
    }


def initial_head(config: dict[str, Any], norm: mx.array, resume: Path | None) -> MTPHead:
    """Return a new head in float32, or one with a checkpoint's weights.

    config: of its layer.
    norm: [H], the target's final norm, with which its own begins.
    resume: folder of the checkpoint, or None.
    """
    head = MTPHead(config)
    head.norm.weight = norm.astype(mx.float32)
    if resume is not None:
        name, start = str(resume), MTPHead(config)
        tensors = head_tensors(read_tensors(resume, name), QWEN, config["num_hidden_layers"], name)
        load_tensors(start, {n: v for n, v in tensors.items() if n != "d2t"}, name)
        plain = tree_flatten(dequantize_model(start).parameters())
        head.load_weights([(n, v.astype(mx.float32)) for n, v in plain])
    mx.eval(head.parameters())
    return head


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, save, and return what the model card needs."""
    target, tokenizer = load_target(args.model, "bfloat16")
    replies, heldout = Replies.read(*args.replies), Replies.read(args.heldout)
    config = layer_config(args, vars(target.args))
    draft_ids = frequent_tokens(replies, args.draft_vocab, config["vocab_size"], list(tokenizer.eos_token_ids))
    frozen = freeze_target(target, draft_ids)
    mx.random.seed(args.seed)
    head = initial_head(config, target.model.norm.weight, args.resume)
    mx.eval(target.parameters(), frozen.head)
    started = time.perf_counter()

    def see(tokens: mx.array) -> tuple[mx.array, ...]:
        hidden = target.model(tokens)
        return token_shares(frozen, tokens, hidden), hidden

    def loss(
        tokens: mx.array, lengths: mx.array, firsts: mx.array, shares: mx.array, hidden: mx.array
    ) -> mx.array:
        anchors = draw_anchors(shares, lengths, firsts, anchor_count(args, tokens))
        outputs = chains(head, QWEN, config, frozen.embedding, tokens, hidden, anchors, args.chain)
        return chain_loss.loss(outputs, frozen.score, frozen, tokens, lengths, anchors, hidden, args.hard)

    history, quantized = learn(args, head, see, loss, replies)
    if first_process():
        save(Path(args.out), config, head, quantized, draft_ids)
    head.update(shipped_weights(head.parameters(), quantized))

    def accepted(tokens: mx.array, lengths: mx.array) -> mx.array:
        anchors, hidden = every_anchor(tokens), target.model(tokens)
        outputs = chains(head, QWEN, config, frozen.embedding, tokens, hidden, anchors, DEPTH)
        return accepted_drafts(outputs, frozen.score, frozen, tokens, lengths, anchors)

    counts = accepted_at_anchors(accepted, heldout, args.max_length)
    return {
        **facts(history, started, replies, head),
        "accepted_length": {depth: accepted_length(counts, depth) for depth in range(1, DEPTH + 1)},
    }


def save(
    folder: Path, config: dict[str, Any], head: MTPHead, quantized: dict[str, dict[str, Any]], draft_ids: list[int]
) -> None:
    """Write the head as original checkpoints have it: tensors ``mtp.*``, norms less one; quantised as trained."""
    folder.mkdir(parents=True, exist_ok=True)
    shipped = MTPHead(config)
    shipped.update(head.parameters())
    nn.quantize(shipped, class_predicate=lambda path, _: quantized.get(path, False))
    whole = dict(tree_flatten(shipped.parameters()))
    # Readers recognise norms less one by their means; where training moved these too far, norms are written whole.
    less = shift_norms(whole, -1.0)
    tensors = less if norms_lack_one(less) else whole
    named = {f"mtp.{name}": value for name, value in {**tensors, "d2t": mx.array(draft_ids)}.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), named, metadata={"format": "mlx"})
    written = {
        "model_type": "qwen3_5_mtp",
        "text_config": config,
        "quantization": next(iter(quantized.values()), None),
    }
    (folder / "config.json").write_text(json.dumps(written, indent=1) + "\n")


def main() -> int:
    """Run the command; see ``training.run``."""
    return run(setup_arg_parser().parse_args(), train, summary)


if __name__ == "__main__":
    raise SystemExit(main())
