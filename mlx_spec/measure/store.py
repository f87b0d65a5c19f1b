"""What was measured once on this machine: one JSON file in the cache folder, an entry a measurement."""

import hashlib
import json
import os
import platform
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

import metal_kernels
import mlx_spec.target
from metal_kernels.launching.implementations import implementation
from mlx_spec.cache_folder import cache_folder
from mlx_spec.target import Target

NAME = "machine.json"


def read() -> dict[str, Any]:
    """Return all entries; a missing or damaged file holds none."""
    try:
        known = json.loads(path().read_text())
        return known if isinstance(known, dict) else {}
    except (OSError, ValueError):
        return {}


def write(key: str, entry: object) -> None:
    """Add an entry to those that are there, in one step; a full disk only means measuring again next time."""
    place = path()
    temporary = place.with_suffix(f".{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(read() | {key: entry}, indent=1))
        temporary.replace(place)
    except OSError:
        with suppress(OSError):
            temporary.unlink()


def path() -> Path:
    """Return where the entries are."""
    return cache_folder() / NAME


def key(target: Target, *more: str) -> str:
    """Identify machine, model, versions, the implementation of the operations, and what ``more`` names."""
    weights = dict(tree_flatten(target.model.parameters()))
    parts = [
        platform.node(),
        platform.machine(),
        str(mx.default_device()),
        implementation(),
        *(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "mlx-spec")),
        code_digest(),
        target.name,
        f"{sum(w.nbytes for w in weights.values())} bytes {target.dtype}",
        *more,
    ]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


@cache
def code_digest() -> str:
    """Identify the code of a pass: installed from a repository, it changes while its version does not."""
    packages = (Path(metal_kernels.__file__).parent, Path(mlx_spec.target.__file__).parent)
    files = sorted(path for package in packages for path in package.rglob("*") if is_source(path))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def is_source(path: Path) -> bool:
    """Whether a file is part of the code, which what Python caches is not."""
    return path.is_file() and "__pycache__" not in path.parts
