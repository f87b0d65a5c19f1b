"""A kernel body, and how it is launched: on an Apple GPU, or on an NVIDIA GPU through the CUDA dialect."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import mlx.core as mx

from metal_kernels.launching import cuda_dialect

FOLDER = Path(__file__).parent.parent
BODY = "// body\n"
Launcher = Callable[..., list[mx.array]]
Variant = tuple[str, ...]
"""The name of a kernel, and the template values that its text is compiled for."""


@dataclass(frozen=True)
class Kernel:
    """A kernel: ``<name>.metal`` holds helper functions, then a line ``// body``, then the body.

    inputs, outputs: the names that the body gives to its buffers. includes: names of files whose text goes
    before the helpers. cuda_twin: name of a ``.cu`` file of the same form that NVIDIA GPUs run instead.
    scratch: outputs that only another kernel reads, so that elements which nobody reads may stay unwritten.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    includes: tuple[str, ...] = ()
    cuda_twin: str | None = None
    scratch: tuple[str, ...] = ()

    def text(self, file: str | None = None) -> tuple[str, str]:
        """Return (helpers, body) of the ``.metal`` file, or of the file that is named."""
        helpers, body = (FOLDER / (file or f"{self.name}.metal")).read_text().split(BODY)
        return "".join((FOLDER / name).read_text() for name in self.includes) + helpers, body

    def __call__(
        self,
        inputs: Sequence[mx.array],
        *,
        template: Sequence[tuple[str, Any]],
        groups: tuple[int, int, int],
        threads: tuple[int, int, int],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Launch ``groups`` threadgroups of ``threads`` threads; returns the outputs, not initialised before.

        template: names and values (dtypes, ints, bools) that the text is specialised for.
        """
        note_launch(self)
        values = [*template, ("SIGNATURE", signature(inputs))]
        if _variants is not None:
            _variants.add((self.name, *(f"{name}={value}" for name, value in values)))
        return (_launcher or _gpu_launcher)(self)(
            inputs=list(inputs),
            template=values,
            grid=tuple(g * t for g, t in zip(groups, threads, strict=True)),
            threadgroup=threads,
            output_shapes=list(shapes),
            output_dtypes=list(dtypes),
        )


def signature(inputs: Sequence[mx.array]) -> int:
    """Return a number that differs where the signature that MLX writes for a kernel does.

    MLX finds compiled kernels by name and template alone. Where the same ones came with another dtype, its CUDA
    backend would run the wrong kernel; and Metal's compile again at each change between less than eight elements,
    which are passed in constant memory, and more.
    """
    words = [f"{x.dtype}{' few' * (x.size < 8)}{' scalar' * (x.ndim == 0)}" for x in inputs]
    return crc32(",".join(words).encode()) >> 1


_launcher: Callable[[Kernel], Launcher] | None = None
_launched: list[Kernel | str] | None = None
_variants: set[Variant] | None = None


@contextmanager
def launching(launcher: Callable[[Kernel], Launcher]) -> Iterator[None]:
    """Launch every kernel through ``launcher``; this is how the emulator of the tests runs the ``.metal`` text."""
    global _launcher
    before, _launcher = _launcher, launcher
    try:
        yield
    finally:
        _launcher = before


def note_launch(what: Kernel | str) -> None:
    """Note a kernel, or a function of the CPU library by its name, for ``noting_launches``."""
    if _launched is not None:
        _launched.append(what)


@contextmanager
def noting_launches() -> Iterator[list[Kernel | str]]:
    """Note every kernel and CPU function that is launched inside the block, in the list that is returned."""
    global _launched
    before, _launched = _launched, []
    try:
        yield _launched
    finally:
        _launched = before


@contextmanager
def noting_variants() -> Iterator[set[Variant]]:
    """Note what has to be compiled for the launches inside the block: each variant takes a GPU time once."""
    global _variants
    before, _variants = _variants, set()
    try:
        yield _variants
    finally:
        _variants = before


def can_launch() -> bool:
    """Whether kernels run here: on the default device, or through the emulator."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    return _launcher is not None or (on_gpu and (mx.metal.is_available() or mx.cuda.is_available()))


def runs_on_cuda() -> bool:
    """Whether kernels are launched on an NVIDIA GPU."""
    return _launcher is None and not mx.metal.is_available() and mx.cuda.is_available()


def is_emulated() -> bool:
    """Whether ``launching`` replaces the GPU."""
    return _launcher is not None


@cache
def _gpu_launcher(kernel: Kernel) -> Launcher:
    names: dict[str, Any] = {"input_names": list(kernel.inputs), "output_names": list(kernel.outputs)}
    if mx.metal.is_available():
        helpers, body = kernel.text()
        return cast(Launcher, mx.fast.metal_kernel(name=kernel.name, source=body, header=helpers, **names))
    if kernel.cuda_twin:
        helpers, body = kernel.text(kernel.cuda_twin)
    else:
        helpers, body = cuda_dialect.translate(*kernel.text())
    return cast(Launcher, mx.fast.cuda_kernel(name=kernel.name, source=body, header=helpers, **names))
