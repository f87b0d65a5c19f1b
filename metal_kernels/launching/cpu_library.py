"""Calls of the CPU library's functions over the memory of MLX arrays; nothing is copied.

A call is made at once: what it reads is evaluated first, what it writes is there when it returns. Python's lock is
released meanwhile.
"""

import ctypes as c
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from metal_kernels.launching.cores import wanted_threads
from metal_kernels.launching.cpu_build import BuildError, built
from metal_kernels.launching.launch import note_launch

# What the library does not take, in words, where it was asked to.
_left: dict[str, None] = {}
# The library's numbers of the types.
TYPES = {mx.bfloat16: 0, mx.float16: 1, mx.float32: 2}
NUMPY_TYPES: dict[mx.Dtype, Any] = {
    mx.float16: np.float16,
    mx.float32: np.float32,
    mx.int32: np.int32,
    mx.bool_: np.bool_,
}
LETTERS: dict[str, Any] = {"p": c.c_void_p, "i": c.c_int, "n": c.c_size_t, "f": c.c_float}
# Arguments by letters: addresses, ints, sizes, floats.
FUNCTIONS = {
    "cpu_linear": "pi n ppp iii nn pi p i p",
    "cpu_gather": "pi nn p ppp iii nn i p",
    "cpu_rms_norm": "pi pi nn f p",
    "cpu_norm_rope": "pi pp i pp pp nnnnnn ii ff",
    "cpu_attention": "ppp i pn pppp pi p nnnn nnnnn n i ff",
    "cpu_argmax": "pi nn pp",
    "cpu_topk": "pi nnn ppp",
    "cpu_logprob": "pi p nn pp",
    "cpu_mask": "pi p nn p",
    "cpu_accept": "pn p pn pn pn pn p p",
    "cpu_dynamic_conv": "pi pi pi p nnn nnnn p",
    "cpu_causal_conv": "ppp ppp i pp pi nn nn nn nn pppp",
    "cpu_gated_delta": "ppp pi pi pp pp pi pi pp i pi pi pp n nn nn nn nn pp",
    "cpu_threads": "i",
}


def missing() -> str | None:
    """Return None where the library runs, else a sentence that says what it lacks.

    Raises ValueError for a number of threads in the environment that is none.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        return f"The CPU library needs MLX's device to be a CPU, not {mx.default_device()}."
    return _loaded()[1]


def known_failure() -> str | None:
    """Return why the library does not run, if it was looked for and does not."""
    return _loaded()[1] if _loaded.cache_info().currsize else None


def call(name: str, *arguments: Any) -> None:
    """Call a function with addresses of arrays, None and numbers; the last array or arrays are written."""
    note_launch(name)
    kept = [dense(x) if isinstance(x, mx.array) else x for x in arguments]
    getattr(_loaded()[0], name)(*[address(x) if isinstance(x, mx.array) else x for x in kept])


def set_threads(count: int) -> None:
    """Compute with so many threads, the caller included, instead of one for each core that may be used."""
    _loaded()[0].cpu_threads(count)


def leave(what: str) -> None:
    """Remember for ``in_words`` that MLX's operations did something in the library's place."""
    _left[what] = None


def in_words() -> str:
    """Say what the library was compiled for, how many threads compute, and what it left to MLX so far."""
    library, left = _loaded()[0], f"; by MLX: {', '.join(sorted(_left))}" if _left else ""
    count = library.cpu_thread_count()
    return f"C for {library.cpu_instructions().decode()}, {count} thread{'s' if count > 1 else ''}{left}"


def dense(x: Any) -> mx.array:
    """Evaluate an array and return it, or a copy where it has gaps in memory."""
    return x if memoryview(x).c_contiguous else mx.contiguous(x)


def address(x: Any) -> int | None:
    """Return where the numbers of a dense array lie, as long as someone holds it; None for none."""
    return c.addressof(c.c_char.from_buffer(x)) if x.size else None


def empty(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return an evaluated array of its own, to be written."""
    return mx.array(_template(shape, dtype))


def copied(x: mx.array, shape: tuple[int, ...], offset: int = 0) -> mx.array:
    """Return the numbers of x from a byte on, in another shape: MLX takes longer to evaluate a view."""
    x, out = dense(x), empty(shape, x.dtype)
    start, place = address(x), address(out)
    if start is not None and place is not None:
        c.memmove(place, start + offset, out.nbytes)
    return out


@cache
def _loaded() -> tuple[Any, str | None]:
    try:
        library = c.CDLL(str(built()))
    except BuildError as error:
        return None, f"The CPU library does not run: {error}."
    except OSError as error:
        return None, f"The CPU library does not run: it cannot be loaded: {error}."
    for name, letters in FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes = [LETTERS[letter] for letter in letters.replace(" ", "")]
        function.restype = None
    library.cpu_instructions.restype, library.cpu_thread_count.restype = c.c_char_p, c.c_int
    library.cpu_threads(wanted_threads())
    return library, None


class _Device(c.Structure):
    _fields_ = [("type", c.c_int32), ("number", c.c_int32)]


class _Tensor(c.Structure):
    """``DLManagedTensor`` of dlpack.h."""

    _fields_ = [
        ("data", c.c_void_p),
        ("device", _Device),
        ("ndim", c.c_int32),
        ("code", c.c_uint8),
        ("bits", c.c_uint8),
        ("lanes", c.c_uint16),
        ("shape", c.POINTER(c.c_int64)),
        ("strides", c.c_void_p),
        ("offset", c.c_uint64),
        ("context", c.c_void_p),
        ("deleter", c.c_void_p),
    ]


class _Template:
    """Zeros in bfloat16, which numpy does not know, as DLPack hands them over; ``mx.array`` copies them."""

    DEVICE, CODE = (1, 0), 4  # kDLCPU, kDLBfloat

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.memory = np.zeros(shape, np.uint16)
        self.shape = (c.c_int64 * len(shape))(*shape)
        place = self.memory.ctypes.data, _Device(*self.DEVICE), len(shape)
        self.tensor = _Tensor(*place, self.CODE, 16, 1, self.shape, None, 0, None, None)

    def __dlpack__(self, **_: Any) -> Any:
        return _capsule(c.addressof(self.tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.DEVICE


_capsule = c.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = c.py_object, [c.c_void_p, c.c_char_p, c.c_void_p]


@lru_cache(maxsize=512)
def _template(shape: tuple[int, ...], dtype: mx.Dtype) -> Any:
    """Return what ``mx.array`` makes a new array of. Its zeros are pages that the system never fills."""
    if dtype == mx.bfloat16:
        return _Template(shape)
    return np.zeros(shape, NUMPY_TYPES[dtype])
