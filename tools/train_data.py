"""Batches of replies for drafter training, read from what ``tools.write_replies`` wrote."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class Replies:
    """Token sequences, prompt then reply: sequence i is ``tokens[offsets[i]:offsets[i + 1]]``."""

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray
    greedy: np.ndarray

    @staticmethod
    def read(*paths: str | Path) -> "Replies":
        """Read what ``tools.write_replies`` wrote, one or several .npz files."""
        parts = []
        for path in paths:
            with np.load(path) as data:
                parts.append([data[n] for n in ("tokens", "offsets", "prompt_lengths", "greedy")])
        tokens, offsets, prompt_lengths, greedy = zip(*parts, strict=True)
        lengths = np.concatenate([np.diff(o) for o in offsets])
        return Replies(
            np.concatenate(tokens),
            np.concatenate([[0], np.cumsum(lengths)]),
            np.concatenate(prompt_lengths),
            np.concatenate(greedy),
        )

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> np.ndarray:
        """Length of each sequence, prompt included."""
        return np.diff(self.offsets)

    def reply_tokens(self) -> np.ndarray:
        """All reply tokens, flat."""
        parts = [self.tokens[self.offsets[i] + p : self.offsets[i + 1]] for i, p in enumerate(self.prompt_lengths)]
        return np.concatenate(parts)


@dataclass(frozen=True)
class Batch:
    """Padded sequences [N, S], their lengths [N], and the position of each reply's first token [N]."""

    tokens: np.ndarray
    lengths: np.ndarray
    firsts: np.ndarray

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """All three, on the device."""
        return mx.array(self.tokens), mx.array(self.lengths), mx.array(self.firsts)


def frequent_tokens(replies: Replies, count: int, vocab_size: int, always: list[int]) -> list[int]:
    """Return ``count`` ids, ascending: ``always``, what the replies use most, then unused ids from 0 on."""
    uses = np.bincount(replies.reply_tokens(), minlength=vocab_size)
    uses[always] = uses.max() + 1
    ranked = np.argsort(-uses, kind="stable")
    return sorted(int(i) for i in ranked[:count])


def make_batch(replies: Replies, index: np.ndarray, size: int) -> Batch:
    """Pad the sequences ``index`` to ``size``; longer ones lose their end."""
    tokens = np.zeros((len(index), size), dtype=np.int32)
    lengths = np.minimum(replies.lengths[index], size).astype(np.int32)
    for row, i in enumerate(index):
        start = replies.offsets[i]
        tokens[row, : lengths[row]] = replies.tokens[start : start + lengths[row]]
    return Batch(tokens, lengths, replies.prompt_lengths[index].astype(np.int32))


def batches(replies: Replies, per_batch: int, size: int, rng: np.random.Generator) -> Iterator[Batch]:
    """Yield batches for ever, epoch after epoch, short sequences with short ones.

    Sequences of at most ``size // 2`` tokens are padded to that and come twice as many to a batch, so that every
    batch has the same number of tokens and there are two array shapes in all.
    """
    usable = np.flatnonzero((replies.lengths - replies.prompt_lengths >= 2) & (replies.prompt_lengths < size - 2))
    short = replies.lengths[usable] <= size // 2
    while True:
        plan = []
        for part, count, width in (
            (usable[short], 2 * per_batch, size // 2),
            (usable[~short], per_batch, size),
        ):
            order = rng.permutation(part)
            plan += [(order[i : i + count], width) for i in range(0, len(order) - count + 1, count)]
        if not plan:
            raise ValueError(f"{len(usable)} usable replies are too few for a batch of {per_batch}.")
        for k in rng.permutation(len(plan)):
            index, width = plan[k]
            yield make_batch(replies, index, width)
