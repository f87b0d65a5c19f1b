"""Finding a checkpoint's folder: one that is here, or a Hugging Face repo, which is fetched."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE

from mlx_spec.demo.model import demo_model_folder
from mlx_spec.errors import DownloadError

DEMO = "demo"
# What is read of the files that mlx-lm fetches: a repo in the cache of one is complete for the other.
FILES = ["*.json", "model*.safetensors", "*.jinja", "*.txt", "*.py", "tokenizer.model", "*.tiktoken"]
# An MTP head may lie beside a model.
HEAD_FILES = ["mtp*.safetensors", "mtp/*.safetensors"]
DRAFTER_FILES = [*FILES, "*.safetensors"]
# What a repo without safetensors may have instead.
TORCH_FILES = "pytorch_model*.bin"


def resolve(name: str, progress: bool = False, files: Sequence[str] = (*FILES, *HEAD_FILES)) -> Path:
    """Return the folder of a checkpoint, which is fetched when needed.

    name: "demo", a folder, or a Hugging Face repo.
    progress: show how far the demo's download is.
    files: patterns of the names of what is fetched of a repo.
    Raises DownloadError, in one sentence, when there is no such model or it cannot be fetched.
    """
    if name == DEMO:
        return demo_model_folder(progress)
    folder = expanded(name)
    if name and folder.is_dir():
        return folder
    if not is_repo(name):
        raise DownloadError(f"{name!r} is neither a folder nor a Hugging Face repo (owner/name).")
    try:
        return fetch(name, files)
    except DownloadError:
        # What mlx-lm left in the cache has no file of a head, and the model is complete without it.
        return fetch(name, FILES)


def expanded(name: str) -> Path:
    """Return a path whose ``~`` is a home folder. Raises DownloadError where there is no such home folder."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise DownloadError(f"{name!r} begins with a home folder that is not known; give the full path.") from None


def with_weights(folder: Path, name: str) -> Path:
    """Return the folder of a repo, with the files that torch wrote where there are no others."""
    return folder if any(folder.glob("*.safetensors")) else fetch(name, [*DRAFTER_FILES, TORCH_FILES])


def is_repo(name: str) -> bool:
    """Whether a name has the form of a Hugging Face repo."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")


def fetch(name: str, patterns: Sequence[str]) -> Path:
    """Return the folder of a repo, with the files that match.

    name: of the repo, owner/name.
    patterns: of file names.
    Raises DownloadError when it cannot be fetched.
    """
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:
        offline = " (HF_HUB_OFFLINE is set)" if HF_HUB_OFFLINE else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DownloadError(
            f"{name} is no folder here and could not be fetched from Hugging Face{offline}: {reason}"
        ) from error
