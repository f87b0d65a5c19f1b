"""Think in several branches, then continue the best: branches of one prompt share its pages and every pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.generate import wired_limit

from mlx_spec.engine import Engine, Generation, Request
from mlx_spec.errors import RequestError
from mlx_spec.generate.stream import encode, make_sampling
from mlx_spec.generate.text_stream import TextStream


@dataclass
class Branch:
    """What a branch said before one was chosen.

    text, tokens: so far, without the prompt. mean_logprob: of the tokens. score: what it was judged by.
    """

    text: str
    tokens: list[int]
    mean_logprob: float
    score: float = 0.0


@dataclass(frozen=True)
class BestBranch:
    """text: all that the chosen branch said. best: its number. branches: all of them, as they were judged."""

    text: str
    best: int
    branches: list[Branch]


Score = Callable[[Branch], float]


@dataclass
class Thought:
    """A branch in progress. ``is_end`` ends it where ``until`` is complete; ``reached`` says that this was why."""

    stream: TextStream
    until: str | None
    logprobs: list[float] = field(default_factory=list)
    reached: bool = False

    def is_end(self, token: int) -> bool:
        """Add a token; true when the branch ends with it."""
        ended = self.stream.add(token)
        self.reached = self.until is not None and self.until in "".join(self.stream.segments)
        return ended or self.reached


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
    num_draft_tokens: int | Literal["adaptive"] | None = None,
    stop: str | Sequence[str] = (),
    **sampling: Any,
) -> BestBranch:
    """Say the beginning of an answer in several branches, and the rest of it in the best.

    branches: how many; branch i draws with seed + i. branch_tokens: most tokens of each before one is chosen.
    until: text that ends a branch earlier, such as "</think>"; it is part of the answer. score: judges a branch,
    the highest is continued; by default the mean log-probability of its tokens. max_tokens: of the whole answer.
    prompt, num_draft_tokens, stop and sampling: see stream_generate; with temp 0 all branches are alike.
    The answer is the one that its branch's seed gives alone. Raises RequestError, and what ``score`` raises.
    """
    if branches < 1 or not 1 <= branch_tokens <= max_tokens:
        raise RequestError(
            f"best_branch takes at least 1 branch of 1 to max_tokens ({max_tokens}) tokens, "
            f"not {branches} of {branch_tokens}."
        )
    stops = [stop] if isinstance(stop, str) else stop
    thoughts = [Thought(TextStream(tokenizer, stops), until) for _ in range(branches)]
    request = Request(
        prompt=encode(tokenizer, prompt),
        max_tokens=branch_tokens,
        num_draft_tokens=num_draft_tokens,
        sampling=make_sampling(sampling),
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        logprobs=True,
        is_end=thoughts[0].is_end,
    )
    with wired_limit(engine.target.model):
        generations = [engine.start(request)]
        try:
            for index, thought in enumerate(thoughts[1:], 1):
                seed = request.sampling.seed + index
                generations.append(engine.fork(generations[0], seed=seed, is_end=thought.is_end))
            _think(engine, generations, thoughts)
            said = [_said(pair, request) for pair in zip(generations, thoughts, strict=True)]
            for branch in said:
                branch.score = branch.mean_logprob if score is None else score(branch)
            best = max(range(branches), key=lambda index: said[index].score)
            text = _continued(engine, generations, best, thoughts[best], max_tokens)
        finally:
            for generation in generations:
                engine.close(generation)
    return BestBranch(text, best, said)


def _think(engine: Engine, generations: list[Generation], thoughts: list[Thought]) -> None:
    while any(generation.finish_reason is None for generation in generations):
        for done, thought in zip(engine.step(generations), thoughts, strict=True):
            if done.error is not None:
                raise done.error
            thought.logprobs += [token.logprob for token in done.logprobs]


def _said(pair: tuple[Generation, Thought], request: Request) -> Branch:
    generation, thought = pair
    tokens = generation.tokens[len(request.prompt) :]
    return Branch("".join(thought.stream.segments), tokens, sum(thought.logprobs) / len(thought.logprobs))


def _continued(engine: Engine, generations: list[Generation], best: int, thought: Thought, max_tokens: int) -> str:
    """Close all branches but the best, and let that go on to its own end, where it has not come to it."""
    generation = generations[best]
    if thought.reached or generation.finish_reason == "length":
        goes_on = engine.fork(generation, max_tokens=max_tokens, is_end=thought.stream.add, logprobs=False)
        for other in generations:
            engine.close(other)
        generations[:] = [goes_on]
        while goes_on.finish_reason is None:
            engine.step(goes_on)
        generation = goes_on
    thought.stream.finish(stop_token=generation.tokens[-1] in generation.request.eos_token_ids)
    return "".join(thought.stream.segments)
