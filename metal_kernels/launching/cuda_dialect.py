"""The text of a Metal kernel as CUDA: attributes become variables, address spaces disappear."""

import re
from pathlib import Path

HEADER = Path(__file__).with_suffix(".h")
# Metal's thread attributes that the bodies use, as expressions of CUDA.
_LINEAR = "((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x)"
ATTRIBUTES = {
    "thread_position_in_threadgroup": ("uint3", "threadIdx"),
    "threadgroup_position_in_grid": ("uint3", "blockIdx"),
    "threadgroups_per_grid": ("uint3", "make_uint3(gridDim.x, gridDim.y, gridDim.z)"),
    "thread_index_in_threadgroup": ("uint", _LINEAR),
    "thread_index_in_simdgroup": ("uint", f"({_LINEAR} & 31)"),
    "simdgroup_index_in_threadgroup": ("uint", f"({_LINEAR} >> 5)"),
}


def translate(helpers: str, body: str) -> tuple[str, str]:
    """Return (header, source) for ``mx.fast.cuda_kernel``.

    Threadgroup arrays are declared as ``threadgroup T name[...]`` at the start of a statement; everywhere else the
    address space words only qualify pointers and are dropped.
    """
    prologue = "".join(
        f"const {kind} {name} = {value};\n" for name, (kind, value) in ATTRIBUTES.items() if name in body
    )
    return HEADER.read_text() + _plain(helpers), prologue + _plain(body)


def _plain(text: str) -> str:
    text = re.sub(r"(?m)^#include <metal_\w+>$", "", text)
    text = re.sub(r"(?m)^(\s*)threadgroup (?=[^;(]*\[[^;]*;)", r"\1__shared__ ", text)
    return re.sub(r"\b(device|constant|thread|threadgroup) (?!_)", "", text)
