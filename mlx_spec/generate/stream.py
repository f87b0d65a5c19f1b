"""Generating text: prompts in, text segments out. What ``mlx_lm.generate`` offers, with a drafter."""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import mlx.core as mx
from mlx_lm.generate import wired_limit

from mlx_spec.decoding.grammar import Grammar
from mlx_spec.decoding.settings import whole
from mlx_spec.engine import Engine, Generation, Request, Round
from mlx_spec.engine.statistics import Statistics
from mlx_spec.errors import ContextFull, RequestError
from mlx_spec.generate.options import begin, text_request
from mlx_spec.generate.text_stream import TextStream, with_detokenizer
from mlx_spec.target import CachedSequence, reserve_positions


@dataclass(frozen=True)
class GenerationResponse:
    """One generated token, or the end of a text.

    text: the text that became certain with it, possibly empty.
    token: its id; None where a text ends in a round that brought no token, because the cache is full: such a last
        response has the rest of the text and the reason.
    logprobs: log-probabilities of all tokens, [V] float32, where they are asked for.
    from_draft: whether it was drafted.
    prompt_tokens, prompt_tps: length of the prompt, and tokens a second of reading it.
    generation_tokens, generation_tps: tokens so far, and their rate.
    peak_memory: the most that MLX held so far, in GB.
    finish_reason: of the last response "stop" or "length", of all others None.
    statistics: of the generation so far, the same object in every response; ``statistics.exact`` says whether rows
        had the bits of rows computed alone.
    logprob: log-probability of the token, where it is asked for.
    top_logprobs: (token, log-probability) of the most likely tokens, where they are asked for.
    index: which of ``n`` texts it belongs to.
    """

    text: str
    token: int | None
    logprobs: mx.array | None
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None
    statistics: Statistics
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)
    index: int = 0


Responses = Generator[GenerationResponse, None, None]


def stream_generate(
    engine: Engine,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    *,
    max_tokens: int = 256,
    n: int = 1,
    num_draft_tokens: int | Literal["auto", "adaptive"] | None = None,
    max_draft_tokens: int | None = None,
    num_sibling_drafts: int | None = None,
    stop: str | Sequence[str] = (),
    grammar: Grammar | None = None,
    logprobs: bool = False,
    top_logprobs: int = 0,
    prefill_step_size: int = 512,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    on_verified: Callable[[CachedSequence, mx.array, mx.array], None] | None = None,
    **sampling: Any,
) -> Responses:
    """Generate from a prompt, token by token.

    engine, tokenizer: from ``load``.
    prompt: text, used as it is (apply the chat template yourself), or token ids.
    max_tokens: length of the text, -1 for no limit.
    n: texts to generate together; text i draws with seed + i, and is the one that this seed gives alone.
    num_draft_tokens: tokens to draft a round. "auto" or None lets measured costs decide; "adaptive" goes up after
        rounds whose drafts were all accepted, and down after rounds in which none was; 0 is plain decoding.
    max_draft_tokens: the most that "auto" and "adaptive" draft a round.
    num_sibling_drafts: second choices to verify beside a number of drafts. None lets measured costs decide.
    stop: text that ends the generation and is not returned.
    grammar: what the text must match, such as ``Grammar.json_schema({...})``.
    logprobs: bring the log-probability of each token, after penalties and before temperature.
    top_logprobs: and those of so many of the most likely tokens, up to 16.
    prefill_step_size: prompt tokens of a pass.
    prompt_progress_callback: called with the prompt tokens that were read, and how many there are.
    on_verified: see Request.
    sampling: temp, top_p, min_p, top_k, seed, accept, logit_bias, repetition_penalty and so on, see Sampling.
    None stands for the default of each option. A full cache ends a text with "length", as a full context does.
    Wrong options are refused at the call; the prompt is read with the first token. Closing the iterator stops
    cleanly and gives the memory back. Raises RequestError, NonFiniteError.
    """
    n, tokenizer = 1 if n is None else whole("n", n), with_detokenizer(tokenizer)
    if n < 1:
        raise RequestError(f"n must be at least 1, not {n}.")
    texts = [TextStream(tokenizer, stop) for _ in range(n)]
    request = text_request(
        tokenizer,
        prompt,
        texts[0],
        max_tokens=max_tokens,
        num_draft_tokens=num_draft_tokens,
        max_draft_tokens=max_draft_tokens,
        num_sibling_drafts=num_sibling_drafts,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        prefill_step_size=prefill_step_size,
        grammar=begin(grammar, tokenizer, engine.target.vocab_size),
        prompt_progress_callback=prompt_progress_callback,
        on_verified=on_verified,
        **sampling,
    )
    request.check(engine.target, engine.max_draft)
    return start_and_read(engine, request, texts)


def start_and_read(engine: Engine, request: Request, texts: Sequence[TextStream]) -> Responses:
    """Generate as many texts of a request as there are streams, and close each at its end."""
    with wired_limit(engine.target.model):
        generations = [engine.start(request)]
        try:
            for index, text in enumerate(texts[1:], 1):
                seed = request.sampling.seed + index
                generations.append(engine.fork(generations[0], seed=seed, is_end=text.add))
            yield from read(engine, generations, texts, at_end=engine.close)
        finally:
            for generation in generations:
                engine.close(generation)


def read(
    engine: Engine,
    generations: Sequence[Generation],
    texts: Sequence[TextStream],
    at_end: Callable[[Generation], None],
) -> Responses:
    """Step generations to their ends, and bring the text of each as it comes.

    at_end: called with each that has come to its end.
    Raises what goes wrong with one of them.
    """
    while running := in_turn(generations):
        rounds = engine.step(running)
        end_where_full(running)
        for done, generation in zip(rounds, running, strict=True):
            index = generations.index(generation)
            yield from responses(generation, done, texts[index], index)
            if generation.finish_reason is not None:
                at_end(generation)
        raise_errors(rounds, running)


def in_turn(generations: Sequence[Generation]) -> list[Generation]:
    """Return those that go on; the ones that have begun come first, where pages are few."""
    return sorted((g for g in generations if g.finish_reason is None), key=lambda g: not g.statistics.tokens)


def end_where_full(generations: Iterable[Generation]) -> None:
    """End by length the texts for which the cache has no position left, as at the end of the context.

    Of several, the first ones get the last pages. One that has not begun waits until another has ended.
    """
    begun = [g for g in generations if g.finish_reason is None and g.statistics.tokens]
    left = reserve_positions([generation.sequence for generation in begun], 1)
    for generation, positions in zip(begun, left, strict=True):
        if not positions:
            generation.finish_reason = "length"


def raise_errors(rounds: Sequence[Round], generations: Sequence[Generation]) -> None:
    """Raise what went wrong in a round of generations that ran; a page that is missing is waited for.

    Where none of them went on or ended, there is nothing to wait for.
    """
    waits = any(done.tokens for done in rounds) or any(each.finish_reason is not None for each in generations)
    for done, generation in zip(rounds, generations, strict=True):
        is_waiting = waits and isinstance(done.error, ContextFull)
        if done.error is not None and generation.finish_reason is None and not is_waiting:
            raise done.error


def responses(generation: Generation, done: Round, text: TextStream, index: int = 0) -> Responses:
    """Return what a round brought a generation, token by token; the last one of all has the ``finish_reason``.

    text: the stream that its request was made with.
    index: which of several texts it is.
    """
    statistics, ended = generation.statistics, generation.finish_reason is not None
    before, tokens = statistics.tokens - len(done.tokens), list[int | None](done.tokens)
    if ended and not text.is_finished:
        tokens = tokens or [None]
        text.finish(stop_token=tokens[-1] is None or tokens[-1] in generation.request.eos_token_ids)
    for i, token in enumerate(tokens):
        logprobs = done.logprobs[i] if done.logprobs else None
        yield GenerationResponse(
            text=text.segments[before + i],
            token=token,
            logprobs=logprobs.all if logprobs else None,
            from_draft=i < done.num_from_draft,
            prompt_tokens=statistics.prompt_tokens,
            prompt_tps=statistics.prompt_tps,
            generation_tokens=before + i + (token is not None),
            generation_tps=statistics.generation_tps,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=generation.finish_reason if ended and i + 1 == len(tokens) else None,
            statistics=statistics,
            logprob=logprobs.logprob if logprobs else None,
            top_logprobs=logprobs.top if logprobs else [],
            index=index,
        )


@overload
def generate(
    engine: Engine,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    verbose: bool = False,
    *,
    n: None = None,
    **options: Any,
) -> str: ...


@overload
def generate(
    engine: Engine,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    verbose: bool = False,
    *,
    n: int,
    **options: Any,
) -> list[str]: ...


def generate(
    engine: Engine,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    verbose: bool = False,
    *,
    n: int | None = None,
    **options: Any,
) -> str | list[str]:
    """Generate a whole text and return it.

    engine, tokenizer: from ``load``.
    prompt: text, used as it is (apply the chat template yourself), or token ids.
    verbose: print the text as it comes, and a summary; several texts when all are complete.
    n: generate so many texts together, and return a list of them.
    options: see stream_generate.
    Raises RequestError, NonFiniteError.
    """
    texts = [""] * (n or 1)
    response = None
    for response in stream_generate(engine, tokenizer, prompt, n=1 if n is None else n, **options):
        texts[response.index] += response.text
        if verbose and n is None:
            print(response.text, end="", flush=True)
    if verbose and response is not None:
        if n is not None:
            print(f"\n{'-' * 10}\n".join(texts), end="")
        print(f"\n{'=' * 10}\n{response.statistics}\nPeak memory: {response.peak_memory:.3f} GB")
    return texts[0] if n is None else texts
