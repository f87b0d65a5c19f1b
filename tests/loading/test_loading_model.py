"""What people's folders look like: files that are missing, broken, renamed or not what they are taken for."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load as mlx_lm_load
from mlx_lm import stream_generate as mlx_lm_stream
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_folders import EOS, TOKENS, write_model
from tiny_models import CONFIGS

from mlx_spec import load, stream_generate
from mlx_spec.errors import ModelError, ModelWarning, UnsupportedModel

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
PROMPT = [5, 40, 77, 12, 90, 33, 61, 28, 110, 17]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model; tests change copies of it."""
    return write_model(tmp_path_factory.mktemp("models") / "plain")


def copied(folder: Path, to: Path) -> Path:
    """Return a copy of a folder."""
    shutil.copytree(folder, to)
    return to


def edited(folder: Path, file: str = "config.json", **changes: Any) -> Path:
    """Change keys of a JSON file, which may not be there yet; None removes a key."""
    path = folder / file
    content = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return folder


def tokens(folder: Path) -> list[int]:
    """Return the tokens of a text of plain decoding."""
    engine, tokenizer = load(str(folder), None)
    return [response.token for response in stream_generate(engine, tokenizer, PROMPT, max_tokens=16)]


def refusal(folder: Path) -> str:
    """Return the sentence with which a folder is refused."""
    with pytest.raises(ModelError) as error:
        load(str(folder), None)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("content", [b"", LFS, b"\x08\x00", b"x" * 100])
@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_file_that_is_not_what_its_name_says(plain: Path, tmp_path: Path, file: str, content: bytes) -> None:
    """Empty, truncated, something else, or the pointer that git leaves without its LFS extension."""
    folder = copied(plain, tmp_path / "m")
    (folder / file).write_bytes(content)
    message = refusal(folder)
    assert file in message
    assert ("Git LFS pointer" in message) == (content == LFS)


def test_a_truncated_shard_is_named(plain: Path, tmp_path: Path) -> None:
    """Downloads that stopped: the header is whole, tensors at the end are not there."""
    folder = copied(plain, tmp_path / "m")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) * 2 // 3])
    assert "model.safetensors" in refusal(folder)


def test_a_shard_that_the_index_names_is_missing(plain: Path, tmp_path: Path) -> None:
    """Named, instead of the parameters that it would hold."""
    folder = copied(plain, tmp_path / "m")
    weights: Any = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    placed = {name: files[i % 2] for i, name in enumerate(weights)}
    there = {name: value for name, value in weights.items() if placed[name] == files[0]}
    mx.save_safetensors(str(folder / files[0]), there, {"format": "mlx"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    message = refusal(folder)
    assert "model-00002-of-00002.safetensors, which is not there" in message


def test_other_formats_are_named(plain: Path, tmp_path: Path) -> None:
    """What lies there, and what would convert it."""
    folder = copied(plain, tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "weights.00.safetensors")
    message = refusal(folder)
    assert "weights.00.safetensors" in message
    assert "mlx_lm.convert" in message


@pytest.mark.parametrize("name", ["models [4bit]", "[abc]", "x[!y]z", "a*b", "what?", "größe"])
def test_any_name_of_a_folder_will_do(plain: Path, tmp_path: Path, name: str) -> None:
    """A name is no pattern."""
    assert tokens(copied(plain, tmp_path / name)) == tokens(plain)


def test_bytes_are_no_weights(plain: Path, tmp_path: Path) -> None:
    """FP8 checkpoints, which MLX reads as whole numbers."""
    folder = copied(plain, tmp_path / "m")
    weights: Any = mx.load(str(folder / "model.safetensors"))
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = mx.ones(weights[name].shape, dtype=mx.uint8)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    message = refusal(folder)
    assert name in message
    assert "uint8" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization": {"group_size": 64}}, "bits"),
        ({"quantization": {"group_size": 64, "bits": 7}}, "bits"),
        ({"quantization": {"group_size": 64, "bits": 4, "mode": "turbo"}}, "mode"),
        ({"quantization": 4}, "quantization"),
        ({"quantization_config": {"bits": 4, "group_size": 64}}, "quant_method"),
        ({"quantization_config": {"quant_method": "torchao"}}, "quant_method"),
    ],
)
def test_quantization_settings(plain: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """Named by key, before mlx-lm meets them."""
    assert words in refusal(edited(copied(plain, tmp_path / "m"), **changes))


def test_a_drafter_is_no_model(tmp_path: Path) -> None:
    """Said before a family is looked for."""
    config = dflash2_config(vocab_size=len(TOKENS), mask_token_id=2)
    folder = write_drafter(tmp_path / "d", config, random_tensors(config))
    assert "give it as --drafter" in refusal(folder)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("is_list", [True, False])
def test_end_tokens_of_every_file_end_a_text(plain: Path, tmp_path: Path, file: str, is_list: bool) -> None:
    """As in mlx-lm, which is asked."""
    whole = tokens(plain)
    end = whole[6]
    folder = edited(copied(plain, tmp_path / "m"), file, eos_token_id=[EOS, end] if is_list else end)
    model, tokenizer = mlx_lm_load(str(folder))
    expected = [response.token for response in mlx_lm_stream(model, tokenizer, PROMPT, max_tokens=16)]
    assert expected == whole[: whole.index(end) + 1]
    assert tokens(folder) == expected


def test_what_is_no_end_token_is_left_out(plain: Path, tmp_path: Path) -> None:
    """Optional files never end a load."""
    folder = copied(plain, tmp_path / "m")
    edited(folder, "generation_config.json", eos_token_id=[EOS, "</s>", None, -1, True])
    with pytest.warns(ModelWarning, match="eos_token_id"):
        assert tokens(folder) == tokens(plain)
    (folder / "generation_config.json").write_text("{")
    with pytest.warns(ModelWarning, match="generation_config.json is not valid JSON"):
        tokens(folder)


def test_a_head_that_is_tied_outside_only(tmp_path: Path) -> None:
    """Of a vision model's configuration."""
    text = {**CONFIGS["qwen3_5"]["text_config"], "vocab_size": len(TOKENS)}
    folder = write_model(tmp_path / "m", "qwen3_5", text_config=text)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    kept = {name: value for name, value in weights.items() if "lm_head" not in name}
    mx.save_safetensors(str(folder / "model.safetensors"), kept)
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert len(tokens(folder)) == 16


def test_unknown_settings_are_named(plain: Path, tmp_path: Path) -> None:
    """In one line, and the model runs."""
    folder = edited(copied(plain, tmp_path / "m"), attn_logit_softcapping=30.0)
    with pytest.warns(ModelWarning, match="attn_logit_softcapping"):
        assert tokens(folder) == tokens(plain)


def test_a_family_that_is_not_run(plain: Path, tmp_path: Path) -> None:
    """Whatever kind of value names it."""
    with pytest.raises(UnsupportedModel, match="model_type"):
        load(str(edited(copied(plain, tmp_path / "m"), model_type=["llama"])), None)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_head_beside_tied_embeddings(tmp_path: Path, is_same: bool) -> None:
    """Left out as mlx-lm does; said where that changes the text."""
    folder = edited(write_model(tmp_path / "m"), tie_word_embeddings=True)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    if is_same:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        tokens(folder)
    else:
        with pytest.warns(ModelWarning, match=r"lm_head\.weight is left out"):
            tokens(folder)


def test_a_chat_template_may_lie_in_chat_template_json_alone(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    messages = [{"role": "user", "content": "hi"}]
    assert not load(str(folder), None)[1].has_chat_template
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = load(str(folder), None)[1]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "u:hi|a:"
    (folder / "chat_template.jinja").write_text("another")
    assert load(str(folder), None)[1].apply_chat_template(messages, tokenize=False) == "another"
    (folder / "chat_template.jinja").unlink()
    for broken in ("{}", "[]", "{", '{"chat_template": 5}'):
        (folder / "chat_template.json").write_text(broken)
        with pytest.warns(ModelWarning, match="chat_template.json .* left out"):
            assert not load(str(folder), None)[1].has_chat_template


@pytest.mark.parametrize("index", ["{", '{"weight_map": {"mtp.fc.weight": "mtp.safetensors"}}'])
def test_an_index_that_is_broken_or_names_more_does_not_matter(plain: Path, tmp_path: Path, index: str) -> None:
    """Where the tensors of the model are all there, as in mlx-lm."""
    folder = copied(plain, tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(index)
    assert tokens(folder) == tokens(plain)
