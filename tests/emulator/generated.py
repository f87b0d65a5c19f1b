"""The text that MLX generates for a kernel, and that text as C++."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from emulator.errors import EmulatorError
from emulator.lint import complaint, declarations
from metal_kernels.launching import launch
from metal_kernels.launching.launch import Kernel

ATTRIBUTES = {
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threads_per_threadgroup",
    "threadgroups_per_grid",
    "threads_per_grid",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
}


@dataclass(frozen=True)
class Specialisation:
    """All that MLX's text depends on. inputs: dtype, whether it has no axes, whether it is small."""

    kernel: Kernel
    text: tuple[str, str]
    inputs: tuple[tuple[mx.Dtype, bool, bool], ...]
    template: tuple[tuple[str, type, Any], ...]
    outputs: tuple[mx.Dtype, ...]


@dataclass(frozen=True)
class Program:
    """text: what MLX generates. cpp, lint: the same for ``metal.h`` and for ``address_spaces.h``."""

    text: str
    cpp: str
    lint: str


_programs: dict[Specialisation, Program] = {}


def launched() -> list[Specialisation]:
    """Return what this process has launched so far."""
    return list(_programs)


def program(
    kernel: Kernel,
    inputs: Sequence[mx.array],
    template: Sequence[tuple[str, Any]],
    output_dtypes: Sequence[mx.Dtype],
) -> Program:
    """Generate a kernel for inputs of these shapes and dtypes, once."""
    key = Specialisation(
        kernel,
        kernel.text(),
        tuple((x.dtype, x.ndim == 0, x.size < 8) for x in inputs),
        tuple((name, type(value), value) for name, value in template),
        tuple(output_dtypes),
    )
    if key not in _programs:
        _programs[key] = _as_cpp(kernel, generate(kernel, inputs, template, output_dtypes))
    return _programs[key]


def generate(
    kernel: Kernel,
    inputs: Sequence[mx.array],
    template: Sequence[tuple[str, Any]],
    output_dtypes: Sequence[mx.Dtype],
) -> str:
    """Return what MLX compiles on a Mac: while it traces an export, ``verbose`` prints it on any machine."""
    helpers, body = kernel.text()
    metal_kernel: Any = mx.fast.metal_kernel(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=body,
        header=helpers,
    )

    def call(*arrays: mx.array) -> list[mx.array]:
        return metal_kernel(
            inputs=list(arrays),
            template=list(template),
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)] * len(output_dtypes),
            output_dtypes=list(output_dtypes),
            verbose=True,
            stream=mx.gpu,
        )

    with _printed() as printed:
        mx.export_function(lambda _: None, call, *(mx.zeros(x.shape, x.dtype) for x in inputs))
    return printed[0].split("```\n", 1)[1].rsplit("\n```", 1)[0]


@contextmanager
def _printed() -> Iterator[list[str]]:
    """Collect what the process, C++ included, prints to standard output."""
    printed: list[str] = []
    sys.stdout.flush()
    before = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield printed
        finally:
            os.dup2(before, 1)
            os.close(before)
            file.seek(0)
            printed.append(file.read().decode())


# Metal has no double: a literal without a suffix is a float.
_FLOAT = re.compile(r"(?<![\w.])(?:\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?![\w.])")
_INCLUDE = re.compile(r"(?m)^#include <metal_\w+>$")
_UNROLL = re.compile(r"(?m)^\s*#pragma unroll.*$")
# The same declarations as in metal_kernels.launching.cuda_dialect.
_THREADGROUP_ARRAY = re.compile(r"(?m)^(\s*)threadgroup (?=[^;(]*\[[^;]*;)")
_DECLARATION = re.compile(r"(?m)^(\s*)threadgroup ([\w:]+)\s+((?:\w+\s*(?:\[[^\[\];]+\]\s*)+,?\s*)+);")


def _as_cpp(kernel: Kernel, text: str) -> Program:
    helpers, body = kernel.text()
    if not text.startswith(helpers) or body not in text:
        raise EmulatorError(f"{kernel.name}: MLX generates a text that does not hold the kernel's:\n{text}")
    if said := complaint(re.sub("//.*", "", helpers + body)):
        raise EmulatorError(f"{kernel.name}: Metal would refuse this kernel: {said}")
    if _THREADGROUP_ARRAY.search(helpers):
        raise EmulatorError(f"{kernel.name}: a threadgroup array in a helper: Metal takes them in the body alone")
    at = text.index(body, len(helpers))
    signature, rest = text[len(helpers) : at], text[at + len(body) :]
    text_by_file = _INCLUDE.sub("", "".join([*_numbered(kernel, signature), f'\n#line 1 "MLX"\n{rest}']))
    plain = _FLOAT.sub(lambda m: m[0] + "f", re.sub(r"\[\[[^\[\]]*\]\]", "", text_by_file))
    if found := re.search(r"(?m)^\s*threadgroup [^*&(]*?;", _DECLARATION.sub("", plain)):
        raise EmulatorError(f"{kernel.name}: `{found[0].strip()}`: the form is `threadgroup type name[size];`")
    # Loops stay loops: unrolled they give the same numbers, and take up to five times as long to compile.
    rolled = _UNROLL.sub("", _DECLARATION.sub(_declare, plain))
    cpp = f'#include "metal.h"\n{rolled}{_call(kernel, signature, rest)}'
    return Program(text, cpp, declarations(plain, _THREADGROUP_ARRAY))


def _numbered(kernel: Kernel, signature: str) -> Iterator[str]:
    """Yield the parts of the text up to the end of the body; compilers then count lines as the files do."""
    helpers, body = kernel.text()
    for name in kernel.includes:
        included = (launch.FOLDER / name).read_text()
        helpers = helpers.removeprefix(included)
        yield f'#line 1 "{name}"\n{included}'
    yield f'#line 1 "{kernel.name}.metal"\n{helpers}{signature}'
    yield f'#line {helpers.count(chr(10)) + 2} "{kernel.name}.metal"\n{body}'


def _declare(found: re.Match[str]) -> str:
    """Turn ``threadgroup T a[N], b[M];`` into references to memory that the runtime gives and checks."""
    before, kind, names = found.groups()
    return before + "".join(
        f'typedef {kind} {name}_array{sizes}; auto& {name} = emulator::threadgroup_array<{name}_array>("{name}"); '
        for name, sizes in re.findall(r"(\w+)\s*((?:\[[^\[\]]*\]\s*)+)", names)
    )


def _call(kernel: Kernel, signature: str, rest: str) -> str:
    """Return the C++ function that calls the kernel with its buffers and attributes."""
    head = re.search(r"\[\[kernel\]\] void (\w+)\(\n(.*)\) \{\n$", signature, re.S)
    if head is None:
        raise EmulatorError(
            f"{kernel.name}: MLX generates a signature that the emulator does not know:\n{signature}"
        )
    name, parameters = head.groups()
    if specialised := re.search(r"decltype\((.*?)\) ", rest):
        name = specialised[1]
    names = (*kernel.inputs, *kernel.outputs)
    arguments = []
    for parameter in parameters.split(",\n"):
        if buffer := re.fullmatch(
            r"\s*(const )?(device|constant) (\w+)([*&]) (\w+) \[\[buffer\(\d+\)\]\]", parameter
        ):
            const, _, kind, reference, of = buffer.groups()
            if of not in names:
                raise EmulatorError(
                    f"{kernel.name}: the emulator does not pass {of}: use a template value or a buffer"
                )
            pointer = f"({const or ''}{kind}*)buffers[{names.index(of)}]"
            arguments.append(pointer if reference == "*" else f"*{pointer}")
        else:
            attribute = parameter.split()[1]
            if attribute not in ATTRIBUTES:
                raise EmulatorError(f"{kernel.name}: the emulator does not know the attribute {attribute}")
            arguments.append(f"emulator::attribute(emulator::current_thread().{attribute})")
    return (
        '\nextern "C" __attribute__((visibility("default"))) void emulator_body(void** buffers) {\n'
        f"  {name}({', '.join(arguments)});\n}}\n"
    )
