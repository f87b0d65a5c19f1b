"""From logits to the distribution that tokens are drawn from, row by row, in mlx-lm's order.

Logit bias and penalties first, each row with the history it would have in plain decoding; then top-p, min-p and
top-k on the untempered distribution; then the temperature.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from mlx_spec.drafters.tree import Tree
from mlx_spec.errors import RequestError

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""A pure function: (tokens so far [n] int32, scores [1, V] float32) to scores [1, V], as in mlx-lm.

It is called for drafted rows too, in any order, and again for rows that were rejected, so it may depend on its
arguments alone: one that counts its calls gives another text with drafts than without.
"""

# Smaller temperatures would overflow float32 where scores are divided by them.
LEAST_TEMP = 1e-30


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The names are mlx-lm's.

    temp: temperature; 0 takes the most likely token.
    top_p: nucleus sampling: the smallest set of tokens with this total probability; 0 or 1 for all.
    min_p: drop tokens less likely than this times the most likely one; 0 for none.
    top_k: keep so many of the most likely tokens; 0 for all.
    seed: same seed, same text, drafted or not.
    accept: "coupled" gives the text that plain decoding with this seed gives; "rejection" accepts more often and
        gives other draws from the same distribution. Greedy requests need neither.
    logit_bias: what to add to the logits of some tokens; minus infinity forbids one.
    repetition_penalty: divides the logits of the last ``repetition_context_size`` tokens, or multiplies negative
        ones.
    presence_penalty, frequency_penalty: subtracted from the logits of the tokens in their context, once, or for
        each time that they occur.
    logits_processors: pure functions, see LogitsProcessor; they come after bias and penalties.
    Raises RequestError for a value that has no meaning.
    """

    temp: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0
    accept: str = "coupled"
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    logits_processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temp", 0.0, math.inf),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("top_k", 0, math.inf),
            ("repetition_penalty", 0.0, math.inf),
        ):
            value = getattr(self, name)
            if value is not None and not (low <= value <= high and value < math.inf):
                raise RequestError(f"{name} must lie between {low} and {high}, not {value}.")
        if 0 < self.temp < LEAST_TEMP:
            raise RequestError(f"temp must be 0, for greedy decoding, or at least {LEAST_TEMP}, not {self.temp}.")
        if self.top_k != int(self.top_k):
            raise RequestError(f"top_k must be a whole number, not {self.top_k}.")
        for name in ("repetition_context_size", "presence_context_size", "frequency_context_size"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if not all(math.isfinite(penalty or 0) for penalty in (self.presence_penalty, self.frequency_penalty)):
            raise RequestError("presence_penalty and frequency_penalty must be finite numbers.")
        for token, bias in (self.logit_bias or {}).items():
            if not bias < math.inf:
                raise RequestError(
                    f"logit_bias of token {token} must be a finite number, or minus infinity to forbid it, "
                    f"not {bias}."
                )
        if self.accept not in ("coupled", "rejection"):
            raise RequestError(f"accept must be 'coupled' or 'rejection', not {self.accept!r}.")

    @cached_property
    def processors(self) -> list[LogitsProcessor]:
        """Bias and penalties, then the caller's own processors."""
        bias = None if self.logit_bias is None else dict(self.logit_bias)
        return [
            *make_logits_processors(
                bias,
                self.repetition_penalty,
                self.repetition_context_size,
                self.presence_penalty,
                self.presence_context_size,
                self.frequency_penalty,
                self.frequency_context_size,
            ),
            *self.logits_processors,
        ]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError when a biased token is outside the vocabulary."""
        wrong = [t for t in self.logit_bias or () if not 0 <= t < vocab_size]
        if wrong:
            raise RequestError(f"logit_bias names tokens {wrong[:4]}; the vocabulary has {vocab_size}.")

    def processed(
        self, logits: mx.array, history: Sequence[int], drafts: mx.array, tree: Tree | None = None
    ) -> mx.array:
        """Apply bias, penalties and the caller's processors to the logits of a round's rows.

        logits: [R, V]; row j follows ``history`` (prompt included) and the first j of ``drafts`` [R - 1], or those
        on its path through a tree. Returns [R, V], in float32 where there is anything to apply: 16 bits would
        round what is added.
        """
        if not self.processors:
            return logits
        logits = logits.astype(mx.float32)
        known = mx.concatenate([mx.array(list(history), dtype=mx.int32), drafts])
        if tree is None or tree.is_chain:
            histories = [known[: len(history) + j] for j in range(logits.shape[0])]
        else:
            before = list(range(len(history)))
            indices = [[*before, *(len(history) + row - 1 for row in path[1:])] for path in tree.paths]
            histories = [known[mx.array(index)] for index in indices]
        return mx.concatenate([self._process(tokens, logits[j : j + 1]) for j, tokens in enumerate(histories)])

    def filtered(self, logits: mx.array) -> mx.array:
        """Turn processed logits [R, V] into scores whose softmax is the distribution to draw from.

        Returns [R, V]: the logits when greedy, else float32 filtered log-probabilities over the temperature.
        """
        if self.temp == 0:
            return logits
        logits = logits.astype(mx.float32)
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if 0 < self.top_p < 1:
            scores = apply_top_p(scores, self.top_p)
        if self.min_p > 0:
            scores = apply_min_p(scores, self.min_p)
        if 0 < self.top_k < scores.shape[-1]:
            scores = apply_top_k(scores, self.top_k)
        return scores * (1.0 / self.temp)

    def _process(self, tokens: mx.array, logits: mx.array) -> mx.array:
        for processor in self.processors:
            logits = processor(tokens, logits)
        return logits
