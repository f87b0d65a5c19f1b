"""Generating text: prompts in, text segments out. What ``mlx_lm.generate`` offers, with a drafter."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any, Literal, overload

import mlx.core as mx
from mlx_lm.generate import wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_spec.decoding.grammar import Grammar, Place
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.decoding.settings import whole
from mlx_spec.engine import Engine, Generation, Request, Round
from mlx_spec.engine.request import token_ids
from mlx_spec.engine.statistics import Statistics
from mlx_spec.errors import ContextFull, RequestError
from mlx_spec.generate.text_stream import TextStream
from mlx_spec.target import CachedSequence, reserve_positions

# What mlx_lm's functions take and these do not, and what to do instead.
NOT_HERE = {
    "sampler": "a function cannot share its noise with a drafter, so give its settings: temp=, top_p=, min_p=, "
    "top_k=, xtc_probability= and so on",
    "prompt_cache": "a cache belongs to a running engine, so use engine.start and engine.fork",
    "draft_model": "the drafter is the second argument of load",
    "max_kv_size": "give max_cached_tokens= to load, for all generations together",
    "kv_bits": "the cache keeps the model's precision",
    "kv_group_size": "the cache keeps the model's precision",
    "quantized_kv_start": "the cache keeps the model's precision",
    "input_embeddings": "a prompt is text or token ids",
}


@dataclass(frozen=True)
class GenerationResponse:
    """One generated token.

    text: the text that became certain with it, possibly empty.
    token: its id.
    logprobs: log-probabilities of all tokens, [V] float32, where they are asked for.
    from_draft: whether the drafter proposed it.
    prompt_tokens, prompt_tps: length of the prompt, and tokens a second of reading it.
    generation_tokens, generation_tps: tokens so far, and their rate.
    peak_memory: the most that MLX held so far, in GB.
    finish_reason: of the last token "stop" or "length", of all others None.
    statistics: of the generation so far, the same object in every response; ``statistics.exact`` says whether rows
        had the bits of rows computed alone.
    logprob: log-probability of the token, where it is asked for.
    top_logprobs: (token, log-probability) of the most likely tokens, where they are asked for.
    index: which of ``n`` texts it belongs to.
    """

    text: str
    token: int
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


def stream_generate(
    engine: Engine,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    *,
    max_tokens: int = 256,
    n: int = 1,
    num_draft_tokens: int | Literal["adaptive"] | None = None,
    num_sibling_drafts: int | None = None,
    stop: str | Sequence[str] = (),
    grammar: Grammar | None = None,
    logprobs: bool = False,
    top_logprobs: int = 0,
    prefill_step_size: int = 512,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    on_verified: Callable[[CachedSequence, mx.array, mx.array], None] | None = None,
    **sampling: Any,
) -> Iterator[GenerationResponse]:
    """Generate from a prompt, token by token.

    engine, tokenizer: from ``load``.
    prompt: text, used as it is (apply the chat template yourself), or token ids.
    max_tokens: length of the text, -1 for no limit.
    n: texts to generate together; text i draws with seed + i, and is the one that this seed gives alone.
    num_draft_tokens: tokens to draft a round. None lets measured costs decide; "adaptive" goes up after rounds
        whose drafts were all accepted, and down after rounds in which none was; 0 is plain decoding.
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
    Closing the iterator stops cleanly and gives the memory back. Raises RequestError, NonFiniteError.
    """
    n, tokenizer = 1 if n is None else whole("n", n), with_detokenizer(tokenizer)
    if n < 1:
        raise RequestError(f"n must be at least 1, not {n}.")
    streams = [TextStream(tokenizer, stop_strings(stop)) for _ in range(n)]
    request = Request(
        prompt=encode(tokenizer, prompt),
        max_tokens=max_tokens,
        num_draft_tokens=num_draft_tokens,
        sampling=make_sampling(sampling),
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        prefill_step_size=prefill_step_size,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        num_sibling_drafts=num_sibling_drafts,
        grammar=begin(grammar, tokenizer, engine),
        is_end=streams[0].add,
        on_progress=no_progress if prompt_progress_callback is None else prompt_progress_callback,
        on_verified=on_verified,
    )
    with wired_limit(engine.target.model):
        generations = [engine.start(request)]
        try:
            for index in range(1, n):
                seed = request.sampling.seed + index
                generations.append(engine.fork(generations[0], seed=seed, is_end=streams[index].add))
            while running := in_turn(generations):
                rounds = engine.step(running)
                end_where_full(running)
                for done, generation in zip(rounds, running, strict=True):
                    index = generations.index(generation)
                    yield from _responses(done, generation, streams[index], index)
                    if generation.finish_reason is not None:
                        engine.close(generation)
                raise_errors(rounds)
        finally:
            for generation in generations:
                engine.close(generation)


def no_progress(done: int, total: int) -> None:
    """Show nothing."""


def in_turn(generations: Sequence[Generation]) -> list[Generation]:
    """Return those that go on; the ones that have begun come first, where pages are few."""
    return sorted((g for g in generations if g.finish_reason is None), key=lambda g: not g.statistics.tokens)


def end_where_full(generations: Sequence[Generation]) -> None:
    """End by length the texts for which the cache has no position left, as at the end of the context.

    Of several, the first ones get the last pages. One that has not begun waits until another has ended.
    """
    begun = [g for g in generations if g.finish_reason is None and g.statistics.tokens]
    left = reserve_positions([generation.sequence for generation in begun], 1)
    for generation, positions in zip(begun, left, strict=True):
        if not positions:
            generation.finish_reason = "length"


def raise_errors(rounds: Sequence[Round]) -> None:
    """Raise what went wrong in a round; a page that is missing is waited for where others go on."""
    waits = any(done.tokens for done in rounds)
    for done in rounds:
        if done.error is not None and not (waits and isinstance(done.error, ContextFull)):
            raise done.error


def _responses(
    done: Round, generation: Generation, stream: TextStream, index: int
) -> Iterator[GenerationResponse]:
    statistics, finished = generation.statistics, generation.finish_reason
    before = statistics.tokens - len(done.tokens)
    if done.tokens and finished is not None:
        stream.finish(stop_token=done.tokens[-1] in generation.request.eos_token_ids)
    for i, token in enumerate(done.tokens):
        is_last = i + 1 == len(done.tokens)
        logprobs = done.logprobs[i] if done.logprobs else None
        yield GenerationResponse(
            text=stream.segments[before + i],
            token=token,
            logprobs=logprobs.all if logprobs else None,
            from_draft=i < done.num_from_draft,
            prompt_tokens=statistics.prompt_tokens,
            prompt_tps=statistics.prompt_tps,
            generation_tokens=before + i + 1,
            generation_tps=statistics.generation_tps,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finished if is_last else None,
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


def with_detokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer as mlx-lm's; one of transformers is wrapped. Raises RequestError for what is none."""
    if hasattr(tokenizer, "detokenizer"):
        return tokenizer
    if not hasattr(tokenizer, "eos_token_id"):
        raise RequestError(f"A tokenizer of mlx_spec.load, mlx_lm or transformers is needed, not {tokenizer!r}.")
    return TokenizerWrapper(tokenizer)


def encode(tokenizer: Any, prompt: str | Sequence[int] | mx.array) -> list[int]:
    """Return the token ids of a prompt; text gets a BOS token where the tokenizer adds one and it has none yet.

    Raises RequestError for anything else, and for text that is none.
    """
    if not isinstance(prompt, str):
        return token_ids(prompt)
    require_text("The prompt", prompt)
    bos = tokenizer.bos_token
    return list(tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos)))


def begin(grammar: Grammar | None, tokenizer: Any, engine: Engine) -> Place | None:
    """Return the place before the first token of a grammar, if there is one. Raises RequestError."""
    if grammar is not None and not isinstance(grammar, Grammar):
        found = shorten(repr(grammar), 80)
        raise RequestError(f"grammar takes a mlx_spec.Grammar, such as Grammar.json_schema(...), not {found}.")
    return None if grammar is None else grammar.start(tokenizer, engine.target.vocab_size)


def require_text(what: str, text: str) -> None:
    """Raise RequestError for half characters, as Python reads bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} must be UTF-8 text; what comes after {text[: error.start][-20:]!r} is not."
        ) from None


def stop_strings(stop: str | Sequence[str] | None) -> list[str]:
    """Return the strings that end a text. Raises RequestError for anything else."""
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, Iterable) or not all(isinstance(each, str) for each in strings):
        raise RequestError(f"stop takes a string or several, not {stop!r}.")
    return list(strings)


def make_sampling(options: dict[str, Any]) -> Sampling:
    """Build the sampling settings. Raises RequestError for a name or a value that is none of them."""
    fields = Sampling.__dataclass_fields__
    for name, value in options.items():
        if name in NOT_HERE and value is not None:
            raise RequestError(f"{name}= is not taken here: {NOT_HERE[name]}.")
        if name not in fields.keys() | NOT_HERE.keys():
            raise RequestError(f"There is no option {name}=; sampling takes {', '.join(fields)}.")
    return Sampling(**{name: value for name, value in options.items() if value is not None})
