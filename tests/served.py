"""A server on a port of this machine, with the tiny trained pair: half of its drafts are accepted."""

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from mlx_spec import Engine, load
from mlx_spec.server.app import make_app
from mlx_spec.server.metrics import Metrics
from mlx_spec.server.settings import Settings
from mlx_spec.server.worker import Worker

PAIR = Path(__file__).parent / "tiny_pair"
CONTEXT = 8192
WAIT = 60.0


def write_pair(folder: Path, context: int = CONTEXT) -> Path:
    """Copy the tiny pair's target, with so many positions."""
    shutil.copytree(PAIR / "target", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
    return folder


@dataclass
class Served:
    """A server that runs: its address, its worker, and the model's folder."""

    url: str
    worker: Worker
    folder: Path

    @property
    def engine(self) -> Engine:
        """The engine; only while nothing runs."""
        assert self.worker._loaded is not None
        return self.worker._loaded[0]

    @property
    def tokenizer(self) -> Any:
        assert self.worker._loaded is not None
        return self.worker._loaded[1]

    def wait_until_idle(self) -> None:
        """Wait until nothing runs and nothing waits."""
        until = time.monotonic() + WAIT
        while self.worker.counts.running or self.worker.counts.waiting or self.worker._busy_since:
            assert time.monotonic() < until, "the worker does not come to rest"
            time.sleep(0.01)


@contextmanager
def serve(folder: Path, drafter: str | None = str(PAIR / "head"), **options: Any) -> Iterator[Served]:
    """Serve a model; options are those of Settings and of Worker."""
    for_worker = {
        name: options.pop(name) for name in ("max_waiting", "max_kept_bytes", "idle_seconds") if name in options
    }
    metrics = Metrics("tiny")
    worker = Worker(lambda: load(str(folder), drafter), on_end=metrics.observe, **for_worker)
    app = make_app(worker, Settings(**{"model_id": "tiny", "loaded_from": str(folder), **options}), metrics)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    thread.start()
    try:
        while worker.state == "loading" or not server.started:
            time.sleep(0.01)
        if worker.error is not None:
            raise worker.error
        yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", worker, folder)
    finally:
        worker.begin_stop()
        server.should_exit = True
        thread.join(WAIT)
        worker.stop(WAIT)
        listening.close()
