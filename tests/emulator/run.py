"""Launches a compiled kernel over guarded memory."""

import ctypes as c
import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np

from emulator.compiler import HERE, compiled
from emulator.errors import EmulatorError
from emulator.generated import program
from metal_kernels.launching.launch import Kernel, Launcher

GUARD = 1 << 24
MAX_THREADS = 1024
STACK = 1 << 18
_PAGE = max(mmap.PAGESIZE, 16384)


@dataclass(frozen=True)
class Way:
    """One way to run: the order of threads, where data touches unmapped memory, and what fills fresh memory."""

    name: str
    order: int
    against_end: bool
    poison: int


WAYS = (Way("forward", 0, True, 0xFF), Way("reverse", 1, False, 0x5B), Way("shuffled", 2, True, 0x9D))


def launcher(kernel: Kernel, *, check: bool = True) -> Launcher:
    """Return what launches a kernel on the CPU, at once: inputs are evaluated, so this does not trace or compile.

    check: run in three orders of threads, simdgroups and threadgroups, over memory filled differently, and raise
    EmulatorError unless all bits agree.
    """
    return partial(_launch, kernel, WAYS if check else WAYS[:1])


def _launch(
    kernel: Kernel,
    ways: Sequence[Way],
    *,
    inputs: list[mx.array],
    template: list[tuple[str, Any]],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    output_shapes: list[tuple[int, ...]],
    output_dtypes: list[mx.Dtype],
) -> list[mx.array]:
    if min(*grid, *threadgroup) < 1 or math.prod(threadgroup) > MAX_THREADS:
        raise EmulatorError(
            f"{kernel.name}: grid {grid} with threadgroups of {threadgroup}; Metal takes 1 to 1024"
        )
    if (len(inputs), len(output_shapes), len(output_dtypes)) != (len(kernel.inputs), *[len(kernel.outputs)] * 2):
        raise EmulatorError(f"{kernel.name}: takes {kernel.inputs} and gives {kernel.outputs}")
    made = program(kernel, inputs, template, output_dtypes)
    body = _load(kernel.name, made.cpp, made.lint)
    data = [np.ascontiguousarray(_as_numpy(x)) for x in inputs]
    sizes = [math.prod(shape) * dtype.size for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
    results = [_run(kernel, body, data, sizes, grid, threadgroup, way) for way in ways]
    for way, result in zip(ways[1:], results[1:], strict=True):
        for name, dtype, a, b in zip(kernel.outputs, output_dtypes, results[0], result, strict=True):
            first, second = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
            unlike = first != second
            if name in kernel.scratch:
                unlike &= (first != ways[0].poison) | (second != way.poison)
            if unlike.any():
                differing = np.flatnonzero(unlike) // dtype.size
                raise EmulatorError(
                    f"{kernel.name}: output '{name}' depends on the order of threads or on memory that was never "
                    f"written ({ways[0].name} against {way.name} order): {len(np.unique(differing))} elements, "
                    f"the first at flat index {differing[0]}: a race, a missing barrier, or an unwritten element"
                )
    return [
        _as_mlx(raw, shape, dtype)
        for raw, shape, dtype in zip(results[0], output_shapes, output_dtypes, strict=True)
    ]


def _as_numpy(x: mx.array) -> np.ndarray:
    return np.asarray(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)


def _as_mlx(raw: bytes, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    kind = {mx.bfloat16: "uint16", mx.bool_: "bool"}.get(dtype) or str(dtype).split(".")[-1]
    made = mx.array(np.frombuffer(raw, kind).reshape(shape))
    return made.view(mx.bfloat16) if dtype == mx.bfloat16 else made


# ---- guarded memory

_libc = c.CDLL(None)
_libc.mmap.restype = c.c_void_p
_libc.mmap.argtypes = [c.c_void_p, c.c_size_t, c.c_int, c.c_int, c.c_int, c.c_long]
_libc.mprotect.argtypes = [c.c_void_p, c.c_size_t, c.c_int]
_libc.munmap.argtypes = [c.c_void_p, c.c_size_t]
_READ, _READ_WRITE = 1, 3


def _map(size: int) -> int:
    """Reserve memory that nobody may touch yet."""
    private_anonymous = 0x1002 if sys.platform == "darwin" else 0x22
    base = _libc.mmap(None, size, 0, private_anonymous, -1, 0)
    if base in (None, c.c_void_p(-1).value):
        raise MemoryError(f"the emulator cannot map {size} bytes")
    return base


class _Buffer:
    """A buffer between unmapped pages; the bytes that pad it to 16 are watched."""

    def __init__(self, name: str, size: int, way: Way, contents: np.ndarray | None = None) -> None:
        self.name, self.size, self.poison = name, size, way.poison
        self.room = max(_PAGE, -(-size // _PAGE) * _PAGE)
        self.base = _map(self.room + 2 * GUARD)
        inside = self.base + GUARD
        _libc.mprotect(inside, self.room, _READ_WRITE)
        c.memset(inside, way.poison, self.room)
        self.address = inside + (self.room - -(-size // 16) * 16 if way.against_end else 0)
        if contents is not None:
            c.memmove(self.address, contents.ctypes.data, size)
            _libc.mprotect(inside, self.room, _READ)

    def read(self, kernel: Kernel) -> bytes:
        before = self.address - self.base - GUARD
        room = c.string_at(self.base + GUARD, self.room)
        around = np.frombuffer(room[:before] + room[before + self.size :], np.uint8)
        written = np.flatnonzero(around != self.poison)
        if written.size:
            offset = written[0] - before + (self.size if written[0] >= before else 0)
            raise EmulatorError(
                f"{kernel.name}: out-of-bounds write to '{self.name}': byte offset {offset} of {self.size}"
            )
        return room[before : before + self.size]

    def region(self) -> "_Region":
        end = self.base + self.room + 2 * GUARD
        return _Region(self.name.encode(), self.base, end, self.address, self.size)

    def free(self) -> None:
        _libc.munmap(self.base, self.room + 2 * GUARD)


# ---- the runtime; the structures are those of runtime.cpp


class _Region(c.Structure):
    _fields_ = [
        ("name", c.c_char_p),
        ("begin", c.c_void_p),
        ("end", c.c_void_p),
        ("data", c.c_void_p),
        ("bytes", c.c_ulong),
    ]


class _Launch(c.Structure):
    _fields_ = [
        ("body", c.c_void_p),
        ("buffers", c.POINTER(c.c_void_p)),
        ("grid", c.c_uint * 3),
        ("threadgroup", c.c_uint * 3),
        ("order", c.c_int),
        ("seed", c.c_uint),
        ("poison", c.c_int),
        ("against_end", c.c_int),
        ("stacks", c.c_void_p),
        ("stack_bytes", c.c_ulong),
        ("regions", c.POINTER(_Region)),
        ("region_count", c.c_int),
        ("message", c.c_char_p),
        ("message_bytes", c.c_ulong),
    ]


@cache
def _runtime() -> c.CDLL:
    library = compiled("runtime", (HERE / "runtime.cpp").read_text())
    library.emulator_interface.restype = c.c_void_p
    library.emulator_run.argtypes = [c.POINTER(_Launch)]
    return library


@cache
def _stacks() -> int:
    base = _map(MAX_THREADS * STACK)
    for thread in range(MAX_THREADS):
        _libc.mprotect(base + thread * STACK + _PAGE, STACK - _PAGE, _READ_WRITE)
    return base


@cache
def _load(name: str, cpp: str, lint: str) -> int:
    library = compiled(name, cpp, lint)
    c.c_void_p.in_dll(library, "emulator_runtime").value = _runtime().emulator_interface()
    return c.cast(library.emulator_body, c.c_void_p).value or 0


def _run(
    kernel: Kernel,
    body: int,
    inputs: list[np.ndarray],
    output_sizes: list[int],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    way: Way,
) -> list[bytes]:
    buffers = [_Buffer(name, x.nbytes, way, x) for name, x in zip(kernel.inputs, inputs, strict=True)]
    outputs = [_Buffer(name, size, way) for name, size in zip(kernel.outputs, output_sizes, strict=True)]
    buffers += outputs
    message = c.create_string_buffer(1000)
    launch = _Launch(
        body=body,
        buffers=(c.c_void_p * len(buffers))(*(b.address for b in buffers)),
        grid=grid,
        threadgroup=tuple(min(t, g) for t, g in zip(threadgroup, grid, strict=True)),
        order=way.order,
        seed=1,
        poison=way.poison,
        against_end=way.against_end,
        stacks=_stacks(),
        stack_bytes=STACK,
        regions=(_Region * len(buffers))(*(b.region() for b in buffers)),
        region_count=len(buffers),
        message=c.cast(message, c.c_char_p),
        message_bytes=len(message),
    )
    try:
        if _runtime().emulator_run(c.byref(launch)):
            raise EmulatorError(f"{kernel.name}: {message.value.decode()}")
        return [b.read(kernel) for b in outputs]
    finally:
        for b in buffers:
            b.free()
