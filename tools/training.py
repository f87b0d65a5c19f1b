"""The training loop of all drafters.

Weights are kept in float32 and rounded to their quantised values in every step, so that quantising them afterwards
loses nothing. Muon trains the matrices of the layers, AdamW the rest at a twentieth of the rate. ``mlx.launch``
spreads a run over several GPUs.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers
from mlx.utils import tree_flatten, tree_map_with_path
from tqdm import tqdm

from metal_kernels.launching.implementations import using
from mlx_spec.cli.quantize_drafter import add_quantization_arguments, quantization
from mlx_spec.errors import MlxSpecError
from tools.muon import Muon
from tools.train_data import Batch, Replies, batches, check_enough

# Steps that compile, and are not timed when the schedule is fitted to a time limit.
FIRST_TIMED = 10
# Steps after which the schedule is fitted again.
FIT_EVERY = 200
# Mean number of steps that a batch is kept for.
KEPT_USES = 4
# AdamW's rate as a share of Muon's.
ADAMW_SHARE = 0.05

See = Callable[[mx.array], tuple[mx.array, ...]]
"""Runs the target over tokens [N, S], and returns what the loss needs of it."""
Draw = Callable[[Batch, np.random.Generator], tuple[mx.array, ...]]
"""Returns what a step needs besides its batch, drawn anew for each."""
History = list[tuple[int, float, float]]
"""(step, seconds, loss) of some steps."""


def add_training_arguments(parser: argparse.ArgumentParser, anchors: int, resumed: str) -> None:
    """Add the options that every trainer has.

    anchors: default of ``--anchors``.
    resumed: what ``--resume`` takes besides a checkpoint of the same shape.
    """
    add = parser.add_argument
    add("--model", default="demo", help="target: demo, a folder, or a Hugging Face repo")
    add("--replies", required=True, nargs="+", help=".npz files of replies to train on")
    add("--heldout", required=True, help=".npz of replies to measure acceptance on")
    add("--out", required=True, help="folder for the checkpoint")
    add(
        "--hard",
        type=float,
        default=0.2,
        help="share of the reply's token in the teacher; the rest is the target's distribution",
    )
    add(
        "--batch-size",
        type=int,
        default=64,
        help="sequences of full length in a step, on each GPU; shorter ones are more",
    )
    add("--max-length", type=int, default=512, help="most tokens of a sequence")
    add("--anchors", type=int, default=anchors, help="positions to draft from in a sequence of full length")
    add(
        "--keep",
        type=int,
        default=0,
        help=f"batches whose target outputs are kept in memory, for {KEPT_USES} steps each",
    )
    add("--learning-rate", type=float, default=0.02, help="peak rate of Muon")
    add("--steps", type=int, default=4000, help="steps of training; Ctrl-C ends earlier and saves")
    add("--time-limit", type=float, help="seconds of training, to which the number of steps is fitted")
    add("--resume", type=Path, help=f"start from this checkpoint, of the same shape{resumed}")
    add("--seed", type=int, default=0, help="seed of initial weights and of the order of replies")
    add_quantization_arguments(parser)


def anchor_count(args: argparse.Namespace, tokens: mx.array | np.ndarray) -> int:
    """Return the number of anchors of each sequence of a batch [N, S], so that all batches have as many in all."""
    sequences, size = tokens.shape
    return int(min(args.anchors * args.batch_size // sequences, size - 2))


def run(
    args: argparse.Namespace,
    train: Callable[[argparse.Namespace], dict[str, Any]],
    summary: Callable[[dict[str, Any]], Iterable[str]],
) -> int:
    """Train, print a summary and one JSON line, and write ``training.json`` beside the checkpoint.

    args: of the command line.
    train: trains, saves the checkpoint and returns facts.
    summary: turns these into lines.
    Returns the exit status: 0, or 2 after a line on stderr where the training cannot run.
    """
    try:
        with using("stock"):  # our kernels have no gradients
            result = train(args)
    except MlxSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not first_process():
        return 0
    for line in summary(result):
        print(line)
    arguments = {name: str(value) for name, value in vars(args).items()}
    Path(args.out, "training.json").write_text(json.dumps({"arguments": arguments, **result}, indent=1) + "\n")
    print(json.dumps({"arguments": arguments, **result}))
    return 0


def learn(
    args: argparse.Namespace,
    model: nn.Module,
    see: See,
    loss: Callable[..., mx.array],
    replies: Replies,
    draw: Draw = lambda batch, rng: (),
) -> tuple[History, dict[str, dict[str, Any]]]:
    """Train a drafter's modules, which are bfloat16 afterwards.

    args: of the command line.
    model: the modules.
    see: runs the target.
    loss: takes tokens, lengths and first reply tokens of a batch, then what ``see`` and ``draw`` returned.
    replies: to train on.
    draw: what each step needs besides its batch.
    Returns the history, and the quantization of each quantised module by its path.
    Raises RequestError where the replies are too few.
    """
    check_enough(replies, args.batch_size, args.max_length)
    optimizer = make_optimizer()
    optimizer.init(model.trainable_parameters())
    quantized = quantization(model, args)
    step = make_step(model, loss, optimizer, quantized)
    history = fit(args, model, step, optimizer, replies, mx.compile(see), draw)
    mx.eval(model.parameters())
    model.set_dtype(mx.bfloat16)
    return history, quantized


def facts(history: History, started: float, replies: Replies, model: nn.Module) -> dict[str, Any]:
    """Return the facts about a training that its model card needs; ``started`` is of ``time.perf_counter``."""
    return {
        "steps": history[-1][0],
        "seconds": round(time.perf_counter() - started, 1),
        "replies": len(replies),
        "tokens": int(len(replies.tokens)),
        "parameters": sum(v.size for _, v in tree_flatten(model.parameters())),
        "step_seconds_loss": history[:: max(1, len(history) // 20)],
    }


def shipped_weights(weights: Any, quantized: dict[str, dict[str, Any]]) -> Any:
    """Return the weights rounded to their quantised values, with gradients as if they were not rounded.

    weights: tree of parameters in float32.
    quantized: the quantization of each quantised module by its path.
    Codebooks stay in float32, so that small updates of frequent tokens are not lost to rounding.
    """

    def ship(path: str, weight: mx.array) -> mx.array:
        how, weight = quantized.get(path.removesuffix(".weight")), weight.astype(mx.float32)
        if how is not None:
            kept = mx.dequantize(*mx.quantize(mx.stop_gradient(weight).astype(mx.bfloat16), **how), **how)
            weight = weight + mx.stop_gradient(kept - weight)
        return weight if path.endswith("codebook.weight") else weight.astype(mx.bfloat16)

    return tree_map_with_path(ship, weights)


def make_step(
    model: nn.Module, loss: Callable[..., mx.array], optimizer: Any, quantized: dict[str, dict[str, Any]]
) -> Callable[..., mx.array]:
    """Return the compiled training step, which takes what ``loss`` takes and returns its value before the step.

    model: the drafter's modules; while ``loss`` runs, their weights are rounded to their quantised values.
    loss: returns a scalar.
    optimizer: of the modules.
    quantized: the quantization of each quantised module by its path.
    """
    group = processes()

    def shipped_loss(weights: Any, *inputs: mx.array) -> mx.array:
        model.update(shipped_weights(weights, quantized))
        return loss(*inputs)

    state = [model.state, optimizer.state, mx.random.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(*inputs: mx.array) -> mx.array:
        master = model.trainable_parameters()
        value, gradients = mx.value_and_grad(shipped_loss)(master, *inputs)
        model.update(master)
        if group is not None:
            gradients = nn.average_gradients(gradients, group)
        optimizer.update(model, gradients)
        return value

    return step


def processes() -> mx.distributed.Group | None:
    """Return the group of processes that ``mlx.launch`` started, or None where it did not start this one."""
    if "MLX_RANK" not in os.environ:
        return None
    return mx.distributed.init(backend="nccl" if mx.cuda.is_available() else "any")


def first_process() -> bool:
    """Return whether this process is the one that prints and writes files."""
    group = processes()
    return group is None or group.rank() == 0


def make_optimizer() -> optimizers.MultiOptimizer:
    """Return Muon for the matrices of the layers and AdamW for everything else."""
    muon = Muon(mx.array(0.0))
    adamw = optimizers.AdamW(mx.array(0.0), betas=[0.9, 0.95], weight_decay=0.01)
    return optimizers.MultiOptimizer(
        [muon, adamw], [lambda path, w: path.endswith("proj.weight") or path == "fc.weight"]
    )


def fit(
    args: argparse.Namespace,
    model: nn.Module,
    step: Callable[..., mx.array],
    optimizer: optimizers.MultiOptimizer,
    replies: Replies,
    see: See,
    draw: Draw,
) -> History:
    """Run the steps; return the history of every 100th step.

    args: of the command line.
    model, step, optimizer: see ``make_step``.
    replies, see, draw: see ``learn``.
    Ctrl-C ends the training early, with the weights that there are; before the first step it raises SystemExit. An
    error of the device, as when its memory is full, ends it early with the weights of the last step that certainly
    ended, and is raised where there is none.
    """
    group = processes()
    rng = np.random.default_rng([args.seed, 0 if group is None else group.rank()])
    source = seen_batches(args, replies, see, rng)
    started, steps, history, value = time.perf_counter(), args.steps, [], mx.array(0.0)
    with tqdm(total=steps, desc="training", mininterval=5, disable=not first_process()) as bar:
        try:
            for done in count(1):
                if done == FIRST_TIMED:
                    timed_from = time.perf_counter()
                if args.time_limit and (done == 2 * FIRST_TIMED or done % FIT_EVERY == 0):
                    pace = (time.perf_counter() - timed_from) / (done - FIRST_TIMED)
                    steps = agreed(done + int((args.time_limit - (time.perf_counter() - started)) / pace))
                    bar.total = steps
                for part, share in zip(optimizer.optimizers, (1.0, ADAMW_SHARE), strict=True):
                    part.learning_rate = schedule(share * args.learning_rate, done, steps)
                batch, seen = next(source)
                before = model.trainable_parameters()
                last, value = value, step(*batch.arrays, *seen, *draw(batch, rng))
                mx.async_eval(value)
                # Reading the loss of the step before lets this step run while the next one is prepared.
                loss = float((last if done < steps else value).item())
                finished = before
                bar.update()
                if done % 100 == 0 or done >= steps:
                    history.append((done, round(time.perf_counter() - started, 1), round(loss, 4)))
                    bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                if done >= steps:
                    return history
        except KeyboardInterrupt:
            if done == 1:
                raise SystemExit("stopped before the first step: nothing is saved") from None
            ended = done - 1
            bar.write("stopped; saving what there is")
        except RuntimeError as error:
            if done <= 2:
                raise
            ended = done - 2
            model.update(finished)
            bar.write(f"{error}\nstopped after {ended} steps; saving what there is")
    return [*history, (ended, round(time.perf_counter() - started, 1), round(loss, 4))]


def agreed(steps: int) -> int:
    """Return the mean of the number of steps that each process computed for the run."""
    group = processes()
    if group is None:
        return steps
    return int(mx.distributed.all_sum(mx.array(steps), group=group).item()) // group.size()


def seen_batches(
    args: argparse.Namespace, replies: Replies, see: See, rng: np.random.Generator
) -> Iterator[tuple[Batch, tuple[mx.array, ...]]]:
    """Yield batches for ever with the target's outputs for them.

    With ``args.keep``, as many batches are kept, drawn at random, and replaced after KEPT_USES uses on average.
    """

    def fresh() -> Iterator[tuple[Batch, tuple[mx.array, ...]]]:
        for batch in batches(replies, args.batch_size, args.max_length, rng):
            seen = see(mx.array(batch.tokens))
            mx.async_eval(seen)
            yield batch, seen

    source = fresh()
    if not args.keep:
        yield from source
    filling = tqdm(range(args.keep), desc="target", mininterval=5, disable=not first_process())
    kept = [next(source) for _ in filling]
    while True:
        k = int(rng.integers(len(kept)))
        if rng.random() < 1 / KEPT_USES:
            kept[k] = next(source)
        yield kept[k]


def schedule(peak: float, step: int, steps: int) -> mx.array:
    """Return the learning rate of step 1, 2, ...: linear warm-up over 3 % of the steps, then a cosine to zero."""
    warm = max(1, int(0.03 * steps))
    if step <= warm:
        return mx.array(peak * step / warm)
    return mx.array(peak * 0.5 * (1 + np.cos(np.pi * min(1.0, (step - warm) / max(1, steps - warm)))))
