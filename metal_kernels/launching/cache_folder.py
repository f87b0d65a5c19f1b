"""Where the packages keep files that they can create again."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache folder, which may not exist yet.

    It is ``$MLX_SPEC_CACHE``; where this is unset or empty, ``~/Library/Caches/mlx_spec`` on macOS, and elsewhere
    ``$XDG_CACHE_HOME/mlx_spec`` or ``~/.cache/mlx_spec``.
    """
    if chosen := os.environ.get("MLX_SPEC_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx_spec"
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "mlx_spec"
    return Path.home() / ".cache" / "mlx_spec"
