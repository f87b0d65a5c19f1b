"""load() with EAGLE heads: folders and repos, files that torch wrote, bits a weight, and what is fetched."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from pretended_device import set_on_cpu
from tiny_eagles import eagle_config, eagle_tensors, midlayer, vocabulary, write_eagle
from tiny_folders import TOKENS, write_dflash2, write_model
from tiny_heads import head_tensors, write_head

from metal_kernels.launching.implementations import using
from mlx_spec import generate, load
from mlx_spec.checkpoints import hub
from mlx_spec.cli.generate import main
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.engine import Engine
from mlx_spec.errors import DownloadError, DrafterMismatch, RequestError

CONFIG = eagle_config(vocab_size=len(TOKENS))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("m") / "llama", "llama")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = eagle_tensors(CONFIG, dtype=mx.bfloat16)
    return write_eagle(tmp_path_factory.mktemp("e") / "head", CONFIG, midlayer(tensors))


def drafter_of(engine: Engine) -> ChainDrafter:
    assert isinstance(engine.drafter, ChainDrafter)
    return engine.drafter


def test_a_folder_is_known_by_its_config(model: Path, head: Path) -> None:
    engine, tokenizer = load(str(model), str(head))
    assert drafter_of(engine).name == "eagle"
    assert drafter_of(engine).target_layer_ids == (1, 1, 0)
    assert engine.costs is not None
    plain = generate(engine, tokenizer, "hello", max_tokens=12, num_draft_tokens=0)
    for count in (1, 4, "adaptive", None):
        assert generate(engine, tokenizer, "hello", max_tokens=12, num_draft_tokens=count) == plain


SAYS: dict[str, dict[str, Any]] = {
    "its target's architecture and layers": {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40},
    "no architecture": {"architectures": None},
    "its architecture as a text": {"architectures": "LlamaForCausalLMEagle3"},
    "no number of layers": {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": None},
}


@pytest.mark.parametrize("says", SAYS)
@pytest.mark.parametrize("version", [1, 3])
def test_a_folder_is_known_by_its_tensors(version: int, says: str, model: Path, tmp_path: Path) -> None:
    config = eagle_config(version=version, vocab_size=len(TOKENS))
    tensors = eagle_tensors(config, version, dtype=mx.bfloat16)
    engine, _ = load(str(model), str(write_eagle(tmp_path, {**config, **SAYS[says]}, midlayer(tensors))))
    assert drafter_of(engine).name == "eagle"


def test_a_whole_model_is_no_drafter(model: Path, tmp_path: Path) -> None:
    small = write_model(tmp_path / "small", "llama", hidden_size=32, num_hidden_layers=2, intermediate_size=48)
    for place in (small, model):
        with pytest.raises(DrafterMismatch, match=f"{place} is a whole model without a drafter's head"):
            load(str(model), str(place))


@pytest.mark.parametrize("file", ["head.gguf", "head.bin", "head.pt"])
def test_files_of_other_formats_are_refused_by_what_they_are(file: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"GGUF\3\0\0\0" + b"\0" * 40)
    with pytest.raises(DrafterMismatch, match="is a GGUF file; drafters are read from safetensors files"):
        load(str(model), str(tmp_path / file))


def test_files_of_macos_beside_a_head_are_passed_over(model: Path, head: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(head, tmp_path / "head"))
    for place in (folder, write_dflash2(tmp_path / "dflash")):
        (place / "._model.safetensors").write_bytes(b"\0\5\x16\7" + b"\0" * 90)
        assert load(str(model), str(place))[0].drafter is not None


def test_a_head_with_more_padding_than_its_target(model: Path, tmp_path: Path) -> None:
    config = eagle_config(version=1, vocab_size=len(TOKENS) + 2)
    folder = write_eagle(tmp_path, config, eagle_tensors(config, 1, dtype=mx.bfloat16))
    engine, tokenizer = load(str(model), str(folder))
    plain = generate(engine, tokenizer, "hello", max_tokens=12, num_draft_tokens=0)
    assert generate(engine, tokenizer, "hello", max_tokens=12, num_draft_tokens=5) == plain


def test_the_command_takes_one(model: Path, head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", str(model), "-p", "hello", "-m", "8", "--stats", "json"]
    texts = []
    for more in (
        ["--num-draft-tokens", "0"],
        ["--num-draft-tokens", "3"],
        ["--num-draft-tokens", "3", "--draft-bits", "4"],
    ):
        assert main([*argv, "--drafter", str(head), *more]) == 0
        summary = json.loads(capsys.readouterr().out)
        texts.append(summary["text"])
        assert len(summary["drafted"]) == int(more[1])
    assert len(set(texts)) == 1
    assert main([*argv, "--drafter", str(head), "--draft-bits", "7"]) == 1
    assert "error: draft_bits takes 2, 3, 4, 5, 6, 8, 16, not 7." in capsys.readouterr().err


def bits_of(engine: Engine) -> int | None:
    quantization = drafter_of(engine).forward.attention.output.quantization
    return None if quantization is None else quantization.bits


def test_a_head_is_quantised_to_four_bits_on_a_gpu_unless_told_otherwise(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For MLX's own operations on a CPU it is unpacked; there the bits that are asked for only round."""
    config = eagle_config(vocab_size=len(TOKENS), head_dim=32, intermediate_size=128)
    head = write_eagle(tmp_path, config, eagle_tensors(config, dtype=mx.bfloat16))

    def rounded(bits: int | None) -> mx.array:
        return drafter_of(load(str(model), str(head), draft_bits=bits)[0]).forward.attention.output.weight

    with using("stock"):
        assert mx.array_equal(rounded(None), rounded(16))
        assert rounded(4).dtype == mx.bfloat16 and not mx.array_equal(rounded(4), rounded(16))
    assert rounded(4).dtype == mx.uint32
    set_on_cpu(monkeypatch, lambda: False)
    for bits, expected in ((None, 4), (8, 8), (16, None)):
        assert bits_of(load(str(model), str(head), draft_bits=bits)[0]) == expected


def test_draft_bits_are_for_heads(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qwen = write_model(tmp_path / "qwen3", "qwen3")
    config = json.loads((qwen / "config.json").read_text())
    mtp = write_head(
        tmp_path / "mtp",
        {"model_type": "qwen3_5_mtp", "text_config": config},
        head_tensors("qwen3", dtype=mx.bfloat16),
    )
    with pytest.raises(RequestError, match="draft_bits is for MTP and EAGLE heads"):
        load(str(model), str(write_dflash2(tmp_path / "dflash")), draft_bits=4)
    set_on_cpu(monkeypatch, lambda: False)
    assert bits_of(load(str(qwen), str(mtp))[0]) is None
    assert bits_of(load(str(qwen), str(mtp), draft_bits=5)[0]) == 5


def write_torch(folder: Path) -> Path:
    """A head as torch saved it, for a model of 96 tokens."""
    shutil.copytree(Path(__file__).parent.parent / "oracles" / "speculators" / "torch_bin", folder)
    return folder


def test_of_a_repo_without_safetensors_the_files_that_torch_wrote_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = write_torch(tmp_path / "repo"), []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.append("pytorch_model*.bin" in allow_patterns)
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    model = write_model(tmp_path / "model", "llama")
    with pytest.raises(DrafterMismatch, match=f"vocabulary size 96; target .* has {len(TOKENS)}"):
        load(str(model), "owner/eagle")
    assert asked == [False, False, True]


def test_safetensors_are_fetched_alone(head: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.append("pytorch_model*.bin" in allow_patterns)
        return str(head)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    assert drafter_of(load(str(model), "owner/eagle")[0])
    assert asked == [False, False]


def test_a_head_with_an_index_is_no_model_without_a_head(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"model.embed_tokens.weight": mx.random.normal((len(TOKENS), 64))}
    tensors = eagle_tensors(CONFIG, dtype=mx.bfloat16) | own
    folder = write_eagle(tmp_path, CONFIG, tensors)
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: str(folder))
    assert drafter_of(load(str(model), "owner/eagle")[0]).name == "eagle"


def test_eagle_1_with_a_trimmed_vocabulary(model: Path, tmp_path: Path) -> None:
    config = eagle_config(version=1, vocab_size=len(TOKENS))
    folder = write_eagle(tmp_path, config, eagle_tensors(config, 1, ("fc bias",), dtype=mx.bfloat16))
    engine, tokenizer = load(str(model), str(folder), draft_vocab=40)
    assert drafter_of(engine).head.size == 40
    plain = generate(engine, tokenizer, "hello", max_tokens=12, num_draft_tokens=0)
    assert generate(engine, tokenizer, "hello", max_tokens=12, num_draft_tokens=5) == plain


def test_a_repo_that_there_is_not(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(name: str, allow_patterns: list[str]) -> str:
        raise OSError("404 Client Error")

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    with pytest.raises(DownloadError, match="owner/eagle"):
        load(str(model), "owner/eagle")


def test_a_head_of_another_model_is_refused_by_what_differs(model: Path, tmp_path: Path) -> None:
    config: dict[str, Any] = eagle_config(vocab_size=len(TOKENS))
    tensors = eagle_tensors(config) | vocabulary([1, 2, 300], 301)
    with pytest.raises(DrafterMismatch, match=f"1, 2, 300, no ascending ids below {len(TOKENS)}"):
        load(str(model), str(write_eagle(tmp_path, config, tensors)))


def test_a_model_without_a_head_of_its_own(
    model: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, kind in (("eagle", "EAGLE head"), ("dflash2", "DFlash 2 drafter")):
        with pytest.raises(DrafterMismatch, match=f"comes with no {kind}: give --drafter the folder or repo"):
            load(str(model), name)
    shutil.copytree(head, tmp_path / "eagle")
    assert drafter_of(load(str(model), "eagle")[0]).name == "eagle"
