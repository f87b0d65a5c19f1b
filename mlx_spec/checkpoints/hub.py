"""Finding a checkpoint's folder: one that is here, or a Hugging Face repo, which is fetched."""

import os
from pathlib import Path

from huggingface_hub import snapshot_download

from mlx_spec.demo.model import demo_model_folder
from mlx_spec.errors import DownloadError

DEMO = "demo"
FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
# What a repo without safetensors may have instead.
TORCH_FILES = "pytorch_model*.bin"


def resolve(name: str, progress: bool = False) -> Path:
    """Return the folder of a model, which is fetched when needed.

    name: "demo", a folder, or a Hugging Face repo.
    progress: show how far the demo's download is.
    Raises DownloadError, in one sentence, when there is no such model or it cannot be fetched.
    """
    if name == DEMO:
        return demo_model_folder(progress)
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if not is_repo(name):
        raise DownloadError(f"{name!r} is neither a folder nor a Hugging Face repo (owner/name).")
    return fetch(name, FILES)


def with_weights(folder: Path, name: str) -> Path:
    """Return the folder of a repo, with the files that torch wrote where there are no others."""
    return folder if any(folder.glob("*.safetensors")) else fetch(name, [*FILES, TORCH_FILES])


def is_repo(name: str) -> bool:
    """Whether a name has the form of a Hugging Face repo."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")


def fetch(name: str, patterns: list[str]) -> Path:
    """Return the folder of a repo, with the files that match.

    name: of the repo, owner/name.
    patterns: of file names.
    Raises DownloadError when it cannot be fetched.
    """
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DownloadError(
            f"{name} is no folder here and could not be fetched from Hugging Face{offline}: {reason}"
        ) from error
