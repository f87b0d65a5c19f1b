"""How far the drafts of a chain stand in decoding, worked out from one pass over held-out replies."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from tools.train_data import Replies, make_batch
from tools.train_drafter import decoding_rounds


def standing_drafts(
    stand: Callable[[mx.array, mx.array], mx.array], heldout: Replies, max_length: int, limit: int = 512
) -> list[np.ndarray]:
    """Return how many drafts stand behind each anchor that held-out greedy replies could have.

    stand: from tokens [N, S] and lengths [N] to the drafts of each chain that stand, see ``chain_loss.standing``.
    """
    chosen, stands = np.flatnonzero(heldout.greedy & (heldout.prompt_lengths >= 2))[:limit], list[np.ndarray]()
    for i in range(0, len(chosen), 16):
        batch = make_batch(heldout, chosen[i : i + 16], max_length)
        rows = np.array(stand(mx.array(batch.tokens), mx.array(batch.lengths)))
        # Decoding begins with the prompt's last token as anchor; chain i is that of the anchor at i + 1.
        for row, first, length in zip(rows, batch.firsts, batch.lengths, strict=True):
            stands.append(row[first - 2 : length - 2])
    return stands


def accepted_length(stands: list[np.ndarray], depth: int) -> float:
    """Return the tokens a round, the bonus token included, of decoding with so many drafts."""
    lengths = []
    for row in stands:
        cut = np.minimum(row, depth)
        lengths += [1 + int(cut[at]) for at in decoding_rounds(cut)]
    return round(float(np.mean(lengths)), 3) if lengths else 0.0


def told(result: dict[str, Any]) -> Iterator[str]:
    """Say how far the drafts of a trained head stand."""
    for depth, length in result["accepted_length"].items():
        yield f"{depth} drafts a round: accepted length {length}"
