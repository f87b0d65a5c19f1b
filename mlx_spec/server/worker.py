"""The thread that owns the engine: it runs rounds of all requests together, and knows nothing of HTTP."""

import gc
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.generate import wired_limit

from metal_kernels import MAX_VERIFY_ROWS
from mlx_spec.engine import Engine, Generation, Round
from mlx_spec.engine.prompt import next_chunk
from mlx_spec.errors import ContextFull, MlxSpecError
from mlx_spec.generate import end_where_full, responses
from mlx_spec.server.job import Failed, Finished, Job, Tokens
from mlx_spec.server.prefix_store import PrefixStore
from mlx_spec.target.pages import PAGE_SLOTS

logger = logging.getLogger(__name__)
Loaded = tuple[Engine, Any]
# Positions that a text should be able to grow by before it is begun beside others.
HEADROOM = 256
# A round or a chunk of a prompt takes no longer than this; after it the worker counts as wedged.
WEDGED_SECONDS = 300.0


class Busy(Exception):
    """As many requests wait as may wait."""


class Stopping(Exception):
    """The server is shutting down."""


@dataclass
class Counts:
    """What the worker has to do, and what it did since it began."""

    running: int = 0
    waiting: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)


class Worker:
    """Loads a model in a thread of its own, and answers jobs with it.

    Jobs begin in the order in which they come, up to 16 texts at a time; others wait. ``counts``, ``state``,
    ``loads`` (how often the model was loaded) and ``context`` (positions of a prompt with its reply, once it is
    known) may be read from any thread.
    """

    def __init__(
        self,
        load: Callable[[], Loaded],
        *,
        max_waiting: int = 64,
        max_kept_bytes: int | None = None,
        idle_seconds: float | None = None,
        on_end: Callable[[Finished, Job], None] = lambda finished, job: None,
    ) -> None:
        """Begin to load.

        load: returns the engine and the tokenizer; called again after the model was unloaded.
        max_waiting: jobs that may wait for their turn.
        max_kept_bytes: see PrefixStore.
        idle_seconds: after so long without a request the model is unloaded; None for never.
        on_end: called with each text that ended, in the worker's thread.
        """
        self.state: Literal["loading", "ready", "unloaded", "failed", "stopped"] = "loading"
        self.error: Exception | None = None
        self.counts = Counts()
        self.loads = 0
        self.context: int | None = None
        self._load, self._on_end = load, on_end
        self._max_waiting, self._max_kept_bytes, self._idle_seconds = max_waiting, max_kept_bytes, idle_seconds
        self._loaded: Loaded | None = None
        self._store: PrefixStore | None = None
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._uses = 0
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._busy_since: float | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="mlx_spec engine", daemon=True)
        self._thread.start()

    @property
    def is_wedged(self) -> bool:
        """Whether the thread died, or has been in one round for longer than any takes."""
        since = self._busy_since
        is_slow = since is not None and time.monotonic() - since > WEDGED_SECONDS
        return is_slow or (not self._thread.is_alive() and self.state not in ("failed", "stopped"))

    @property
    def cache_usage(self) -> float:
        """Share of the cache that is in use, by what runs and by what is kept, from 0 to 1."""
        loaded = self._loaded
        return 0.0 if loaded is None else loaded[0].target.pool.pages_in_use / loaded[0].target.pool.max_pages

    @contextmanager
    def use(self) -> Iterator[Loaded]:
        """Give the engine's and the tokenizer's descriptions, and keep the model loaded meanwhile.

        Waits while it is loaded. Only the worker may step the engine. Raises what loading raised, or Stopping.
        """
        with self._lock:
            self._uses += 1
        try:
            self._wake.put(None)
            with self._ready:
                while self._loaded is None:
                    if self.error is not None:
                        raise self.error
                    if self._stopping:
                        raise Stopping
                    self._ready.wait(0.5)
                loaded = self._loaded
            yield loaded
        finally:
            with self._lock:
                self._uses -= 1

    def submit(self, job: Job) -> None:
        """Let a job wait for its turn. Raises Busy where too many do, and Stopping at the end."""
        with self._lock:
            if self._stopping:
                raise Stopping
            has_room = not self._waiting and sum(len(each.texts) for each in self._running) < MAX_VERIFY_ROWS
            if len(self._waiting) >= self._max_waiting and not has_room:
                raise Busy
            self._waiting.append(job)
            self.counts.waiting = len(self._waiting)
        self._wake.put(None)

    def cancel(self, job: Job) -> None:
        """End a job that nobody waits for, after the round or the chunk that runs."""
        job.is_cancelled = True
        self._wake.put(None)

    def begin_stop(self) -> None:
        """End all jobs at once, and the thread after the round that runs. Safe in a signal handler."""
        self._stopping = True
        for job in (*self._running, *self._waiting):
            job.deliver(Failed(Stopping()))
        self._wake.put(None)

    def wait(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def stop(self, seconds: float = 1.0) -> bool:
        """End all jobs and the thread; return whether it ended within so many seconds."""
        self.begin_stop()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            self._load_model()
            while not self._stopping:
                self._wait()
                if self._waiting or self._running:
                    self._run_until_idle()
                elif self._is_idle_for_long():
                    self._unload()
        except Exception as error:
            logger.exception("The engine's thread ended.")
            self.state, self.error = "failed", error
        finally:
            self._fail_all(self.error or Stopping())
            if self.state != "failed":
                self.state = "stopped"

    def _load_model(self) -> None:
        self.state = "loading"
        try:
            loaded = self._load()
        except Exception as error:
            with self._ready:
                self.state, self.error = "failed", error
                self._ready.notify_all()
            raise
        self._store = PrefixStore(loaded[0], self._max_kept_bytes)
        self.context = context_of(loaded[0])
        self._last_use = time.monotonic()
        self.loads += 1
        with self._ready:
            self._loaded, self.state = loaded, "ready"
            self._ready.notify_all()

    def _unload(self) -> None:
        """Give the model's memory back. The next request loads it again."""
        with self._lock:
            if self._uses or self._waiting:
                return
            self._loaded, self.state = None, "unloaded"
        if self._store is not None:
            self._store.clear()
        self._store = None
        gc.collect()  # an engine and its drafter refer to each other
        mx.clear_cache()
        logger.info("Unloaded the model after %s s without a request.", self._idle_seconds)

    def _wait(self) -> None:
        """Wait for something to do, and load the model where someone asks for it."""
        timeout = None if self._idle_seconds is None or self._loaded is None else self._idle_seconds / 4
        try:
            self._wake.get(timeout=timeout)
            while True:
                self._wake.get_nowait()
        except queue.Empty:
            pass
        if self._loaded is None and (self._uses or self._waiting) and not self._stopping:
            self._load_model()
        if self._uses:
            self._last_use = time.monotonic()

    def _is_idle_for_long(self) -> bool:
        is_idle = self._idle_seconds is not None and self._loaded is not None and not self._uses
        return is_idle and time.monotonic() - self._last_use > (self._idle_seconds or 0)

    def _run_until_idle(self) -> None:
        assert self._loaded is not None
        engine, tokenizer = self._loaded
        with wired_limit(engine.target.model):
            while (self._waiting or self._running) and not self._stopping:
                self._busy_since = time.monotonic()
                try:
                    self._round(engine, tokenizer)
                except Exception as error:
                    logger.exception("A round failed.")
                    self._fail_all(error)
        self._busy_since = None
        self._last_use = time.monotonic()

    def _round(self, engine: Engine, tokenizer: Any) -> None:
        """Let jobs go and come, and run one round of the rest."""
        self._drop_cancelled(engine)
        self._begin_waiting(engine, tokenizer)
        self._fork(engine)
        parts = [(job, each) for job in self._running for each in job.generations if each.finish_reason is None]
        parts.sort(key=lambda part: not part[1].statistics.tokens)
        generations = [generation for _, generation in parts]
        self._make_room(engine, generations)
        rounds = engine.step(generations)
        end_where_full(generations)
        for (job, generation), done in zip(parts, rounds, strict=True):
            if job in self._running:
                self._deliver(engine, job, generation, done)
        for job in [job for job in self._running if job.is_done]:
            self._end(engine, job)
        self.counts.running = sum(len(job.texts) for job in self._running)

    def _begin_waiting(self, engine: Engine, tokenizer: Any) -> None:
        """Begin the jobs that wait, in their order, as far as there are rows and pages for them."""
        while self._waiting and self._has_room(engine, self._waiting[0]):
            with self._lock:
                job = self._waiting.popleft()
                self.counts.waiting = len(self._waiting)
            try:
                self._begin(engine, tokenizer, job)
            except MlxSpecError as error:
                job.deliver(Failed(error))

    def _begin(self, engine: Engine, tokenizer: Any, job: Job) -> None:
        assert self._store is not None
        others = [each for other in self._running for each in other.generations[:1]]
        after = self._store.nearest(job.request, others)
        generation = engine.start(job.request, after=after)
        self._store.log_departure(job.request, tokenizer, generation.statistics.cached_tokens)
        job.generations.append(generation)
        with self._lock:
            self._running.append(job)
        self.counts.prompt_tokens += len(job.request.prompt)
        self.counts.cached_tokens += generation.statistics.cached_tokens

    def _has_room(self, engine: Engine, job: Job) -> bool:
        """Whether there are rows for its texts, and pages for its prompt and for the next tokens of all others."""
        if job.is_cancelled or not self._running:
            return True
        if sum(len(each.texts) for each in self._running) + len(job.texts) > MAX_VERIFY_ROWS:
            return False
        assert self._store is not None
        promised = sum(unread_pages(each) for each in self._running)
        return pages_of(job) + promised <= engine.target.pool.free_pages + self._store.pages

    def _fork(self, engine: Engine) -> None:
        """Fork the prompts of several texts before their first round, with the last chunk that is to be read."""
        for job in list(self._running):
            first = job.generations[0]
            left = first.anchor_position - first.sequence.length
            if job.is_forked or first.finish_reason is not None or next_chunk(first) < left:
                continue
            seed = job.request.sampling.seed
            try:
                self._make_room(engine, [first])
                for index, text in enumerate(job.texts[1:], 1):
                    job.generations.append(engine.fork(first, seed=seed + index, is_end=text.add))
            except MlxSpecError as error:
                self._fail(engine, job, error)

    def _make_room(self, engine: Engine, generations: list[Generation]) -> None:
        """Drop kept prefixes where this round needs their pages."""
        assert self._store is not None
        chunk = max((next_chunk(each) for each in generations if not each.is_read), default=0)
        self._store.free_pages(2 * len(generations) + -(-chunk // PAGE_SLOTS))

    def _deliver(self, engine: Engine, job: Job, generation: Generation, done: Round) -> None:
        """Hand over what a round brought a text."""
        job.progress = (generation.sequence.length, len(job.request.prompt))
        index = job.generations.index(generation)
        if done.error is not None and self._is_fatal(done.error):
            self._fail(engine, job, done.error)
            return
        if found := list(responses(generation, done, job.texts[index], index)):
            job.first_token = job.first_token or time.monotonic()
            self.counts.generated_tokens += len(done.tokens)
            job.deliver(Tokens(index, found))
        if generation.finish_reason is not None:
            statistics = generation.statistics
            statistics.depth_reason = generation.policy.reason if engine.max_draft else ""
            seconds = (job.first_token or time.monotonic()) - job.started
            finished = Finished(index, generation.finish_reason, statistics, seconds)
            self._count(finished)
            self._on_end(finished, job)
            job.deliver(finished)

    def _is_fatal(self, error: Exception) -> bool:
        """Whether a text ends with an error of its round; for a page it waits where others may give some back."""
        return not isinstance(error, ContextFull) or sum(len(each.generations) for each in self._running) == 1

    def _count(self, finished: Finished) -> None:
        statistics, counts = finished.statistics, self.counts
        counts.finished[finished.reason] = counts.finished.get(finished.reason, 0) + 1
        counts.drafts += statistics.rounds - statistics.undrafted_rounds
        counts.draft_tokens += sum(statistics.drafted)
        counts.accepted_tokens += sum(statistics.accepted)
        more = len(statistics.accepted) - len(counts.accepted_by_position)
        counts.accepted_by_position += [0] * more
        for position, accepted in enumerate(statistics.accepted):
            counts.accepted_by_position[position] += accepted

    def _drop_cancelled(self, engine: Engine) -> None:
        with self._lock:
            self._waiting = deque(job for job in self._waiting if not job.is_cancelled)
            self.counts.waiting = len(self._waiting)
        for job in [job for job in self._running if job.is_cancelled]:
            self.counts.finished["abort"] = self.counts.finished.get("abort", 0) + 1
            self._end(engine, job)

    def _end(self, engine: Engine, job: Job) -> None:
        """Keep what a job has cached of its prompt, and give back the rest."""
        assert self._store is not None
        with self._lock:
            self._running.remove(job)
        for generation in job.generations[1:]:
            engine.close(generation)
        if job.generations:
            self._store.keep(job.generations[0])

    def _fail(self, engine: Engine, job: Job, error: Exception) -> None:
        with self._lock:
            self._running.remove(job)
        for generation in job.generations:
            engine.close(generation)
        self.counts.finished["error"] = self.counts.finished.get("error", 0) + 1
        job.deliver(Failed(error))

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
            self.counts.waiting = 0
        for job in list(self._running):
            assert self._loaded is not None
            self._fail(self._loaded[0], job, error)
        for job in waiting:
            job.deliver(Failed(error))
        self.counts.running = 0


def context_of(engine: Engine) -> int:
    """Return the most positions that a prompt and its reply may have together."""
    return min(engine.target.context, engine.target.pool.max_pages * PAGE_SLOTS)


def pages_of(job: Job) -> int:
    """Return how many pages a job needs to begin, were nothing shared."""
    return -(-(len(job.request.prompt) + HEADROOM * len(job.texts)) // PAGE_SLOTS)


def unread_pages(job: Job) -> int:
    """Return how many more pages a running job needs for its prompt, and a little more."""
    return max(0, pages_of(job) - sum(len(each.sequence.pages) for each in job.generations[:1]))
