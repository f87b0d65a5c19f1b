"""Reading the JSON files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from mlx_spec.errors import ModelError

LFS_POINTER = b"version https://git-lfs.github.com/spec"


def read_config(folder: Path, name: str, what: str, error: type[ModelError]) -> dict[str, Any]:
    """Return the configuration of a checkpoint.

    folder: of the checkpoint.
    name: what the user calls it, for messages.
    what: "model" or "drafter", for messages.
    error: raised when there is no configuration, or when it is no JSON object.
    """
    if not (folder / "config.json").exists() and not (folder / "config.json").is_symlink():
        raise error(f"{name} is no {what}: it has no config.json.")
    return read_json(folder / "config.json", name, error)


def read_json(path: Path, name: str, error: type[ModelError]) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint.

    name: of the checkpoint, for messages.
    error: raised where the file cannot be read or holds anything else.
    """
    try:
        text = path.read_bytes()
    except OSError as reason:
        raise error(f"{name}: {path.name} cannot be read ({reason.strerror or reason}).") from None
    if text.startswith(LFS_POINTER):
        raise error(f"{name}: {path.name} is a Git LFS pointer, not the file itself: run git lfs pull there.")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise error(f"{name}: {path.name} is not valid JSON ({reason}); download it again.") from None
    if not isinstance(content, dict):
        raise error(f"{name}: {path.name} holds a {type(content).__name__}, not an object.")
    return content
