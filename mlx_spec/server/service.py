"""What the routes share: preparing requests away from the event loop, giving them to the worker, errors."""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mlx_spec.errors import RequestError
from mlx_spec.server.chat import ChatRequest, Prepared, as_api_error, prepare, prompt_ids
from mlx_spec.server.errors import ApiError
from mlx_spec.server.run import Run
from mlx_spec.server.settings import Settings
from mlx_spec.server.worker import Busy, Stopping, Worker

logger = logging.getLogger(__name__)
RETRY = {"Retry-After": "1"}


class Service:
    """A worker and the settings of its server."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self.worker = worker
        self.settings = settings
        # One thread: tokenizers are not made for several, and the event loop must not wait for them.
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="mlx_spec prepare")

    def require_model(self, model: str | None) -> None:
        """Raise ApiError for a model that is not the one that is served."""
        if not self.settings.knows(model):
            raise ApiError(
                404,
                f"The model {model!r} is not served here; {self.settings.model_id!r} is.",
                "model",
                "model_not_found",
            )

    def require_loaded(self) -> None:
        """Raise ApiError while the model is loaded for the first time, and where that failed."""
        if self.worker.state == "failed":
            raise ApiError(503, "The model could not be loaded; the server's log says why.")
        if self.worker.loads == 0:
            raise ApiError(503, "The model is being loaded.", headers=RETRY)

    async def prepare(self, model: str | None, asked: ChatRequest) -> Prepared:
        """Return a request ready for the worker. Raises ApiError."""
        self.require_model(model)
        self.require_loaded()
        return await asyncio.get_running_loop().run_in_executor(self._preparing, self._prepare, asked)

    async def count(self, model: str | None, asked: ChatRequest) -> int:
        """Return how many tokens the prompt of a request has. Raises ApiError."""
        self.require_model(model)
        self.require_loaded()
        return await asyncio.get_running_loop().run_in_executor(self._preparing, self._count, asked)

    def run(self, prepared: Prepared) -> Run:
        """Give a request to the worker. Raises ApiError where too many wait."""
        try:
            return Run(self.worker, prepared)
        except (Busy, Stopping) as error:
            raise self.error_of(error) from error

    def run_all(self, prepared: Sequence[Prepared]) -> list[Run]:
        """Give several requests to the worker, or none of them. Raises ApiError where too many wait."""
        runs: list[Run] = []
        try:
            for each in prepared:
                runs.append(self.run(each))
        except ApiError:
            for run in runs:
                run.cancel()
            raise
        return runs

    def error_of(self, error: Exception) -> ApiError:
        """Return what to tell a client of an error."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, Busy):
            return ApiError(429, "Too many requests wait; try again in a moment.", headers=RETRY)
        if isinstance(error, Stopping):
            return ApiError(503, "The server is shutting down.", headers=RETRY)
        if not isinstance(error, RequestError):
            logger.error("A request failed.", exc_info=error)
        return as_api_error(error, self.settings)

    def close(self) -> None:
        """End the thread that prepares requests."""
        self._preparing.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, asked: ChatRequest) -> Prepared:
        with self.worker.use() as (engine, tokenizer):
            return prepare(engine, tokenizer, self.settings, asked)

    def _count(self, asked: ChatRequest) -> int:
        with self.worker.use() as (_, tokenizer):
            return len(prompt_ids(tokenizer, self.settings, asked))
