"""Which files hold a checkpoint's weights, what is said of others, and which bits are taken for numbers."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from mlx_spec.checkpoints.tensors import (
    check_tensors,
    decode_fp8,
    load_tensors,
    read_files,
    read_tensors,
    tensor_names,
    weight_files,
)
from mlx_spec.errors import DrafterMismatch

ORACLES = Path(__file__).parent.parent / "oracles" / "speculators"
APPLE = bytes.fromhex("00051607000200004d6163204f532058") + b" " * 8 + b"\0" * 60
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
STRAY = {
    "._model.safetensors": APPLE,
    ".cache.safetensors": b"",
    "adapters.safetensors": POINTER,
    "adapter_model.safetensors": b"{",
    "optimizer.safetensors": b"",
    "optimizer_state.safetensors": POINTER,
    "training_state.safetensors": b"x",
    "scheduler.safetensors": b"",
    "rng_state_0.safetensors": b"",
}


def write(folder: Path, file: str, **tensors: mx.array) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / file), tensors or {"a": mx.ones((2, 2))})
    return folder / file


def write_index(folder: Path, **files: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def refusal(path: Path, *words: str) -> None:
    with pytest.raises(DrafterMismatch) as error:
        read_files([path], "the head")
    message = str(error.value)
    assert message.startswith(f"the head: {path.name} ") and "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("stray", STRAY)
def test_files_of_other_programs_are_passed_over(stray: str, tmp_path: Path) -> None:
    weights = write(tmp_path, "model.safetensors")
    (tmp_path / stray).write_bytes(STRAY[stray])
    assert weight_files(tmp_path, "the head") == [weights]
    assert read_tensors(tmp_path, "the head").keys() == {"a"}


def test_an_index_names_the_files_unless_they_are_not_there(tmp_path: Path) -> None:
    one, two = write(tmp_path, "model-1.safetensors"), write(tmp_path, "model-2.safetensors", b=mx.ones(2))
    other = write(tmp_path, "consolidated.safetensors", c=mx.ones(2))
    assert weight_files(tmp_path, "the head") == [other, one, two]
    write_index(tmp_path, a="model-1.safetensors", b="model-2.safetensors")
    assert weight_files(tmp_path, "the head") == [one, two]
    write_index(tmp_path, a="model-1.safetensors", b="model-3.safetensors")
    assert weight_files(tmp_path, "the head") == [other, one, two]


def test_what_torch_wrote_is_read_where_there_is_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "optimizer.bin").write_bytes(b"")
    assert weight_files(tmp_path, "the head") == [tmp_path / "pytorch_model.bin"]
    weights = write(tmp_path, "model.safetensors")
    assert weight_files(tmp_path, "the head") == [weights]


def test_a_file_is_read_as_what_it_is_whatever_its_name_says(tmp_path: Path) -> None:
    for name in ("head.pt", "head.bin", "head.safetensors"):
        shutil.copy(ORACLES / "torch_bin" / "pytorch_model.bin", tmp_path / name)
        assert read_files([tmp_path / name], "the head")["fc.weight"].dtype == mx.bfloat16


def test_every_unreadable_file_is_refused_with_its_reason(tmp_path: Path) -> None:
    def file(name: str, contents: bytes) -> Path:
        (tmp_path / name).write_bytes(contents)
        return tmp_path / name

    refusal(file("model.safetensors", POINTER), "is a Git LFS pointer", "run git lfs pull")
    refusal(file("model.safetensors", b""), "it is empty", "download it again")
    refusal(file("model.safetensors", APPLE), "cannot be read", "download it again")
    refusal(file("model.safetensors", b"PK\3\4" + b"\0" * 60), "cannot be read", "torch")
    for name in ("head.gguf", "head.bin", "head.pt", "head"):
        refusal(file(name, b"GGUF\3\0\0\0" + b"\0" * 40), "is a GGUF file", "safetensors", "torch.save")
    refusal(file("head.npz.txt", b"hello"), "*.txt", "safetensors")
    refusal(tmp_path / "gone.safetensors", "cannot be read")
    (tmp_path / "folder.safetensors").mkdir()
    refusal(tmp_path / "folder.safetensors", "cannot be read")
    np.savez(tmp_path / "arrays.npz", a=np.ones(2))
    refusal(tmp_path / "arrays.npz", "no data.pkl", "converted to safetensors")


def test_names_are_those_of_the_files_that_can_be_read(tmp_path: Path) -> None:
    paths = [write(tmp_path, "one.safetensors"), tmp_path / "gone.safetensors", tmp_path / "empty.safetensors"]
    paths[2].write_bytes(b"")
    assert tensor_names([*paths, write(tmp_path, "two.safetensors", b=mx.ones(1))], "x") == {"a", "b"}


@pytest.mark.parametrize("dtype", [mx.uint8, mx.int8, mx.int32, mx.uint32, mx.bool_])
def test_bits_that_are_no_numbers_are_no_weights(dtype: mx.Dtype) -> None:
    expected = {"fc.weight": mx.ones((2, 2), dtype=mx.float32)}
    for good in (mx.float16, mx.bfloat16, mx.float32):
        check_tensors(expected, {"fc.weight": mx.ones((2, 2)).astype(good)}, "the head")
    with pytest.raises(DrafterMismatch, match="the head: fc.weight is of type .*whose bits are no weights"):
        check_tensors(expected, {"fc.weight": mx.ones((2, 2)).astype(dtype)}, "the head")


def test_packed_weights_have_the_type_that_mlx_packs_into() -> None:
    expected = {"fc.weight": mx.ones((2, 2), dtype=mx.uint32), "fc.scales": mx.ones((2, 1), dtype=mx.uint8)}
    check_tensors(expected, expected, "the head")
    for wrong in (mx.int32, mx.float32):
        with pytest.raises(DrafterMismatch, match="fc.weight is of type"):
            check_tensors(expected, {**expected, "fc.weight": mx.ones((2, 2)).astype(wrong)}, "the head")


FOREIGN = {
    **dict.fromkeys(("weight_scale_2", "weight_scale", "input_scale", "weight_scale_inv"), mx.ones(1)),
    **dict.fromkeys(("weight_global_scale", "global_scale", "weight_packed", "qweight", "g_idx"), mx.ones(1)),
}


@pytest.mark.parametrize("part", FOREIGN)
def test_scales_of_other_quantisations_are_refused_by_name(part: str) -> None:
    module, tensors = nn.Linear(4, 4, bias=False), {"weight": mx.ones((4, 4)), f"fc.{part}": FOREIGN[part]}
    with pytest.raises(
        DrafterMismatch, match=f"the head: fc.{part} belongs to a quantisation that mlx_spec does not"
    ):
        load_tensors(module, tensors, "the head")


@pytest.mark.parametrize("shape", [(128, 128), (130, 300), (3, 256, 128), (5, 7), (2, 129, 257)])
def test_fp8_with_a_scale_for_each_block_is_decoded(shape: tuple[int, ...]) -> None:
    """As mlx-lm decodes the same layout for DeepSeek: block by block of 128 rows and columns."""
    mx.random.seed(0)
    weight = mx.to_fp8(mx.random.normal(shape))
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scales = mx.random.uniform(0.5, 2.0, blocks)
    found = decode_fp8({"fc.weight": weight, "fc.weight_scale_inv": scales, "norm.weight": mx.ones(4)})
    assert found.keys() == {"fc.weight", "norm.weight"} and found["fc.weight"].dtype == mx.bfloat16
    plain, expected = np.array(mx.from_fp8(weight, dtype=mx.float32)), np.zeros(shape, dtype=np.float32)
    for place in np.ndindex(shape):
        block = (*place[:-2], place[-2] // 128, place[-1] // 128) if len(shape) > 1 else place
        expected[place] = plain[place] * np.array(scales)[block]
    np.testing.assert_allclose(np.array(found["fc.weight"].astype(mx.float32)), expected, rtol=2**-8)


def test_scales_that_are_not_those_of_blocks_are_left_to_be_refused() -> None:
    bytes_, floats = mx.zeros((128, 128), dtype=mx.uint8), mx.zeros((128, 128))
    cases: list[dict[str, Any]] = [
        {"fc.weight": bytes_, "fc.weight_scale_inv": mx.ones((128, 1))},
        {"fc.weight": bytes_, "fc.weight_scale_inv": mx.ones(())},
        {"fc.weight": floats, "fc.weight_scale_inv": mx.ones((1, 1))},
        {"fc.weight_scale_inv": mx.ones((1, 1))},
    ]
    for tensors in cases:
        assert decode_fp8(tensors).keys() == tensors.keys()
