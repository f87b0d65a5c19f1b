"""The CUDA form of a kernel as MLX would compile it, and its compilation by nvcc."""

import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from emulator.compiler import KEPT

from metal_kernels.launching.launch import Kernel

INCLUDE = re.compile(r"(?m)^#include <.*>$")
CUDA_TYPES = {mx.bfloat16: "__nv_bfloat16", mx.float16: "__half", mx.float32: "float", mx.bool_: "bool"}


def cuda_type(dtype: mx.Dtype) -> str:
    return CUDA_TYPES.get(dtype) or str(dtype).split(".")[-1] + "_t"


def template_value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};\n"
    return (
        f"constexpr int {name} = {value};\n" if isinstance(value, int) else f"using {name} = {cuda_type(value)};\n"
    )


def cuda_text(
    kernel: Kernel,
    text: tuple[str, str],
    template: Iterable[tuple[str, Any]],
    inputs: Iterable[mx.Dtype],
    outputs: Iterable[mx.Dtype],
) -> str:
    """Write around (header, source) what ``mx.fast.cuda_kernel`` writes around it."""
    header, source = text
    arguments = []
    for name, dtype in zip(kernel.inputs, inputs, strict=True):
        arguments.append(f"const {cuda_type(dtype)}* {name}")
        if f"{name}_shape" in source:
            arguments.append(f"const int* {name}_shape")
    arguments += [f"{cuda_type(dtype)}* {name}" for name, dtype in zip(kernel.outputs, outputs, strict=True)]
    values = "".join(template_value(name, value) for name, value in template)
    return (
        "#include <cstdint>\n#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <cooperative_groups.h>\n"
        f"{header}\nnamespace mlx::core::cu {{\n"
        f'extern "C" __global__ void {kernel.name}({", ".join(arguments)}) {{\n{values}{source}\n}}\n}}\n'
    )


def together(texts: Mapping[str, str]) -> str:
    """Join texts by name, each in a namespace of its own: most of a compilation is reading CUDA's headers."""
    includes = {line for text in texts.values() for line in INCLUDE.findall(text)}
    parts = [
        f'namespace of_{name} {{\n#line 1 "{name}"\n{INCLUDE.sub("", text)}}}\n' for name, text in texts.items()
    ]
    return "\n".join([*sorted(includes), *parts])


def compile_cuda(text: str, folder: Path) -> None:
    """Compile a text for sm_90, unless that has been done before. Fails with what nvcc says."""
    compiled = KEPT / (hashlib.sha256(text.encode()).hexdigest()[:32] + ".ptx")
    if compiled.exists():
        return
    (folder / "kernel.cu").write_text(text)
    command = ["nvcc", "-std=c++17", "-arch=sm_90", "-ptx", "-o", str(folder / "ptx"), str(folder / "kernel.cu")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shutil.copy(folder / "ptx", compiled)
