"""The results of measurements on this machine: one JSON file in the cache folder, one entry a measurement."""

import hashlib
import json
import os
import platform
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
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
    """Return all entries by key; a missing or damaged file has none."""
    try:
        known = json.loads(path().read_text(encoding="utf-8"))
        return known if isinstance(known, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def write(key: str, entry: object) -> None:
    """Add or replace an entry, atomically. Where the file cannot be written, nothing is stored.

    key: see ``key``.
    entry: any JSON value.
    """
    try:
        file = path()
    except ValueError:
        return
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(read() | {key: entry}, indent=1))
        temporary.replace(file)
    except OSError:
        with suppress(OSError):
            temporary.unlink()


def path() -> Path:
    """Return the path of the file."""
    return cache_folder() / NAME


def key(target: Target, *more: str) -> str:
    """Return a key of machine, model, versions, the implementation of the operations, and ``more``."""
    weights = dict(tree_flatten(target.model.parameters()))
    parts = [
        platform.node(),
        platform.machine(),
        str(mx.default_device()),
        implementation(),
        *(f"{name} {version_of(name)}" for name in ("mlx", "mlx-lm", "mlx-spec")),
        code_digest(),
        target.name,
        f"{sum(w.nbytes for w in weights.values())} bytes {target.dtype}",
        *more,
    ]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def version_of(package: str) -> str:
    """Return the version of an installed package; one that was copied here, or packed, has none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


@cache
def code_digest() -> str:
    """Return a digest of the code of a pass: in a checkout it changes while the version does not."""
    packages = (Path(metal_kernels.__file__).parent, Path(mlx_spec.target.__file__).parent)
    files = sorted(path for package in packages for path in package.rglob("*") if is_source(path))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def is_source(path: Path) -> bool:
    """Return whether a file is source, and not in Python's cache."""
    return path.is_file() and "__pycache__" not in path.parts
