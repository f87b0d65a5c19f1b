"""load() with an MTP head: the one that a model ships, others, trimmed vocabularies, and extracted ones."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from pretended_device import set_on_cpu
from tiny_folders import folder_config, write_dflash2, write_model
from tiny_heads import MIMO, Tensors, head_tensors, renamed, write_head, zero_centred

from metal_kernels.launching.implementations import using
from mlx_spec import generate, load
from mlx_spec.checkpoints import hub
from mlx_spec.cli import extract_mtp
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.engine import Engine
from mlx_spec.errors import DrafterMismatch, ModelError, ModelWarning, RequestError
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
    assert engine.costs is not None
    plain = generate(engine, tokenizer, "hello", max_tokens=12, num_draft_tokens=0)
    for count in (1, 4, "adaptive", None):
        assert generate(engine, tokenizer, "hello", max_tokens=12, num_draft_tokens=count) == plain


def test_a_model_without_a_head(model: Path) -> None:
    assert load(str(model), "auto")[0].drafter is None
    with pytest.raises(DrafterMismatch, match=rf"{model} holds no MTP weights.*extract_mtp") as error:
        load(str(model), "mtp")
    assert "\n" not in str(error.value)


def beside(tensors: Tensors) -> dict[str, Any]:
    """Files beside a model: a head, as its original checkpoint names its tensors."""
    return {"mtp.safetensors": renamed(tensors, {}, "mtp.")}


def twice(tensors: Tensors) -> Tensors:
    return {n.replace("layers.0", f"layers.{i}"): v for n, v in tensors.items() for i in (0, 1)}


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "two layers": (beside(twice(head())), "2 MTP layers"),
    "a tensor is missing": (beside({n: v for n, v in head().items() if "o_proj" not in n}), "missing .*o_proj"),
    "a tensor too many": (beside(head() | {"fc.weight_scale_inv": mx.ones((1, 1))}), "fc.weight_scale_inv"),
    "of another width": (beside(head() | {"fc.weight": mx.zeros((32, 64))}), r"fc.weight is \[32, 64\]"),
    "NaN": (beside(head() | {"fc.weight": head()["fc.weight"] * float("nan")}), "NaN or infinity in fc.weight"),
    "bytes": (beside(head() | {"fc.weight": mx.zeros((64, 128), dtype=mx.uint8)}), "fc.weight is of type uint8"),
    "d2t rounded": (beside(head() | {"d2t": mx.array([3.5, 4.0])}), "d2t is of type float32"),
    "an empty file": ({"mtp.safetensors": b""}, "mtp.safetensors .*empty"),
    "a pointer": ({"mtp/weights.safetensors": POINTER}, "weights.safetensors is a Git LFS pointer"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_model_runs_without_a_head_that_cannot_be_used(case: str, model: Path, tmp_path: Path) -> None:
    """As it does in mlx_lm, with one sentence that says why; asked for, such a head is refused by the same one."""
    files, reason = UNUSABLE[case]
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    for file, contents in files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        if isinstance(contents, bytes):
            (folder / file).write_bytes(contents)
        else:
            mx.save_safetensors(str(folder / file), contents)
    with pytest.raises(DrafterMismatch, match=reason) as error:
        load(str(folder), "mtp")
    with pytest.warns(ModelWarning) as warned:
        engine, tokenizer = load(str(folder))
    assert [str(w.message) for w in warned] == [f"No drafter is used, because {error.value}"]
    plain, plain_tokenizer = load(str(model), None)
    assert engine.drafter is None
    assert generate(engine, tokenizer, "hello", max_tokens=8) == generate(
        plain, plain_tokenizer, "hello", max_tokens=8
    )
    # Who sets something of a drafter asks for one.
    with pytest.raises((DrafterMismatch, RequestError)), warnings.catch_warnings():
        warnings.simplefilter("ignore", ModelWarning)
        load(str(folder), draft_bits=4)


@pytest.mark.parametrize("file", ["._model.safetensors", "adapters.safetensors", "other.safetensors"])
@pytest.mark.parametrize("contents", [POINTER, b"", b"\0" * 64])
def test_other_files_beside_a_model_change_nothing(
    file: str, contents: bytes, model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    (folder / file).write_bytes(contents)
    assert load(str(folder))[0].drafter is None


def test_a_head_that_the_index_leaves_out_is_found(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "mimo")
    own = renamed(head_tensors("mimo", dtype=mx.bfloat16), MIMO, "model.mtp_layers.0.")
    weights = mx.load(str(folder / "model.safetensors"))
    mx.save_safetensors(str(folder / "model.safetensors"), weights | own, {"format": "mlx"})
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("auto", "mtp"):
        assert drafter_of(load(str(folder), name)[0]).name == "mtp"


def test_the_demo_names_its_own_head(monkeypatch: pytest.MonkeyPatch, model: Path, sidecar: Path) -> None:
    monkeypatch.setattr(hub, "demo_model_folder", lambda progress: model)
    monkeypatch.setitem(loading_drafter.DRAFTERS, "mtp", sidecar)
    assert drafter_of(load("demo", "mtp")[0]).max_draft == 15


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
