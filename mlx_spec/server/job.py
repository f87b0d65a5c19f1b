"""What a request asks of the worker, and what comes back: plain data."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mlx_spec.engine import Generation, Request, Statistics
from mlx_spec.generate import GenerationResponse, TextStream


@dataclass(frozen=True)
class Tokens:
    """What a round brought one text: responses, one a token."""

    index: int
    responses: list[GenerationResponse]


@dataclass(frozen=True)
class Finished:
    """The end of one text.

    reason: "stop" or "length".
    statistics: of its generation; they change no more.
    first_token_seconds: from the request to its first token.
    """

    index: int
    reason: str
    statistics: Statistics
    first_token_seconds: float


@dataclass(frozen=True)
class Failed:
    """The end of a job that went wrong."""

    error: Exception


Event = Tokens | Finished | Failed


@dataclass(eq=False)
class Job:
    """One prompt, and one or more texts that answer it.

    request: of the first text; text i draws with its seed + i.
    texts: the streams of the texts; the first is the request's own.
    deliver: takes the events, in the worker's thread; returns at once.
    progress: prompt tokens that are read, and how many there are.
    generations: of the texts, while they run; the worker's own.
    is_cancelled: nobody waits for it any more.
    started, first_token: times by the clock of ``time.monotonic``.
    """

    request: Request
    texts: list[TextStream]
    deliver: Callable[[Event], None]
    progress: tuple[int, int] = (0, 0)
    generations: list[Generation] = field(default_factory=list)
    is_cancelled: bool = False
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None

    @property
    def is_forked(self) -> bool:
        """Whether all its texts run."""
        return len(self.generations) == len(self.texts)

    @property
    def is_done(self) -> bool:
        """Whether all its texts have ended."""
        return self.is_forked and all(each.finish_reason is not None for each in self.generations)
