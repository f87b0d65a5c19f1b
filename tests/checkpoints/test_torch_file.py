"""Files that torch wrote are read without torch, and run nothing."""

import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_spec.checkpoints.tensors import read_files
from mlx_spec.checkpoints.torch_file import Storage, read_torch_files, rebuild_tensor
from mlx_spec.errors import DrafterMismatch

ORACLES = Path(__file__).parent.parent / "oracles" / "speculators"


def test_tensors_equal_those_of_the_safetensors_file() -> None:
    """Written by torch: bfloat16, float32 views of one storage, int64, bool, and a transposed one."""
    found = read_torch_files([ORACLES / "torch_bin" / "pytorch_model.bin"], "head")
    expected = read_files([ORACLES / "llama" / "model.safetensors"], "head")
    renamed = {name.replace("layers.0.", "midlayer."): value for name, value in expected.items()}
    assert found.keys() == renamed.keys()
    for name, value in found.items():
        assert value.shape == renamed[name].shape
        assert mx.array_equal(value.astype(mx.float32), renamed[name].astype(mx.float32)), name
    assert found["fc.weight"].dtype == mx.bfloat16
    assert found["midlayer.hidden_norm.weight"].dtype == mx.float32
    assert (found["d2t"].dtype, found["t2d"].dtype) == (mx.int64, mx.bool_)


class Named:
    """Pickled as a call of what a file names."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def write(path: Path, content: Any, storages: dict[str, bytes] | None = None) -> Path:
    """Write an archive of torch's form."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
        for key, value in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", value)
    return path


def refusal(path: Path, *words: str) -> None:
    with pytest.raises(DrafterMismatch) as error:
        read_torch_files([path], "the head")
    assert all(word in str(error.value) for word in ("the head", path.name, *words)), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "call", [Named(os.system, "touch ran"), Named(eval, "1 + 1"), Named(getattr, "a", "upper"), Named(np.zeros, 3)]
)
def test_a_file_that_names_functions_runs_none(
    call: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refusal(write(tmp_path / "pytorch_model.bin", {"fc.weight": call}), "more than tensors", "safetensors")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {"state": {"a": 1}}])
def test_other_contents_are_refused(content: Any, tmp_path: Path) -> None:
    refusal(write(tmp_path / "pytorch_model.bin", content), "no dictionary of tensors")


@pytest.mark.parametrize(
    "arguments, word",
    [
        ((0, (4, 4), (4, 1)), "ends at 15"),
        ((7, (2,), (1,)), "ends at 8"),
        ((0, (2,), (-1,)), "without a storage"),
        ((-1, (2,), (1,)), "without a storage"),
    ],
)
def test_tensors_that_reach_beyond_their_storage_are_refused(arguments: tuple[Any, ...], word: str) -> None:
    storage = Storage(np.zeros(8, dtype=np.float32), mx.float32)
    with pytest.raises(pickle.UnpicklingError, match=word):
        rebuild_tensor(storage, *arguments)


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_broken_and_old_files(part: float, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    whole = (ORACLES / "torch_bin" / path.name).read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    refusal(path, "download it again", "torch before 1.6")


def test_several_files_make_one_head(tmp_path: Path) -> None:
    first = tmp_path / "pytorch_model-00001-of-00002.bin"
    shutil.copy(ORACLES / "torch_bin" / "pytorch_model.bin", first)
    second = write(tmp_path / "pytorch_model-00002-of-00002.bin", {})
    assert len(read_torch_files([first, second], "head")) == 16
