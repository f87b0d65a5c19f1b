"""Train an EAGLE-3 head for a target, on replies that the target wrote (see ``tools.write_replies``).

Training runs the modules that are shipped: one Llama layer over outputs of target layers, each normed (EAGLE-3.1),
with an output head of its own over the tokens that the replies use most. Chains read the head's own output, as
in decoding. Weights are rounded to their quantised values in every step. ``mlx.launch`` spreads a run over several
GPUs. Needs a GPU, of Apple or NVIDIA: a CPU is enough for tiny models only.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from mlx_spec.checkpoints.settings import Settings
from mlx_spec.checkpoints.tensors import load_tensors, read_tensors
from mlx_spec.drafters.eagle.head import EagleHead
from mlx_spec.drafters.eagle.spec import EagleSpec, HeadConfig, read_head_config, read_spec
from mlx_spec.drafters.eagle.tensors import head_tensors
from mlx_spec.errors import DrafterMismatch
from tools import chain_loss
from tools.chain_acceptance import accepted_at_anchors, accepted_length, summary
from tools.chain_loss import accepted_drafts, every_anchor
from tools.eagle_chains import chains
from tools.teacher import Frozen, draw_anchors, freeze_target, run_target, watch
from tools.train_data import Replies, frequent_tokens
from tools.training import add_training_arguments, anchor_count, facts, first_process, learn, run, shipped_weights
from tools.write_replies import load_target

# Drafts of a chain when acceptance is measured.
DEPTH = 7


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_eagle",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_training_arguments(parser, anchors=96, resumed=", with its vocabulary")
    add = parser.add_argument
    add("--chain", type=int, default=5, help="drafts of each chain in training")
    add("--intermediate-size", type=int, help="feed-forward width (default: the target's)")
    add(
        "--target-layer-ids",
        type=int,
        nargs="+",
        help="target layers whose outputs are read (default: 4, evenly spread)",
    )
    add(
        "--draft-vocab",
        type=int,
        default=8192,
        help="size of the draft vocabulary: the tokens that the replies use most",
    )
    add("--target-head", action="store_true", help="use the target's output head instead of an own one")
    return parser


def head_config(args: argparse.Namespace, target: dict[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` of the head, in the layout of the ``speculators`` library."""
    depth, heads = target["num_hidden_layers"], target["num_attention_heads"]
    layer_ids = args.target_layer_ids or [round(1 + i * (depth - 3) / 3) for i in range(4)]
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "dtype": "bfloat16",
        "draft_vocab_size": args.draft_vocab,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
        # This key numbers the inputs of layers.
        "eagle_aux_hidden_state_layer_ids": [index + 1 for index in layer_ids],
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "hidden_size": target["hidden_size"],
            "intermediate_size": args.intermediate_size or target["intermediate_size"],
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": target["num_key_value_heads"],
            "head_dim": target.get("head_dim") or target["hidden_size"] // heads,
            "rms_norm_eps": target["rms_norm_eps"],
            "vocab_size": target["vocab_size"],
            "max_position_embeddings": target["max_position_embeddings"],
            "rope_theta": target["rope_theta"],
            "rope_scaling": target.get("rope_scaling"),
            "tie_word_embeddings": False,
        },
    }


def new_head(config: HeadConfig, spec: EagleSpec, draft_vocab: int | None) -> EagleHead:
    """Build a head; with ``draft_vocab``, it has an output head over as many tokens."""
    head = EagleHead(config, spec, {"fc.weight", "fc_norm.0.weight"})
    if draft_vocab is not None:
        head.lm_head = nn.Linear(config.hidden_size, draft_vocab, bias=False)
    return head


def initial_head(
    config: HeadConfig, spec: EagleSpec, frozen: Frozen, norm: mx.array, args: argparse.Namespace
) -> EagleHead:
    """Return a new head in float32, or one with a checkpoint's weights.

    config, spec: of the head.
    frozen: its output head begins as the target's.
    norm: [H], the target's final norm, with which its own begins.
    args: the checkpoint to resume, and whether the head has an output head.
    """
    draft_vocab, resume = None if args.target_head else frozen.head.shape[0], args.resume
    head = new_head(config, spec, draft_vocab)
    head.norm.weight = norm.astype(mx.float32)
    if not args.target_head:
        head.lm_head.weight = frozen.head.astype(mx.float32)
    if resume is not None:
        name, start = str(resume), new_head(config, spec, draft_vocab)
        tensors = head_tensors(read_tensors(resume, name), name)
        load_tensors(start, {n: v for n, v in tensors.items() if n not in ("d2t", "t2d")}, name)
        plain = tree_flatten(dequantize_model(start).parameters())
        head.load_weights([(n, v.astype(mx.float32)) for n, v in plain])
    mx.eval(head.parameters())
    return head


def resumed_ids(folder: Path) -> list[int]:
    """Return the draft vocabulary of a checkpoint, in the order of its output head's rows."""
    offsets = np.array(read_tensors(folder, str(folder))["d2t"])
    return [int(i) for i in offsets + np.arange(offsets.size)]


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, save, and return what the model card needs."""
    target, tokenizer = load_target(args.model, "bfloat16")
    replies, heldout = Replies.read(*args.replies), Replies.read(args.heldout)
    raw = head_config(args, vars(target.args))
    settings = Settings(raw, "the new head", DrafterMismatch)
    config, spec = read_head_config(settings), read_spec(settings, True, target.args.num_hidden_layers)
    draft_ids = (
        resumed_ids(args.resume)
        if args.resume
        else frequent_tokens(replies, args.draft_vocab, config.vocab_size, list(tokenizer.eos_token_ids))
    )
    frozen = freeze_target(target, draft_ids)
    mx.random.seed(args.seed)
    head = initial_head(config, spec, frozen, target.model.norm.weight, args)
    mx.eval(target.parameters(), frozen.head)
    started = time.perf_counter()
    score = head.get("lm_head") or frozen.score

    def loss(
        tokens: mx.array,
        lengths: mx.array,
        firsts: mx.array,
        shares: mx.array,
        hidden: mx.array,
        aux_hidden_states: mx.array,
    ) -> mx.array:
        anchors = draw_anchors(shares, lengths, firsts, anchor_count(args, tokens))
        outputs = chains(head, spec, config, frozen.embedding, tokens, aux_hidden_states, anchors, args.chain)
        return chain_loss.loss(outputs, score, frozen, tokens, lengths, anchors, hidden, args.hard)

    history, quantized = learn(args, head, watch(target, frozen, spec.target_layer_ids), loss, replies)
    if first_process():
        save(Path(args.out), raw, config, spec, head, quantized, draft_ids)
    head.update(shipped_weights(head.parameters(), quantized))

    def accepted(tokens: mx.array, lengths: mx.array) -> mx.array:
        anchors, (_, aux_hidden_states) = every_anchor(tokens), run_target(target, tokens, spec.target_layer_ids)
        outputs = chains(head, spec, config, frozen.embedding, tokens, aux_hidden_states, anchors, DEPTH)
        return accepted_drafts(outputs, score, frozen, tokens, lengths, anchors)

    counts = accepted_at_anchors(accepted, heldout, args.max_length)
    return {
        **facts(history, started, replies, head),
        "accepted_length": {depth: accepted_length(counts, depth) for depth in range(1, DEPTH + 1)},
    }


def save(
    folder: Path,
    raw: dict[str, Any],
    config: HeadConfig,
    spec: EagleSpec,
    head: EagleHead,
    quantized: dict[str, dict[str, Any]],
    draft_ids: list[int],
) -> None:
    """Write a checkpoint in the layout of the ``speculators`` library, quantised as trained."""
    folder.mkdir(parents=True, exist_ok=True)
    shipped = new_head(config, spec, len(draft_ids) if "lm_head" in head else None)
    shipped.update(head.parameters())
    nn.quantize(shipped, class_predicate=lambda path, _: quantized.get(path, False))
    ids = np.array(draft_ids)
    marked = np.zeros(config.vocab_size, dtype=bool)
    marked[ids] = True
    vocabulary = {"d2t": mx.array(ids - np.arange(ids.size)), "t2d": mx.array(marked)}
    tensors = {**dict(tree_flatten(shipped.parameters())), **vocabulary}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    written = {**raw, "draft_vocab_size": ids.size, "quantization": next(iter(quantized.values()), None)}
    (folder / "config.json").write_text(json.dumps(written, indent=1) + "\n")


def main() -> int:
    """Run the command; see ``training.run``."""
    return run(setup_arg_parser().parse_args(), train, summary)


if __name__ == "__main__":
    raise SystemExit(main())
