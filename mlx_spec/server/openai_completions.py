"""OpenAI's older completions: one or several prompts, used as they are."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from mlx_spec.decoding.logprobs import MAX_TOP_LOGPROBS
from mlx_spec.generate import GenerationResponse
from mlx_spec.server.body import (
    Count,
    Json,
    Penalty,
    Sampled,
    Share,
    Stop,
    Temperature,
    Texts,
    bias_of,
    data,
    stops,
)
from mlx_spec.server.chat import ChatRequest
from mlx_spec.server.errors import bad_request
from mlx_spec.server.openai_chat import StreamOptions
from mlx_spec.server.run import End, Piece, Run, speculation, text_tokens, usage
from mlx_spec.server.token_text import token_bytes

Ids = list[Annotated[int, Field(ge=0)]]
MAX_PROMPTS = 16


class CompletionBody(Sampled):
    """The body of ``POST /v1/completions``."""

    model: str | None = None
    prompt: str | list[str] | Ids | list[Ids]
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    n: Texts = 1
    best_of: Texts | None = None
    stop: Stop | None = None
    max_tokens: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    user: str | None = None

    def asked(self) -> list[ChatRequest]:
        """Return what is asked for, one request a prompt. Raises ApiError."""
        if self.best_of not in (None, self.n):
            raise bad_request("best_of is not served: texts are not compared. Leave it out, or give n.", "best_of")
        if self.echo and self.logprobs is not None:
            raise bad_request("echo with logprobs is not served: prompts have no log-probabilities.", "echo")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream: true.", "stream_options")
        return [
            ChatRequest(
                prompt,
                sampling={**self.sampling(), **bias_of(self.logit_bias)},
                n=self.n,
                max_tokens=self.max_tokens,
                stop=stops(self.stop),
                logprobs=self.logprobs is not None,
                top_logprobs=self.logprobs or 0,
                num_draft_tokens=self.drafts(),
                prompt_field="prompt",
            )
            for prompt in self.prompts()
        ]

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts. Raises ApiError for none, and for too many."""
        given: Any = self.prompt
        is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        prompts: list[str | list[int]] = [given] if is_one else list(given)
        if not 0 < len(prompts) <= MAX_PROMPTS:
            raise bad_request(f"prompt takes 1 to {MAX_PROMPTS} prompts, not {len(prompts)}.", "prompt")
        return prompts


class CompletionWriter:
    """Writes the replies of one request."""

    def __init__(self, body: CompletionBody, runs: Sequence[Run], model_id: str) -> None:
        """runs: one a prompt."""
        self._body, self._runs = body, runs
        self._head = {
            "id": f"cmpl-{runs[0].id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_id,
        }
        self._offsets: dict[int, int] = {}

    async def whole(self) -> Json:
        """Return the reply when it is complete."""
        count = self._body.n * len(self._runs)
        texts, reasons = [self._echoed(index) for index in range(count)], [""] * count
        tokens: list[list[GenerationResponse]] = [[] for _ in range(count)]
        async for index, event in self._events():
            if isinstance(event, Piece):
                texts[index] += "".join(part.text for part in event.parts)
                tokens[index] += event.tokens
            else:
                reasons[index] = event.reason
        choices = [self._choice(*each) for each in zip(range(count), texts, tokens, reasons, strict=True)]
        return {
            **self._head,
            "choices": choices,
            "usage": usage(self._runs),
            "speculation": speculation(self._runs),
        }

    async def stream(self) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        options, left = self._body.stream_options or StreamOptions(), self._body.n * len(self._runs)
        head = {**self._head, **({"usage": None} if options.include_usage else {})}
        if self._body.echo:
            for index in range(left):
                yield data({**head, "choices": [self._choice(index, self._echoed(index), [], None)]})
        async for index, event in self._events():
            if isinstance(event, Piece):
                text = "".join(part.text for part in event.parts)
                if text or self._body.logprobs is not None:
                    yield data({**head, "choices": [self._choice(index, text, event.tokens, None)]})
                continue
            left -= 1
            block = {} if left else {"speculation": speculation(self._runs)}
            yield data({**head, "choices": [self._choice(index, "", [], event.reason)], **block})
        if options.include_usage:
            yield data({**self._head, "choices": [], "usage": usage(self._runs)})
        yield "data: [DONE]\n\n"

    async def _events(self) -> AsyncIterator[tuple[int, Piece | End]]:
        """Yield what comes of all prompts, those of the first one first, with the number of the choice."""
        for number, run in enumerate(self._runs):
            async for event in run.events():
                yield number * self._body.n + event.index, event

    def _echoed(self, index: int) -> str:
        """Return the prompt of a choice, where it is to be part of the text."""
        if not self._body.echo:
            return ""
        prepared = self._runs[index // self._body.n].prepared
        given = self._body.prompts()[index // self._body.n]
        return given if isinstance(given, str) else str(prepared.tokenizer.decode(given))

    def _choice(self, index: int, text: str, tokens: Sequence[GenerationResponse], reason: str | None) -> Json:
        logprobs = None if self._body.logprobs is None else self._logprobs(index, tokens)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, tokens: Sequence[GenerationResponse]) -> Json:
        prepared = self._runs[index // self._body.n].prepared
        shown = text_tokens(prepared, tokens)

        def name(token: int) -> str:
            return token_bytes(prepared.tokenizer, token).decode("utf-8", "replace")

        names, offset = [name(token) for token, _ in shown], self._offsets.get(index, 0)
        offsets = []
        for each in names:
            offsets.append(offset)
            offset += len(each)
        self._offsets[index] = offset
        return {
            "tokens": names,
            "token_logprobs": [each.logprob for _, each in shown],
            "top_logprobs": [{name(id): logprob for id, logprob in each.top_logprobs} for _, each in shown],
            "text_offset": offsets,
        }
