"""Where the packages keep files that they can create again."""

import atexit
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache folder, which may not exist yet.

    It is ``$MLX_SPEC_CACHE``; where this is unset or empty, ``~/Library/Caches/mlx_spec`` on macOS, and elsewhere
    ``$XDG_CACHE_HOME/mlx_spec`` or ``~/.cache/mlx_spec``. Where there is no home folder it is one of this process.
    Raises ValueError for a ``~user`` in ``$MLX_SPEC_CACHE`` that is not known.
    """
    if chosen := os.environ.get("MLX_SPEC_CACHE"):
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            raise ValueError(
                f"MLX_SPEC_CACHE is {chosen!r}, whose home folder is not known; give the full path."
            ) from None
    if sys.platform != "darwin" and (xdg := os.environ.get("XDG_CACHE_HOME")):
        return Path(xdg) / "mlx_spec"
    try:
        home = Path.home()
    except RuntimeError:
        return _temporary_folder()
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "mlx_spec"


@cache
def _temporary_folder() -> Path:
    """Return a folder that nobody else can write to, because compiled code is loaded from it."""
    folder = Path(tempfile.mkdtemp(prefix="mlx_spec-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
