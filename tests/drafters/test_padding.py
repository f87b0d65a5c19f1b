"""Drafters whose vocabulary has more padding than their target's, or less: they draft what both have."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from choosing import GREEDY
from mlx import nn
from mlx_lm.utils import _get_classes
from one_draft import extend, propose
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_eagles import eagle_config, eagle_tensors, midlayer, write_eagle
from tiny_heads import head_tensors, write_head
from tiny_models import CONFIGS

from mlx_spec.drafters.base import Committed, Drafter
from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.drafters.draft_head import differ_by_padding
from mlx_spec.drafters.eagle.load import load_eagle
from mlx_spec.drafters.mtp.load import load_mtp
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target import Target

TOKENS, SIZE = mx.array([5, 17, 3, 88, 41, 9, 270], dtype=mx.int32), 272
SIZES, LAST = (270, 271, 272, 273, 274), 4


@pytest.mark.parametrize(
    "one, other, alike",
    [
        (151936, 151669, True),
        (151936, 152064, True),
        (151669, 152064, True),
        (248320, 248077, True),
        (128256, 128264, True),
        (32000, 32064, True),
        (151936, 151936, True),
        (96, 97, False),
        (32000, 32768, False),
        (128256, 151936, False),
        (151936, 155000, False),
        (96, 0, False),
    ],
)
def test_what_counts_as_padding(one: int, other: int, alike: bool) -> None:
    assert differ_by_padding(one, other) == differ_by_padding(other, one) == alike


@cache
def target(family: str) -> Target:
    """A target whose last tokens score far from the others, so that candidates out of all its rows hold some."""
    config = {**CONFIGS[family], "vocab_size": SIZE, "tie_word_embeddings": False}
    model_class, args_class = _get_classes(config)
    mx.random.seed(3)
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    # Of each two neighbours one scores high, whatever the hidden state is.
    signs = mx.where(mx.arange(LAST) % 2 == 0, 100.0, -100.0)[:, None]
    weight = model.lm_head.weight
    model.lm_head.weight = mx.concatenate([weight[:-LAST], signs * weight[-1]])
    mx.eval(model.parameters())
    return Target(model, config, "padded")


def drafted(drafter: Drafter, on: Target) -> list[list[int]]:
    """The candidates of four drafts after a text that holds a token that the drafter may not know."""
    state = drafter.open()
    extend(
        drafter,
        state,
        Committed(0, TOKENS, on.forward([(on.open(), TOKENS)], drafter.target_layer_ids).aux_hidden_states),
    )
    draft = propose(drafter, state, 271, 4, GREEDY)
    assert all(np.isfinite(np.array(draft.ranks)).reshape(-1))
    return draft.candidates.tolist()


def load_block(folder: Path, size: int, selector: bool) -> Drafter:
    plain = dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"))
    changes: dict[str, Any] = {} if selector else {"architectures": ["DFlashDraftModel"], **plain}
    config = dflash2_config(vocab_size=size, **changes)
    return load_dflash2(write_drafter(folder, config, random_tensors(config)), target("qwen3"), "d")


def load_first_eagle(folder: Path, size: int, ends: bool) -> Drafter:
    config = eagle_config(version=1, vocab_size=size)
    return load_eagle(
        write_eagle(folder, config, with_ends(eagle_tensors(config, 1), size, ends)), target("llama"), "e"
    )


def load_third_eagle(folder: Path, size: int, ends: bool) -> Drafter:
    config = eagle_config(vocab_size=size, draft_vocab_size=size)
    tensors = {n: v for n, v in eagle_tensors(config).items() if n not in ("d2t", "t2d", "lm_head.weight")}
    return load_eagle(write_eagle(folder, config, midlayer(with_ends(tensors, size, ends))), target("llama"), "e")


def load_head(folder: Path, size: int, ends: bool) -> Drafter:
    config = {"model_type": "qwen3_5_mtp", "text_config": {**CONFIGS["qwen3"], "vocab_size": size}}
    return load_mtp(write_head(folder, config, with_ends(head_tensors("qwen3"), size, ends)), target("qwen3"), "m")


def with_ends(tensors: dict[str, mx.array], size: int, ends: bool) -> dict[str, mx.array]:
    """Add an embedding and an output head of the head's own, whose last rows score highest."""
    if not ends:
        return tensors
    rise = mx.arange(size)[:, None] / size
    return tensors | {
        name: mx.random.normal((size, 64)) * (0.1 + 2 * rise**40)
        for name in ("embed_tokens.weight", "lm_head.weight")
    }


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("load", [load_block, load_first_eagle, load_third_eagle, load_head])
def test_only_tokens_that_both_have_are_drafted(
    load: Callable[[Path, int, bool], Drafter], more: bool, tmp_path: Path
) -> None:
    family = "llama" if "eagle" in load.__name__ else "qwen3"
    for size in SIZES:
        found = drafted(load(tmp_path / str(size), size, more), target(family))
        assert SIZE - LAST <= max(map(max, found)) < min(size, SIZE)


@pytest.mark.parametrize("load", [load_block, load_first_eagle, load_third_eagle, load_head])
def test_larger_differences_are_refused(load: Callable[[Path, int, bool], Drafter], tmp_path: Path) -> None:
    for size in (269, 275):
        with pytest.raises(DrafterMismatch, match=f"vocabulary size {size}; target .* has {SIZE}"):
            load(tmp_path / str(size), size, False)


def test_the_codebooks_of_a_block_drafter_may_be_quantised(tmp_path: Path) -> None:
    config = dflash2_config(vocab_size=270, selector_rank=32)
    tensors = random_tensors(config)
    for name in ("predecessor", "successor"):
        parts = mx.quantize(tensors.pop(f"candidate_selector.{name}_codebook"), 32, 4)
        for part, value in zip(("weight", "scales", "biases"), parts, strict=True):
            tensors[f"candidate_selector.{name}_codebook.{part}"] = value
    drafter = load_dflash2(write_drafter(tmp_path, config, tensors), target("qwen3"), "d")
    assert isinstance(drafter.model.candidate_selector.successor_codebook, nn.QuantizedEmbedding)
    assert max(map(max, drafted(drafter, target("qwen3")))) < 270
