"""What holds for every test."""

import os
from collections.abc import Iterator

import mlx.core as mx
import pytest

from metal_kernels.launching import cpu_library
from metal_kernels.launching.cores import VARIABLE, usable_cores


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Compile the CPU library once, before tests choose cache folders of their own."""
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        # Several processes that each take all cores wait for each other.
        os.environ.setdefault(VARIABLE, str(max(1, usable_cores() // int(workers))))
    cpu_library.missing()


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Run compiled functions as they are: MLX on a CPU takes a second or more for each operation that it fuses."""
    mx.disable_compile()
    yield
    mx.enable_compile()
