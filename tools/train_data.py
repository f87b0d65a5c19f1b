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


def epoch(replies: Replies, per_batch: int, size: int, rng: np.random.Generator) -> list[Batch]:
    """Return batches of all usable replies in random order, sequences of similar lengths together.

    Sequences are padded to a half, three quarters or all of ``size``, and a batch has ``per_batch * size`` places
    whatever its width: few array shapes, of one cost.
    """
    usable = np.flatnonzero((replies.lengths - replies.prompt_lengths >= 2) & (replies.prompt_lengths < size - 2))
    widths, found = (size // 2, size * 3 // 4, size), list[Batch]()
    fits = np.searchsorted(widths, np.minimum(replies.lengths[usable], size))
    for k, width in enumerate(widths):
        order, count = rng.permutation(usable[fits == k]), per_batch * size // width
        found += [
            make_batch(replies, order[i : i + count], width) for i in range(0, len(order) - count + 1, count)
        ]
    if not found:
        raise ValueError(f"{len(usable)} usable replies are too few for a batch of {per_batch}.")
    return [found[k] for k in rng.permutation(len(found))]


def batches(replies: Replies, per_batch: int, size: int, rng: np.random.Generator) -> Iterator[Batch]:
    """Yield batches for ever, epoch after epoch."""
    while True:
        yield from epoch(replies, per_batch, size, rng)
