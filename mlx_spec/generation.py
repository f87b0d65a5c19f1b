"""Generating text: prompts in, text segments out. What ``mlx_lm.generate`` offers, with a drafter."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.generate import wired_limit

from mlx_spec.engine import Engine, Generation, Request
from mlx_spec.errors import RequestError
from mlx_spec.sampling import Sampling
from mlx_spec.statistics import Statistics
from mlx_spec.target import Sequence as CachedSequence
from mlx_spec.text import TextStream


@dataclass(frozen=True)
class GenerationResponse:
    """One generated token.

    text: the text that became certain with it, possibly empty. from_draft: whether the drafter proposed it.
    peak_memory: GB. finish_reason: None but for the last token, "stop" or "length". statistics: of the generation
    so far, the same object in every response; ``statistics.exact`` says whether rows were those of plain decoding.
    """

    text: str
    token: int
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None
    statistics: Statistics


def stream_generate(
    engine: Engine,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    *,
    max_tokens: int = 256,
    num_draft_tokens: int | Literal["adaptive"] | None = None,
    stop: str | Sequence[str] = (),
    prefill_step_size: int = 512,
    prompt_progress_callback: Callable[[int, int], None] = lambda done, total: None,
    on_verified: Callable[[CachedSequence, mx.array, mx.array], None] | None = None,
    **sampling: Any,
) -> Iterator[GenerationResponse]:
    """Generate from a prompt, token by token.

    engine, tokenizer: from ``load``. prompt: text, used as it is (apply the chat template yourself), or token ids.
    max_tokens: -1 for no limit. num_draft_tokens: None lets measured costs decide, "adaptive" goes up after rounds
    whose drafts all stood and down after rounds in which none did, 0 is plain decoding. stop: text that ends the
    generation and is not returned. on_verified: see Request. sampling: temp, top_p, min_p, top_k,
    seed, accept, logit_bias, repetition_penalty and so on, see Sampling.
    Closing the iterator stops cleanly and gives the memory back. Raises RequestError, NonFiniteError.
    """
    stream = TextStream(tokenizer, [stop] if isinstance(stop, str) else stop)
    request = Request(
        prompt=encode(tokenizer, prompt),
        max_tokens=max_tokens,
        num_draft_tokens=num_draft_tokens,
        sampling=make_sampling(sampling),
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        prefill_step_size=prefill_step_size,
        is_end=stream.add,
        on_progress=prompt_progress_callback,
        on_verified=on_verified,
    )
    with wired_limit(engine.target.model):
        generation = engine.start(request)
        try:
            while generation.finish_reason is None:
                yield from _responses(engine, generation, stream)
        finally:
            engine.close(generation)


def _responses(engine: Engine, generation: Generation, stream: TextStream) -> Iterator[GenerationResponse]:
    before = generation.statistics.tokens
    done = engine.step(generation)
    statistics, finished = generation.statistics, generation.finish_reason
    if finished is not None:
        stream.finish(stop_token=done.tokens[-1] in generation.request.eos_token_ids)
    for i, token in enumerate(done.tokens):
        is_last = i + 1 == len(done.tokens)
        yield GenerationResponse(
            text=stream.segments[before + i],
            token=token,
            from_draft=i < done.from_draft,
            prompt_tokens=statistics.prompt_tokens,
            prompt_tps=statistics.prompt_tps,
            generation_tokens=before + i + 1,
            generation_tps=statistics.generation_tps,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finished if is_last else None,
            statistics=statistics,
        )


def generate(
    engine: Engine, tokenizer: Any, prompt: str | Sequence[int] | mx.array, verbose: bool = False, **options: Any
) -> str:
    """Generate a whole text and return it; ``verbose`` prints it as it comes, and a summary.

    options: see stream_generate.
    """
    parts = []
    response = None
    for response in stream_generate(engine, tokenizer, prompt, **options):
        parts.append(response.text)
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response is not None:
        print(f"\n{'=' * 10}\n{response.statistics}\nPeak memory: {response.peak_memory:.3f} GB")
    return "".join(parts)


def encode(tokenizer: Any, prompt: str | Sequence[int] | mx.array) -> list[int]:
    """Return the token ids of a prompt; text gets a BOS token where the tokenizer adds one and it has none yet."""
    if not isinstance(prompt, str):
        return [int(t) for t in np.array(prompt).reshape(-1)]
    bos = tokenizer.bos_token
    return list(tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos)))


def make_sampling(options: dict[str, Any]) -> Sampling:
    """Build the sampling settings. Raises RequestError for a name that is none of them."""
    unknown = options.keys() - Sampling.__dataclass_fields__.keys()
    if unknown:
        raise RequestError(
            f"Unknown option {', '.join(sorted(unknown))}; "
            f"sampling takes {', '.join(Sampling.__dataclass_fields__)}."
        )
    return Sampling(**options)
