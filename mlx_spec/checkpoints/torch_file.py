"""Reading tensors that torch saved, without torch and without running anything that a file names.

Such a file is a zip archive: ``data.pkl`` describes how tensors are cut out of storages, which are other members,
plain bytes. Pickle can call any function that it names; here it can name five, all of them ours.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.errors import DrafterMismatch

# What torch calls storages, and how numpy reads their bytes; bfloat16 comes as its bits.
STORAGES = {
    "BFloat16Storage": (np.uint16, mx.bfloat16),
    "HalfStorage": (np.float16, mx.float16),
    "FloatStorage": (np.float32, mx.float32),
    "LongStorage": (np.int64, mx.int64),
    "IntStorage": (np.int32, mx.int32),
    "ByteStorage": (np.uint8, mx.uint8),
    "BoolStorage": (np.bool_, mx.bool_),
}


@dataclass(frozen=True)
class Storage:
    """The elements of one or several tensors, one after another."""

    values: np.ndarray
    dtype: mx.Dtype


def read_torch_files(paths: Sequence[Path], name: str) -> dict[str, mx.array]:
    """Read the tensors of files that ``torch.save`` wrote. Raises DrafterMismatch for files of any other kind."""
    tensors: dict[str, mx.array] = {}
    for path in paths:
        try:
            tensors.update(read_torch_file(path))
        except pickle.UnpicklingError as error:
            raise DrafterMismatch(
                f"{name}: {path.name} holds more than tensors ({error}), so it is not read; "
                "have it converted to safetensors."
            ) from None
        except Exception as error:
            raise DrafterMismatch(
                f"{name}: {path.name} cannot be read ({error}); download it again, or have it converted to "
                "safetensors if torch before 1.6 wrote it."
            ) from None
    return tensors


def read_torch_file(path: Path) -> dict[str, mx.array]:
    """Read the tensors of one file. Raises UnpicklingError for whatever is no dictionary of plain tensors."""
    with zipfile.ZipFile(path) as archive:
        index = next((item for item in archive.namelist() if item.endswith("data.pkl")), None)
        if index is None:
            raise pickle.UnpicklingError("no data.pkl, so torch.save did not write it")
        loaded = TensorUnpickler(archive, index.removesuffix("data.pkl")).load()
    if not isinstance(loaded, dict) or not all(isinstance(value, mx.array) for value in loaded.values()):
        raise pickle.UnpicklingError("no dictionary of tensors")
    return {str(key): value for key, value in loaded.items()}


class TensorUnpickler(pickle.Unpickler):
    """Builds dictionaries of tensors and nothing else. folder: of the archive, where the storages lie."""

    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{folder}data.pkl")))
        self._archive, self._folder = archive, folder
        self._storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name in a file means. Raises UnpicklingError for all names but a few."""
        if module == "torch" and name in STORAGES:
            return name
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
            ("torch._utils", "_rebuild_parameter"): rebuild_parameter,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return known[module, name]

    def persistent_load(self, pid: Any) -> Storage:
        """Read the storage that a tensor is cut out of."""
        kind, storage, key, _, count = pid
        if kind != "storage" or storage not in STORAGES or not str(key).isdecimal():
            raise pickle.UnpicklingError(f"an unknown storage {pid!r:.80}")
        if key not in self._storages:
            numpy_type, dtype = STORAGES[storage]
            values: np.ndarray = np.frombuffer(self._archive.read(f"{self._folder}data/{key}"), dtype=numpy_type)
            self._storages[key] = Storage(values[:count], dtype)
        return self._storages[key]


def rebuild_tensor(
    storage: Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object
) -> mx.array:
    """Cut a tensor out of a storage.

    offset: of its first element.
    size, stride: as torch counts them, in elements.
    Raises UnpicklingError where it would reach beyond the storage.
    """
    if not isinstance(storage, Storage) or min((offset, *size, *stride), default=0) < 0:
        raise pickle.UnpicklingError("a tensor without a storage")
    if any(n == 0 for n in size):
        return mx.zeros(size, dtype=storage.dtype)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if last >= storage.values.size:
        raise pickle.UnpicklingError(f"a tensor that ends at {last} in a storage of {storage.values.size}")
    strides = tuple(step * storage.values.itemsize for step in stride)
    values = np.lib.stride_tricks.as_strided(storage.values[offset:], size, strides, writeable=False)
    array = mx.array(np.ascontiguousarray(values))
    return array if array.dtype == storage.dtype else array.view(storage.dtype)


def rebuild_parameter(data: mx.array, *_: object) -> mx.array:
    """Take a parameter for the tensor that it is."""
    return data
