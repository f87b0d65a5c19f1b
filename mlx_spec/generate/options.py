"""From what a caller gives, a prompt and options, to what the engine takes: a request."""

from collections.abc import Callable, Mapping, Sequence
from textwrap import shorten
from typing import Any, Literal, TypeGuard

import mlx.core as mx

from mlx_spec.decoding.grammar import Grammar, Place
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.engine import Request
from mlx_spec.engine.request import token_ids
from mlx_spec.errors import RequestError
from mlx_spec.generate.text_stream import TextStream, with_detokenizer
from mlx_spec.target import CachedSequence

# What mlx_lm's functions take and these do not, and what to do instead.
NOT_HERE = {
    "sampler": "a function cannot share its noise with a drafter, so give its settings: temp=, top_p=, min_p=, "
    "top_k=, xtc_probability= and so on",
    "prompt_cache": "a cache belongs to a running engine, so use a Conversation, or engine.start and engine.fork",
    "draft_model": "the drafter is the second argument of load",
    "max_kv_size": "give max_cached_tokens= to load, for all generations together",
    "kv_bits": "the cache keeps the model's precision",
    "kv_group_size": "the cache keeps the model's precision",
    "quantized_kv_start": "the cache keeps the model's precision",
    "input_embeddings": "a prompt is text or token ids",
}


def text_request(
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    text: TextStream,
    *,
    max_tokens: int = 256,
    num_draft_tokens: int | Literal["auto", "adaptive"] | None = None,
    max_draft_tokens: int | None = None,
    num_sibling_drafts: int | None = None,
    logprobs: bool = False,
    top_logprobs: int = 0,
    prefill_step_size: int = 512,
    grammar: Place | None = None,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    on_verified: Callable[[CachedSequence, mx.array, mx.array], None] | None = None,
    **sampling: Any,
) -> Request:
    """Return the request of a text, for ``engine.start``.

    text: takes in its tokens and ends it at a stop string. A text stream belongs to one generation.
    grammar: what the text must match, from ``Grammar.start``.
    The other arguments are those of stream_generate. The tokenizer's end tokens end the text.
    Raises RequestError for a prompt or an option that is none.
    """
    tokenizer = with_detokenizer(tokenizer)
    return Request(
        prompt=encode(tokenizer, prompt),
        max_tokens=max_tokens,
        num_draft_tokens=num_draft_tokens,
        max_draft_tokens=max_draft_tokens,
        sampling=make_sampling(sampling),
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        prefill_step_size=prefill_step_size,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        num_sibling_drafts=num_sibling_drafts,
        grammar=grammar,
        is_end=text.add,
        on_progress=no_progress if prompt_progress_callback is None else prompt_progress_callback,
        on_verified=on_verified,
    )


def begin(grammar: Grammar | None, tokenizer: Any, vocab_size: int) -> Place | None:
    """Return the place before the first token of a grammar, if there is one. Raises RequestError."""
    if grammar is not None and not isinstance(grammar, Grammar):
        found = shorten(repr(grammar), 80)
        raise RequestError(f"grammar takes a mlx_spec.Grammar, such as Grammar.json_schema(...), not {found}.")
    return None if grammar is None else grammar.start(tokenizer, vocab_size)


def no_progress(done: int, total: int) -> None:
    """Show nothing."""


def chat_prompt(tokenizer: Any, messages: Sequence[Mapping[str, Any]], /, **template: Any) -> list[int]:
    """Return the token ids of a chat, up to where the model's next reply begins.

    messages: as ``[{"role": "user", "content": "Hello"}]``.
    template: further arguments of the model's chat template, such as ``enable_thinking=False``.
    Raises RequestError where there is no template, and for what it refuses.
    """
    tokenizer = with_detokenizer(tokenizer)
    if not tokenizer.has_chat_template and "chat_template" not in template:
        raise RequestError(
            "A list of messages needs a model with a chat template, and this one has none: give text or token ids."
        )
    settings = {"add_generation_prompt": True, **template, "tokenize": False}
    try:
        rendered = tokenizer.apply_chat_template(messages, **settings)
    except Exception as error:  # templates raise what they like
        raise RequestError(f"The model's chat template refuses the messages: {error}") from error
    require_text("A message", rendered)
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def is_chat(prompt: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def encode(tokenizer: Any, prompt: str | Sequence[int] | mx.array) -> list[int]:
    """Return the token ids of a prompt; text gets a BOS token where the tokenizer adds one and it has none yet.

    Raises RequestError for anything else, and for text that is none.
    """
    if not isinstance(prompt, str):
        return token_ids(prompt)
    require_text("The prompt", prompt)
    bos = tokenizer.bos_token
    return list(tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos)))


def require_text(what: str, text: str) -> None:
    """Raise RequestError for half characters, as Python reads bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} must be UTF-8 text; what comes after {text[: error.start][-20:]!r} is not."
        ) from None


def make_sampling(options: dict[str, Any]) -> Sampling:
    """Build the sampling settings. Raises RequestError for a name or a value that is none of them."""
    fields = Sampling.__dataclass_fields__
    for name, value in options.items():
        if name in NOT_HERE and value is not None:
            raise RequestError(f"{name}= is not taken here: {NOT_HERE[name]}.")
        if name not in fields.keys() | NOT_HERE.keys():
            raise RequestError(f"There is no option {name}=; sampling takes {', '.join(fields)}.")
    return Sampling(**{name: value for name, value in options.items() if value is not None})
