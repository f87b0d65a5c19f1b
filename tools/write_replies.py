"""Let a target write replies to prompts, many at a time: the training data of its drafters.

Ctrl-C, SIGTERM and --time-limit end the run early and save the replies that are complete. Needs a GPU, of Apple or
NVIDIA: a CPU is enough for tiny models only.
"""

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import dequantize_model, load
from tqdm import tqdm

from mlx_spec.checkpoints.hub import resolve
from mlx_spec.cli.bench import read_prompts
from mlx_spec.errors import MlxSpecError, UnsupportedModel

DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}

# Steps between reads of the tokens, which synchronise with the host; as many are wasted on a finished row.
CHUNK = 16
# Batches shrink to multiples of this, so that few shapes occur: a GPU plans its kernels for each shape.
ROW_MULTIPLE = 64
SHRINK_BELOW = 0.75

TOP_P_ROUNDS = 20
TOP_P_RANGE = 30.0


@dataclass(frozen=True)
class Settings:
    """How replies are written.

    max_tokens: longest reply.
    eos_ids: tokens that end a reply.
    temp, top_p: of sampled replies.
    deadline: when to stop, by ``time.monotonic``.
    """

    max_tokens: int
    eos_ids: frozenset[int]
    temp: float = 0.8
    top_p: float = 0.95
    deadline: float = float("inf")


@dataclass
class Replies:
    """The replies so far.

    by_prompt: number of the prompt to ids of the reply, with the end-of-sequence token where it was reached.
    """

    by_prompt: dict[int, list[int]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """The number of reply tokens."""
        return sum(map(len, self.by_prompt.values()))


def keep_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Return log probabilities with -inf outside the smallest set of tokens with probability ``top_p``.

    logprobs: [B, V], normalised.
    The threshold is found by bisection, because sorting the vocabulary costs more than a step.
    """
    high = logprobs.max(axis=-1, keepdims=True)
    low = high - TOP_P_RANGE
    probs = mx.exp(logprobs)
    for _ in range(TOP_P_ROUNDS):
        middle = (low + high) / 2
        mass = mx.where(logprobs >= middle, probs, 0).sum(axis=-1, keepdims=True)
        enough = mass >= top_p
        low, high = mx.where(enough, middle, low), mx.where(enough, high, middle)
    return mx.where(logprobs >= low, logprobs, -mx.inf)


def next_tokens(logits: mx.array, num_greedy: int, settings: Settings) -> mx.array:
    """Return a token [B] int32 for each row of logits [B, V]: the first ``num_greedy`` greedy, others sampled."""
    chosen = []
    if num_greedy:
        chosen.append(mx.argmax(logits[:num_greedy], axis=-1))
    if num_greedy < logits.shape[0]:
        logprobs = nn.log_softmax(logits[num_greedy:].astype(mx.float32), axis=-1)
        if 0 < settings.top_p < 1:
            logprobs = keep_top_p(logprobs, settings.top_p)
        chosen.append(mx.random.categorical(logprobs / settings.temp))
    return mx.concatenate(chosen).astype(mx.int32)


class Batch:
    """Rows that are decoded together, greedy ones first.

    All rows are at the same position, so that caches need neither padding nor masks: they start together at the
    end of the shortest prompt, and a row with a longer prompt reads its own tokens until that ends. Prompts are
    batched by length, so that this takes few steps.
    """

    def __init__(self, model: nn.Module, numbers: Sequence[int], prompts: Sequence[list[int]], num_greedy: int):
        """Prefill what all prompts reach.

        model: of mlx-lm.
        numbers: of the prompts.
        prompts: their ids.
        num_greedy: how many are answered greedily.
        """
        self.model = model
        self.numbers = np.array(numbers)
        self.lengths = np.array([len(p) for p in prompts])
        self.num_greedy = num_greedy
        self.tokens = np.zeros((len(prompts), self.lengths.max()), np.int32)
        for row, prompt in zip(self.tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        self.finished = np.zeros(len(prompts), bool)
        self.caches = plain_caches(model)
        self.position = int(self.lengths.min())
        self.forced, self.forced_lengths = mx.array(self.tokens), mx.array(self.lengths)
        self.last = self.forced[:, self.position - 1]
        if self.position > 1:
            self.model(self.forced[:, : self.position - 1], cache=self.caches)
            # The logits are not evaluated, so they are never computed.
            mx.eval([cache.state for cache in self.caches])

    def __len__(self) -> int:
        return len(self.numbers)

    def step(self, settings: Settings) -> mx.array:
        """Begin to compute the tokens at the next position, and return them: [B] int32."""
        logits = self.model(self.last[:, None], cache=self.caches)[:, -1]
        tokens = next_tokens(logits, self.num_greedy, settings)
        if self.position < self.forced.shape[1]:
            within_prompt = self.position < self.forced_lengths
            tokens = mx.where(within_prompt, self.forced[:, self.position], tokens)
        self.last = tokens
        self.position += 1
        mx.async_eval(tokens)
        return tokens

    def advance(self, settings: Settings) -> None:
        """Decode CHUNK positions."""
        start = self.position
        columns = [self.step(settings) for _ in range(CHUNK)]
        # The only synchronisation with the host in a chunk.
        self.tokens = np.concatenate([self.tokens[:, :start], np.array(mx.stack(columns, axis=1))], axis=1)

    def collect(self, settings: Settings) -> dict[int, list[int]]:
        """Mark the rows that are finished, and return their replies by number of the prompt."""
        tokens = self.tokens[:, : self.position]
        in_reply = np.arange(self.position) >= self.lengths[:, None]
        is_end = np.isin(tokens, list(settings.eos_ids)) & in_reply
        limits = self.lengths + settings.max_tokens
        stops = np.where(is_end.any(axis=1), np.minimum(is_end.argmax(axis=1) + 1, limits), limits)
        done = np.flatnonzero(~self.finished & (stops <= self.position))
        self.finished[done] = True
        return {int(self.numbers[row]): tokens[row, self.lengths[row] : stops[row]].tolist() for row in done}

    def shrink(self) -> None:
        """Drop finished rows where that makes the batch at least a quarter smaller."""
        alive = np.flatnonzero(~self.finished)
        size = -(-len(alive) // ROW_MULTIPLE) * ROW_MULTIPLE
        if not len(alive) or size > SHRINK_BELOW * len(self):
            return
        spare = np.flatnonzero(self.finished)[: size - len(alive)]
        keep = np.sort(np.concatenate([alive, spare]))
        self.num_greedy = int((keep < self.num_greedy).sum())
        for name in ("numbers", "lengths", "tokens", "finished"):
            setattr(self, name, getattr(self, name)[keep])
        rows = mx.array(keep)
        self.forced, self.forced_lengths = self.forced[rows], self.forced_lengths[rows]
        self.last = self.last[rows]
        for cache in self.caches:
            cache.keys, cache.values = cache.keys[rows], cache.values[rows]
        mx.eval([cache.state for cache in self.caches], self.last)


def plain_caches(model: nn.Module) -> list[KVCache]:
    """Return the model's empty caches. Raises UnsupportedModel where one is not a plain KVCache."""
    caches = make_prompt_cache(model)
    others = sorted({type(cache).__name__ for cache in caches} - {KVCache.__name__})
    if others:
        raise UnsupportedModel(
            f"Replies are written with KVCache in every layer; this model has {', '.join(others)}. "
            "Use a model with full attention."
        )
    return caches


def make_batches(prompts: Sequence[list[int]], greedy: np.ndarray, size: int, seed: int) -> list[list[int]]:
    """Return prompt numbers in batches of prompts of similar length, greedy ones first in each.

    prompts: their ids.
    greedy: bool, of each prompt.
    size: prompts of a batch.
    seed: of the batches' random order, which keeps the mixture of lengths where a run ends early.
    """
    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    batches = [by_length[start : start + size] for start in range(0, len(by_length), size)]
    random.Random(seed).shuffle(batches)
    return [sorted(batch, key=lambda number: not greedy[number]) for batch in batches]


def choose_greedy(count: int, share: float, seed: int) -> np.ndarray:
    """Return which of ``count`` prompts are answered greedily, a random ``share`` of them: bool [count]."""
    greedy = np.zeros(count, bool)
    greedy[np.random.default_rng(seed).permutation(count)[: round(share * count)]] = True
    return greedy


def write_batch(batch: Batch, settings: Settings) -> Iterator[dict[int, list[int]]]:
    """Decode a batch to its end or to the deadline; yield replies when they are complete."""
    while not batch.finished.all() and time.monotonic() < settings.deadline:
        batch.advance(settings)
        yield batch.collect(settings)
        batch.shrink()


def write_replies(
    model: nn.Module,
    prompts: Sequence[list[int]],
    greedy: np.ndarray,
    batches: Sequence[Sequence[int]],
    settings: Settings,
) -> Replies:
    """Write a reply to every prompt; after the deadline, Ctrl-C or SIGTERM return those that are complete.

    model: of mlx-lm.
    prompts: their ids.
    greedy: bool, of each prompt.
    batches: numbers of prompts, greedy ones first in each batch.
    settings: see there.
    """
    replies = Replies()
    with sigterm_interrupts(), tqdm(total=len(prompts), unit="reply", smoothing=0.05) as bar:
        try:
            for numbers in batches:
                if time.monotonic() >= settings.deadline:
                    break
                batch = Batch(model, numbers, [prompts[n] for n in numbers], int(greedy[list(numbers)].sum()))
                for done in write_batch(batch, settings):
                    replies.by_prompt.update(done)
                    bar.update(len(done))
        except KeyboardInterrupt:
            bar.write("Stopped: saving the replies that are complete.")
    return replies


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does. Signals can be handled in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def chat_text(tokenizer: Any, item: dict[str, Any]) -> str:
    """Return a prompt in the chat template, up to where the reply begins."""
    messages = [{"role": "user", "content": item["prompt"]}]
    if item.get("system"):
        messages.insert(0, {"role": "system", "content": item["system"]})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def encode(tokenizer: Any, items: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the ids of all prompts, encoded in parallel."""
    texts = [chat_text(tokenizer, item) for item in items]
    return [e.ids for e in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]


def save_replies(
    path: Path, items: Sequence[dict[str, Any]], prompts: Sequence[list[int]], greedy: np.ndarray, replies: Replies
) -> None:
    """Write prompts with their replies as one .npz file, see ``train_data.Replies``.

    path: to write.
    items: the prompts, as in the prompt file.
    prompts: their ids.
    greedy: bool, of each prompt.
    replies: those that are complete; other prompts are left out.
    """
    numbers = sorted(replies.by_prompt)
    rows = [prompts[n] + replies.by_prompt[n] for n in numbers]
    kinds = sorted({item["kind"] for item in items})
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        tokens=np.array([token for row in rows for token in row], np.uint32),
        offsets=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        prompt_lengths=np.array([len(prompts[n]) for n in numbers], np.int32),
        greedy=greedy[numbers],
        kind=np.array([kinds.index(items[n]["kind"]) for n in numbers], np.uint8),
        kinds=np.array(kinds),
        numbers=np.array(numbers, np.int32),
    )


def load_target(name: str, dtype: str | None) -> tuple[nn.Module, Any]:
    """Load a model and its tokenizer with mlx-lm.

    name: "demo", a folder or a Hugging Face repo.
    dtype: a key of DTYPES, to dequantise and convert to; None for the weights as they are stored.
    Raises ModelError where there is no such model.
    """
    model, tokenizer = load(str(resolve(name)))[:2]
    if dtype is not None:
        model = dequantize_model(model)
        model.set_dtype(DTYPES[dtype])
        mx.eval(model.parameters())
    return model, tokenizer


def print_table(items: Sequence[dict[str, Any]], replies: Replies, eos_ids: frozenset[int]) -> None:
    """Print for each kind of prompt the replies, their mean length and the share that ended before the limit."""
    print(f"{'kind':<14} {'replies':>8} {'mean tokens':>12} {'ended':>7}")
    for kind in sorted({item["kind"] for item in items}):
        own = [reply for number, reply in replies.by_prompt.items() if items[number]["kind"] == kind]
        if own:
            ended = np.mean([reply[-1] in eos_ids for reply in own])
            print(f"{kind:<14} {len(own):>8} {np.mean([len(r) for r in own]):>12.1f} {ended:>7.2f}")


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.write_replies", description=__doc__)
    parser.add_argument("--model", required=True, help="demo, a folder or a Hugging Face repo")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with prompt, kind, system")
    parser.add_argument("--out", type=Path, required=True, help=".npz file to write")
    parser.add_argument("--max-tokens", type=int, default=224, help="longest reply (default 224)")
    parser.add_argument("--batch-size", type=int, default=512, help="replies written together (default 512)")
    parser.add_argument("--greedy-share", type=float, default=0.5, help="share of greedy replies (default 0.5)")
    parser.add_argument("--temp", type=float, default=0.8, help="temperature of the others (default 0.8)")
    parser.add_argument(
        "--top-p", type=float, default=0.95, help="nucleus sampling of the others; 1 for all tokens (default 0.95)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling and of the order (default 0)")
    parser.add_argument("--limit", type=int, help="number of prompts to use, from the first on (default: all)")
    parser.add_argument(
        "--time-limit",
        type=float,
        help="seconds of writing, loading not included, after which complete replies are saved (default: none)",
    )
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), help="dequantise and convert the weights (default: as they are stored)"
    )
    return parser


def main() -> int:
    """Run the command; exit status 2 where it cannot run."""
    args = setup_arg_parser().parse_args()
    try:
        run(args)
    except MlxSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(args: argparse.Namespace) -> None:
    """Write replies and save them; print a table, then one JSON line."""
    items = read_prompts(args.prompts, None)[: args.limit]
    model, tokenizer = load_target(args.model, args.dtype)
    prompts = encode(tokenizer, items)
    greedy = choose_greedy(len(items), args.greedy_share, args.seed)
    batches = make_batches(prompts, greedy, args.batch_size, args.seed)
    mx.random.seed(args.seed)
    start = time.monotonic()
    deadline = start + args.time_limit if args.time_limit is not None else float("inf")
    eos_ids = frozenset(tokenizer.eos_token_ids)
    settings = Settings(args.max_tokens, eos_ids, args.temp, args.top_p, deadline)
    replies = write_replies(model, prompts, greedy, batches, settings)
    seconds = time.monotonic() - start
    save_replies(args.out, items, prompts, greedy, replies)
    print_table(items, replies, eos_ids)
    result = {
        "device": str(mx.default_device()),
        "mlx": mx.__version__,  # type: ignore[attr-defined]
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "prompts": len(items),
        "replies": len(replies.by_prompt),
        "reply_tokens": replies.num_tokens,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(replies.num_tokens / seconds, 1),
        "bytes": args.out.stat().st_size,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    raise SystemExit(main())
