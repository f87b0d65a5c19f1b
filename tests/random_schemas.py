"""Random JSON schemas whose values are short, and what a text must be under one."""

import json
import random
from typing import Any

import jsonschema

WORDS = ["name", "age", "city", "tags", "x", "is_ready", "Größe", "a b"]


def random_schema(seed: int) -> dict[str, Any]:
    """Return an object's schema, the same one for the same seed."""
    return random_object(random.Random(seed), depth=2)


def random_value(lot: random.Random, depth: int) -> dict[str, Any]:
    makers = [random_text, random_whole, random_number, random_choice, lambda lot: {"type": "boolean"}]
    if depth and lot.random() < 0.4:
        return lot.choice([random_object, random_list, random_either])(lot, depth - 1)
    return lot.choice(makers)(lot)


def random_object(lot: random.Random, depth: int) -> dict[str, Any]:
    names = lot.sample(WORDS, lot.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: random_value(lot, depth) for name in names},
        "required": [name for name in names if lot.random() < 0.7],
        "additionalProperties": False,
    }


def random_list(lot: random.Random, depth: int) -> dict[str, Any]:
    least = lot.randint(0, 2)
    items = random_value(lot, depth)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + lot.randint(0, 2)}


def random_either(lot: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_value(lot, depth), {"type": "null"}]}


def random_text(lot: random.Random) -> dict[str, Any]:
    return lot.choice(
        [
            {"type": "string", "maxLength": lot.randint(1, 12)},
            {"type": "string", "minLength": 2, "maxLength": 5},
            {"type": "string", "pattern": "^[a-z]{1,6}$"},
            {"type": "string", "format": "date"},
        ]
    )


def random_whole(lot: random.Random) -> dict[str, Any]:
    least = lot.randint(-20, 20)
    return {"type": "integer", "minimum": least, "maximum": least + lot.randint(0, 300)}


def random_number(lot: random.Random) -> dict[str, Any]:
    return {"type": "number", "minimum": 0, "maximum": lot.choice([1, 10, 2.5])}


def random_choice(lot: random.Random) -> dict[str, Any]:
    return lot.choice([{"enum": lot.sample(["red", "green", 7, None, True, [1]], 3)}, {"const": {"k": [1, "z"]}}])


def check(text: str, finish_reason: str | None, schema: dict[str, Any]) -> None:
    """Assert that a text is valid under a schema, unless its length cut it."""
    if finish_reason != "length":
        assert finish_reason == "stop"
        jsonschema.validate(json.loads(text), schema)
