"""Batches of replies for drafter training, from files of ``tools.write_replies``."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_spec.errors import RequestError


@dataclass(frozen=True)
class Replies:
    """Prompts with their replies.

    tokens: of all sequences, one after another.
    offsets: [n + 1]; sequence i is ``tokens[offsets[i]:offsets[i + 1]]``.
    prompt_lengths: [n], tokens of the prompts.
    greedy: bool [n], whether the reply is greedy, and not sampled.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray
    greedy: np.ndarray

    @staticmethod
    def read(*paths: str | Path) -> "Replies":
        """Read one or several .npz files of ``tools.write_replies``."""
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
        """Return all reply tokens, one reply after another."""
        parts = [self.tokens[self.offsets[i] + p : self.offsets[i + 1]] for i, p in enumerate(self.prompt_lengths)]
        return np.concatenate(parts)


@dataclass(frozen=True)
class Batch:
    """Padded sequences.

    tokens: int32 [N, S].
    lengths: int32 [N], of the sequences.
    firsts: int32 [N], position of each reply's first token.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    firsts: np.ndarray

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """All three as arrays of MLX."""
        return mx.array(self.tokens), mx.array(self.lengths), mx.array(self.firsts)


def frequent_tokens(replies: Replies, count: int, vocab_size: int, always: list[int]) -> list[int]:
    """Return ``count`` ids, ascending: ``always``, then what the replies use most, then ids from 0 on."""
    uses = np.bincount(replies.reply_tokens(), minlength=vocab_size)
    uses[always] = uses.max() + 1
    ranked = np.argsort(-uses, kind="stable")
    return sorted(int(i) for i in ranked[:count])


def make_batch(replies: Replies, index: np.ndarray, size: int) -> Batch:
    """Return the sequences ``index``, padded or cut to ``size`` tokens."""
    tokens = np.zeros((len(index), size), dtype=np.int32)
    lengths = np.minimum(replies.lengths[index], size).astype(np.int32)
    for row, i in enumerate(index):
        start = replies.offsets[i]
        tokens[row, : lengths[row]] = replies.tokens[start : start + lengths[row]]
    return Batch(tokens, lengths, replies.prompt_lengths[index].astype(np.int32))


def numbers_by_width(replies: Replies, size: int) -> list[tuple[int, np.ndarray]]:
    """Return the widths that sequences are padded to, each with the numbers of its usable replies.

    Usable are replies of two tokens or more whose prompt is shorter than ``size`` - 2.
    """
    usable = np.flatnonzero((replies.lengths - replies.prompt_lengths >= 2) & (replies.prompt_lengths < size - 2))
    widths = size // 2, size * 3 // 4, size
    fits = np.searchsorted(widths, np.minimum(replies.lengths[usable], size))
    return [(width, usable[fits == k]) for k, width in enumerate(widths)]


def check_enough(replies: Replies, per_batch: int, size: int) -> None:
    """Raise RequestError where the replies fill no batch, see ``epoch``."""
    groups = numbers_by_width(replies, size)
    if not any(len(numbers) >= per_batch * size // width for width, numbers in groups):
        usable = sum(len(numbers) for _, numbers in groups)
        raise RequestError(
            f"{usable} usable replies are too few for a batch of {per_batch}: give more replies or a smaller "
            f"--batch-size. Usable are replies of two tokens or more to prompts of fewer than {size - 2} tokens; "
            "a batch takes replies of similar lengths."
        )


def epoch(replies: Replies, per_batch: int, size: int, rng: np.random.Generator) -> list[Batch]:
    """Return batches of all usable replies in random order, with sequences of similar lengths together.

    Sequences are padded to a half, three quarters or all of ``size``, and a batch has about ``per_batch * size``
    positions at any width, so that there are few shapes of one cost. Raises RequestError, see ``check_enough``.
    """
    check_enough(replies, per_batch, size)
    found = list[Batch]()
    for width, numbers in numbers_by_width(replies, size):
        order, count = rng.permutation(numbers), per_batch * size // width
        found += [
            make_batch(replies, order[i : i + count], width) for i in range(0, len(order) - count + 1, count)
        ]
    return [found[k] for k in rng.permutation(len(found))]


def batches(replies: Replies, per_batch: int, size: int, rng: np.random.Generator) -> Iterator[Batch]:
    """Yield batches for ever, epoch after epoch; see ``epoch``."""
    while True:
        yield from epoch(replies, per_batch, size, rng)
