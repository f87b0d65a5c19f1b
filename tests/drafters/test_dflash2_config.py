"""Reading the configuration of DFlash and DFlash 2 checkpoints, from both layouts."""

from dataclasses import replace
from typing import Any

import pytest
from tiny_drafters import dflash2_config

from mlx_spec.checkpoints.settings import Settings
from mlx_spec.drafters.dflash2.config import (
    HARMLESS,
    UNSUPPORTED,
    DFlash2Config,
    default_layer_ids,
    read_config,
    read_settings,
)
from mlx_spec.errors import DrafterMismatch

SLIDING, FULL = "sliding_attention", "full_attention"

QWEN38_27B = dict(
    architectures=["DFlash2DraftModel"],
    model_type="qwen3",
    dtype="bfloat16",
    hidden_act="silu",
    attention_bias=False,
    is_causal=False,
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    layer_types=[SLIDING] * 5,
    sliding_window=2048,
    use_sliding_window=True,
    max_window_layers=5,
    max_position_embeddings=262144,
    num_target_layers=64,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_theta": 10000000, "rope_type": "default"},
    tie_word_embeddings=False,
    vocab_size=248320,
    dflash_config=dict(
        block_size=8,
        conv_group_size=16,
        conv_kernel_size=2,
        mask_token_id=248070,
        selector_rank=256,
        selector_top_k=16,
        target_layer_ids=[5, 19, 33, 47, 61],
    ),
)

# The keys that transformers' Qwen3Config has as defaults are left out of transformer_layer_config: vocab_size,
# hidden_size, num_attention_heads, head_dim, rms_norm_eps.
SPECULATORS_QWEN3_8B = dict(
    architectures=["DFlash2DraftModel"],
    speculators_model_type="dflash2",
    speculators_version="0.9.0",
    block_size=16,
    mask_token_id=151669,
    draft_vocab_size=151936,
    aux_hidden_state_layer_ids=[2, 10, 18, 26, 34],
    sliding_window_non_causal=True,
    sample_from_anchor=False,
    conv_kernel_size=2,
    conv_group_size=16,
    selector_rank=256,
    selector_top_k=16,
    transformer_layer_config=dict(
        model_type="qwen3",
        intermediate_size=12288,
        num_hidden_layers=8,
        num_key_value_heads=8,
        layer_types=[SLIDING] * 8,
        sliding_window=2048,
        use_sliding_window=True,
        max_position_embeddings=40960,
        rope_parameters={"rope_theta": 1000000, "rope_type": "default"},
    ),
)
NATIVE_QWEN3_8B = dict(
    QWEN38_27B,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=8,
    layer_types=[SLIDING] * 8,
    max_position_embeddings=40960,
    rope_parameters={"rope_theta": 1000000, "rope_type": "default"},
    vocab_size=151936,
    num_target_layers=None,
    dflash_config=dict(
        QWEN38_27B["dflash_config"], block_size=16, mask_token_id=151669, target_layer_ids=[1, 9, 17, 25, 33]
    ),
)


def dflash1_config(**changes: Any) -> dict[str, Any]:
    """The old layout: block_size and rope_theta at the top level, no is_causal."""
    config = dict(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        hidden_act="silu",
        vocab_size=151936,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        num_target_layers=36,
        block_size=16,
        rope_theta=1000000,
        rope_scaling=None,
        sliding_window=None,
        use_sliding_window=False,
        dflash_config=dict(mask_token_id=151669, target_layer_ids=[1, 9, 17, 25, 33]),
    )
    return {**config, **changes}


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Remove a key from every level."""
    return {
        k: without(v, key) if isinstance(v, dict) and k != "rope_parameters" else v
        for k, v in config.items()
        if k != key
    }


def test_qwen38_27b_dflash2() -> None:
    assert read_config(QWEN38_27B, "x") == DFlash2Config(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=248320,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        rope_theta=1e7,
        rope_scaling=None,
        block_size=8,
        mask_token_id=248070,
        target_layer_ids=(5, 19, 33, 47, 61),
        num_target_layers=64,
        causal=(False,) * 5,
        windows=(2048,) * 5,
        conv_kernel_size=2,
        conv_group_size=16,
        selector_rank=256,
        selector_top_k=16,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
        draft_token_ids=None,
    )
    assert read_config(QWEN38_27B, "x").context_window == 2047


def test_muse_glimmer_30b_dflash2() -> None:
    config = dict(
        QWEN38_27B,
        hidden_size=6656,
        intermediate_size=19968,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
        vocab_size=202048,
        num_target_layers=52,
        dflash_config=dict(
            QWEN38_27B["dflash_config"],
            block_size=16,
            mask_token_id=201818,
            target_layer_ids=[1, 13, 25, 37, 49],
            output_multiplier=0.19611613513818404,
            final_logit_softcapping=20.0,
        ),
    )
    assert read_config(config, "x") == replace(
        read_config(QWEN38_27B, "x"),
        hidden_size=6656,
        intermediate_size=19968,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=None,
        vocab_size=202048,
        num_target_layers=52,
        block_size=16,
        mask_token_id=201818,
        target_layer_ids=(1, 13, 25, 37, 49),
        output_multiplier=0.19611613513818404,
        final_logit_softcapping=20.0,
    )


QWEN3_4B = dict(hidden_size=2560, vocab_size=151936, num_target_layers=36, mask_token_id=151669, block_size=16)
PUBLISHED_DFLASH1: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3-4B-DFlash-b16": (
        {},
        dict(QWEN3_4B, target_layer_ids=(1, 9, 17, 25, 33), causal=(False,) * 5, windows=(None,) * 5),
    ),
    "Qwen3-8B-DFlash-b16": (
        dict(hidden_size=4096, intermediate_size=12288),
        dict(QWEN3_4B, hidden_size=4096, target_layer_ids=(1, 9, 17, 25, 33), windows=(None,) * 5),
    ),
    "Qwen3.5-4B-DFlash": (
        dict(
            vocab_size=248320,
            num_target_layers=32,
            rope_theta=10000000,
            dflash_config=dict(mask_token_id=248070, target_layer_ids=[1, 8, 15, 22, 29]),
        ),
        dict(vocab_size=248320, mask_token_id=248070, target_layer_ids=(1, 8, 15, 22, 29), rope_theta=1e7),
    ),
    "Qwen3.5-27B-DFlash": (
        dict(
            hidden_size=5120,
            num_hidden_layers=6,
            num_target_layers=64,
            layer_types=[SLIDING] * 5 + [FULL],
            sliding_window=4096,
            dflash_config=dict(mask_token_id=248070),
        ),
        dict(
            causal=(True,) * 5 + (False,),
            windows=(4096,) * 5 + (None,),
            context_window=None,
            target_layer_ids=(1, 13, 25, 37, 49, 61),
        ),
    ),
    "Qwen3.6-27B-DFlash": (
        dict(
            hidden_size=5120,
            intermediate_size=17408,
            num_target_layers=64,
            layer_types=[SLIDING] * 4 + [FULL],
            sliding_window=2048,
            dflash_config=dict(mask_token_id=248070, target_layer_ids=[1, 16, 31, 46, 61]),
        ),
        dict(causal=(True,) * 4 + (False,), windows=(2048,) * 4 + (None,), target_layer_ids=(1, 16, 31, 46, 61)),
    ),
    "Qwen3.6-35B-A3B-DFlash": (
        dict(
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=8,
            num_key_value_heads=4,
            num_target_layers=40,
            dflash_config=dict(mask_token_id=248070, target_layer_ids=[1, 10, 19, 28, 37]),
        ),
        dict(num_hidden_layers=8, num_key_value_heads=4, target_layer_ids=(1, 10, 19, 28, 37)),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED_DFLASH1)
def test_published_dflash_1(name: str) -> None:
    changes, expected = PUBLISHED_DFLASH1[name]
    config = read_config(dflash1_config(**changes), name)
    assert {key: getattr(config, key) for key in expected} == expected
    assert (config.conv_kernel_size, config.conv_group_size, config.selector_rank) == (0, 0, 0)


def test_both_layouts_read_alike() -> None:
    native, speculators = read_config(NATIVE_QWEN3_8B, "x"), read_config(SPECULATORS_QWEN3_8B, "x")
    assert native == speculators
    assert speculators.target_layer_ids == (1, 9, 17, 25, 33)
    assert (speculators.hidden_size, speculators.head_dim, speculators.vocab_size) == (4096, 128, 151936)
    assert (speculators.num_attention_heads, speculators.rms_norm_eps) == (32, 1e-6)


def test_every_qwen3_default_may_be_left_out() -> None:
    config = dict(SPECULATORS_QWEN3_8B, transformer_layer_config={})
    config.pop("draft_vocab_size")
    read = read_config(config, "x")
    assert (read.vocab_size, read.hidden_size, read.intermediate_size) == (151936, 4096, 22016)
    assert (read.num_hidden_layers, read.num_attention_heads, read.num_key_value_heads) == (32, 32, 32)
    assert (read.head_dim, read.max_position_embeddings, read.rms_norm_eps) == (128, 32768, 1e-6)
    assert (read.rope_theta, read.rope_scaling, read.windows) == (1e4, None, (None,) * 32)


def test_speculators_dflash_1() -> None:
    """Without DFlash2DraftModel there is no convolution, and sliding layers are causal if the file is silent."""
    config = dict(SPECULATORS_QWEN3_8B, architectures=["DFlashDraftModel"], speculators_model_type="dflash")
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        config.pop(key)
    config.pop("sliding_window_non_causal")
    read = read_config(config, "x")
    assert (read.conv_kernel_size, read.selector_rank, read.causal) == (0, 0, (True,) * 8)
    assert read_config(dict(config, sliding_window_non_causal=True), "x").causal == (False,) * 8


@pytest.mark.parametrize(
    ("top", "nested", "expected"), [(16, ..., 16), (..., 8, 8), (16, 8, 8)], ids=["old", "new", "both"]
)
def test_block_size_is_read_from_both_places(top: Any, nested: Any, expected: int) -> None:
    config = without(QWEN38_27B, "block_size")
    if top is not ...:
        config["block_size"] = top
    if nested is not ...:
        config["dflash_config"]["block_size"] = nested
    assert read_config(config, "x").block_size == expected


@pytest.mark.parametrize(
    ("top", "nested", "expected"),
    [
        # (is_causal, dflash_config.causal) to (sliding layer, full layer)
        (..., ..., (True, False)),
        (None, ..., (True, False)),
        (False, ..., (False, False)),
        (True, ..., (True, True)),
        (..., False, (False, False)),
        (..., True, (True, True)),
        (None, True, (True, True)),
        (False, True, (False, False)),
        (True, False, (True, True)),
    ],
)
def test_causality_of_each_layer(top: Any, nested: Any, expected: tuple[bool, bool]) -> None:
    config = dflash2_config(layer_types=[SLIDING, FULL], is_causal=top)
    if nested is not ...:
        config["dflash_config"]["causal"] = nested
    assert read_config(config, "x").causal == expected


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([FULL, FULL], ((None, None), None)),
        ([SLIDING, FULL], ((24, None), None)),
        ([FULL, SLIDING], ((None, 24), None)),
        ([SLIDING, SLIDING], ((24, 24), 23)),
        (..., ((None, None), None)),
    ],
)
def test_windows_follow_the_layer_types(layers: Any, expected: Any) -> None:
    config = read_config(dflash2_config(layer_types=layers), "x")
    assert (config.windows, config.context_window) == expected


@pytest.mark.parametrize("layers", [[SLIDING], [SLIDING] * 3, [SLIDING, "chunked_attention"]])
def test_odd_layer_types_are_refused(layers: list[str]) -> None:
    with pytest.raises(DrafterMismatch, match="layer_types must name .* for each of 2 layers, found"):
        read_config(dflash2_config(layer_types=layers), "x")


def test_default_taps() -> None:
    assert default_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert default_layer_ids(64, 5) == [1, 16, 31, 46, 61]
    assert default_layer_ids(36, 1) == [18]
    config = dflash1_config(dflash_config=dict(mask_token_id=151669))
    assert read_config(config, "x").target_layer_ids == (1, 9, 17, 25, 33)


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        (dict(rope_theta=1e6), 1e6, None),
        (dict(rope_theta=1e6, rope_scaling=None), 1e6, None),
        (dict(), 1e4, None),
        (dict(rope_theta=1e6, rope_scaling={"rope_type": "yarn", "factor": 4.0}), 1e6, YARN),
        (dict(rope_theta=1e6, rope_scaling={"type": "yarn", "factor": 4.0}), 1e6, YARN),
        (dict(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}), 5e5, None),
        (dict(rope_theta=1e6, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}), 5e5, None),
        (
            dict(rope_parameters={"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}),
            5e5,
            {"rope_type": "linear", "factor": 2.0},
        ),
    ],
)
def test_old_and_new_places_of_the_rope(changes: dict[str, Any], theta: float, scaling: Any) -> None:
    config = read_config({**dflash2_config(rope_parameters=...), **changes}, "x")
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(("cap", "expected"), [(20.0, 20.0), (0, None), (-1.0, None), (None, None)])
@pytest.mark.parametrize("nested", [True, False])
def test_a_soft_cap_of_zero_or_less_is_none(nested: bool, cap: Any, expected: float | None) -> None:
    config = dflash2_config()
    (config["dflash_config"] if nested else config)["final_logit_softcapping"] = cap
    assert read_config(config, "x").final_logit_softcapping == expected


VARIANTS = {
    "projector_type": "domino",
    "markov_rank": 256,
    "attention_sink_bias": True,
    "attention_value_scale": 0.707,
    "use_gemma_norm": True,
    "use_swa": True,
    "rope_is_neox_style": False,
    "is_neox_style": False,
    "sample_from_anchor": True,
    "query_zero_predicts_next": True,
    "shift_label": True,
    "partial_rotary_factor": 0.5,
    "mlp_bias": True,
    "attention_bias": True,
    "hidden_act": "gelu",
}


@pytest.mark.parametrize("key", UNSUPPORTED)
@pytest.mark.parametrize("nested", [True, False])
def test_variants_are_refused_by_name(nested: bool, key: str) -> None:
    config = without(dflash2_config(), key)
    assert read_config(config, "some/drafter")
    place = config["dflash_config"] if nested else config
    for plain in UNSUPPORTED[key]:
        place[key] = plain
        assert read_config(config, "some/drafter")
    place[key] = VARIANTS[key]
    with pytest.raises(DrafterMismatch, match=rf"some/drafter sets {key} to {VARIANTS[key]!r}"):
        read_config(config, "some/drafter")


@pytest.mark.parametrize("key", ["projector_type", "sample_from_anchor", "hidden_act"])
def test_variants_are_refused_in_the_speculators_layout(key: str) -> None:
    with pytest.raises(DrafterMismatch, match=rf"sets {key} to"):
        read_config({**SPECULATORS_QWEN3_8B, key: VARIANTS[key]}, "x")


def test_a_vocabulary_of_its_own_is_refused_with_both_numbers() -> None:
    with pytest.raises(DrafterMismatch, match="draft_vocab_size 32000, vocab_size 151936"):
        read_config(dict(SPECULATORS_QWEN3_8B, draft_vocab_size=32000), "x")


NEEDED = [
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "rms_norm_eps", "max_position_embeddings", "sliding_window", "block_size", "mask_token_id"),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
]


@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize("key", NEEDED)
def test_missing_keys_are_named(key: str, null: bool) -> None:
    config = without(dflash2_config(), key)
    if null:
        (config if key in dflash2_config() else config["dflash_config"])[key] = None
    with pytest.raises(DrafterMismatch, match=f"x: config.json has no '{key}'"):
        read_config(config, "x")


def test_missing_target_depth_is_named_where_the_taps_follow_from_it() -> None:
    with pytest.raises(DrafterMismatch, match="has no 'num_target_layers'"):
        read_config(without(without(dflash2_config(), "target_layer_ids"), "num_target_layers"), "x")


@pytest.mark.parametrize("key", ["aux_hidden_state_layer_ids", "transformer_layer_config", "mask_token_id"])
def test_missing_keys_of_the_speculators_layout_are_named(key: str) -> None:
    with pytest.raises(DrafterMismatch, match=f"has no '{key}'"):
        read_config(without(SPECULATORS_QWEN3_8B, key), "x")


def test_head_dim_may_be_left_out() -> None:
    assert read_config(without(dflash2_config(), "head_dim"), "x").head_dim == 16


COUNTS = {*NEEDED, "head_dim", "num_target_layers", "vocab_size"} - {"rms_norm_eps", "mask_token_id"}
WRONG = {
    **dict.fromkeys(COUNTS, (0, -1, 2.5, "8", [8], True, {}, 1e30)),
    "mask_token_id": (-1, "95", [95], 1.5, True),
    "rms_norm_eps": (0, -1e-6, "small", [1e-6], True, float("nan")),
    "block_size": (0, 1, "8", [8], 129, 10**30),
    "conv_group_size": (0, 48, "16"),
    "num_key_value_heads": (0, 3, "2"),
    "num_hidden_layers": (0, "2", 257, 10**9),
    "is_causal": (0, "yes", [False]),
    "layer_types": (7, {"a": 1}, [1, 2]),
    "target_layer_ids": ("0", 3, [0, "2"], [0.5], {"0": 1}),
    "draft_token_ids": ("0", 3, [0, "2"], [True]),
    "input_embedding_scale": ("1", [1.0], True),
    "output_multiplier": (0, -1.0, "1"),
    "final_logit_softcapping": ("20", [20]),
    "dflash_config": ([1], "x", 3),
    "rope_parameters": ([1], "yarn", 3),
    "rope_theta": ("1e6", -1, 0, [1e6]),
    "architectures": (3, {"a": "b"}),
}


@pytest.mark.parametrize("key", sorted(WRONG))
def test_wrong_values_are_refused_by_key_and_value(key: str) -> None:
    for value in WRONG[key]:
        config = without(dflash2_config(), key)
        if key == "rope_theta":
            config.pop("rope_parameters")
        (config if key not in dflash2_config()["dflash_config"] else config["dflash_config"])[key] = value
        with pytest.raises(DrafterMismatch) as error:
            read_config(config, "some/drafter")
        message = str(error.value)
        assert message.startswith(f"some/drafter: {key} in config.json is ") and repr(value) in message
        assert "must be" in message and "\n" not in message


def test_only_published_keys_are_known() -> None:
    """What a published configuration holds is read or harmless; a key that is neither is named."""
    published = [QWEN38_27B, SPECULATORS_QWEN3_8B, NATIVE_QWEN3_8B, dflash1_config(), dflash2_config()]
    published += [dflash1_config(**changes) for changes, _ in PUBLISHED_DFLASH1.values()]
    for config in published:
        settings = Settings(config, "x", DrafterMismatch)
        read_settings(settings)
        assert settings.unread(HARMLESS) == []
    config = dflash2_config(sinks=4, novelty=0, extra=None, nested={"a": 1})
    config["dflash_config"]["gated"] = True
    config["rope_parameters"]["wavelength"] = 3
    settings = Settings(config, "x", DrafterMismatch)
    read_settings(settings)
    assert settings.unread(HARMLESS) == ["gated", "nested", "sinks", "wavelength"]
