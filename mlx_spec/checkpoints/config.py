"""Reading a checkpoint's ``config.json``."""

import json
from pathlib import Path
from typing import Any

from mlx_spec.errors import ModelError


def read_config(folder: Path, name: str, what: str, error: type[ModelError]) -> dict[str, Any]:
    """Return the configuration of a checkpoint.

    folder: of the checkpoint.
    name: what the user calls it, for messages.
    what: "model" or "drafter", for messages.
    error: raised when there is no configuration, or when it is no JSON object.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise error(f"{name} is no {what}: it has no config.json.") from None
    except ValueError as reason:
        raise error(f"{name}: config.json is not valid JSON ({reason}).") from None
    if not isinstance(config, dict):
        raise error(f"{name}: config.json holds a {type(config).__name__}, not an object.")
    return config
