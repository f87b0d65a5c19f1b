"""Tiny random model folders as published: config, weights, byte-level tokenizer, and drafters that fit them."""

import copy
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from tiny_drafters import dflash2_config, write_drafter
from tiny_models import CONFIGS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>"]
BOS, EOS = 0, 1
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["t h", "th e", "i n", "e r", "a n", "Ġ a", "Ġ the", "o n"]
TOKENS = [*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}"
    "{% if not loop.last or add_generation_prompt %}|{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{{ opening | default('') }}{% endif %}"
)
# Tokens that a greedy text can contain: printable ASCII, so that a random model's text is valid UTF-8.
PRINTABLE = [i for i, token in enumerate(TOKENS) if i >= len(SPECIAL) and token.isascii()]


def folder_config(family: str, **changes: Any) -> dict[str, Any]:
    """Return the tiny configuration of a family with this vocabulary."""
    return {**CONFIGS[family], "vocab_size": len(TOKENS), "bos_token_id": BOS, "eos_token_id": EOS, **changes}


def folder_model(config: dict[str, Any], bits: int | None = None, seed: int = 0) -> nn.Module:
    """Build a random model whose greedy text is printable ASCII, quantised (group 32) where ``bits`` is given."""
    mx.random.seed(seed)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    model.update(
        nn.utils.tree_map(lambda w: mx.random.normal(w.shape) * 0.15 if w.ndim > 1 else w, model.parameters())
    )
    allowed = mx.zeros((len(TOKENS), 1))
    allowed[mx.array(PRINTABLE)] = 1.0
    head = getattr(model, "language_model", model).lm_head
    head.weight = head.weight * allowed
    model.set_dtype(mx.bfloat16)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    return model


def write_model(folder: Path, family: str = "llama", bits: int | None = None, **changes: Any) -> Path:
    """Write a model folder and return it; ``changes`` go into its ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder_config(family, **changes)
    weights = dict(tree_flatten(folder_model(config, bits).parameters()))
    if bits is not None:
        config["quantization"] = {"group_size": 32, "bits": bits}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, merges: list[str] | None = None) -> Path:
    """Write a byte-level BPE tokenizer with its chat template; without ``merges`` every byte is a token."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [tuple(merge.split(" ")) for merge in (MERGES if merges is None else merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": SPECIAL[0],
                "eos_token": SPECIAL[1],
                "pad_token": SPECIAL[2],
                "chat_template": TEMPLATE,
                "clean_up_tokenization_spaces": False,
            }
        )
    )
    return folder


def write_dflash2(folder: Path, **changes: Any) -> Path:
    """Write a DFlash 2 drafter that fits these models and return its folder; ``changes``: see dflash2_config."""
    return write_drafter(folder, dflash2_config(**{"vocab_size": len(TOKENS), "mask_token_id": 2, **changes}))
