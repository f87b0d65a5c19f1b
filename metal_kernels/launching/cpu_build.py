"""Compiles the C text of ``cpu/`` once for this machine, and keeps the library in the cache folder."""

import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from pathlib import Path

from metal_kernels.launching.cache_folder import cache_folder

FOLDER = Path(__file__).parent.parent / "cpu"
FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"]
# Bits must not depend on where a compiler likes to fuse a product with a sum.
FLAGS += ["-ffp-contract=off", "-fno-math-errno"]
LIBRARIES = ["-lm", "-lpthread"]
SECONDS = 300


class BuildError(Exception):
    """The library cannot be had here; the message is a sentence for users."""


def built() -> Path:
    """Return the library, compiled with ``$CC`` or ``cc`` unless it has been. Raises BuildError."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    flags = [*FLAGS, *(["-march=native"] if platform.machine() == "x86_64" else [])]
    text = b"".join(path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in (".c", ".h"))
    key = hashlib.sha256("\n".join([*compiler, *flags, cpu_features()]).encode() + text).hexdigest()[:16]
    library = cache_folder() / f"cpu-{key}.so"
    if library.is_file():  # it gets this name in one rename, so it is complete
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="cpu.", dir=library.parent) as temporary:
            fresh = Path(temporary) / library.name
            compile_library([*compiler, *flags], fresh)
            os.replace(fresh, library)
    except OSError as error:
        raise BuildError(f"a writable cache folder is needed; {library.parent}: {error.strerror}") from error
    return library


def compile_library(command: list[str], library: Path) -> None:
    """Run a compiler. Raises BuildError with what it said."""
    sources = sorted(str(path) for path in FOLDER.glob("*.c"))
    line = [*command, *sources, "-o", str(library), *LIBRARIES]
    try:
        done = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except FileNotFoundError as error:
        raise BuildError(f"a C compiler is needed; {command[0]} was not found (set CC to name another)") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"a C compiler is needed; {command[0]} cannot be used: {error}") from error
    if done.returncode:
        said = [text for text in done.stderr.splitlines() if "error" in text] or [f"status {done.returncode}"]
        raise BuildError(f"{command[0]} cannot compile {FOLDER}: {said[0]}")


def cpu_features() -> str:
    """Name what a library that was compiled for this machine may need of a CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # macOS, where arm64 is one and the same for this text
        return platform.machine()
    named = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {named}"
