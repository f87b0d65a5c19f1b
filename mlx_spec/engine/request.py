"""What is asked of the engine, what it is doing about it, and what a round brought: plain data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx

from mlx_spec.decoding.accept import AcceptRule
from mlx_spec.decoding.logprobs import TokenLogprobs
from mlx_spec.engine.draft_policy import DepthPolicy
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.engine.statistics import Statistics
from mlx_spec.target import Sequence as CachedSequence


@dataclass(frozen=True)
class Request:
    """What to generate, as plain data.

    prompt: token ids, at least one. max_tokens: -1 for no limit but the context. num_draft_tokens: None lets
    measured costs decide, "adaptive" the rounds before, 0 is plain decoding. eos_token_ids end the text.
    is_end: called with each new token in order; true ends the text with that token (stop strings, say).
    logprobs: rounds bring the log-probability of each token; top_logprobs: and of so many of the likeliest, to 16.
    num_leaves: verify so many runners-up beside a number of drafts; None lets measured costs decide.
    on_verified: called with (sequence, row tokens [R], logits [R, V]) before each commit, for diagnosis; of a tree
    with the rows that stand.
    """

    prompt: Sequence[int]
    max_tokens: int = 256
    num_draft_tokens: int | Literal["adaptive"] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    eos_token_ids: frozenset[int] = frozenset()
    prefill_step_size: int = 512
    logprobs: bool = False
    top_logprobs: int = 0
    num_leaves: int | None = None
    is_end: Callable[[int], bool] = lambda token: False
    on_progress: Callable[[int, int], None] = lambda done, total: None
    on_verified: Callable[[CachedSequence, mx.array, mx.array], None] | None = None


@dataclass(eq=False)
class Generation:
    """A request in progress.

    drafting: what the drafter remembers of the sequence; None without a drafter, and while it remembers nothing.
    tokens: prompt and text so far; the last one is the anchor, which the target has not cached yet.
    finish_reason: None while running, then "stop" or "length". last_turn: the number of the last turn that it had,
    counted over all generations of the engine.
    """

    request: Request
    sequence: CachedSequence
    drafting: Any
    rule: AcceptRule
    policy: DepthPolicy
    tokens: list[int]
    statistics: Statistics = field(default_factory=Statistics)
    finish_reason: str | None = None
    last_turn: int = 0

    @property
    def room(self) -> int:
        """How many more tokens the request allows; the context is checked by the engine."""
        limit = self.request.max_tokens
        return (1 << 30) if limit < 0 else limit - (len(self.tokens) - len(self.request.prompt))

    @property
    def may_draft(self) -> bool:
        """Whether the request leaves room for drafts; plain decoding does nothing for a drafter."""
        return self.request.num_draft_tokens != 0

    @property
    def is_closed(self) -> bool:
        """Whether its pages were given back."""
        return self.sequence.length != len(self.tokens) - 1


@dataclass(frozen=True)
class Round:
    """What one round emitted for a generation: tokens, and how many of them were drafted.

    logprobs: of each token, where the request asks for them.
    error: why there are none, where this generation failed and others of the round did not; it is as before.
    """

    tokens: list[int]
    from_draft: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: Exception | None = None
