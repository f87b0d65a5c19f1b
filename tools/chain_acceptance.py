"""How many drafts of a chain are accepted in decoding, computed from one pass over held-out replies."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from tools.train_data import Replies, make_batch
from tools.train_drafter import decoding_rounds


def accepted_at_anchors(
    accepted: Callable[[mx.array, mx.array], mx.array], heldout: Replies, max_length: int, limit: int = 512
) -> list[np.ndarray]:
    """Return, for each held-out greedy reply, how many drafts are accepted after each possible anchor.

    accepted: from tokens [N, S] and lengths [N] to accepted drafts [N, S - 1], see ``chain_loss.accepted_drafts``.
    heldout: the replies; sampled ones are skipped.
    max_length: tokens of a sequence that are read.
    limit: replies that are read.
    """
    chosen, found = np.flatnonzero(heldout.greedy & (heldout.prompt_lengths >= 2))[:limit], list[np.ndarray]()
    for i in range(0, len(chosen), 16):
        batch = make_batch(heldout, chosen[i : i + 16], max_length)
        rows = np.array(accepted(mx.array(batch.tokens), mx.array(batch.lengths)))
        # Decoding begins with the prompt's last token as anchor; chain i is that of the anchor at i + 1.
        for row, first, length in zip(rows, batch.firsts, batch.lengths, strict=True):
            found.append(row[first - 2 : length - 2])
    return found


def accepted_length(accepted: list[np.ndarray], depth: int) -> float:
    """Return the tokens a round, the bonus token included, of decoding with chains of ``depth`` drafts.

    accepted: see ``accepted_at_anchors``.
    """
    lengths = []
    for row in accepted:
        counts = np.minimum(row, depth)
        lengths += [1 + int(counts[index]) for index in decoding_rounds(counts)]
    return round(float(np.mean(lengths)), 3) if lengths else 0.0


def summary(result: dict[str, Any]) -> Iterator[str]:
    """Yield lines with the accepted lengths of a trained head."""
    for depth, length in result["accepted_length"].items():
        yield f"{depth} drafts a round: accepted length {length}"
