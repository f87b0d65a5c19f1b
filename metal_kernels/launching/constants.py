"""Small arrays of numbers that kernels read: made once, and kept where a kernel reads them fast."""

from functools import lru_cache

import mlx.core as mx

from metal_kernels.launching.launch import runs_on_cuda

# MLX's CUDA backend keeps smaller arrays in host memory, whoever wrote them.
MIN_NUMBERS = 4


@lru_cache(maxsize=8192)
def ints(*numbers: int) -> mx.array:
    """Return fixed numbers as int32 [n], evaluated: an array that is not would be made again in every pass."""
    return _kept(list(numbers), mx.int32)


@lru_cache(maxsize=1024)
def floats(*numbers: float) -> mx.array:
    """Return fixed numbers as float32 [n], evaluated."""
    return _kept(list(numbers), mx.float32)


def resident(numbers: mx.array) -> mx.array:
    """Return an array that the host wrote in the device's own memory, lazily.

    On an NVIDIA GPU each threadgroup that reads it would wait for the bus. Apple GPUs share the host's memory.
    """
    return numbers + 0 if runs_on_cuda() else numbers


def _kept(numbers: list[int] | list[float], dtype: mx.Dtype) -> mx.array:
    padded = resident(mx.array([*numbers, *[0] * (MIN_NUMBERS - len(numbers))], dtype=dtype))
    kept = padded[: len(numbers)]
    mx.eval(kept)
    return kept
