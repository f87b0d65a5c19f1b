"""From logits to the distribution that tokens are drawn from, row by row, in mlx-lm's order.

Logit bias and penalties first, each row with the history it would have in plain decoding; then top-p, min-p, XTC
and top-k on the untempered distribution; then the temperature.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from mlx_spec.decoding import noise
from mlx_spec.decoding.settings import fill_defaults, number, put, whole
from mlx_spec.drafters.tree import Tree
from mlx_spec.errors import RequestError

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""A pure function: (tokens so far [n] int32, scores [1, V] float32) to scores [1, V], as in mlx-lm.

It is called for drafted rows too, in any order, and again for rows that were rejected, so it may depend on its
arguments alone: one that counts its calls gives another text with drafts than without.
"""

# Smaller temperatures would overflow float32 where scores are divided by them.
LEAST_TEMP = 1e-30
NUMBERS = ("temp", "top_p", "min_p", "xtc_probability", "xtc_threshold") + (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
WHOLE_NUMBERS = ("min_tokens_to_keep", "top_k", "seed") + (
    "repetition_context_size",
    "presence_context_size",
    "frequency_context_size",
)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The names are mlx-lm's.

    temp: temperature; 0 takes the most likely token.
    top_p: nucleus sampling: the smallest set of tokens with this total probability; 0 or 1 for all.
    min_p: drop tokens less likely than this times the most likely one; 0 for none.
    min_tokens_to_keep: but keep so many of the most likely ones.
    xtc_probability: of excluding top choices (XTC) where a token is drawn: of all tokens above ``xtc_threshold``
        only the least likely is kept; 0 for never.
    xtc_threshold: probability, up to 0.5, above which a token is such a top choice.
    xtc_special_tokens: ids that XTC never excludes, such as those of a newline and the end tokens.
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
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: tuple[int, ...] = ()
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
        fill_defaults(self)
        for name in NUMBERS:
            if (value := getattr(self, name)) is not None:
                put(self, name, number(name, value))
        for name in WHOLE_NUMBERS:
            put(self, name, whole(name, getattr(self, name)))
        self._check_ranges()
        put(self, "logit_bias", None if self.logit_bias is None else read_bias(self.logit_bias))
        put(self, "xtc_special_tokens", read_ids("xtc_special_tokens", self.xtc_special_tokens))
        put(self, "logits_processors", read_processors(self.logits_processors))
        if self.accept not in ("coupled", "rejection"):
            raise RequestError(f"accept must be 'coupled' or 'rejection', not {self.accept!r}.")

    def _check_ranges(self) -> None:
        for name, low, high in (
            ("temp", 0.0, math.inf),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("xtc_probability", 0.0, 1.0),
            ("xtc_threshold", 0.0, 0.5),
            ("top_k", 0, math.inf),
            ("repetition_penalty", 0.0, math.inf),
        ):
            value = getattr(self, name)
            if value is not None and not (low <= value <= high and value < math.inf):
                raise RequestError(f"{name} must lie between {low} and {high}, not {value}.")
        if 0 < self.temp < LEAST_TEMP:
            raise RequestError(f"temp must be 0, for greedy decoding, or at least {LEAST_TEMP}, not {self.temp}.")
        sizes = ("repetition_context_size", "presence_context_size", "frequency_context_size")
        for name in ("min_tokens_to_keep", *sizes):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name) or 0):
                raise RequestError(f"{name} must be a finite number, not {getattr(self, name)}.")

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
        """Raise RequestError when a setting names a token outside the vocabulary."""
        for name in ("logit_bias", "xtc_special_tokens"):
            wrong = [t for t in getattr(self, name) or () if not 0 <= t < vocab_size]
            if wrong:
                raise RequestError(f"{name} names tokens {wrong[:4]}; the vocabulary has {vocab_size}.")

    @property
    def filters(self) -> Hashable:
        """What ``filtered`` depends on: rows of requests that have this in common can be filtered in one call."""
        xtc = (self.xtc_probability, self.xtc_threshold, tuple(self.xtc_special_tokens), self.seed)
        cut = (self.temp, self.top_p, self.min_p, self.min_tokens_to_keep, self.top_k)
        return cut, xtc if self.xtc_probability else None

    @property
    def is_filtered(self) -> bool:
        """Whether any token may be left out of the draw."""
        return 0 < self.top_p < 1 or self.min_p > 0 or self.top_k > 0 or self.xtc_probability > 0

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

    def filtered(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """Turn processed logits [R, V] into scores whose softmax is the distribution to draw from.

        positions: of the token that is drawn from each row; XTC is drawn by them.
        Returns [R, V]: the logits when greedy, else float32 filtered log-probabilities over the temperature.
        """
        if self.temp == 0:
            return logits
        logits = logits.astype(mx.float32)
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if 0 < self.top_p < 1:
            scores = apply_top_p(scores, self.top_p)
        if self.min_p > 0:
            keep = min(int(self.min_tokens_to_keep), scores.shape[-1])
            scores = apply_min_p(scores, self.min_p, keep)
        if self.xtc_probability > 0:
            scores = self._without_top_choices(scores, positions)
        if 0 < self.top_k < scores.shape[-1]:
            scores = apply_top_k(scores, self.top_k)
        return scores * (1.0 / self.temp)

    def _without_top_choices(self, scores: mx.array, positions: Sequence[int]) -> mx.array:
        """Apply XTC to rows [R, V] as mlx-lm's ``apply_xtc`` does, but with the noise of each row's position.

        Plain decoding and any draft then have the same draw for a position.
        """
        probabilities = mx.softmax(scores, axis=-1)
        is_top = probabilities > self.xtc_threshold
        least_likely_top = mx.min(mx.where(is_top, probabilities, mx.inf), axis=-1, keepdims=True)
        excluded = probabilities > least_likely_top
        if self.xtc_special_tokens:
            excluded[:, mx.array(list(self.xtc_special_tokens))] = False
        drawn = [mx.random.uniform(key=noise.key(self.seed, position, noise.XTC)) for position in positions]
        applies = mx.stack(drawn)[:, None] <= self.xtc_probability
        return mx.where(mx.logical_and(applies, excluded), -mx.inf, scores)

    def _process(self, tokens: mx.array, logits: mx.array) -> mx.array:
        for processor in self.processors:
            logits = processor(tokens, logits)
        return logits


def read_bias(given: Any) -> dict[int, float]:
    """Return biases by token id. Raises RequestError for what is none, and for a bias without a meaning."""
    try:
        pairs = given.items()
        bias_of = {whole_id(token): float(bias) for token, bias in pairs}
    except (AttributeError, TypeError, ValueError, RequestError):
        raise RequestError(f"logit_bias maps token ids to numbers, it is not {given!r}.") from None
    for token, bias in bias_of.items():
        if token < 0:
            raise RequestError(f"logit_bias names token {token}; token ids begin at 0.")
        if not bias < math.inf:
            raise RequestError(
                f"logit_bias of token {token} must be a finite number, or minus infinity to forbid it, not {bias}."
            )
    return bias_of


def whole_id(token: Any) -> int:
    """Return a token id, which JSON gives as text."""
    return int(token) if isinstance(token, str) else whole("a token id", token)


def read_ids(name: str, given: Any) -> tuple[int, ...]:
    """Return token ids. Raises RequestError for what is none."""
    try:
        return tuple(whole(name, token) for token in given)
    except (TypeError, RequestError):
        raise RequestError(f"{name} takes token ids, not {given!r}.") from None


def read_processors(given: Any) -> tuple[LogitsProcessor, ...]:
    """Return logits processors. Raises RequestError for what is none."""
    if not isinstance(given, list | tuple) or not all(callable(each) for each in given):
        raise RequestError(f"logits_processors takes a list of functions, not {given!r}.")
    return tuple(given)
