"""Text from tokens, as it comes: whole characters only, and nothing from a stop string on."""

from collections.abc import Iterable, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper

from mlx_spec.errors import RequestError

SPACE = "Ġ"  # of byte-level tokens
ZERO_WIDTH_JOINER = "\u200d"


class TextStream:
    """Turns the tokens of one generation into text segments.

    ``add`` is an end test for the engine: it is called once per token, in order, and is true for the token that
    completes a stop string. ``segments``: for each token so far, the text that became certain with it.
    ``is_finished``: nothing more comes.
    """

    def __init__(self, tokenizer: Any, stop: str | Sequence[str] | None = ()) -> None:
        """Begin the text of one generation, which ends before any of the stop strings.

        Raises RequestError for what is no tokenizer and no string.
        """
        self.segments: list[str] = []
        self.is_finished = False
        self._detokenizer = with_detokenizer(tokenizer).detokenizer
        self._stop = [s for s in stop_strings(stop) if s]
        self._held = ""
        self._ended = False
        self._dropped = ""

    def add(self, token: int) -> bool:
        """Add a token; true when the text ends with it because a stop string is complete."""
        if not self.segments:
            self._dropped = dropped_space(self._detokenizer, token)
        self._detokenizer.add_token(token)
        self._hold(self._detokenizer.last_segment)
        self._ended = self._cut_at_stop()
        self.segments.append(self._take())
        return self._ended

    def finish(self, stop_token: bool) -> None:
        """Release what is held back; an end that is no text, such as EOS, adds a segment of its own."""
        self.is_finished = True
        if stop_token:
            self.segments.append("")
        if not self._ended:
            self._detokenizer.finalize()
            self._hold(self._detokenizer.last_segment)
            self._held += self._dropped
            self._cut_at_stop()
        if self.segments:
            self.segments[-1] += self._held
        self._held = ""

    def _hold(self, segment: str) -> None:
        if segment:
            self._held += self._dropped + segment
            self._dropped = ""

    def _cut_at_stop(self) -> bool:
        found = [at for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            self._held = self._held[: min(found)]
        return bool(found)

    def _take(self) -> str:
        keep = 0 if self._ended else self._unsure()
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return ready

    def _unsure(self) -> int:
        """Length of the tail that may become a stop string, or that joins the next character to an emoji."""
        tails = [
            size
            for stop in self._stop
            for size in range(1, min(len(stop), len(self._held) + 1))
            if self._held.endswith(stop[:size])
        ]
        if self._held.endswith(ZERO_WIDTH_JOINER):
            tails.append(2)
        return min(max(tails, default=0), len(self._held))


def dropped_space(detokenizer: Any, first: int) -> str:
    """Return the space that mlx-lm's detokenizer of byte-level tokens drops of a text's first token, if any."""
    tokens = detokenizer.tokenmap if isinstance(detokenizer, BPEStreamingDetokenizer) else []
    return " " if first < len(tokens) and tokens[first].startswith(SPACE) else ""


def with_detokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer as mlx-lm's; one of transformers is wrapped. Raises RequestError for what is none."""
    if hasattr(tokenizer, "detokenizer"):
        return tokenizer
    if not hasattr(tokenizer, "eos_token_id"):
        raise RequestError(f"A tokenizer of mlx_spec.load, mlx_lm or transformers is needed, not {tokenizer!r}.")
    return TokenizerWrapper(tokenizer)


def stop_strings(stop: str | Sequence[str] | None) -> list[str]:
    """Return the strings that end a text. Raises RequestError for anything else."""
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, Iterable) or not all(isinstance(each, str) for each in strings):
        raise RequestError(f"stop takes a string or several, not {stop!r}.")
    return list(strings)
