"""Tests that load models as they are loaded on another device."""

from collections.abc import Callable

import pytest

MODULES = ("drafter", "weights")


def set_on_cpu(monkeypatch: pytest.MonkeyPatch, on_cpu: Callable[[], bool]) -> None:
    """Let the loader take MLX's device for a CPU, or for none."""
    for module in MODULES:
        monkeypatch.setattr(f"mlx_spec.loading.{module}.on_cpu", on_cpu)
