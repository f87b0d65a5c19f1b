"""Train a DFlash 2 drafter for a target, on replies that the target wrote (see ``tools.write_replies``).

The modules that are trained are the modules that are shipped. Weights are kept in float32 and computed with as
``tools.quantize_drafter`` packs them, so packing costs nothing. Matrices of the layers learn by Muon, the rest by
AdamW at a twentieth of the rate. ``mlx.launch`` spreads a run over several GPUs.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers
from mlx.utils import tree_flatten, tree_map_with_path
from tqdm import tqdm

from metal_kernels.implementations import using
from mlx_spec.config_file import read_config as read_config_file
from mlx_spec.drafters.checkpoint import load_tensors, read_tensors
from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.dflash2.config import DFlash2Config, read_config
from mlx_spec.drafters.dflash2.drafter import native_names
from mlx_spec.errors import DrafterMismatch
from tools import train_dflash2 as dflash2
from tools.quantize_drafter import add_packing_arguments, packing, plain_tensors, published_names
from tools.train_data import Batch, Replies, batches, frequent_tokens, make_batch
from tools.write_replies import load_target

# Steps that compile, and are left out when the schedule is fitted to a time limit.
FIRST_TIMED = 10
# Share of the blocks that have all their rows.
WHOLE_BLOCKS = 0.7
# AdamW's rate as a share of Muon's.
ADAMW_SHARE = 0.05


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_drafter",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="demo", help="target: demo, a folder, or a Hugging Face repo")
    add("--replies", required=True, nargs="+", help=".npz files of replies to train on")
    add("--heldout", required=True, help=".npz of replies to measure acceptance on")
    add("--out", required=True, help="folder for the checkpoint")
    add("--layers", type=int, default=3, help="decoder layers of the drafter")
    add("--intermediate-size", type=int, help="feed-forward width (default: the target's)")
    add("--taps", type=int, nargs="+", help="target layers to read (default: 6, evenly spread)")
    add("--block-size", type=int, default=8, help="rows of a block: the anchor and the drafts")
    add("--selector-rank", type=int, default=64)
    add("--conv-group-size", type=int, default=16)
    add("--mask-token", help="token whose embedding marks rows to fill (default: an unused special token)")
    add("--draft-vocab", type=int, default=12288, help="tokens the draft head scores, most frequent first")
    add("--hard", type=float, default=0.2, help="weight of the token that came against the target's distribution")
    add("--batch-size", type=int, default=64, help="sequences a step, on each GPU")
    add("--anchors", type=int, default=48, help="blocks a sequence")
    add("--max-length", type=int, default=512, help="tokens of a sequence")
    add("--learning-rate", type=float, default=0.02, help="peak rate of Muon")
    add("--steps", type=int, default=4000)
    add("--time-limit", type=float, help="seconds: the schedule is fitted to it after the first steps")
    add("--resume", type=Path, help="start from this checkpoint, of the same shape or of fewer layers")
    add("--seed", type=int, default=0)
    add_packing_arguments(parser)
    return parser


def drafter_config(args: argparse.Namespace, target: dict[str, Any], tokenizer: Any, draft_ids: list[int]) -> dict:
    """Return the ``config.json`` of the drafter, in the native layout."""
    depth, heads = target["num_hidden_layers"], target["num_attention_heads"]
    taps = args.taps or [round(1 + i * (depth - 3) / 5) for i in range(6)]
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
            "target_layer_ids": taps,
            "draft_token_ids": draft_ids,
        },
    }


def mask_token(name: str | None, tokenizer: Any) -> int:
    """Return the id of the mask token: the named one, or the last special token that ends no text."""
    if name is not None:
        return int(tokenizer.convert_tokens_to_ids(name))
    unused = set(tokenizer.all_special_ids) - set(tokenizer.eos_token_ids) - {tokenizer.bos_token_id}
    return max(unused)


def freeze_target(model: Any, draft_ids: list[int]) -> dflash2.Frozen:
    """Take the embedding and the head rows of the draft vocabulary out of a dequantised model."""
    embedding = model.model.embed_tokens.weight
    head = (getattr(model, "lm_head", None) or model.model.embed_tokens).weight
    index = np.full(embedding.shape[0], -1, dtype=np.int32)
    index[draft_ids] = np.arange(len(draft_ids))
    ids = mx.array(draft_ids)
    return dflash2.Frozen(embedding, head[ids], ids, mx.array(index))


def shipped_weights(weights: Any, packed: dict[str, dict[str, Any]]) -> Any:
    """Return the weights as they will be computed with: rounded to what packing keeps, gradients passing through.

    Codebooks stay in float32, so that the gradients of frequent tokens, sums over many rows, are not rounded away.
    """

    def ship(path: str, weight: mx.array) -> mx.array:
        how, weight = packed.get(path.removesuffix(".weight")), weight.astype(mx.float32)
        if how is not None:
            kept = mx.dequantize(*mx.quantize(mx.stop_gradient(weight).astype(mx.bfloat16), **how), **how)
            weight = weight + mx.stop_gradient(kept - weight)
        return weight if path.endswith("codebook.weight") else weight.astype(mx.bfloat16)

    return tree_map_with_path(ship, weights)


def make_step(
    model: nn.Module, loss: Callable[..., mx.array], optimizer: Any, packed: dict[str, dict[str, Any]]
) -> Callable[..., mx.array]:
    """Return the compiled training step of a drafter: what ``loss`` takes, to the loss before the step.

    ``loss`` runs the drafter's modules, which hold their weights as they will be computed with.
    """
    group = processes()

    def shipped_loss(weights: Any, *inputs: mx.array) -> mx.array:
        model.update(shipped_weights(weights, packed))
        return loss(*inputs)

    state = [model.state, optimizer.state, mx.random.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(*inputs: mx.array) -> mx.array:
        master = model.trainable_parameters()
        value, gradients = mx.value_and_grad(shipped_loss)(master, *inputs)
        model.update(master)
        if group is not None:
            gradients = nn.average_gradients(gradients, group)
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        return value

    return step


def processes() -> mx.distributed.Group | None:
    """Return the processes that ``mlx.launch`` started, or None if it did not start this one."""
    if "MLX_RANK" not in os.environ:
        return None
    return mx.distributed.init(backend="nccl" if mx.cuda.is_available() else "any")


def make_optimizer() -> optimizers.MultiOptimizer:
    """Return Muon for the matrices of the layers and AdamW for everything else."""
    muon = optimizers.Muon(mx.array(0.0), weight_decay=0.0)
    adamw = optimizers.AdamW(mx.array(0.0), betas=[0.9, 0.95], weight_decay=0.01)
    return optimizers.MultiOptimizer(
        [muon, adamw], [lambda path, w: path.endswith("proj.weight") or path == "fc.weight"]
    )


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
    """Draw the rows of each block: most are whole, some shorter, because the policy runs shorter blocks too."""
    short = rng.integers(2, block_size, shape)
    return np.where(rng.random(shape) < WHOLE_BLOCKS, block_size, short).astype(np.int32)


def acceptance(
    model: DraftModel,
    config: DFlash2Config,
    frozen: dflash2.Frozen,
    target: Any,
    heldout: Replies,
    max_length: int,
    limit: int = 512,
) -> tuple[list[float], list[float]]:
    """Return the share of drafts that stand at positions 1 .. block size - 1, over held-out greedy replies.

    First of the blocks that decoding starts, each behind what the one before gave, then of blocks at every place.
    """
    chosen = np.flatnonzero(heldout.greedy & (heldout.lengths - heldout.prompt_lengths >= 2))[:limit]
    steps = np.arange(1, config.block_size)
    # Of decoding and of every place: drafts that stood, and drafts there were tokens for.
    counts = np.zeros((2, 2, config.block_size - 1))
    for i in range(0, len(chosen), 16):
        batch = make_batch(heldout, chosen[i : i + 16], max_length)
        most = int((batch.lengths - batch.firsts).max()) - 1
        places = np.minimum(batch.firsts[:, None] + np.arange(most), batch.lengths[:, None] - 2)
        tokens, lengths, anchors = (mx.array(a) for a in (batch.tokens, batch.lengths, places))
        seen = dflash2.run_target(target, tokens, config.target_layer_ids)
        standing = np.array(dflash2.drafts_standing(model, config, frozen, tokens, lengths, anchors, seen))
        for row, length, first in zip(standing, batch.lengths, batch.firsts, strict=True):
            left = length - 1 - np.arange(first, length - 1)
            stood = row[: len(left), None] >= steps, left[:, None] >= steps
            rounds = decoding_rounds(row[: len(left)])
            counts += [[s[rounds].sum(axis=0) for s in stood], [s.sum(axis=0) for s in stood]]
    decoding, everywhere = counts[:, 0] / np.maximum(counts[:, 1], 1)
    return decoding.tolist(), everywhere.tolist()


def decoding_rounds(standing: np.ndarray) -> list[int]:
    """Return the places where decoding starts a round, given how many drafts would stand behind each place."""
    rounds, at = [], 0
    while at < len(standing):
        rounds.append(at)
        at += 1 + int(standing[at])
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
    optimizer = make_optimizer()
    optimizer.init(model.trainable_parameters())
    packed = packing(model, args)

    def loss(tokens: mx.array, lengths: mx.array, firsts: mx.array, rows: mx.array) -> mx.array:
        seen = dflash2.run_target(target, tokens, config.target_layer_ids)
        anchors = dflash2.draw_anchors(frozen, tokens, lengths, firsts, seen.hidden, rows.shape[1])
        seen = dflash2.Seen(mx.stop_gradient(seen.taps), mx.stop_gradient(seen.hidden))
        return dflash2.loss(model, config, frozen, tokens, lengths, anchors, rows, seen, args.hard)

    def inputs(batch: Batch, rng: np.random.Generator) -> tuple[mx.array, ...]:
        # Batches of shorter sequences have more of them and fewer blocks in each.
        count = len(batch.lengths)
        rows = block_rows((count, args.anchors * args.batch_size // count), config.block_size, rng)
        return (*batch.arrays, mx.array(rows))

    step = make_step(model, loss, optimizer, packed)
    history = fit(args, step, optimizer, replies, inputs)
    mx.eval(model.parameters())
    model.set_dtype(mx.bfloat16)
    if first_process():
        save(Path(args.out), raw, model)
    model.update(shipped_weights(model.parameters(), packed))
    decoding, everywhere = acceptance(model, config, frozen, target, heldout, args.max_length)
    return {
        "steps": history[-1][0],
        "seconds": round(time.perf_counter() - started, 1),
        "replies": len(replies),
        "tokens": int(len(replies.tokens)),
        "parameters": sum(v.size for _, v in tree_flatten(model.parameters())),
        "accepted_length": round(1 + sum(decoding), 3),
        "acceptance": [round(s, 3) for s in decoding],
        "accepted_length_everywhere": round(1 + sum(everywhere), 3),
        "acceptance_everywhere": [round(s, 3) for s in everywhere],
        "step_seconds_loss": history[:: max(1, len(history) // 20)],
    }


def first_process() -> bool:
    """Whether this process is the one that writes files."""
    group = processes()
    return group is None or group.rank() == 0


def fit(
    args: argparse.Namespace,
    step: Callable[..., mx.array],
    optimizer: optimizers.MultiOptimizer,
    replies: Replies,
    inputs: Callable[[Batch, np.random.Generator], tuple[mx.array, ...]] = lambda batch, rng: batch.arrays,
) -> list[tuple[int, float, float]]:
    """Run the steps and return (step, seconds, loss) every 100 of them. Ctrl-C ends early, keeping the weights.

    inputs: makes what ``step`` takes of a batch; what has to be drawn comes from the generator.
    """
    group = processes()
    rng = np.random.default_rng([args.seed, 0 if group is None else group.rank()])
    source = batches(replies, args.batch_size, args.max_length, rng)
    started, steps, history, value = time.perf_counter(), args.steps, [], mx.array(0.0)
    with tqdm(total=steps, desc="training", mininterval=5, disable=not first_process()) as bar:
        try:
            for done in count(1):
                if done == FIRST_TIMED:
                    timed_from = time.perf_counter()
                if args.time_limit and done in (2 * FIRST_TIMED, 20 * FIRST_TIMED):
                    pace = (time.perf_counter() - timed_from) / (done - FIRST_TIMED)
                    steps = done + int((args.time_limit - (time.perf_counter() - started)) / pace)
                    if group is not None:
                        steps = int(mx.distributed.all_sum(mx.array(steps), group=group).item()) // group.size()
                    bar.total = steps
                for part, share in zip(optimizer.optimizers, (1.0, ADAMW_SHARE), strict=True):
                    part.learning_rate = schedule(share * args.learning_rate, done, steps)
                last, value = value, step(*inputs(next(source), rng))
                mx.async_eval(value)
                # While a step runs, the next is prepared.
                loss = float((last if done < steps else value).item())
                bar.update()
                if done % 100 == 0 or done >= steps:
                    history.append((done, round(time.perf_counter() - started, 1), round(loss, 4)))
                    bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                if done >= steps:
                    return history
        except KeyboardInterrupt:
            bar.write("stopped; saving what there is")
    return [*history, (done - 1, round(time.perf_counter() - started, 1), round(loss, 4))]


def schedule(peak: float, step: int, steps: int) -> mx.array:
    """Return the rate of step 1 ff.: linear warm-up over 3 % of the steps, then a cosine to zero."""
    warm = max(1, int(0.03 * steps))
    if step <= warm:
        return mx.array(peak * step / warm)
    return mx.array(peak * 0.5 * (1 + np.cos(np.pi * min(1.0, (step - warm) / max(1, steps - warm)))))


def save(folder: Path, config: dict[str, Any], model: nn.Module) -> None:
    """Write a checkpoint in the published layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = published_names(dict(tree_flatten(model.parameters())))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    """Run the command."""
    args = setup_arg_parser().parse_args()
    with using("stock"):  # our kernels have no gradients
        result = train(args)
    if not first_process():
        return
    for position, share in enumerate(result["acceptance"], 1):
        print(f"position {position}: {share:.3f} of the drafts that far stood")
    print(f"accepted length: {result['accepted_length']}")
    arguments = {name: str(value) for name, value in vars(args).items()}
    Path(args.out, "training.json").write_text(json.dumps({"arguments": arguments, **result}, indent=1) + "\n")
    print(json.dumps({"arguments": arguments, **result}))


if __name__ == "__main__":
    main()
