"""What Metal's compiler refuses and a C++ compiler would let pass."""

import re

_VECTORS = "(?:float|half|bfloat|char|uchar|short|ushort|int|uint)[234]"
_TYPES = "float|half|bfloat|bool|char|uchar|short|ushort|int|uint|long|ulong|size_t|auto|float16_t|bfloat16_t"
_SPACES = "device|constant|threadgroup|thread"


def complaint(text: str) -> str | None:
    """Find what needs no compiler to be seen: a pointer without address space, a lambda, ``metal::as_type``."""
    if "metal::as_type" in text:
        return "as_type is a keyword of Metal: it is written without `metal::`"
    if found := re.search(r"\[[&=]?\]\s*\(", text):
        return f"`{found[0]}`: Metal has no lambdas before Metal 4"
    types = "|".join([_TYPES, _VECTORS, r"u?int\d+_t", *set(re.findall(r"typename (\w+)", text))])
    # A declared pointer or reference, or a cast to one.
    for found in re.finditer(rf"((?:\b\w+\s+)*)\b(?:{types})\s*(?:const\s*)?[*&]\s*(?:\w+\s*[=,;)\[]|\))", text):
        if not re.search(rf"\b(?:{_SPACES}|typename)\b", found[1]):
            return f"`{found[0].strip()}`: pointers and references name an address space (device, thread, ...)"
    return None


def declarations(text: str, threadgroup_array: re.Pattern[str]) -> str:
    """Return the text for ``address_spaces.h``, whose vectors have no constructors."""
    text = threadgroup_array.sub(r"\1static threadgroup ", text)
    text = re.sub(rf"\b({_VECTORS})(?=\()", r"make_\1", text)
    return f'#include "address_spaces.h"\n{text}'
