"""How every command runs: warnings of a checkpoint as notes, one line for an error, a status for each end."""

import atexit
import gc
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

from mlx_spec.errors import MlxSpecError, ModelWarning

STOPPED, TERMINATED = 130, 143


class Terminated(KeyboardInterrupt):
    """SIGTERM: the command ends as after Ctrl-C, with another status."""


def status_of(stopped: KeyboardInterrupt) -> int:
    """Return the exit status of a command that was stopped."""
    return TERMINATED if isinstance(stopped, Terminated) else STOPPED


def run_command(run: Callable[[], int], failed: int = 1) -> int:
    """Run a command's work and return its exit status.

    run: the work; returns the status.
    failed: the status after an error.
    """
    end_without_a_last_collection()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not have every character of an answer
    with notes(), stopped_by_sigterm():
        try:
            status = run()
            sys.stdout.flush()
            return status
        except MlxSpecError as error:
            print(f"error: {error}", file=sys.stderr)
            return failed
        except KeyboardInterrupt as error:
            print("stopped", file=sys.stderr)
            return status_of(error)
        except OSError as error:
            return failed if told(error) else 0


@cache
def end_without_a_last_collection() -> None:
    """Let the process end at once: Python would go through all that was loaded, which takes it a second or two."""
    atexit.register(gc.freeze)


def told(error: OSError) -> bool:
    """Say what could not be read or written; a reader that went away needs no word."""
    if isinstance(error, BrokenPipeError) or error.filename is None:
        # What is still buffered goes nowhere, without another complaint at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return False
    what = "The answer cannot be written" if error.filename is None else "A file cannot be used"
    print(f"error: {what}: {error}", file=sys.stderr)
    return True


@contextmanager
def notes() -> Iterator[None]:
    """Print what loading found in a checkpoint as one line each."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, ModelWarning):
            note(str(message))
        else:
            others(message, category, *place, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("always", ModelWarning)
        others, warnings.showwarning = warnings.showwarning, show
        yield


def note(text: str) -> None:
    """Say something on standard error that does not stop the command."""
    print(f"note: {text}", file=sys.stderr)


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the command cleanly, so that what it began to fetch or write goes away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
