"""Which implementation of each operation runs on this machine.

``native`` is our kernel, whose rows do not depend on each other. ``stock`` is MLX's own operation, or a
composition of them where it has none: on the CPU its rows are independent too (in bfloat16), on GPUs they are not.
``cpu`` is our C text, compiled on this machine, for the operations that it has, and ``stock`` for the others.
``reference`` is the plain formula in float32, for debugging.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Literal, cast, get_args

from metal_kernels.launching import cpu_library
from metal_kernels.launching.cpu_library import missing
from metal_kernels.launching.launch import can_launch, is_emulated, runs_on_cuda

Implementation = Literal["native", "stock", "reference", "cpu"]
VARIABLE = "MLX_SPEC_KERNELS"
NAMES = get_args(Implementation)

# Of the thread, or the task: a server's engines may run by different implementations at the same time.
_wanted: ContextVar[Implementation | None] = ContextVar("wanted", default=None)


def implementation() -> Implementation:
    """Return what runs now: what ``using`` or the environment asks for, else the best that this machine can.

    That is native on a GPU, and cpu on a CPU where the library compiles; where it does not, a warning says so
    once. Raises ValueError for an unknown name or number of threads, and for cpu where it does not run.
    """
    wanted = _wanted.get() or os.environ.get(VARIABLE) or None
    if wanted not in (None, *NAMES):
        raise ValueError(f"{VARIABLE} is {wanted!r}; it takes native, stock, reference or cpu.")
    if wanted in (None, "native") and can_launch():
        return "native"
    if wanted is None:
        if reason := missing():
            _warn(f"{reason} MLX's own operations run in its place; on a CPU they take several times as long.")
        return "stock" if reason else "cpu"
    if wanted == "cpu" and (reason := missing()):
        raise ValueError(f"{VARIABLE} asks for cpu. {reason}")
    return "stock" if wanted == "native" else cast(Implementation, wanted)


def is_traceable() -> bool:
    """Whether a pass can be compiled into one graph: native kernels on a GPU, which no host code has to read."""
    return implementation() == "native" and not is_emulated()


def is_eager() -> bool:
    """Whether operations are computed when they are called: those of the CPU library."""
    return implementation() == "cpu"


def in_words(chosen: Implementation) -> str:
    """Say for people what an implementation is on this machine, and where it is not the best one, why."""
    if chosen == "cpu":
        return f"cpu ({cpu_library.in_words()})"
    if chosen == "native":
        return f"native ({'emulated' if is_emulated() else 'CUDA' if runs_on_cuda() else 'Metal'})"
    if chosen == "reference":
        return "reference (plain formulas)"
    reason = cpu_library.known_failure()
    return f"stock (MLX's own operations{'' if reason is None else f': {reason}'})"


@cache
def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=3)


@contextmanager
def using(wanted: Implementation | None) -> Iterator[None]:
    """Run operations by ``wanted`` inside the block, where this machine can; by the environment for None."""
    before = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(before)
