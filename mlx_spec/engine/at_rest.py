"""Computing what is still lazy when a call of the engine ends, so that any thread may make the next one.

MLX can compute a lazy array only in the thread that made it; a computed one is good in every thread.
"""

import atexit
import threading
import time
from collections.abc import Iterator
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import mlx.core as mx

# What a thread needs, after Python has joined it, to give back what MLX compiled in it.
SECONDS_TO_END = 0.1


def compute(*roots: Any) -> None:
    """Begin to compute every array that these objects hold; nothing here waits for the device."""
    mx.async_eval(*arrays_in(*roots))
    if threading.current_thread() is not threading.main_thread():
        wait_at_exit()


@cache
def wait_at_exit() -> None:
    """Let other threads end before the interpreter does.

    What MLX compiled in a thread is given back when the thread ends, under Python's lock. Where the interpreter is
    gone by then, MLX 0.32 aborts the process.
    """
    atexit.register(time.sleep, SECONDS_TO_END)


def arrays_in(*roots: Any) -> list[mx.array]:
    """Return the arrays that objects hold, at any depth; a drafter need not name its own."""
    found, seen, waiting = list[mx.array](), set[int](), list(roots)
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, mx.array):
            found.append(each)
        else:
            waiting += parts_of(each)
    return found


def parts_of(holder: Any) -> Iterator[Any]:
    """Yield what an object holds: items, attributes, and what a function is bound to."""
    if isinstance(holder, str | bytes | int | float | type | None):
        return
    if isinstance(holder, dict):
        yield from holder.values()
    # Long lists of numbers, such as pages and tokens, hold nothing else.
    elif isinstance(holder, list | tuple) and not (holder and isinstance(holder[0], int)):
        yield from holder
    elif isinstance(holder, MethodType):
        yield holder.__self__
    elif isinstance(holder, partial):
        yield from (holder.func, holder.args, holder.keywords)
    elif isinstance(holder, FunctionType):
        yield from (cell.cell_contents for cell in holder.__closure__ or ())
    yield from getattr(holder, "__dict__", {}).values()
