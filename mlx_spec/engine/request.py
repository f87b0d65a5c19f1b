"""What is asked of the engine, as plain data, and whether it can be had."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from metal_kernels import MAX_VERIFY_ROWS
from mlx_spec.decoding.grammar import Place
from mlx_spec.decoding.logprobs import MAX_TOP_LOGPROBS
from mlx_spec.decoding.sampling import Sampling, read_ids
from mlx_spec.decoding.settings import fill_defaults, put, whole
from mlx_spec.errors import ContextFull, RequestError
from mlx_spec.target import CachedSequence, Target
from mlx_spec.target.pages import PAGE_SLOTS


@dataclass(frozen=True)
class Request:
    """What to generate.

    prompt: token ids, at least one.
    max_tokens: of the whole text, -1 for no limit but the context.
    num_draft_tokens: tokens to draft a round; "auto" or None lets measured costs decide, "adaptive" the rounds
        before, 0 is plain decoding.
    sampling: how tokens are chosen.
    eos_token_ids: end the text, as its last token.
    prefill_step_size: prompt tokens of a pass.
    logprobs: rounds bring the log-probability of each token.
    top_logprobs: and of so many of the most likely tokens, up to 16.
    max_draft_tokens: the most that "auto" and "adaptive" draft a round; None for the drafter's most.
    num_sibling_drafts: verify so many runners-up beside a number of drafts; None lets measured costs decide.
    grammar: what the text must match, as ``Grammar.start`` gives it; None for any text.
    is_end: called with each new token in order; true ends the text with that token (for stop strings).
    on_progress: called with the prompt tokens that are prefilled, and how many there are.
    on_verified: called with (sequence, row tokens [R], logits [R, V]) before each commit, for diagnosis; of a tree
        with the accepted rows.
    """

    prompt: Sequence[int]
    max_tokens: int = 256
    num_draft_tokens: int | Literal["auto", "adaptive"] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    eos_token_ids: frozenset[int] = frozenset()
    prefill_step_size: int = 512
    logprobs: bool = False
    top_logprobs: int = 0
    max_draft_tokens: int | None = None
    num_sibling_drafts: int | None = None
    grammar: Place | None = None
    is_end: Callable[[int], bool] = lambda token: False
    on_progress: Callable[[int, int], None] = lambda done, total: None
    on_verified: Callable[[CachedSequence, mx.array, mx.array], None] | None = None

    def __post_init__(self) -> None:
        fill_defaults(self)
        put(self, "prompt", token_ids(self.prompt))
        for name in ("max_tokens", "prefill_step_size", "top_logprobs"):
            put(self, name, whole(name, getattr(self, name)))
        if isinstance(self.num_draft_tokens, str) and self.num_draft_tokens == "auto":
            put(self, "num_draft_tokens", None)
        for name in ("num_draft_tokens", "max_draft_tokens", "num_sibling_drafts"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                put(self, name, whole(name, value))
        if not isinstance(self.sampling, Sampling):
            raise RequestError(f"sampling takes a mlx_spec.Sampling, not {self.sampling!r}.")
        if self.grammar is not None and not isinstance(self.grammar, Place):
            found = shorten(repr(self.grammar), 80)
            raise RequestError(f"grammar takes what Grammar.start returns, not {found}.")
        put(self, "eos_token_ids", frozenset(read_ids("eos_token_ids", self.eos_token_ids)))
        for name in ("is_end", "on_progress", "on_verified"):
            if (value := getattr(self, name)) is not None and not callable(value):
                raise RequestError(f"{name} takes a function, not {value!r}.")

    @property
    def may_draft(self) -> bool:
        """Whether drafting is allowed at all; plain decoding does nothing for a drafter."""
        return self.num_draft_tokens != 0

    @property
    def work(self) -> str:
        """What a round does for it besides its passes, in words: rounds of equal work cost about the same."""
        sampling = self.sampling
        parts = {
            "greedy" if sampling.temp == 0 else sampling.accept: True,
            "filters": sampling.temp > 0 and sampling.is_filtered,
            "processors": bool(sampling.processors),
            "grammar": self.grammar is not None,
            "log-probabilities": self.logprobs or self.top_logprobs > 0,
            "watched": self.on_verified is not None,
            "without a drafter": not self.may_draft,
        }
        return ", ".join(name for name, is_done in parts.items() if is_done)

    def check(self, target: Target, max_draft: int) -> None:
        """Raise RequestError or ContextFull for what cannot be done.

        target: that would do it.
        max_draft: the most tokens of its drafter's drafts, 0 without a drafter.
        """
        self._check_prompt(target)
        self.check_limits()
        most = min(MAX_TOP_LOGPROBS, target.vocab_size)
        if not 0 <= self.top_logprobs <= most:
            raise RequestError(f"top_logprobs must lie between 0 and {most}, not {self.top_logprobs}.")
        self.sampling.check_vocabulary(target.vocab_size)
        self._check_depth(max_draft)
        self._check_siblings(target)
        self._check_grammar(target)

    def check_limits(self) -> None:
        """Raise RequestError for limits that no target could serve."""
        count, most = self.num_draft_tokens, self.max_draft_tokens
        if most is not None and isinstance(count, int):
            raise RequestError(
                f"max_draft_tokens is {most}, but num_draft_tokens is {count} already: give one of them."
            )
        if most is not None and most < 1:
            raise RequestError(
                f"max_draft_tokens must be at least 1, not {most}; num_draft_tokens=0 is plain decoding."
            )
        if self.max_tokens == 0 or self.max_tokens < -1:
            raise RequestError(f"max_tokens must be positive, or -1 for no limit, not {self.max_tokens}.")
        if self.prefill_step_size < 1:
            raise RequestError(f"prefill_step_size must be at least 1, not {self.prefill_step_size}.")

    def _check_prompt(self, target: Target) -> None:
        if not len(self.prompt):
            raise RequestError("The prompt is empty: at least one token is needed.")
        wrong = [t for t in self.prompt if not 0 <= t < target.vocab_size]
        if wrong:
            raise RequestError(f"The prompt holds tokens {wrong[:4]}; the vocabulary has {target.vocab_size}.")
        if len(self.prompt) > target.context:
            raise ContextFull(
                f"The prompt has {len(self.prompt)} tokens, {target.name} has {target.context} positions. "
                "Shorten the prompt."
            )
        if len(self.prompt) > target.pool.max_pages * PAGE_SLOTS:
            raise ContextFull(
                f"The prompt has {len(self.prompt)} tokens; all {target.pool.max_pages} KV pages hold "
                f"{target.pool.max_pages * PAGE_SLOTS}: load the model with a larger max_cached_tokens."
            )

    def _check_depth(self, max_draft: int) -> None:
        count = self.num_draft_tokens
        if count is None or count == "adaptive":
            return
        if isinstance(count, str):
            raise RequestError(f"num_draft_tokens is {count!r}; it takes a number, 'auto', 'adaptive', or None.")
        if not 0 <= count <= max_draft:
            what = f"this drafter drafts at most {max_draft} tokens" if max_draft else "there is no drafter"
            raise RequestError(f"num_draft_tokens is {count}, but {what}.")

    def _check_grammar(self, target: Target) -> None:
        if self.grammar is None:
            return
        if self.grammar.vocab_size != target.vocab_size:
            raise RequestError(
                f"The grammar was started for {self.grammar.vocab_size} tokens, but the vocabulary has "
                f"{target.vocab_size}: give that number to Grammar.start."
            )
        if missing := sorted(self.grammar.end_tokens - self.eos_token_ids):
            raise RequestError(
                f"Texts of the grammar end with tokens {missing}, but eos_token_ids is "
                f"{sorted(self.eos_token_ids)}: add them."
            )

    def _check_siblings(self, target: Target) -> None:
        siblings, count = self.num_sibling_drafts, self.num_draft_tokens
        if not siblings or count == 0:
            return
        if not isinstance(count, int):
            raise RequestError(
                f"num_sibling_drafts is {siblings}; it needs a number of num_draft_tokens too, not {count!r}."
            )
        if not 0 < siblings < MAX_VERIFY_ROWS - count:
            raise RequestError(
                f"num_sibling_drafts is {siblings}, but beside an anchor and {count} drafts a pass has "
                f"{max(0, MAX_VERIFY_ROWS - 1 - count)} rows."
            )
        if not target.takes_trees:
            raise RequestError(
                f"num_sibling_drafts is {siblings}, but {target.name} has recurrent layers, which step through "
                "rows in one order: leave num_sibling_drafts out."
            )


def token_ids(prompt: Any) -> list[int]:
    """Return the token ids of a prompt: a list, an array, or one of these in a list. Raises RequestError."""
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict) and "role" in prompt[0]:
        raise RequestError(
            "A prompt is text or token ids, not a list of messages: give what "
            "tokenizer.apply_chat_template(messages, add_generation_prompt=True) returns."
        )
    if hasattr(prompt, "keys") and "input_ids" in prompt:
        raise RequestError(
            'A prompt is text or token ids, not all that a tokenizer returns: give its "input_ids".'
        )
    try:
        ids = np.array(prompt)
        shape = ids.shape[1:] if ids.ndim == 2 and len(ids) == 1 else ids.shape
        if len(shape) == 1 and (ids.dtype.kind in "iu" or not ids.size):
            return [int(token) for token in ids.reshape(-1).tolist()]
    except (TypeError, ValueError, OverflowError):
        shape = None
    if shape is not None and len(shape) == 2 and ids.dtype.kind in "iu":
        raise RequestError(f"A prompt is one list of token ids, not {len(ids)}: generate from one at a time.")
    raise RequestError(f"A prompt is text or a list of token ids, not {shorten(repr(prompt), 80)}.")
