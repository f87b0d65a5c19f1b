"""What holds for every test."""

import pytest

from metal_kernels.launching import cpu_library


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Compile the CPU library once, before tests choose cache folders of their own."""
    cpu_library.missing()
