"""Reading what a setting was given: numbers of any library, and None for the default."""

from dataclasses import MISSING, fields
from typing import Any

from mlx_spec.errors import RequestError


def whole(name: str, value: Any) -> int:
    """Return a whole number, such as 5, 5.0 or numpy's 5. Raises RequestError for anything else."""
    try:
        if not isinstance(value, str | bytes) and int(value) == value:
            return int(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise RequestError(f"{name} must be a whole number, not {value!r}.")


def number(name: str, value: Any) -> float:
    """Return a number. Raises RequestError for what is none."""
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise RequestError(f"{name} must be a number, not {value!r}.")


def fill_defaults(settings: Any) -> None:
    """Put the default in the place of None, in a frozen dataclass under construction."""
    for field in fields(settings):
        if getattr(settings, field.name) is None:
            make = field.default_factory
            put(settings, field.name, field.default if make is MISSING else make())


def put(settings: Any, name: str, value: Any) -> None:
    """Set a field of a frozen dataclass under construction."""
    object.__setattr__(settings, name, value)
