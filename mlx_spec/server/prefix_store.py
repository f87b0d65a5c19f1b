"""What ended generations have cached, kept for prompts that begin as theirs did."""

import logging
from typing import Any

from mlx_spec.engine import Engine, Generation, Request
from mlx_spec.engine.prompt import common_length
from mlx_spec.target import CachedSequence

logger = logging.getLogger(__name__)
# Characters that the log shows on either side of the place where two prompts part.
SHOWN = 40


class PrefixStore:
    """Generations that have ended, the least recently used first.

    They share pages among each other and with running ones. Dropping one frees the pages that are its own alone,
    so that what several conversations begin with goes with the last of them.
    """

    def __init__(self, engine: Engine, max_bytes: int | None) -> None:
        """Begin empty. max_bytes: to keep at most; None for as many as the pool's pages have."""
        self._engine = engine
        pool = engine.target.pool
        self._max_bytes = pool.max_pages * pool.page_bytes if max_bytes is None else max_bytes
        self._kept: list[Generation] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def pages(self) -> int:
        """How many pages would be free if nothing were kept."""
        owners = dict[int, int]()
        for sequence in self._sequences:
            for page in sequence.pages:
                owners[page] = owners.get(page, 0) + 1
        return sum(self._engine.target.pool.owners(page) == count for page, count in owners.items())

    @property
    def bytes(self) -> int:
        """Bytes of all pages and recurrent states that are kept; what the drafter remembers is not counted."""
        pages = {page for sequence in self._sequences for page in sequence.pages}
        states = {
            id(array): array.nbytes
            for sequence in self._sequences
            if sequence.recurrent is not None
            for array in sequence.recurrent.arrays
        }
        return len(pages) * self._engine.target.pool.page_bytes + sum(states.values())

    @property
    def _sequences(self) -> list[CachedSequence]:
        return [sequence for generation in self._kept for sequence in generation.sequences]

    def nearest(self, request: Request, running: list[Generation]) -> Generation | None:
        """Return the generation, kept or running, of which a request can share most, if any."""
        best, most = None, 0
        for generation in (*self._kept, *running):
            shared = self._engine.reusable_tokens(request, generation)
            if shared > most:
                best, most = generation, shared
        if best in self._kept:
            self._kept.remove(best)
            self._kept.append(best)
        return best

    def keep(self, generation: Generation) -> None:
        """Keep an ended generation, as far as a later one could share it, and drop others over the bound."""
        self._engine.trim(generation)
        if generation.sequence.length == 0:
            self._engine.close(generation)
            return
        self._kept.append(generation)
        while self._kept and self.bytes > self._max_bytes:
            self.drop_oldest()

    def free_pages(self, wanted: int) -> None:
        """Drop what is kept, the least recently used first, until so many pages are free or nothing is left."""
        while self._kept and self._engine.target.pool.free_pages < wanted:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        """Give back what the least recently used generation has to itself."""
        self._engine.close(self._kept.pop(0))

    def clear(self) -> None:
        """Give everything back."""
        while self._kept:
            self.drop_oldest()

    def log_departure(self, request: Request, tokenizer: Any, reused: int) -> None:
        """Log how much of a prompt is read again, and where it departs from the nearest that is kept."""
        if not logger.isEnabledFor(logging.INFO) or not self._kept:
            return
        lengths = [common_length(request.prompt, each.request.prompt) for each in self._kept]
        at = max(lengths)
        other = self._kept[lengths.index(at)].request.prompt
        before, here, there = request.prompt[:at][-SHOWN:], request.prompt[at:], other[at:]
        if not there:
            logger.info("Prompt of %d tokens, %d reused: it goes on from a kept one.", len(request.prompt), reused)
            return
        logger.info(
            "Prompt of %d tokens, %d reused: after %d tokens and %r it departs from the nearest kept one with %r, "
            "not %r.",
            len(request.prompt),
            reused,
            at,
            tokenizer.decode(before)[-SHOWN:],
            tokenizer.decode(here[:SHOWN])[:SHOWN],
            tokenizer.decode(there[:SHOWN])[:SHOWN],
        )
