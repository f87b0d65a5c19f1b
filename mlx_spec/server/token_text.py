"""The bytes of single tokens, which need not be whole characters."""

import re
from functools import cache
from typing import Any

BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes that a token adds to a text; of a special one its name."""
    name = tokenizer.convert_ids_to_tokens(token)
    if name is None:
        return b""
    if found := BYTE.fullmatch(name):
        return bytes([int(found[1], 16)])
    text = str(tokenizer.decode([token]))
    if "\ufffd" not in text:
        return text.encode()
    table = byte_level()
    return bytes(table[c] for c in name) if all(c in table for c in name) else text.encode()


@cache
def byte_level() -> dict[str, int]:
    """Return which byte each character of byte-level tokens stands for, as GPT-2 defined it."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(others)}
