"""Conversations: turn after turn on one engine, of which each continues what the one before has computed."""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import wired_limit

from mlx_spec.decoding.grammar import Grammar
from mlx_spec.engine import Engine, Generation, Request
from mlx_spec.errors import RequestError
from mlx_spec.generate.options import begin, chat_prompt, is_chat, text_request
from mlx_spec.generate.stream import Responses, read
from mlx_spec.generate.text_stream import TextStream, with_detokenizer


class Conversation:
    """A chat that keeps what its last turn has computed, for the next one.

    with Conversation(engine, tokenizer) as conversation:
        messages = [{"role": "user", "content": "Hello"}]
        for response in conversation.stream(messages, max_tokens=100):
            print(response.text, end="")
    """

    def __init__(self, engine: Engine, tokenizer: Any, /, **template: Any) -> None:
        """Begin with nothing.

        engine, tokenizer: from ``load``.
        template: further arguments of the model's chat template, such as ``enable_thinking=False``.
        """
        self._engine = engine
        self._tokenizer = with_detokenizer(tokenizer)
        self._template = template
        self._last: Generation | None = None

    def __enter__(self) -> "Conversation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stream(
        self,
        prompt: Sequence[Mapping[str, Any]] | str | Sequence[int] | mx.array,
        *,
        stop: str | Sequence[str] = (),
        grammar: Grammar | None = None,
        **options: Any,
    ) -> Responses:
        """Generate the next reply, token by token.

        prompt: the whole conversation so far: messages, which the model's chat template renders, or text or token
            ids, used as they are. As far as its tokens are those of the turn before, their cache is used again;
            a message may be changed, dropped or rendered otherwise at any time.
        stop: text that ends the reply and is not returned.
        grammar: what the reply must match.
        options: see stream_generate, but for ``n``.
        Leaving the iterator stops the reply, and the conversation can go on from there. The next turn ends one
        that still runs. Raises RequestError, for wrong options at the call, and NonFiniteError.
        """
        if "n" in options:
            raise RequestError("A conversation has one reply a turn, so n= is not taken: use stream_generate.")
        ids: Any = chat_prompt(self._tokenizer, prompt, **self._template) if is_chat(prompt) else prompt
        text = TextStream(self._tokenizer, stop)
        place = begin(grammar, self._tokenizer, self._engine.target.vocab_size)
        request = text_request(self._tokenizer, ids, text, grammar=place, **options)
        request.check(self._engine.target, self._engine.max_draft)
        return self._turn(request, text)

    def close(self) -> None:
        """Give back what the last turn keeps; a further turn begins anew."""
        if self._last is not None:
            self._engine.close(self._last)
            self._last = None

    def _turn(self, request: Request, text: TextStream) -> Responses:
        with wired_limit(self._engine.target.model):
            generation = self._engine.start(request, after=self._last)
            self.close()
            self._last = generation
            try:
                yield from read(self._engine, [generation], [text], at_end=lambda _: None)
            finally:
                self._engine.cancel(generation)
