"""Runs the ``.metal`` text of ``metal_kernels`` on a CPU.

The text that MLX generates for a kernel is compiled as C++ against ``metal.h``. Every GPU thread is a fiber on one
CPU thread (``runtime.cpp``): they run one after the other and change at simdgroup operations and barriers, where
all threads of a simdgroup or threadgroup must meet. Buffers and threadgroup arrays end at an unmapped page.

    with launching(launcher):
        y = wrapper(x)

What a CPU cannot show: speed, the last bits of exp and its like (the C library's here), Apple's own compiler, and
mistakes in the memory flags of a barrier.
"""

from emulator.compiler import has_clang as has_clang
from emulator.errors import EmulatorError as EmulatorError
from emulator.run import launcher as launcher
