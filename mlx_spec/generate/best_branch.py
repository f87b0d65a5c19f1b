"""Begin an answer in several branches, then continue the best: they share the prompt's pages and every pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.generate import wired_limit

from mlx_spec.decoding.grammar import Grammar
from mlx_spec.decoding.settings import whole
from mlx_spec.engine import Engine, Generation, Request, Round
from mlx_spec.errors import RequestError
from mlx_spec.generate.options import begin, encode, make_sampling
from mlx_spec.generate.stream import end_where_full, raise_errors
from mlx_spec.generate.text_stream import TextStream, with_detokenizer


@dataclass
class Branch:
    """A branch as it was when one was chosen.

    text, tokens: so far, without the prompt.
    mean_logprob: the mean log-probability of its tokens.
    score: what it was chosen by, the highest first.
    """

    text: str
    tokens: list[int]
    mean_logprob: float
    score: float = 0.0


@dataclass(frozen=True)
class BestBranch:
    """The answer, and the branches that it was chosen from.

    text: the whole text of the chosen branch.
    best: its number.
    branches: all of them, as they were when it was chosen.
    """

    text: str
    best: int
    branches: list[Branch]


Score = Callable[[Branch], float]


@dataclass
class RunningBranch:
    """A branch in progress.

    stream: its text so far.
    until: text that ends it, where there is one.
    logprobs: of its tokens.
    is_complete: whether ``until`` was what ended it.
    """

    stream: TextStream
    until: str | None
    logprobs: list[float] = field(default_factory=list)
    is_complete: bool = False

    def is_end(self, token: int) -> bool:
        """Add a token; true when the branch ends with it."""
        ended = self.stream.add(token)
        self.is_complete = self.until is not None and self.until in "".join(self.stream.segments)
        return ended or self.is_complete


def best_branch(
    engine: Engine,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    *,
    branches: int = 4,
    branch_tokens: int = 128,
    until: str | None = None,
    score: Score | None = None,
    max_tokens: int = 256,
    num_draft_tokens: int | Literal["auto", "adaptive"] | None = None,
    max_draft_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    grammar: Grammar | None = None,
    **sampling: Any,
) -> BestBranch:
    """Generate the beginning of an answer in several branches, and the rest of it in the best.

    engine, tokenizer: from ``load``.
    prompt: text, used as it is (apply the chat template yourself), or token ids.
    branches: how many; branch i draws with seed + i, so with temp 0 all are alike.
    branch_tokens: most tokens of each before one is chosen.
    until: text that ends a branch earlier, such as "</think>"; it is part of the answer.
    score: a function of a branch, of which the highest is continued; by default its mean log-probability.
    max_tokens: length of the whole answer.
    num_draft_tokens, max_draft_tokens: tokens to draft a round, see stream_generate.
    stop: text that ends the answer and is not returned.
    grammar: what each branch must match, and so the answer.
    sampling: see stream_generate.
    The answer is the one that its branch's seed gives alone. Raises RequestError, and what ``score`` raises.
    """
    tokenizer = with_detokenizer(tokenizer)
    branches, branch_tokens = whole("branches", branches), whole("branch_tokens", branch_tokens)
    max_tokens = whole("max_tokens", max_tokens)
    if branches < 1 or not 1 <= branch_tokens <= max_tokens:
        raise RequestError(
            f"best_branch takes at least 1 branch of 1 to max_tokens ({max_tokens}) tokens, "
            f"not {branches} of {branch_tokens}."
        )
    running = [RunningBranch(TextStream(tokenizer, stop), until) for _ in range(branches)]
    request = Request(
        prompt=encode(tokenizer, prompt),
        max_tokens=branch_tokens,
        num_draft_tokens=num_draft_tokens,
        max_draft_tokens=max_draft_tokens,
        sampling=make_sampling(sampling),
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        logprobs=True,
        grammar=begin(grammar, tokenizer, engine.target.vocab_size),
        is_end=running[0].is_end,
    )
    with wired_limit(engine.target.model):
        generations = [engine.start(request)]
        try:
            for index, branch in enumerate(running[1:], 1):
                seed = request.sampling.seed + index
                generations.append(engine.fork(generations[0], seed=seed, is_end=branch.is_end))
            _run_to_choice(engine, generations, running)
            candidates = [_candidate(*pair, request) for pair in zip(generations, running, strict=True)]
            for candidate in candidates:
                candidate.score = candidate.mean_logprob if score is None else score(candidate)
            best = max(range(branches), key=lambda index: candidates[index].score)
            text = _continued(engine, generations, best, running[best], max_tokens)
        finally:
            for generation in generations:
                engine.close(generation)
    return BestBranch(text, best, candidates)


def _run_to_choice(engine: Engine, generations: list[Generation], branches: list[RunningBranch]) -> None:
    """Run all branches together until each has its ``branch_tokens`` or has come to its end."""
    branch_of = dict(zip(generations, branches, strict=True))
    while running := [generation for generation in generations if generation.finish_reason is None]:
        for generation, done in zip(running, stepped(engine, running), strict=True):
            branch_of[generation].logprobs += [token.logprob for token in done.logprobs]


def stepped(engine: Engine, running: list[Generation]) -> list[Round]:
    """Run a round of branches. Raises what goes wrong with one of them; a full cache ends it."""
    rounds = engine.step(running)
    end_where_full(running)
    raise_errors(rounds, running)
    return rounds


def _candidate(generation: Generation, branch: RunningBranch, request: Request) -> Branch:
    """Return what there is to choose a branch by."""
    tokens = generation.tokens[len(request.prompt) :]
    return Branch("".join(branch.stream.segments), tokens, sum(branch.logprobs) / len(branch.logprobs))


def _continued(
    engine: Engine, generations: list[Generation], best: int, branch: RunningBranch, max_tokens: int
) -> str:
    """Close all branches but the best, and let that go on to its own end, where it has not come to it."""
    generation = generations[best]
    if branch.is_complete or generation.finish_reason == "length":
        goes_on = engine.fork(generation, max_tokens=max_tokens, is_end=branch.stream.add, logprobs=False)
        for other in generations:
            engine.close(other)
        generations[:] = [goes_on]
        end_where_full(generations)
        while goes_on.finish_reason is None:
            stepped(engine, generations)
        generation = goes_on
    branch.stream.finish(stop_token=generation.tokens[-1] in generation.request.eos_token_ids)
    return "".join(branch.stream.segments)
