"""Log-probabilities of the tokens that a round's rows emit, from their full logits and in one fixed order of sums.

They are those of the distribution after bias and penalties and before temperature and filters, as in mlx-lm.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_kernels import logprob_rows, topk_rows

MAX_TOP_LOGPROBS = 16


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one token.

    logprob: its own.
    top: (token, log-probability) of the likeliest ones, the best first.
    all: [V] float32, of every token.
    """

    logprob: float
    top: list[tuple[int, float]]
    all: mx.array


@dataclass(frozen=True)
class RowLogprobs:
    """Of R rows, lazy.

    logits: [R, V].
    total: log-sum-exp [R].
    chosen: [R], of each row's token.
    top_ids, top_values: [R, K], of the likeliest tokens.
    """

    logits: mx.array
    total: mx.array
    chosen: mx.array
    top_ids: mx.array
    top_values: mx.array

    @staticmethod
    def of(logits: mx.array, tokens: mx.array, top: int) -> "RowLogprobs":
        """Take those of rows.

        logits: [R, V].
        tokens: [R] int32, what each row emits.
        top: so many of the likeliest tokens of each row, 0 to 16.
        """
        total, _ = logprob_rows(logits, tokens)
        # One subtraction for every use, so that a token has one log-probability.
        chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0].astype(mx.float32) - total
        values, ids, _ = topk_rows(logits, max(top, 1))
        return RowLogprobs(logits, total, chosen, ids[:, :top], values[:, :top].astype(mx.float32))

    @property
    def arrays(self) -> list[mx.array]:
        """All that ``read`` reads back, for ``mx.eval``."""
        return [self.total, self.chosen, self.top_ids, self.top_values]

    def read(self, rows: Sequence[int]) -> list[TokenLogprobs]:
        """Return those of some rows."""
        total, chosen, ids, values = (np.array(array) for array in self.arrays)
        found = []
        for row in rows:
            best = zip(ids[row].tolist(), (values[row] - total[row]).tolist(), strict=True)
            whole = self.logits[row].astype(mx.float32) - self.total[row]
            found.append(TokenLogprobs(float(chosen[row]), list(best), whole))
        return found
