"""Converts a llama GGUF into a model folder that mlx-lm loads.

Supports what the demo model has: Q4_1 weights, a tied Q8_0 embedding, F32 norms, a byte-level BPE tokenizer.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Metadata = Mapping[str, Any]  # to str, list[str] or mx.array, as `mx.load` returns them

# Q4_1 and Q8_0 blocks are 32 weights long, and MLX reads them as affine groups without requantizing.
QUANTIZATION = {"group_size": 32, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 8}}
CONTROL_TOKEN = 3  # in `tokenizer.ggml.token_type`

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Convert the llama model in the file ``gguf`` into the new folder ``folder``; see ``write_model_folder``."""
    with mx.stream(mx.cpu):  # reading GGUF has no GPU implementation
        loaded = cast(tuple[dict[str, mx.array], Metadata], mx.load(str(gguf), return_metadata=True))
        write_model_folder(*loaded, folder)


def write_model_folder(arrays: Mapping[str, mx.array], metadata: Metadata, folder: Path) -> None:
    """Write weights, configuration and tokenizer into a new folder.

    arrays: the tensors of a GGUF by name.
    metadata: its metadata by key.
    folder: to create.
    Raises KeyError for a tensor or metadata key that is missing or unknown, and OSError or (from MLX)
    RuntimeError when a file cannot be written.
    """
    folder.mkdir()
    config = llama_config(metadata)
    weights = llama_weights(arrays, config["num_attention_heads"], config["num_key_value_heads"])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    byte_level_bpe(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    _write_json(folder / "generation_config.json", _special_ids(metadata))


def llama_weights(arrays: Mapping[str, mx.array], num_heads: int, num_kv_heads: int) -> dict[str, mx.array]:
    """Return the arrays under mlx-lm's names; only the rows of q and k are reordered."""
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
    weights = {}
    for name, array in arrays.items():
        *block, stem, kind = name.split(".")
        prefix = f"model.layers.{block[1]}.{LAYER_NAMES[stem]}" if block else TOP_NAMES[stem]
        weights[f"{prefix}.{kind}"] = _half_split_rows(array, heads[stem]) if stem in heads else array
    return weights


def _half_split_rows(rows: mx.array, num_heads: int) -> mx.array:
    """Undo GGUF's row order for rope, in which rows i and i + D / 2 of a head are neighbours.

    rows: [num_heads * D, columns], of a weight, its scales or its biases.
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def llama_config(metadata: Metadata) -> dict[str, Any]:
    """Return the contents of ``config.json``."""

    def number(key: str) -> int | float:
        return metadata[f"llama.{key}"].item()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": True,
        "quantization": QUANTIZATION,
        **_special_ids(metadata),
    }


def byte_level_bpe(metadata: Metadata) -> Tokenizer:
    """Return the byte-level BPE tokenizer, with the ``smollm`` pre-tokenizer; control tokens are special."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """Return the contents of ``tokenizer_config.json``."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        # The generic class, because transformers' GPT2Tokenizer would replace the pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[_token_id(metadata, "bos")],
        "eos_token": tokens[_token_id(metadata, "eos")],
        "pad_token": tokens[_token_id(metadata, "padding")],
        "unk_token": tokens[_token_id(metadata, "unknown")],
        "chat_template": metadata["tokenizer.chat_template"],
        "model_max_length": metadata["llama.context_length"].item(),
        "clean_up_tokenization_spaces": False,
    }


def _special_ids(metadata: Metadata) -> dict[str, int]:
    return {
        "bos_token_id": _token_id(metadata, "bos"),
        "eos_token_id": _token_id(metadata, "eos"),
        "pad_token_id": _token_id(metadata, "padding"),
    }


def _token_id(metadata: Metadata, role: str) -> int:
    return metadata[f"tokenizer.ggml.{role}_token_id"].item()


def _write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
