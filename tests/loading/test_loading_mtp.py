"""load() with an MTP head: the one that a model ships, others, trimmed vocabularies, and extracted ones."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from pretended_device import set_on_cpu
from tiny_folders import folder_config, write_dflash2, write_model
from tiny_heads import Tensors, head_tensors, renamed, write_head, zero_centred

from metal_kernels.launching.implementations import using
from mlx_spec import generate, load
from mlx_spec.checkpoints import hub
from mlx_spec.cli import extract_mtp
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.engine import Engine
from mlx_spec.errors import DrafterMismatch, ModelError, RequestError
from mlx_spec.loading import drafter as loading_drafter
from mlx_spec.loading.draft_vocabulary import frequent_tokens

CONFIG = folder_config("qwen3")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("m") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("m") / "qwen3", "qwen3")
    return write_head(folder, None, head(), "mtp.safetensors")


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("s")
    return write_head(folder, {"model_type": "qwen3_5_mtp", "text_config": CONFIG}, head())


def head() -> Tensors:
    return head_tensors("qwen3", dtype=mx.bfloat16)


def drafter_of(engine: Engine) -> ChainDrafter:
    assert isinstance(engine.drafter, ChainDrafter)
    return engine.drafter


@pytest.mark.parametrize("drafter", ["auto", "mtp"])
def test_a_model_drafts_with_the_head_that_it_ships(drafter: str, with_head: Path) -> None:
    engine, tokenizer = load(str(with_head), drafter)
    assert drafter_of(engine).target_layer_ids == (4,)
    assert engine.costs is not None and engine.costs.draft_ms(7) > 0
    plain = generate(engine, tokenizer, "hello", max_tokens=12, num_draft_tokens=0)
    for count in (1, 4, "adaptive", None):
        assert generate(engine, tokenizer, "hello", max_tokens=12, num_draft_tokens=count) == plain


def test_a_model_without_a_head(model: Path) -> None:
    assert load(str(model), "auto")[0].drafter is None
    with pytest.raises(DrafterMismatch, match=rf"{model} holds no MTP weights.*extract_mtp") as error:
        load(str(model), "mtp")
    assert "\n" not in str(error.value)


def test_the_demo_names_its_own_head(monkeypatch: pytest.MonkeyPatch, model: Path, sidecar: Path) -> None:
    monkeypatch.setattr(hub, "demo_model_folder", lambda progress: model)
    monkeypatch.setitem(loading_drafter.DRAFTERS, "mtp", sidecar)
    assert drafter_of(load("demo", "mtp")[0]).max_draft == 7


@pytest.mark.parametrize("form", ["folder", "file", "folder without config"])
def test_heads_of_their_own(form: str, model: Path, sidecar: Path, tmp_path: Path) -> None:
    bare = write_head(tmp_path / "bare", None, head())
    place = {"folder": sidecar, "file": sidecar / "model.safetensors", "folder without config": bare}[form]
    assert mx.array_equal(drafter_of(load(str(model), str(place))[0]).forward.fc.weight, head()["fc.weight"])


def write_original(folder: Path) -> Path:
    """A repo as Hugging Face has it: an index, and shards of which one holds the head and others do not."""
    tensors = renamed(zero_centred(head()), {}, "mtp.")
    write_head(folder, CONFIG, tensors, "model-00002-of-2.safetensors")
    trunk = {"model.embed_tokens.weight": "model-00001-of-2.safetensors"}
    index = trunk | dict.fromkeys(tensors, "model-00002-of-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_of_a_repo_only_the_files_with_the_head_are_fetched(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = write_original(tmp_path / "repo"), []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        assert name == "owner/original"
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    engine, _ = load(str(model), "owner/original")
    assert drafter_of(engine).forward.attention.gated is False
    files = ["config.json", "model.safetensors.index.json"]
    assert asked == [files, [*files, "model-00002-of-2.safetensors"]]


def test_a_repo_of_a_whole_model_without_a_head_is_not_fetched(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-9.safetensors"}}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    asked = []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: asked.append(0) or str(tmp_path))
    with pytest.raises(DrafterMismatch, match="owner/model holds no MTP weights"):
        load(str(model), "owner/model")
    assert len(asked) == 1


def test_a_block_drafter_with_an_index_is_fetched_whole(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_dflash2(tmp_path / "dflash")
    names = ["fc.weight", "lm_head.weight", "model.embed_tokens.weight"]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: str(folder))
    drafter = load(str(model), "owner/dflash")[0].drafter
    assert drafter is not None and drafter.name == "dflash2"


def test_repos_with_a_bare_index_or_none_are_fetched_whole(
    model: Path, sidecar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: str(sidecar))
    assert drafter_of(load(str(model), "owner/sidecar")[0])
    indexed = write_head(tmp_path, {"model_type": "qwen3_5_mtp", "text_config": CONFIG}, head())
    index = {"weight_map": dict.fromkeys(head(), "model.safetensors")}
    (indexed / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: str(indexed))
    assert drafter_of(load(str(model), "owner/sidecar")[0])


def test_a_head_is_quantised_like_its_model_on_a_gpu(
    sidecar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not where MLX's own operations run on a CPU, so that the model is unpacked."""
    quantised = str(write_model(tmp_path / "4bit", "qwen3", bits=4))
    with using("stock"):
        assert drafter_of(load(quantised, str(sidecar))[0]).forward.fc.quantization is None
    set_on_cpu(monkeypatch, lambda: False)
    quantization = drafter_of(load(quantised, str(sidecar))[0]).forward.fc.quantization
    assert quantization is not None and (quantization.bits, quantization.group_size) == (4, 32)


def test_a_trimmed_draft_vocabulary(model: Path, sidecar: Path, tmp_path: Path) -> None:
    engine, tokenizer = load(str(model), str(sidecar), draft_vocab=40)
    ids = drafter_of(engine).head.ids
    assert ids is not None and ids.tolist() == list(range(40))
    plain = generate(engine, tokenizer, "hello", max_tokens=12, num_draft_tokens=0)
    assert generate(engine, tokenizer, "hello", max_tokens=12, num_draft_tokens=5) == plain
    chosen = drafter_of(load(str(model), str(sidecar), draft_vocab=[9, 5, 5, 200])[0]).head
    assert chosen.size == 3 and chosen.ids is not None and chosen.ids.tolist() == [5, 9, 200]
    dflash = write_dflash2(tmp_path / "dflash")
    with pytest.raises(RequestError, match="draft_vocab is for MTP and EAGLE heads"):
        load(str(model), str(dflash), draft_vocab=40)


class Tokenizer:
    """Two added tokens, one of them at the end of the vocabulary; a third ends texts."""

    eos_token_ids = {7}

    def get_added_vocab(self) -> dict[str, int]:
        return {"<pad>": 2, "<end>": 99, "<outside>": 120}


def test_frequent_tokens_are_the_first_ones_and_the_added_ones() -> None:
    assert frequent_tokens(Tokenizer(), 6, 100) == [0, 1, 2, 3, 7, 99]
    assert frequent_tokens(Tokenizer(), 4, 100) == [0, 2, 7, 99]
    assert frequent_tokens(Tokenizer(), 100, 100) is frequent_tokens(Tokenizer(), None, 100) is None
    for wanted in (3, 0, -1, [], [100], [-1, 4]):
        with pytest.raises(RequestError, match="draft_vocab"):
            frequent_tokens(Tokenizer(), wanted, 100)


@pytest.mark.parametrize("bits", [None, 4])
def test_an_extracted_head_drafts_as_the_original(
    bits: int | None, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original, out = write_original(tmp_path / "original"), tmp_path / "out"
    argv = ["--model", str(original), "--out", str(out)]
    assert extract_mtp.main([*argv, *(["--bits", "4", "--group-size", "32"] if bits else [])]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "Qwen3.5"
    written = mx.load(str(out / "model.safetensors"))
    assert ("fc.scales" in written) == bool(bits)
    first, second = (drafter_of(load(str(model), str(place))[0]).forward for place in (original, out))
    assert mx.array_equal(first.norm.weight, second.norm.weight)
    assert mx.allclose(first.fc.dequantized(), second.fc.dequantized(), atol=0.1 if bits else 0)


def test_extracting_from_a_model_without_a_head(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert extract_mtp.main(["--model", str(model), "--out", str(tmp_path / "out")]) == 1
    assert f"error: {model} holds no MTP weights" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_head_of_another_family_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    config: dict[str, Any] = {**CONFIG, "model_type": "gemma4_assistant"}
    folder = write_head(tmp_path, config, renamed(head(), {}, "mtp."))
    with pytest.raises(ModelError, match="Gemma 4 assistant"):
        load(str(model), str(folder))
