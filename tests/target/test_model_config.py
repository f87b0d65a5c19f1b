"""What a target's ``config.json`` is read as, with transformers' own classes as the judge."""

import json
from typing import Any

import numpy as np
import pytest
from tiny_models import CONFIGS

from mlx_spec.checkpoints.settings import Settings
from mlx_spec.errors import ModelWarning, UnsupportedModel
from mlx_spec.target.families import FAMILIES, Family
from mlx_spec.target.model_config import ModelConfig, class_of, unknown_keys

COMMON: dict[str, Any] = dict(
    attention_dropout=0.0,
    hidden_act="silu",
    initializer_range=0.02,
    torch_dtype="bfloat16",
    transformers_version="4.51.0",
    use_cache=True,
)
# As published, of what their makers wrote; the sizes are theirs.
LLAMA_3_1_8B = dict(
    COMMON,
    architectures=["LlamaForCausalLM"],
    attention_bias=False,
    bos_token_id=128000,
    eos_token_id=[128001, 128008, 128009],
    hidden_size=4096,
    intermediate_size=14336,
    max_position_embeddings=131072,
    mlp_bias=False,
    model_type="llama",
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=8,
    pretraining_tp=1,
    rms_norm_eps=1e-05,
    rope_scaling=dict(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
        rope_type="llama3",
    ),
    rope_theta=500000.0,
    tie_word_embeddings=False,
    vocab_size=128256,
)
MISTRAL_7B_V0_1 = dict(
    COMMON,
    architectures=["MistralForCausalLM"],
    bos_token_id=1,
    eos_token_id=2,
    hidden_size=4096,
    intermediate_size=14336,
    max_position_embeddings=32768,
    model_type="mistral",
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=8,
    rms_norm_eps=1e-05,
    rope_theta=10000.0,
    sliding_window=4096,
    tie_word_embeddings=False,
    vocab_size=32000,
)
QWEN2_5_7B = dict(
    COMMON,
    architectures=["Qwen2ForCausalLM"],
    bos_token_id=151643,
    eos_token_id=151645,
    hidden_size=3584,
    intermediate_size=18944,
    max_position_embeddings=32768,
    max_window_layers=28,
    model_type="qwen2",
    num_attention_heads=28,
    num_hidden_layers=28,
    num_key_value_heads=4,
    rms_norm_eps=1e-06,
    rope_theta=1000000.0,
    sliding_window=131072,
    tie_word_embeddings=False,
    use_sliding_window=False,
    vocab_size=152064,
)
QWEN3_8B = dict(
    COMMON,
    architectures=["Qwen3ForCausalLM"],
    attention_bias=False,
    bos_token_id=151643,
    eos_token_id=151645,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=12288,
    max_position_embeddings=40960,
    max_window_layers=36,
    model_type="qwen3",
    num_attention_heads=32,
    num_hidden_layers=36,
    num_key_value_heads=8,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=None,
    tie_word_embeddings=False,
    use_sliding_window=False,
    vocab_size=151936,
)
QWEN3_30B_A3B = dict(
    QWEN3_8B,
    architectures=["Qwen3MoeForCausalLM"],
    decoder_sparse_step=1,
    hidden_size=2048,
    intermediate_size=6144,
    max_window_layers=48,
    mlp_only_layers=[],
    model_type="qwen3_moe",
    moe_intermediate_size=768,
    norm_topk_prob=True,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=48,
    num_key_value_heads=4,
    output_router_logits=False,
    router_aux_loss_coef=0.001,
)
MIMO_7B = dict(
    COMMON,
    architectures=["MiMoForCausalLM"],
    attention_bias=True,
    auto_map=dict(
        AutoConfig="configuration_mimo.MiMoConfig", AutoModelForCausalLM="modeling_mimo.MiMoForCausalLM"
    ),
    bos_token_id=151643,
    eos_token_id=151645,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=11008,
    max_position_embeddings=32768,
    max_window_layers=36,
    model_type="mimo",
    num_attention_heads=32,
    num_hidden_layers=36,
    num_key_value_heads=8,
    num_nextn_predict_layers=1,
    rms_norm_eps=1e-05,
    rope_scaling=None,
    rope_theta=640000,
    sliding_window=None,
    tie_word_embeddings=False,
    use_sliding_window=False,
    vocab_size=151680,
)
QWEN3_NEXT_80B = dict(
    COMMON,
    architectures=["Qwen3NextForCausalLM"],
    attention_bias=False,
    bos_token_id=151643,
    decoder_sparse_step=1,
    eos_token_id=151645,
    full_attention_interval=4,
    head_dim=256,
    hidden_size=2048,
    intermediate_size=5120,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_value_head_dim=128,
    max_position_embeddings=262144,
    mlp_only_layers=[],
    model_type="qwen3_next",
    moe_intermediate_size=512,
    norm_topk_prob=True,
    num_attention_heads=16,
    num_experts=512,
    num_experts_per_tok=10,
    num_hidden_layers=48,
    num_key_value_heads=2,
    output_router_logits=False,
    partial_rotary_factor=0.25,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=10000000,
    router_aux_loss_coef=0.001,
    shared_expert_intermediate_size=512,
    tie_word_embeddings=False,
    use_sliding_window=False,
    vocab_size=151936,
)
QWEN3_5_27B: dict[str, Any] = dict(
    architectures=["Qwen3_5ForConditionalGeneration"],
    image_token_id=248056,
    model_type="qwen3_5",
    text_config=dict(
        attention_bias=False,
        attention_dropout=0.0,
        attn_output_gate=True,
        dtype="bfloat16",
        eos_token_id=248044,
        full_attention_interval=4,
        head_dim=256,
        hidden_act="silu",
        hidden_size=5120,
        initializer_range=0.02,
        intermediate_size=17408,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 16,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_value_head_dim=128,
        mamba_ssm_dtype="float32",
        max_position_embeddings=262144,
        mlp_only_layers=[],
        model_type="qwen3_5_text",
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        num_attention_heads=24,
        num_hidden_layers=64,
        num_key_value_heads=4,
        rms_norm_eps=1e-06,
        rope_parameters=dict(
            mrope_interleaved=True,
            mrope_section=[11, 11, 10],
            partial_rotary_factor=0.25,
            rope_theta=10000000,
            rope_type="default",
        ),
        tie_word_embeddings=False,
        use_cache=True,
        vocab_size=248320,
    ),
    tie_word_embeddings=False,
    transformers_version="4.57.0.dev0",
    video_token_id=248057,
    vision_config=dict(depth=27, hidden_size=1152, model_type="qwen3_5", patch_size=16),
    vision_end_token_id=248054,
    vision_start_token_id=248053,
)
PUBLISHED = {
    "Llama 3.1 8B": (LLAMA_3_1_8B, 131072, 128, 500000.0),
    "Mistral 7B v0.1": (MISTRAL_7B_V0_1, 32768, 128, 10000.0),
    "Qwen2.5 7B": (QWEN2_5_7B, 32768, 128, 1e6),
    "Qwen3 8B": (QWEN3_8B, 40960, 128, 1e6),
    "Qwen3 30B A3B": (QWEN3_30B_A3B, 40960, 128, 1e6),
    "MiMo 7B": (MIMO_7B, 32768, 128, 640000.0),
    "Qwen3-Next 80B": (QWEN3_NEXT_80B, 262144, 64, 1e7),
    "Qwen3.5 27B": (QWEN3_5_27B, 262144, 64, 1e7),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_known(name: str) -> None:
    """Every key is known, and the frequencies are those of the definition."""
    config, context, dims, base = PUBLISHED[name]
    read = ModelConfig.read(config, name)
    assert (read.unknown, read.context, read.rope.dims) == ((), context, dims)
    frequencies = base ** -(np.arange(0, dims, 2) / dims)
    if name != "Llama 3.1 8B":  # whose low ones are divided by 8
        np.testing.assert_allclose(np.array(read.rope.frequencies), frequencies, rtol=1e-5)
    else:
        np.testing.assert_allclose(
            np.array(read.rope.frequencies)[[0, -1]], frequencies[[0, -1]] / [1, 8], rtol=1e-5
        )


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_transformers_writes_of_them_means_the_same(name: str) -> None:
    """transformers 5 renames keys (rope_parameters, num_local_experts, dtype) when it saves a configuration."""
    config, *_ = PUBLISHED[name]
    text = config.get("text_config", config)
    saved = json.loads(class_of(FAMILIES[config["model_type"]])(**text).to_json_string(use_diff=False))
    written = {**config, "text_config": saved} if "text_config" in config else saved
    one, two = (
        ModelConfig.read(config, name),
        ModelConfig.read({**written, "model_type": config["model_type"]}, name),
    )
    assert two.unknown == ()
    assert (one.context, one.windows) == (two.context, two.windows)
    assert (one.rope.dims, one.rope.scale) == (two.rope.dims, two.rope.scale)
    assert np.array_equal(one.rope.frequencies, two.rope.frequencies)
    needed = [key for key in ("num_experts", "head_dim", "norm_topk_prob") if key in text]
    inner = two.arguments.get("text_config", two.arguments)
    assert {key: inner[key] for key in needed} == {key: text[key] for key in needed}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_key_of_the_class_of_transformers_is_known(family: Family) -> None:
    """A key that a later transformers adds fails here: is it read, fixed or harmless?"""
    declared = class_of(family)().to_dict()
    given = Settings(dict.fromkeys(declared, 1), "all", UnsupportedModel)
    assert unknown_keys({}, given, family) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_key_that_is_set_is_named(family: str) -> None:
    """Null, false, zero and what is empty switch nothing on."""
    off = {"attn_logit_softcapping": None, "use_qk_clip": False, "router_bias": 0, "skipped_layers": []}
    assert ModelConfig.read(changed(CONFIGS[family], off), "m").unknown == ()
    read = ModelConfig.read(
        changed(CONFIGS[family], {"attn_logit_softcapping": 50.0, "embedding_multiplier": 12}), "m"
    )
    assert read.unknown == ("attn_logit_softcapping", "embedding_multiplier")
    with pytest.warns(ModelWarning, match="m: config.json sets attn_logit_softcapping, embedding_multiplier"):
        read.warn("m")


def test_an_unknown_setting_of_the_position_encoding_is_named() -> None:
    """Not only keys of the top level."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "high_freq_bias": 2.0}
    assert ModelConfig.read(changed(CONFIGS["llama"], {"rope_parameters": rope}), "m").unknown == (
        "high_freq_bias",
    )


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
REFUSED = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("qwen3", {"attention_bias": True}, "attention_bias"),
    ("qwen2", {"head_dim": 64}, "head_dim"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate"),
    ("qwen3_5", {"layer_types": ["full_attention"] + ["linear_attention"] * 3}, "layer_types"),
    ("qwen3_5_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
    ("qwen3", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ("qwen3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ("qwen3", {"rope_scaling": {**YARN, "truncate": False}}, "truncate"),
    ("qwen2", {"rope_scaling": {"type": "linear"}}, "factor"),
    ("qwen2", {"rope_theta": "1e6"}, "rope_theta"),
    ("qwen2", {"rope_theta": 1, "rope_scaling": YARN}, "rope_theta"),
    ("llama", {"rope_parameters": [1]}, "rope_parameters"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
        "rope_parameters",
    ),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("llama", {"hidden_size": "64"}, "hidden_size"),
    ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps"),
    ("llama", {"vocab_size": None}, "vocab_size"),
    ("llama", {"max_position_embeddings": -1}, "max_position_embeddings"),
    ("llama_sliding", {"sliding_window": None}, "sliding_window"),
    ("qwen3", {"num_hidden_layers": True}, "num_hidden_layers"),
]


@pytest.mark.parametrize(("family", "changes", "key"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_computed_is_refused_by_name(family: str, changes: dict[str, Any], key: str) -> None:
    """Before any weight is read."""
    with pytest.raises(UnsupportedModel, match=key):
        ModelConfig.read(changed(CONFIGS[family], changes), "m")


WINDOWS = [
    ("mistral", {"sliding_window": 8}, (8, 8, 8, 8)),
    ("mistral", {"sliding_window": None}, (None,) * 4),
    ("mistral", {"sliding_window": 4096}, (None,) * 4),  # no shorter than the context
    ("qwen2", {"sliding_window": 8}, (None,) * 4),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 8)),
    ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": True}, (8, 8, 8, 8)),
    ("llama", {"sliding_window": 8}, (None,) * 4),
    ("llama", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 4}, (8, 8, 8, 8)),
]


@pytest.mark.parametrize(("family", "changes", "windows"), WINDOWS)
def test_windows(family: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    """By the rules of each family's class."""
    assert ModelConfig.read(changed(CONFIGS[family], changes), "m").windows == windows


def test_a_model_without_experts_may_say_so() -> None:
    """As dense checkpoints of a family that has both do."""
    none = {"num_experts": 0, "num_experts_per_tok": 0, "moe_intermediate_size": 16}
    assert ModelConfig.read(changed(CONFIGS["qwen3_5"], none), "m").unknown == ()


def test_yarn_stretches_the_context() -> None:
    """Four times 64 positions, although the model names 64."""
    given = {"max_position_embeddings": 64, "rope_scaling": YARN}
    assert ModelConfig.read(changed(CONFIGS["qwen3"], given), "m").context == 256


@pytest.mark.parametrize(
    ("outside", "inside", "has_head", "tied"),
    [
        (None, None, True, False),
        (None, None, False, True),
        (True, None, False, True),
        (False, True, True, True),
        (True, False, True, False),
        (True, False, False, True),
        (False, False, False, False),
    ],
)
def test_where_the_output_head_comes_from(
    outside: bool | None, inside: bool | None, has_head: bool, tied: bool
) -> None:
    """Wrapped configurations contradict themselves; the tensors decide then."""
    config = changed({**CONFIGS["qwen3_5"], "tie_word_embeddings": outside}, {"tie_word_embeddings": inside})
    read = ModelConfig.read(config, "m", has_head)
    assert read.arguments["text_config"]["tie_word_embeddings"] is tied


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with changes where the language model is described."""
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], **changes}}
    return {**config, **changes}


def test_only_vision_models_nest_the_language_model() -> None:
    """What another key of that name holds is not read."""
    read = ModelConfig.read({**CONFIGS["qwen3"], "text_config": {"num_hidden_layers": 9, "rope_theta": 5.0}}, "m")
    assert (len(read.windows), read.arguments["num_hidden_layers"]) == (4, 4)
