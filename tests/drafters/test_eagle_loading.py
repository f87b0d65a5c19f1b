"""Layouts of EAGLE heads, which hidden states they read, their vocabularies, and what is refused."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from one_draft import extend, propose
from tiny_drafters import dflash2_config, random_tensors
from tiny_eagles import (
    DRAFT_IDS,
    Tensors,
    eagle_config,
    eagle_tensors,
    midlayer,
    settings,
    speculators,
    vocabulary,
    write_eagle,
)
from tiny_heads import head_tensors, renamed
from tiny_models import tiny_target

from mlx_spec.drafters.base import Committed
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.eagle.head import EagleHead
from mlx_spec.drafters.eagle.load import load_eagle
from mlx_spec.drafters.eagle.spec import (
    declared_parts,
    is_eagle,
    read_head_config,
    read_spec,
    resolve_layer_ids,
)
from mlx_spec.drafters.eagle.tensors import own_draft_ids
from mlx_spec.errors import DrafterMismatch, ModelError, ModelWarning, UnsupportedModel
from mlx_spec.target import Target

TOKENS = mx.array([5, 17, 3, 88, 41, 9], dtype=mx.int32)
CONFIG = eagle_config()
IDS = "eagle_aux_hidden_state_layer_ids"


@cache
def target() -> Target:
    return tiny_target("llama")


@cache
def tensors() -> Tensors:
    return eagle_tensors(CONFIG, dtype=mx.bfloat16)


def candidates(drafter: ChainDrafter, on: Target | None = None) -> tuple[list[list[int]], list[list[float]]]:
    """Candidates and their scores of three chained drafts after a short text: equal weights give equal ones."""
    on, scores = on or target(), []
    state = drafter.open()
    rows = on.forward([(on.open(), TOKENS)], drafter.target_layer_ids)
    extend(drafter, state, Committed(0, TOKENS, rows.aux_hidden_states))

    def choose(position: int, ids: mx.array, values: mx.array) -> tuple[mx.array, None]:
        scores.append(values.tolist())
        return ids[0], None

    return propose(drafter, state, 7, 3, choose).candidates.tolist(), scores


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], list[list[float]]]:
    return candidates(
        load_eagle(write_eagle(tmp_path_factory.mktemp("plain"), CONFIG, tensors()), target(), "head")
    )


def refusal(kind: type[ModelError], place: Path, *words: str, on: Target | None = None) -> None:
    """Check that a head is refused in one short line that holds these words."""
    with pytest.raises(ModelError) as error:
        load_eagle(place, on or target(), "the head")
    message = str(error.value)
    assert type(error.value) is kind, repr(error.value)
    assert "\n" not in message and len(message) < 400 and "the head" in message
    assert all(word in message for word in words), message


LAYOUTS: dict[str, Callable[[], tuple[dict[str, Any], Tensors]]] = {
    "SafeAILab": lambda: (CONFIG, midlayer(tensors())),
    "AngelSlim": lambda: (
        {**CONFIG, "architectures": ["Eagle3LlamaForCausalLM"], "target_model_type": "qwen3"},
        midlayer(tensors()),
    ),
    "SpecForge": lambda: (
        {**CONFIG, "eagle_config": {"use_aux_hidden_state": True, IDS: [1, 1, 0]}, "norm_output": True},
        midlayer(tensors()) | {"midlayer.self_attn.rotary_emb.inv_freq": mx.ones((12,))},
    ),
    "NVIDIA": lambda: ({**CONFIG, "eagle_config": {IDS: [1, 1, 0], "norm_before_fc": False}}, midlayer(tensors())),
    "prefixed": lambda: (CONFIG, {f"model.{name}": value for name, value in midlayer(tensors()).items()}),
    "speculators": lambda: (
        speculators({**CONFIG, "norm_before_residual": False, IDS: [2, 2, 1]}),
        tensors() | {"verifier_lm_head.weight": mx.ones((40, 64)), "verifier_norm.weight": mx.ones((64,))},
    ),
    "without a mask of the vocabulary": lambda: (CONFIG, {n: v for n, v in tensors().items() if n != "t2d"}),
    "with the target's embedding": lambda: (
        CONFIG,
        tensors() | {"embed_tokens.weight": target().model.model.embed_tokens.weight},
    ),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_published_layouts(layout: str, tmp_path: Path, expected: Any) -> None:
    drafter = load_eagle(write_eagle(tmp_path, *LAYOUTS[layout]()), target(), layout)
    assert drafter.embed == target().embed
    assert candidates(drafter) == expected


def test_an_embedding_of_the_heads_own(tmp_path: Path, expected: Any) -> None:
    own = {"embed_tokens.weight": target().model.model.embed_tokens.weight[::-1]}
    drafter = load_eagle(write_eagle(tmp_path, CONFIG, tensors() | own), target(), "own")
    assert mx.array_equal(drafter.embed(mx.array([3]))[0], own["embed_tokens.weight"][3])
    assert candidates(drafter) != expected


def test_a_quantised_target_lends_its_embedding_to_a_head_that_copied_it_before(tmp_path: Path) -> None:
    packed = tiny_target("llama", bits=4)
    copied = {"embed_tokens.weight": target().model.model.embed_tokens.weight}
    drafter = load_eagle(write_eagle(tmp_path, CONFIG, tensors() | copied), packed, "copied")
    assert drafter.embed == packed.embed


@pytest.mark.parametrize(
    "config, target_layer_ids",
    [
        ({}, (1, 17, 32)),
        ({IDS: None}, (1, 17, 32)),
        ({IDS: [2, 18, 33]}, (1, 17, 32)),
        ({IDS: [1, 36]}, (0, 35)),
        ({"eagle_config": {}}, (1, 17, 32)),
        ({"eagle_config": {IDS: [1, 17, 32]}}, (1, 17, 32)),
        ({"eagle_config": {IDS: [0, 17, 35]}}, (0, 17, 35)),
        # One of them is the number of layers, so they count what layers read.
        ({"eagle_config": {IDS: [24, 30, 36]}}, (23, 29, 35)),
        ({"eagle_config": {"use_aux_hidden_state": False, IDS: [1, 17, 32]}}, (36,)),
        ({IDS: [2, 18, 33], "eagle_config": {IDS: [5, 6, 7]}}, (1, 17, 32)),
    ],
)
def test_the_hidden_states_that_a_head_reads(config: dict[str, Any], target_layer_ids: tuple[int, ...]) -> None:
    assert resolve_layer_ids(settings(config, "the head"), 36) == target_layer_ids


@pytest.mark.parametrize("config", [{IDS: [0, 2, 3]}, {IDS: [2, 18, 37]}, {"eagle_config": {IDS: [-1, 3, 4]}}])
def test_hidden_states_that_there_are_not(config: dict[str, Any]) -> None:
    with pytest.raises(DrafterMismatch, match="the head.*36 layers"):
        resolve_layer_ids(settings(config, "the head"), 36)


@pytest.mark.parametrize(
    "config, residual, output, scores",
    [
        ({}, False, False, True),
        ({"norm_before_residual": True}, True, False, True),
        ({"norm_output": True}, False, False, True),
        ({"norm_output": False}, False, False, False),
        ({"eagle_config": {"norm_before_residual": True}}, True, False, True),
        ({"speculators_model_type": "eagle3"}, True, False, True),
        ({"speculators_model_type": "eagle3", "norm_before_residual": False}, False, False, True),
        ({"speculators_model_type": "eagle3", "norm_output": True}, True, True, True),
        ({"speculators_model_type": "eagle3", "norm_output": False}, True, False, True),
    ],
)
def test_what_a_config_says_and_what_its_absence_means(
    config: dict[str, Any], residual: bool, output: bool, scores: bool
) -> None:
    spec = read_spec(settings(config, "the head"), True, 36)
    assert spec.norm_before_residual == residual
    assert (spec.norm_output, spec.scores_normed) == (output, scores)


@pytest.mark.parametrize(
    "rope, base, dims, scaling",
    [
        ({}, 10000.0, 24, None),
        ({"rope_theta": 5e5}, 5e5, 24, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, 24, None),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {}}}, 1e4, 24, None),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5}}, 1e7, 12, None),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 10000.0, 24, "linear"),
        ({"rope_scaling": None, "rope_theta": 1e6}, 1e6, 24, None),
    ],
)
def test_the_rotation_is_the_heads_own(rope: dict[str, Any], base: float, dims: int, scaling: str | None) -> None:
    for config in (eagle_config(**rope), speculators(eagle_config(**rope))):
        read = read_head_config(settings(config, "the head"))
        assert (read.rope_base, read.rope_dims) == (base, dims)
        assert (read.rope_scaling or {}).get("rope_type") == scaling


@pytest.mark.parametrize(
    "changes, window",
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"max_position_embeddings": 131072}, 4096),
        ({"layer_types": ["sliding_attention"], "sliding_window": 512}, 512),
        ({"layer_types": ["full_attention"], "sliding_window": 512, "max_position_embeddings": 3000}, 3000),
    ],
)
def test_a_head_sees_no_more_than_it_was_trained_on(changes: dict[str, Any], window: int) -> None:
    assert read_head_config(settings(eagle_config(**changes), "the head")).window == window


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_heads(bits: int, tmp_path: Path) -> None:
    """They draft as their dequantised weights do, quantised when they were written or at load."""
    head = EagleHead(read_head_config(settings(CONFIG)), read_spec(settings(CONFIG), True, 4), tensors().keys())
    head.lm_head = nn.Linear(64, len(DRAFT_IDS), bias=False)
    words = {n: v for n, v in tensors().items() if n in ("d2t", "t2d")}
    head.load_weights([(n, v) for n, v in tensors().items() if n not in words])
    # Widths of 80 and 96 are multiples of 16, not of 32 in all cases: some matrices stay as they are.
    nn.quantize(
        head, 32, bits, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0
    )
    packed = dict(tree_flatten(head.parameters()))
    assert packed["fc.weight"].dtype == packed["lm_head.weight"].dtype == mx.uint32
    plain = {
        name: mx.dequantize(value, packed[name[:-6] + "scales"], packed[name[:-6] + "biases"], 32, bits)
        if value.dtype == mx.uint32
        else value
        for name, value in packed.items()
        if not name.endswith(("scales", "biases"))
    }
    unpacked = candidates(load_eagle(write_eagle(tmp_path / "plain", CONFIG, plain | words), target(), "plain"))
    folder = write_eagle(tmp_path / "packed", CONFIG, packed | words)
    assert candidates(load_eagle(folder, target(), "packed", dequantize=True)) == unpacked
    ids, _ = candidates(load_eagle(folder, target(), "packed"))
    assert len(set(ids[0]) & set(unpacked[0][0])) >= 14
    folder = write_eagle(tmp_path / "whole", CONFIG, tensors())
    quantization = {"group_size": 32, "bits": bits}
    assert (
        candidates(load_eagle(folder, target(), "at load", dequantize=True, quantization=quantization)) == unpacked
    )
    rows = load_eagle(folder, target(), "at load", quantization=quantization).forward
    assert rows.attention.output.quantization is not None and rows.attention.output.quantization.bits == bits


def test_eagle_1_drafts_from_a_trimmed_vocabulary(tmp_path: Path) -> None:
    config = eagle_config(version=1)
    folder = write_eagle(tmp_path, config, eagle_tensors(config, 1, ("fc bias",), dtype=mx.bfloat16))
    drafted, _ = candidates(load_eagle(folder, target(), "trimmed", draft_ids=DRAFT_IDS))
    assert set(sum(drafted, [])) <= set(DRAFT_IDS)


def test_heads_are_told_by_their_config() -> None:
    assert is_eagle(eagle_config(), {})
    for version in (1, 3):
        assert is_eagle(speculators(eagle_config(version=version)), {})
    assert is_eagle({"architectures": ["Eagle3LlamaForCausalLM"]}, {}) and is_eagle({"eagle_config": {}}, {})
    assert is_eagle({"architectures": "LlamaForCausalLMEagle3"}, {})
    assert is_eagle({"speculators_model_type": "peagle"}, {})
    for other in (
        {"architectures": ["DFlash2DraftModel"], "dflash_config": {}, "num_hidden_layers": 1},
        {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 36},
        {"speculators_model_type": "dflash2", "num_hidden_layers": 1},
        {"model_type": "qwen3_5_mtp"},
        {},
    ):
        assert not is_eagle(other, {})


def test_heads_are_told_by_their_tensors() -> None:
    """Published heads carry their target's architecture and number of layers, or say nothing."""
    for version in (1, 3):
        own = eagle_tensors(eagle_config(version=version), version)
        for names in (own, midlayer(own), {f"model.{name}": 0 for name in own}):
            for says in ({}, {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40}):
                assert is_eagle(says, names.keys())
    block = random_tensors(dflash2_config(num_hidden_layers=1, layer_types=["full_attention"]))
    others = (block, midlayer(block), head_tensors("qwen3"), renamed(head_tensors("qwen3"), {}, "mtp."))
    for tensors_of_others in others:
        assert not is_eagle({}, tensors_of_others.keys())
    assert not is_eagle({}, [name for name, _ in tree_flatten(target().model.parameters())])


SHORT = [3, 4, 8, 15, 16, 23, 42, 50, 51, 52, 60, 61, 70, 71, 80, 90]
OFFSETS = vocabulary(SHORT, 96)


def short(**changes: mx.array) -> Tensors:
    """A head of few draft tokens, with other tensors of its vocabulary."""
    return tensors() | {"lm_head.weight": tensors()["lm_head.weight"][: len(SHORT)], **OFFSETS, **changes}


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: {n: v for n, v in t.items() if n != "fc.weight"}, ("missing fc.weight",)),
        (lambda t: {n: v for n, v in t.items() if n != "norm.weight"}, ("missing norm.weight",)),
        (lambda t: t | {"layers.0.self_attn.sinks": mx.ones(4)}, ("unused layers.0.self_attn.sinks",)),
        (lambda t: t | {"fc.weight": t["fc.weight"][:, :64]}, ("fc.weight is [64, 64], not [64, 192]",)),
        (lambda t: t | {"fc.weight": t["fc.weight"] * mx.inf}, ("NaN or infinity in fc.weight",)),
        (lambda t: t | {"layers.1.mlp.up_proj.weight": mx.ones((4, 4))}, ("2 EAGLE layers", "one layer")),
        (lambda t: {"fc.weight": t["fc.weight"]}, ("no EAGLE head", "midlayer")),
        # Ids of the target in place of offsets: the last ones lead out of the vocabulary.
        (lambda t: short(d2t=mx.array(SHORT)), ("d2t", "3, 5, 10", "below 96")),
        (lambda t: short(d2t=OFFSETS["d2t"] * 0 - mx.arange(16)), ("d2t", "0, 0, 0")),
        (lambda t: short(d2t=OFFSETS["d2t"] - (mx.arange(16) == 9)), ("d2t", "no ascending ids")),
        (lambda t: short(d2t=mx.zeros((0,), dtype=mx.int32), t2d=mx.zeros(96) > 0), ("d2t names no token",)),
        (lambda t: short(t2d=mx.arange(96) < 16), ("d2t names 16 tokens, 3, 4, 8", "t2d 16, 0, 1, 2")),
        (lambda t: short(t2d=mx.arange(96) < 5), ("d2t names 16 tokens", "t2d 5, 0, 1")),
        (lambda t: t | OFFSETS, ("scores 40 tokens", "d2t names 16")),
        (lambda t: {n: v for n, v in t.items() if n not in ("d2t", "t2d")}, ("scores 40 tokens", "target has 96")),
    ],
)
def test_tensors_that_do_not_fit(
    change: Callable[[Tensors], Tensors], words: tuple[str, ...], tmp_path: Path
) -> None:
    refusal(DrafterMismatch, write_eagle(tmp_path, CONFIG, change(tensors())), *words)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_size": 32}, ("hidden size 32", "has 64")),
        ({"vocab_size": 100}, ("vocabulary size 100", "has 96")),
        ({"num_attention_heads": ...}, ("config.json", "num_attention_heads")),
        ({"rms_norm_eps": "small"}, ("config.json",)),
        ({"hidden_size": 32, "target_hidden_size": 64}, ("width 32", "embed_tokens.weight", "width 64")),
        ({"rope_scaling": {"rope_type": "unheard of"}}, ("config.json", "unheard of")),
        ({"fc_norm": True}, ("missing fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight",)),
        ({"eagle_config": {"norm_before_fc": True}}, ("missing input_norm.weight",)),
        ({IDS: "1, 2, 3"}, ("must be a list of whole numbers", "1, 2, 3")),
        ({"eagle_config": {IDS: [1.5, 2]}}, ("must be a list of whole numbers", "1.5")),
    ],
)
def test_configurations_that_do_not_fit(changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    refusal(DrafterMismatch, write_eagle(tmp_path, eagle_config(**changes), tensors()), *words)


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"architectures": ["PEagleDraftModel"]}, "P-EAGLE"),
        ({"speculators_model_type": "peagle"}, "P-EAGLE"),
        ({"architectures": ["LlamaForCausalLMEagle4"]}, "EAGLE-4"),
    ],
)
def test_heads_that_work_in_another_way_are_refused_by_name(
    changes: dict[str, Any], word: str, tmp_path: Path
) -> None:
    refusal(UnsupportedModel, write_eagle(tmp_path, {**CONFIG, **changes}, tensors()), word)


WRONG = {
    **dict.fromkeys(
        ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"), (0, "64", [64], 1.5)
    ),
    "num_key_value_heads": (0, 3, "2"),
    "head_dim": (0, "24", -24),
    "rms_norm_eps": (0, -1e-5, "small", [1e-5], True),
    "max_position_embeddings": (0, -1, "512", [512]),
    "target_hidden_size": (0, "64"),
    "rope_theta": (0, "10000", [1e4]),
    "rope_parameters": ([1], "yarn", 3),
    "rope_scaling": ([1], "yarn", 3),
    "layer_types": (3, [1], {"a": 1}),
    "eagle_config": ([1], "x", 3),
    "norm_before_residual": (1, "true", [True]),
    "fc_norm": (1, "no"),
    IDS: (3, "1, 2, 3", [1.5, 2], ["1"], {"0": 1}),
}


@pytest.mark.parametrize("key", sorted(WRONG))
@pytest.mark.parametrize("layout", [dict, speculators])
def test_wrong_values_are_refused_by_key_and_value(layout: Callable[..., Any], key: str) -> None:
    for value in WRONG[key]:
        config = settings(layout(eagle_config(**{key: value})), "the head")
        with pytest.raises(DrafterMismatch) as error:
            read_head_config(config), read_spec(config, True, 4), declared_parts(config)
        assert f"{key} in " in str(error.value) and f"is {value!r}, and must be" in str(error.value)


@pytest.mark.parametrize("act", ["gelu", "relu2"])
def test_other_activations_are_refused(act: str, tmp_path: Path) -> None:
    refusal(
        DrafterMismatch, write_eagle(tmp_path, eagle_config(hidden_act=act), tensors()), "hidden_act", act, "silu"
    )


def test_keys_of_published_configurations_are_known(tmp_path: Path) -> None:
    """Those of SafeAILab, AngelSlim, SpecForge, NVIDIA and ``speculators``; a key that nobody knows is named."""
    load_eagle(write_eagle(tmp_path / "known", {**CONFIG, **PUBLISHED}, tensors()), target(), "the head")
    config = {**CONFIG, "sinks": 4, "eagle_config": {"gated": True, "off": 0}}
    with pytest.warns(ModelWarning, match="the head: gated, sinks in config.json is not known"):
        load_eagle(write_eagle(tmp_path / "unknown", config, tensors()), target(), "the head")


PUBLISHED: dict[str, Any] = dict(
    dict(
        bos_token_id=128000, eos_token_id=[128001, 128009], pad_token_id=0, initializer_range=0.02, use_cache=True
    ),
    **dict(hidden_act="silu", tie_word_embeddings=False, torch_dtype="float16", transformers_version="4.28.1"),
    **dict(attention_bias=False, attention_dropout=0.1, mlp_bias=False, pretraining_tp=1, rope_scaling=None),
    **dict(target_model_type="qwen3", num_eagle_features=3, sliding_window=4096, use_sliding_window=True),
    **dict(max_window_layers=1, quantization_config={"ignored": 1}, _name_or_path="x"),
    eagle_config={
        "eagle_aux_hidden_state_layer_ids": [1, 1, 0],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
    },
)


def test_a_position_encoding_that_depends_on_the_length_is_refused(tmp_path: Path) -> None:
    config = eagle_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    refusal(DrafterMismatch, write_eagle(tmp_path, config, tensors()), "rope_type in rope_scaling", "dynamic")


BIG = 8192
SPREAD = np.sort(np.random.default_rng(0).choice(BIG, 40, replace=False))


@pytest.mark.parametrize("dtype", [mx.int64, mx.int32, mx.float32, mx.float16, mx.bfloat16])
def test_draft_tokens_that_a_conversion_cast(dtype: mx.Dtype) -> None:
    """They are right, by the mask beside them or because no number is rounded; else they are refused."""
    large = SimpleNamespace(vocab_size=BIG)
    marked = np.zeros(BIG, dtype=bool)
    marked[SPREAD] = True
    offsets, mask = mx.array(SPREAD - np.arange(40)).astype(dtype), mx.array(marked)
    for t2d in (mask, mask.astype(mx.bfloat16), mask.astype(mx.int8)):
        assert own_draft_ids(offsets, t2d, large, "the head") == SPREAD.tolist()
    if dtype in (mx.float16, mx.bfloat16):
        with pytest.raises(
            DrafterMismatch, match="the head: d2t is of type .*float16, which rounds whole numbers"
        ):
            own_draft_ids(offsets, None, large, "the head")
    else:
        assert own_draft_ids(offsets, None, large, "the head") == SPREAD.tolist()
    few = mx.array([0, 3, 7, 250]).astype(dtype)
    assert own_draft_ids(few, None, large, "the head") == [0, 4, 9, 253]
    for wrong in ([0.5, 1], [float("nan"), 2]):
        with pytest.raises(DrafterMismatch, match="d2t"):
            own_draft_ids(mx.array(wrong), None, large, "the head")


def test_folders_without_weights_or_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refusal(DrafterMismatch, tmp_path, "safetensors", "pytorch_model")
    (tmp_path / "config.json").unlink()
    refusal(DrafterMismatch, tmp_path, "no config.json")


@pytest.mark.parametrize("part", [0.0, 0.5, 0.999])
def test_a_truncated_file(part: float, tmp_path: Path) -> None:
    path = write_eagle(tmp_path, CONFIG, tensors()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    refusal(DrafterMismatch, tmp_path, path.name, "download it again")
