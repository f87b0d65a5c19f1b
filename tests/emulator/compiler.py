"""Compiles kernels and the runtime; compiled code is kept under ``build/emulator``."""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from emulator.errors import EmulatorError

HERE = Path(__file__).parent
KEPT = HERE.parent.parent / "build" / "emulator"


def _version(compiler: str) -> int:
    shown = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True).stdout
    return int(shown.split(".")[0]) if re.match(r"\d", shown) else 0


def _find_compiler() -> str:
    """Clang from 17 on puts fused multiply-adds where Apple's compiler puts them; others come after it."""
    if wanted := os.environ.get("EMULATOR_CXX"):
        return wanted
    for name in ("clang++", *(f"clang++-{version}" for version in range(25, 16, -1))):
        if shutil.which(name) and _version(name) >= 17:
            return name
    for name in ("clang++", "g++", "c++"):
        if shutil.which(name):
            return name
    raise EmulatorError("no C++ compiler: install clang-19 (or g++ from 12 on)")


COMPILER = _find_compiler()
has_clang = "clang" in COMPILER and _version(COMPILER) >= 17


@cache
def _flags() -> list[str]:
    flags = "-std=c++20 -O2 -fPIC -shared -w -fvisibility=hidden -fno-strict-aliasing -fwrapv -fno-math-errno"
    # Locals that were never set are the same in every run, and deep stacks meet their unmapped page.
    flags += " -ftrivial-auto-var-init=pattern -fno-stack-protector -fstack-clash-protection -U_FORTIFY_SOURCE"
    if platform.machine() in ("x86_64", "AMD64"):
        flags += " -mavx2 -mfma -mf16c -fcf-protection=none"
        # Every operation of half rounds, as arm64's do.
        if "clang" in COMPILER:
            flags += " -Xclang -ffloat16-excess-precision=none"
        elif _version(COMPILER) >= 13:
            flags += " -fexcess-precision=16"
    flags += f" -ffp-contract={'on' if 'clang' in COMPILER else 'off'}"
    return flags.split()


# ``metal.h`` defines what these checks call.
CHECKS = ["-fsanitize=alignment,bounds,shift,integer-divide-by-zero", "-fno-sanitize-recover=all"]
CHECKS += ["-fno-sanitize-link-runtime"]


@cache
def _shim() -> str:
    return "".join(path.read_text() for path in sorted(HERE.glob("*.h")))


def compiled(name: str, cpp: str, lint: str | None = None) -> ctypes.CDLL:
    """Compile and load C++. A kernel comes with its text for ``address_spaces.h``, which clang only reads."""
    flags = _flags() + (CHECKS if lint and has_clang else [])
    text = "\0".join([name, cpp, lint or "", COMPILER, *flags, _shim()])
    library = KEPT / (hashlib.sha256(text.encode()).hexdigest()[:32] + ".so")
    if not library.exists():
        _compile(name, cpp, lint, flags, library)
    return ctypes.CDLL(str(library))


def _compile(name: str, cpp: str, lint: str | None, flags: list[str], library: Path) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT) as folder:
        built = os.path.join(folder, "kernel.so")
        source = Path(folder, "kernel.cpp")
        source.write_text(cpp)
        check = _start_lint(lint, folder) if lint and has_clang else None
        command = [COMPILER, *flags, "-I", str(HERE), str(source), "-o", built]
        done = subprocess.run(command, capture_output=True, text=True)
        if check:
            _, said = check.communicate()
            if check.returncode:
                raise EmulatorError(f"{name}: Metal would refuse this kernel:\n{said[:4000]}")
        if done.returncode:
            raise EmulatorError(f"{name} does not compile:\n{done.stderr[:4000]}")
        os.replace(built, library)


def _start_lint(lint: str, folder: str) -> subprocess.Popen[str]:
    source = Path(folder, "lint.cpp")
    source.write_text(lint)
    command = [COMPILER, "-std=c++14", "-fsyntax-only", "-nostdinc", "-w", "-I", str(HERE), str(source)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
