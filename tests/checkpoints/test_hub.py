"""Fetching from Hugging Face: what is asked for, and what is said where it cannot be had."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from mlx_spec.checkpoints import hub
from mlx_spec.errors import DownloadError

REPO = [
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "model-00001-of-00001.safetensors",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
    "vocab.txt",
    "qwen.tiktoken",
    "consolidated.safetensors",
    "adapters.safetensors",
    "original/model.safetensors",
    "onnx/model.onnx",
    "spm.model",
    "pytorch_model.bin",
    "README.md",
]


def test_a_model_is_what_mlx_lm_fetches_too() -> None:
    """So a repo that one of them has in its cache is complete for the other."""
    ours = list(filter_repo_objects(REPO, allow_patterns=hub.FILES))
    assert ours == REPO[:9]
    assert set(ours) <= set(filter_repo_objects(REPO, allow_patterns=DEFAULT_ALLOW_PATTERNS))


def test_a_drafter_may_have_any_weights() -> None:
    found = list(filter_repo_objects(REPO, allow_patterns=hub.DRAFTER_FILES))
    assert {"consolidated.safetensors", "adapters.safetensors"} < set(found)
    assert "pytorch_model.bin" not in found


def test_a_cache_without_a_head_is_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        if len(asked) == 1:
            raise FileNotFoundError("mtp.safetensors is not in the cache")
        return "/cached"

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    assert hub.resolve("owner/name") == Path("/cached")
    assert asked == [[*hub.FILES, *hub.HEAD_FILES], hub.FILES]


@pytest.mark.parametrize("value", ["0", "true", ""])
def test_offline_is_what_hugging_face_takes_for_it(value: str) -> None:
    code = "from mlx_spec.checkpoints.hub import resolve\nresolve('no-one/nothing')"
    environment = {**os.environ, "HF_HUB_OFFLINE": value, "HF_ENDPOINT": "http://127.0.0.1:9"}
    environment.pop("TRANSFORMERS_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment
    )
    assert "no-one/nothing is no folder here and could not be fetched from Hugging Face" in done.stderr
    assert ("(HF_HUB_OFFLINE is set)" in done.stderr) == (value in ("1", "true"))


def test_a_home_folder_that_is_not_known_is_refused() -> None:
    with pytest.raises(DownloadError, match="'~nouserx/m' begins with a home folder that is not known"):
        hub.resolve("~nouserx/m")
