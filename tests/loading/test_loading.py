"""load(): every name that works, and one sentence for every one that does not."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model
from pretended_device import set_on_cpu
from tiny_drafters import dflash2_config, random_tensors
from tiny_folders import TOKENS, write_dflash2, write_model

from metal_kernels.launching.implementations import using
from mlx_spec import generate, load
from mlx_spec.checkpoints import hub
from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.drafters.kind import DrafterOptions, DrafterSource
from mlx_spec.engine.learned_costs import LearnedCosts
from mlx_spec.errors import DownloadError, DrafterMismatch, ModelError, RequestError, UnsupportedModel
from mlx_spec.loading import weights
from mlx_spec.loading.drafter import drafter_name, load_drafter
from mlx_spec.target.families import FAMILIES


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target") / "llama")


@pytest.fixture(scope="module")
def quantized_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target") / "qwen3-4bit", "qwen3", bits=4)


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dflash2(tmp_path_factory.mktemp("drafter") / "dflash2")


def copied(folder: Path, to: Path, **files: bytes | None) -> Path:
    """Copy a folder, with some of its files replaced (``__`` is the dot) or, by None, left out."""
    to.mkdir()
    for file in folder.iterdir():
        contents = files.get(file.name.replace(".", "__"), file.read_bytes())
        if contents is not None:
            (to / file.name).write_bytes(contents)
    return to


def refusal(kind: type[ModelError], *args: Any, **options: Any) -> str:
    """Return the message of the error, which must be one short line."""
    with pytest.raises(ModelError) as error:
        load(*args, **options)
    assert type(error.value) is kind, repr(error.value)
    message = str(error.value)
    assert "\n" not in message and len(message) < 600
    return message


def parameters(module: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(module.parameters()))


def test_auto_is_no_drafter_for_a_folder(target_folder: Path) -> None:
    engine, tokenizer = load(str(target_folder))
    assert engine.drafter is None and engine.sources == ["lookup"]
    assert engine.costs is not None and engine.costs.verify_ms(16) > 0 and not engine.costs.draft
    assert len(generate(engine, tokenizer, "hello", max_tokens=5)) >= 5


def test_none_is_plain_decoding(target_folder: Path) -> None:
    engine, _ = load(str(target_folder), None)
    assert engine.sources == [] and engine.costs is None and engine.max_draft == 0
    with pytest.raises(RequestError, match="with drafter=None nothing is copied"):
        load(str(target_folder), None, lookup_texts=["hello"])


def test_lookup_copies_from_further_texts_too(target_folder: Path) -> None:
    engine, tokenizer = load(str(target_folder), "lookup", lookup_texts=["the quick brown fox jumps"])
    assert engine.sources == ["lookup"] and engine.max_draft == 15
    tokens = tokenizer.encode("the quick brown fox jumps", add_special_tokens=False)
    assert engine.lookup is not None
    copy = engine.lookup.open().propose(tokens[:-1], (), 1)
    assert copy is not None and copy.tokens == (tokens[-1],)


def test_loading_measures_nothing_and_rounds_teach_what_they_cost(
    target_folder: Path, drafter_folder: Path, tmp_path: Path
) -> None:
    store = tmp_path / "cache" / "machine.json"
    engine, tokenizer = load(str(target_folder), str(drafter_folder))
    assert engine.drafter is not None and engine.drafter.max_draft == 7
    assert isinstance(engine.costs, LearnedCosts) and not engine.costs.known() and not store.exists()
    generate(engine, tokenizer, "hello", max_tokens=80)
    learned = engine.costs.known()
    assert learned and all(each.ms > 0 for each in learned)
    again, _ = load(str(target_folder), str(drafter_folder))
    assert isinstance(again.costs, LearnedCosts)
    assert {each.shape for each in again.costs.known()} <= {each.shape for each in learned}
    plain = next(each for each in again.costs.known() if each.shape.depth == 0)
    assert 0.1 < plain.ms / next(each.ms for each in learned if each.shape == plain.shape) < 10
    assert engine.target.pool.pages_in_use == 0


@pytest.mark.parametrize(
    "model, drafter, expected",
    [
        ("demo", "dflash2", "dflash2"),
        ("owner/name", "auto", None),
        ("demo", None, None),
        ("demo", "owner/name", "owner/name"),
        ("owner/name", "some/folder", "some/folder"),
    ],
)
def test_which_drafter_a_model_gets(model: str, drafter: str | None, expected: str | None) -> None:
    assert drafter_name(model, drafter, DrafterSource(Path("nowhere"), model, {}, {})) == expected


@pytest.mark.parametrize("is_cpu, expected", [(True, "eagle"), (False, "dflash2")])
def test_the_demo_drafts_with_what_is_fastest(
    is_cpu: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_on_cpu(monkeypatch, lambda: is_cpu)
    assert drafter_name("demo", "auto", DrafterSource(Path("nowhere"), "demo", {}, {})) == expected


def test_the_home_folder_may_be_a_tilde(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(target_folder.parent))
    assert hub.resolve("~/llama") == target_folder
    assert load("~/llama")[0].target.name == "~/llama"


def test_max_kv_size_bounds_the_pool(target_folder: Path) -> None:
    assert load(str(target_folder), max_cached_tokens=70)[0].target.pool.max_pages == 3


def test_tokenizer_config_reaches_the_tokenizer(target_folder: Path) -> None:
    tokenizer = load(str(target_folder), tokenizer_config={"eos_token": "<|pad|>"})[1]
    assert tokenizer.eos_token == "<|pad|>"


def with_remote_code(target_folder: Path, folder: Path) -> Path:
    """Write a model whose tokenizer is Python code in its folder, which leaves a mark when it runs."""
    config = json.loads((target_folder / "tokenizer_config.json").read_text())
    config |= {
        "auto_map": {"AutoTokenizer": ["own_tokenizer.OwnTokenizer", None]},
        "tokenizer_class": "OwnTokenizer",
    }
    copied(target_folder, folder, tokenizer_config__json=json.dumps(config).encode())
    (folder / "own_tokenizer.py").write_text(
        f"open({str(folder / 'ran')!r}, 'w').close()\nfrom transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    return folder


def test_code_of_a_model_runs_only_where_it_is_trusted(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is asked: a line "y" on standard input is no consent."""
    folder = with_remote_code(target_folder, tmp_path / "m")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert "trust_remote_code" in refusal(ModelError, str(folder))
    assert not (folder / "ran").exists()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert type(load(str(folder), trust_remote_code=True)[1]._tokenizer).__name__ == "OwnTokenizer"
    assert (folder / "ran").exists()


def test_an_architecture_that_is_code_of_the_model_never_runs(target_folder: Path, tmp_path: Path) -> None:
    config = json.loads((target_folder / "config.json").read_text()) | {"model_file": "own.py"}
    folder = copied(target_folder, tmp_path / "m", config__json=json.dumps(config).encode())
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()")
    assert "Python code" in refusal(UnsupportedModel, str(folder), trust_remote_code=True)
    assert not (folder / "ran").exists()


def write_adapters(folder: Path, model: nn.Module, kind: str, seed: int = 0) -> Path:
    """Write random adapters of a model as mlx_lm.lora does; the model has them afterwards."""
    config = {
        "fine_tune_type": kind,
        "num_layers": 2,
        "lora_parameters": {"rank": 4, "scale": 8.0, "dropout": 0.1},
    }
    if kind == "full":
        model.freeze()
        model.layers[-1].unfreeze()
    else:
        model.freeze()
        linear_to_lora_layers(model, 2, config["lora_parameters"], use_dora=kind == "dora")
    mx.random.seed(seed)
    weights = {
        name: w + 0.05 * mx.random.normal(w.shape).astype(w.dtype)
        for name, w in tree_flatten(model.trainable_parameters())
    }
    model.update(tree_unflatten([*weights.items()]))
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_adapters_are_merged(kind: str, target_folder: Path, tmp_path: Path) -> None:
    model = load_model(target_folder)[0]
    adapters = write_adapters(tmp_path / "adapters", model, kind)
    (engine, tokenizer), tokens = load(str(target_folder), adapter_path=adapters), mx.array([5, 17, 40, 66])
    model.eval()
    expected = model(tokens[None])[0].astype(mx.float32)
    target = engine.target
    with_adapters = target.logits(target.forward([(target.open(), tokens)]).hidden).astype(mx.float32)
    plain = load(str(target_folder))[0].target
    without = plain.logits(plain.forward([(plain.open(), tokens)]).hidden).astype(mx.float32)
    scale = mx.abs(expected - without).max()
    assert scale > 0.3
    assert mx.abs(expected - with_adapters).max() < 0.1 * scale
    assert not any("lora" in name for name in parameters(target.model))
    assert generate(engine, tokenizer, "hello", max_tokens=4)


def test_layers_with_adapters_are_not_quantised_again(
    quantized_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantised again they would lose much of what the adapters add."""
    set_on_cpu(monkeypatch, lambda: False)
    model = load_model(quantized_folder)[0]
    adapters = write_adapters(tmp_path / "adapters", model, "lora")
    engine, tokenizer = load(str(quantized_folder), adapter_path=str(adapters))
    layers = engine.target.model.model.layers
    assert "scales" in layers[0].self_attn.q_proj and "scales" not in layers[-1].self_attn.q_proj
    merged = model.model.layers[-1].mlp.down_proj.fuse(dequantize=True).weight
    assert mx.array_equal(layers[-1].mlp.down_proj.weight, merged.astype(mx.bfloat16))
    assert generate(engine, tokenizer, "hello", max_tokens=4)


def test_adapters_that_do_not_fit_are_refused(target_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no adapter_config.json, which mlx_lm.lora writes"):
        load(str(target_folder), adapter_path=tmp_path)
    other = load_model(write_model(tmp_path / "other", intermediate_size=160))[0]
    adapters = write_adapters(tmp_path / "adapters", other, "lora")
    with pytest.raises(ModelError, match="adapters in .* cannot be used: .*mlp"):
        load(str(target_folder), adapter_path=adapters)


@pytest.mark.parametrize("options", [{"draft_vocab": 100}, {"draft_bits": 4}])
def test_settings_of_a_drafter_need_one(options: dict[str, int], target_folder: Path) -> None:
    with pytest.raises(RequestError, match="settings of a drafter"):
        load(str(target_folder), **options)


def test_an_unsupported_model_is_refused_before_weights_are_read(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((target_folder / "config.json").read_text())
    folder = copied(
        target_folder, tmp_path / "m", config__json=json.dumps({**config, "model_type": "mamba"}).encode()
    )
    monkeypatch.setattr("mlx_spec.loading.model.load_model", lambda *_, **__: pytest.fail("weights were read"))
    message = refusal(UnsupportedModel, str(folder))
    assert "'mamba'" in message
    assert all(family in message for family in FAMILIES)


def test_a_config_without_model_type_is_refused(target_folder: Path, tmp_path: Path) -> None:
    folder = copied(target_folder, tmp_path / "m", config__json=b'{"hidden_size": 64}')
    assert "None" in refusal(UnsupportedModel, str(folder))


@pytest.mark.parametrize(
    "contents, words",
    [
        (None, "no config.json"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[1]", "holds a list"),
    ],
)
def test_broken_configurations(target_folder: Path, tmp_path: Path, contents: bytes | None, words: str) -> None:
    folder = copied(target_folder, tmp_path / "m", config__json=contents)
    message = refusal(ModelError, str(folder))
    assert words in message and str(folder) in message


def test_a_config_that_lacks_a_size_is_refused(target_folder: Path, tmp_path: Path) -> None:
    folder = copied(target_folder, tmp_path / "m", config__json=b'{"model_type": "llama"}')
    assert "hidden_size" in refusal(UnsupportedModel, str(folder))


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.999])
def test_truncated_weights(target_folder: Path, tmp_path: Path, part: float) -> None:
    weights = (target_folder / "model.safetensors").read_bytes()
    folder = copied(target_folder, tmp_path / "m", model__safetensors=weights[: int(part * len(weights))])
    assert str(folder) in refusal(ModelError, str(folder))


def test_no_weights(target_folder: Path, tmp_path: Path) -> None:
    folder = copied(target_folder, tmp_path / "m", model__safetensors=None)
    assert "safetensors" in refusal(ModelError, str(folder))


def test_weights_of_another_shape(target_folder: Path, tmp_path: Path) -> None:
    config = json.loads((target_folder / "config.json").read_text())
    folder = copied(
        target_folder, tmp_path / "m", config__json=json.dumps({**config, "intermediate_size": 128}).encode()
    )
    assert "mlp" in refusal(ModelError, str(folder))


def test_missing_weights(target_folder: Path, tmp_path: Path) -> None:
    config = json.loads((target_folder / "config.json").read_text())
    folder = copied(
        target_folder, tmp_path / "m", config__json=json.dumps({**config, "num_hidden_layers": 5}).encode()
    )
    assert "layers.4" in refusal(ModelError, str(folder))


@pytest.mark.parametrize("contents", [None, b"{", b"{}"])
def test_broken_tokenizers(target_folder: Path, tmp_path: Path, contents: bytes | None) -> None:
    folder = copied(target_folder, tmp_path / "m", tokenizer__json=contents)
    assert str(folder) in refusal(ModelError, str(folder))


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/no/where", "~/nowhere", "a/b/c", "../x", "", "demo/"])
def test_names_that_are_neither_folder_nor_repo(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: pytest.fail("the network was asked"))
    message = refusal(DownloadError, name)
    assert message == f"{name!r} is neither a folder nor a Hugging Face repo (owner/name)."


def test_a_file_is_no_model(target_folder: Path) -> None:
    refusal(DownloadError, str(target_folder / "config.json"))


def test_a_repo_is_fetched(target_folder: Path, drafter_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    folders = {"owner/target": target_folder, "owner/drafter": drafter_folder}

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(folders[name])

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    engine, _ = load("owner/target", "owner/drafter")
    assert engine.target.name == "owner/target"
    assert engine.drafter is not None
    assert asked.keys() == folders.keys()
    assert {"*.json", "model*.safetensors"} <= set(asked["owner/target"])


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("text, reason", [("404 not found\n\nmore lines", "404 not found"), ("", "OSError")])
def test_a_repo_that_cannot_be_fetched(
    monkeypatch: pytest.MonkeyPatch, text: str, reason: str, offline: bool
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise OSError(text)

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(hub, "snapshot_download", fail)
    message = refusal(DownloadError, "owner/name")
    assert message.startswith("owner/name ") and message.endswith(reason)
    assert ("HF_HUB_OFFLINE" in message) == offline


def test_quantized_weights_stay_packed_in_the_cpu_library(quantized_folder: Path) -> None:
    """With the scales that they have: the library takes any type."""
    engine, tokenizer = load(str(quantized_folder))
    assert engine.kernels == "cpu"
    kept, given = parameters(engine.target.model), parameters(load_model(quantized_folder)[0])
    names = [name for name in given if name.endswith((".scales", ".biases"))]
    assert names and all(mx.array_equal(kept[name], given[name]) for name in names if name in kept)
    assert engine.target.embed(mx.array([0])).dtype == engine.target.dtype
    assert generate(engine, tokenizer, "hello", max_tokens=4)


def test_quantized_weights_are_unpacked_for_stock_operations_on_a_cpu(
    quantized_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_on_cpu(monkeypatch, lambda: True)
    with using("stock"):
        model = load(str(quantized_folder))[0].target.model
    assert {w.dtype for w in parameters(model).values()} == {mx.bfloat16}
    # Against mlx-lm's own weights, unpacked by hand.
    packed = parameters(load_model(quantized_folder)[0])
    name = "model.layers.1.mlp.up_proj"
    weight = mx.dequantize(*(packed[f"{name}.{part}"] for part in ("weight", "scales", "biases")), 32, 4)
    assert mx.array_equal(model.model.layers[1].mlp.up_proj.weight, weight.astype(mx.bfloat16))


def test_quantized_weights_stay_packed_where_memory_is_short(
    quantized_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_on_cpu(monkeypatch, lambda: True)
    monkeypatch.setattr(weights, "memory_bytes", lambda: 1000)
    with using("stock"):
        engine, tokenizer = load(str(quantized_folder))
    assert mx.uint32 in {w.dtype for w in parameters(engine.target.model).values()}
    assert generate(engine, tokenizer, "hello", max_tokens=4)


def test_quantized_weights_stay_packed_on_a_gpu(quantized_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_on_cpu(monkeypatch, lambda: False)
    kept = parameters(load(str(quantized_folder))[0].target.model)
    assert mx.uint32 in {w.dtype for w in kept.values()}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_size_of_unpacked_weights_does_not_depend_on_their_bits(bits: int) -> None:
    layer = nn.QuantizedLinear(256, 64, bias=False, group_size=32, bits=bits)
    assert weights.dequantized_bytes(layer) == 2 * 256 * 64
    assert weights.dequantized_bytes(nn.Linear(256, 64)) == 0


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32, mx.bfloat16])
def test_one_float_type_is_kept(target_folder: Path, tmp_path: Path, dtype: mx.Dtype) -> None:
    folder = copied(target_folder, tmp_path / "m")
    weights = mx.load(str(target_folder / "model.safetensors"))
    mx.save_safetensors(str(folder / "model.safetensors"), {n: w.astype(dtype) for n, w in weights.items()})
    model = load(str(folder))[0].target.model
    assert {w.dtype for w in parameters(model).values()} == {dtype}


def test_mixed_float_types_become_bfloat16(target_folder: Path, tmp_path: Path) -> None:
    folder = copied(target_folder, tmp_path / "m")
    weights = mx.load(str(target_folder / "model.safetensors"))
    mixed = {n: w.astype(mx.float32 if "norm" in n else mx.float16) for n, w in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), mixed)
    engine, tokenizer = load(str(folder))
    assert {w.dtype for w in parameters(engine.target.model).values()} == {mx.bfloat16}
    assert engine.target.dtype == engine.target.pool.data.dtype == mx.bfloat16
    assert generate(engine, tokenizer, "hello", max_tokens=4)


def test_what_mlx_lm_keeps_in_float32_stays_so(tmp_path: Path) -> None:
    """The decay of recurrent layers is an exponential of an exponential of A_log."""
    folder = write_model(tmp_path / "m", "qwen3_5_moe")
    weights = mx.load(str(folder / "model.safetensors"))
    wide = {n: w.astype(mx.float32) if n.endswith(("A_log", "norm.weight")) else w for n, w in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), wide, {"format": "mlx"})
    engine, tokenizer = load(str(folder))
    kept = {n.split(".")[-1] for n, w in parameters(engine.target.model).items() if w.dtype == mx.float32}
    assert kept == {"A_log"}
    assert engine.target.dtype == engine.target.pool.data.dtype == mx.bfloat16
    assert generate(engine, tokenizer, "hello", max_tokens=4)


@pytest.mark.parametrize(
    "changes, numbers",
    [
        ({"hidden_size": 128}, ("hidden size 128", "64")),
        ({"vocab_size": 500}, ("vocabulary size 500", str(len(TOKENS)))),
        ({"num_target_layers": 6}, ("number of target layers 6", "4")),
    ],
)
def test_a_drafter_of_another_target(
    target_folder: Path, tmp_path: Path, changes: dict[str, int], numbers: tuple[str, str]
) -> None:
    drafter = write_dflash2(tmp_path / "d", **changes)
    message = refusal(DrafterMismatch, str(target_folder), str(drafter))
    assert message == (
        f"{drafter} expects {numbers[0]}; target {target_folder} has {numbers[1]}. "
        "Use a drafter trained for this target."
    )


def test_a_target_is_no_drafter(target_folder: Path) -> None:
    refusal(DrafterMismatch, str(target_folder), str(target_folder))


def test_a_drafter_that_is_nowhere(target_folder: Path) -> None:
    assert "'nowhere'" in refusal(DownloadError, str(target_folder), "nowhere")


def test_an_empty_folder_is_no_drafter(target_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal(DrafterMismatch, str(target_folder), str(tmp_path / "empty"))


def quantized_drafter(folder: Path) -> Path:
    """Write a drafter whose matrices are packed, and return its folder."""
    config = dflash2_config(vocab_size=len(TOKENS), mask_token_id=2)
    tensors = {}
    for name, value in random_tensors(config).items():
        if name.endswith("proj.weight") and value.shape[-1] % 32 == 0:
            packed = mx.quantize(value.astype(mx.bfloat16), group_size=32, bits=8)
            stem = name.removesuffix("weight")
            tensors |= {stem + part: t for part, t in zip(("weight", "scales", "biases"), packed, strict=True)}
        else:
            tensors[name] = value
    write_dflash2(folder)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def test_a_quantized_drafter(target_folder: Path, tmp_path: Path) -> None:
    folder = quantized_drafter(tmp_path / "d")
    target = load(str(target_folder))[0].target
    unpacked, packed = (load_dflash2(folder, target, "d", dequantize=unpack) for unpack in (True, False))
    assert mx.uint32 in {w.dtype for w in parameters(packed.model).values()}
    assert mx.uint32 not in {w.dtype for w in parameters(unpacked.model).values()}
    source = DrafterSource(target_folder, "target", {}, {})
    for dequantize in (True, False):
        drafter: Any = load_drafter(str(folder), target, source, DrafterOptions(dequantize=dequantize)).drafter
        assert (mx.uint32 in {w.dtype for w in parameters(drafter.model).values()}) != dequantize


def test_a_quantized_and_a_plain_drafter_leave_the_text_alone(
    target_folder: Path, drafter_folder: Path, tmp_path: Path
) -> None:
    texts = set()
    for drafter in (None, str(drafter_folder), str(quantized_drafter(tmp_path / "d"))):
        engine, tokenizer = load(str(target_folder), drafter)
        texts.add(generate(engine, tokenizer, "hello", max_tokens=24, num_draft_tokens=7 if drafter else 0))
    assert len(texts) == 1
