"""A prepared request on its way through the worker, as the event loop sees it."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from mlx_spec.engine import Statistics
from mlx_spec.engine.statistics import added
from mlx_spec.generate import GenerationResponse
from mlx_spec.server.chat import Prepared
from mlx_spec.server.job import Event, Failed, Finished, Job, Tokens
from mlx_spec.server.reply import Part, ReplyParser, joined
from mlx_spec.server.worker import Worker


@dataclass(frozen=True)
class Piece:
    """What came of one text: tokens that were drafted, or the one that the model added.

    parts: that became certain with them.
    tokens: ids, with their log-probabilities where these are asked for.
    from_draft: whether a drafter proposed them.
    """

    index: int
    parts: list[Part]
    tokens: list[GenerationResponse]
    from_draft: bool


@dataclass(frozen=True)
class End:
    """The end of one text.

    reason: "stop", "length" or "tool_calls".
    stop_string: what ended it, if one of the request's did.
    reasoning_tokens: tokens of its reasoning.
    """

    index: int
    reason: str
    stop_string: str | None
    reasoning_tokens: int
    statistics: Statistics
    first_token_seconds: float


@dataclass
class TextSoFar:
    """One text of a request, as far as it has come."""

    parser: ReplyParser
    token_ids: list[int] = field(default_factory=list)
    shown: int = 0
    reasoning_tokens: int = 0


class Run:
    """A request that was given to the worker. Whoever stops listening calls ``cancel``."""

    def __init__(self, worker: Worker, prepared: Prepared) -> None:
        """Submit the request. Raises Busy and Stopping."""
        self.prepared = prepared
        self.id = uuid.uuid4().hex
        self.statistics: list[Statistics] = []
        self.first_token_seconds = 0.0
        self.reasoning_tokens = 0
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._texts = [TextSoFar(prepared.parser()) for _ in prepared.texts]
        self._left = len(prepared.texts)
        self.job = Job(prepared.request, prepared.texts, self._deliver)
        worker.submit(self.job)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prepared.request.prompt)

    @property
    def cached_tokens(self) -> int:
        """How many of them were not read again; known with the first token."""
        return next((each.statistics.cached_tokens for each in self.job.generations), 0)

    @property
    def generated_tokens(self) -> int:
        """Tokens of all texts so far."""
        return sum(len(text.token_ids) for text in self._texts)

    def cancel(self) -> None:
        """End what still runs."""
        if self._left:
            self._worker.cancel(self.job)

    async def events(self) -> AsyncIterator[Piece | End]:
        """Yield what comes until all texts have ended. Raises what went wrong."""
        try:
            while self._left:
                event = await self._events.get()
                if isinstance(event, Failed):
                    self._left = 0
                    raise event.error
                if isinstance(event, Tokens):
                    for piece in self._pieces(event):
                        yield piece
                else:
                    async for each in self._end(event):
                        yield each
        finally:
            self.cancel()

    def _deliver(self, event: Event) -> None:
        # The loop is closed where the server has gone before its last reply.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def _pieces(self, event: Tokens) -> list[Piece]:
        """Return what a round brought, drafted tokens and the model's own apart."""
        text = self._texts[event.index]
        pieces = []
        for from_draft in (True, False):
            responses = [each for each in event.responses if each.from_draft is from_draft]
            if responses:
                parts = self._take(text, responses)
                pieces.append(Piece(event.index, parts, responses, from_draft))
        return pieces

    def _take(self, text: TextSoFar, responses: Sequence[GenerationResponse]) -> list[Part]:
        parts: list[Part] = []
        for response in responses:
            was_reasoning = text.parser.is_reasoning
            parts += text.parser.add(response.text)
            text.reasoning_tokens += was_reasoning or text.parser.is_reasoning
            if response.token is not None:
                text.token_ids.append(response.token)
            text.shown += len(response.text)
        return joined(parts)

    async def _end(self, event: Finished) -> AsyncIterator[Piece | End]:
        text = self._texts[event.index]
        parts = text.parser.finish()
        if parts:
            yield Piece(event.index, joined(parts), [], False)
        self._left -= 1
        self.statistics.append(event.statistics)
        self.first_token_seconds = event.first_token_seconds
        self.reasoning_tokens += text.reasoning_tokens
        reason = "tool_calls" if text.parser.calls and event.reason == "stop" else event.reason
        stop = self._stop_string(text) if event.reason == "stop" else None
        yield End(event.index, reason, stop, text.reasoning_tokens, event.statistics, event.first_token_seconds)

    def _stop_string(self, text: TextSoFar) -> str | None:
        """Return which of the request's stop strings ended a text."""
        if not self.prepared.stop or not text.token_ids:
            return None
        if text.token_ids[-1] in self.prepared.request.eos_token_ids:
            return None
        whole = self.prepared.tokenizer.decode(text.token_ids)
        found = [(at, stop) for stop in self.prepared.stop if stop and (at := whole.find(stop)) >= 0]
        return min(found)[1] if found else None


def text_tokens(
    prepared: Prepared, responses: Sequence[GenerationResponse]
) -> list[tuple[int, GenerationResponse]]:
    """Return the tokens that are text, ends left out, each with its response."""
    ends = prepared.request.eos_token_ids
    return [(each.token, each) for each in responses if each.token is not None and each.token not in ends]


def usage(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the counts of tokens of a reply, as OpenAI has them."""
    prompt, generated = sum(run.prompt_tokens for run in runs), sum(run.generated_tokens for run in runs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(run.cached_tokens for run in runs)},
        "completion_tokens_details": {"reasoning_tokens": sum(run.reasoning_tokens for run in runs)},
    }


def speculation(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what speculative decoding did for a reply; counts of several texts are sums."""
    every = [statistics for run in runs for statistics in run.statistics]
    first, request, clamped = every[0], runs[0].prepared.request, runs[0].prepared.clamped
    most = max(len(each.drafted) for each in every)
    drafted = [sum(each.drafted[i] for each in every if len(each.drafted) > i) for i in range(most)]
    accepted = [sum(each.accepted[i] for each in every if len(each.accepted) > i) for i in range(most)]
    by_source = added(each.drafted_by for each in every)
    rounds, tokens = sum(each.rounds for each in every), sum(each.tokens for each in every)
    block: dict[str, Any] = {
        "rounds": rounds,
        "tokens": tokens,
        "accepted_length": round(tokens / rounds, 4) if rounds else 0.0,
        "drafted": sum(drafted),
        "accepted": sum(accepted),
        "drafted_by_position": drafted,
        "accepted_by_position": accepted,
        "drafted_by": {name: asdict(counts) for name, counts in by_source.items()},
        "rounds_by_depth": rounds_by_depth(sum(each.undrafted_rounds for each in every), drafted),
        "depth_reason": first.drafter_failure or first.depth_reason,
        "exact": first.exact,
        "exact_reason": first.exactness.reason,
        "cached_tokens": sum(run.cached_tokens for run in runs),
        "seed": request.sampling.seed if request.sampling.temp else None,
        "time_to_first_token_s": round(runs[0].first_token_seconds, 4),
        "prompt_tokens_per_s": round(first.prompt_tps, 2),
        "tokens_per_s": round(max(each.generation_tps for each in every), 2),
    }
    if runs[0].prepared.notes:
        block["notes"] = list(runs[0].prepared.notes)
    if clamped is not None:
        block["clamped_max_tokens"] = {"asked": clamped, "used": request.max_tokens}
    return block


def rounds_by_depth(undrafted: int, drafted: Sequence[int]) -> dict[str, int]:
    """Return how many rounds drafted how many tokens, from those that drafted at least so many."""
    counts = {0: undrafted} | {
        depth: count - deeper
        for depth, (count, deeper) in enumerate(zip(drafted, [*drafted, 0][1:], strict=True), 1)
    }
    return {str(depth): count for depth, count in counts.items() if count}
