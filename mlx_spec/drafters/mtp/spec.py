"""How MTP heads of different families are wired, as data: a wrong wiring drafts fluently and is seldom accepted.

Sources: the families' published modelling code and the loaders of vLLM and SGLang; for Qwen3.5 also measured
acceptance (llama.cpp pull request 24025, Rapid-MLX 3371).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlx_spec.checkpoints.rope_settings import read_rope
from mlx_spec.checkpoints.settings import VISION, Settings
from mlx_spec.errors import DrafterMismatch, UnsupportedModel


@dataclass(frozen=True)
class MTPSpec:
    """What a head reads, and what its checkpoint calls its parts.

    family: for messages.
    pattern: regular expression of its tensors' names in a whole checkpoint, whose group ``name`` is what ``names``
        maps and whose group ``layer``, if any, numbers several heads.
    names: beginnings of tensor names and what our module calls them; any other name belongs to the decoder layer.
    after_target: the numbers of heads go on from the target's layers.
    hidden_first: the hidden state comes before the embedding in the concatenation.
    reads_normed: the head reads the target's hidden state after the final norm, else before it.
    recycles_normed: a chained step reads the head's own output after its norm, else before it.
    zero_centred: original checkpoints store norm weights less one.
    """

    family: str
    pattern: str
    names: dict[str, str]
    after_target: bool = False
    hidden_first: bool = False
    reads_normed: bool = True
    recycles_normed: bool = True
    zero_centred: bool = False


OWN_NAMES = {
    name: name for name in ("pre_fc_norm_", "fc.", "norm.", "layers.", "embed_tokens.", "lm_head.", "d2t")
}
NEXTN_NAMES = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "norm.",
    "shared_head.head.": "lm_head.",
    "embed_tokens.": "embed_tokens.",
}
MIMO_NAMES = {
    "token_layernorm.": "pre_fc_norm_embedding.",
    "hidden_layernorm.": "pre_fc_norm_hidden.",
    "input_proj.": "fc.",
    "final_layernorm.": "norm.",
}
AFTER_TARGET = r"(?:language_model\.)?model\.layers\.(?P<layer>\d+)\.(?P<name>.+)"

QWEN = MTPSpec("Qwen3.5", r"(?:language_model\.)?(?:model\.)?mtp\.(?P<name>.+)", OWN_NAMES, zero_centred=True)
SPECULATORS = MTPSpec("speculators", r"mtp_layers\.(?P<layer>\d+)\.(?P<name>.+)", MIMO_NAMES, zero_centred=True)
MIMO = MTPSpec("MiMo", r"model\.mtp_layers\.(?P<layer>\d+)\.(?P<name>.+)", MIMO_NAMES, hidden_first=True)
DEEPSEEK = MTPSpec("DeepSeek and GLM", AFTER_TARGET, NEXTN_NAMES, after_target=True)
HY3 = MTPSpec("Hy3", AFTER_TARGET, {**NEXTN_NAMES, "final_layernorm.": "norm."}, after_target=True)
STEP = MTPSpec(
    "Step 3.5",
    AFTER_TARGET,
    {**NEXTN_NAMES, "transformer.shared_head.norm.": "norm.", "transformer.shared_head.output.": "lm_head."},
    after_target=True,
    reads_normed=False,
    zero_centred=True,
)

SPECS: dict[str, MTPSpec] = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), QWEN),
    "mimo": MIMO,
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "joyai_llm_flash"), DEEPSEEK
    ),
    "hy_v3": HY3,
    **dict.fromkeys(("step3p5", "step3p7"), STEP),
}

# Settings of a decoder layer: sizes that every one has, those that some have, and flags.
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
OPTIONAL_SIZES = (
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "num_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)
FLAGS = ("attention_bias", "mlp_bias", "norm_topk_prob", "tie_word_embeddings", "rope_traditional")
OF_ROPE = ("rope_theta", "partial_rotary_factor", "mrope_section")
# Of a configuration that states none, as mlx-lm has it.
MAX_POSITIONS = 32768
# What changes nothing here: tensors say what the head has, and its layer has full attention.
HARMLESS = {
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_nextn_predict_layers", "block_size"),
    *("full_attention_interval", "layer_types", "decoder_sparse_step", "mlp_only_layers", "attn_output_gate"),
    *("mamba_ssm_dtype", "output_router_logits", "num_hidden_layers", "hidden_act"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "mrope_interleaved", "mrope_section"),
    *VISION,
}

# Heads that are no chain of one decoder layer over the target's last hidden state.
OTHER_HEADS = {
    "gemma4_assistant": "a Gemma 4 assistant reads the target's keys and values",
    "gemma4_unified_assistant": "a Gemma 4 assistant reads the target's keys and values",
    "nemotron_h": "a Nemotron-H head is a stack of attention and expert layers",
    "mimo_v2": "a MiMo-V2 head has three different layers with sliding windows",
    "mimo_v2_flash": "a MiMo-V2 head has three different layers with sliding windows",
    "qwen4_exp": "a Qwen3.8-Flash-Next head has recurrent state of its own",
}


def spec_of(config: Mapping[str, Any], name: str) -> MTPSpec:
    """Look up how the head of a checkpoint is wired, by its ``config.json``.

    Unknown model types have Qwen's spec, which heads trained for other targets use too.
    Raises UnsupportedModel for a family whose heads work in another way, DrafterMismatch where ``text_config`` is
    no object.
    """
    if "speculators_model_type" in config:
        return SPECULATORS
    text = Settings(config, name, DrafterMismatch).part("text_config").values
    for model_type in (config.get("model_type"), text.get("model_type")):
        known = plain_type(model_type)
        if known in OTHER_HEADS:
            raise UnsupportedModel(f"{name}: {OTHER_HEADS[known]}, which mlx_spec does not run.")
        if known in SPECS:
            return SPECS[known]
    return QWEN


def plain_type(model_type: Any) -> str:
    """Return a model type without what marks its text part or its head."""
    return str(model_type).removesuffix("_mtp").removesuffix("_text")


def layer_config(config: Settings) -> Settings:
    """Return the part of a ``config.json`` that describes the head's decoder layer, as a model's whole one."""
    parts = (config.part(key) for key in ("transformer_layer_config", "text_config") if config.has(key))
    part = next(parts, config).values
    return replace(config, values={**part, "model_type": plain_type(part.get("model_type"))})


def read_sizes(layer: Settings) -> dict[str, Any]:
    """Return the sizes of a decoder layer, each of its type.

    Raises DrafterMismatch, with the key, for settings that are missing, wrong, or not run.
    """
    sizes: dict[str, Any] = {key: layer.count(key) for key in SIZES}
    sizes["rms_norm_eps"] = layer.positive("rms_norm_eps")
    sizes |= {key: layer.whole(key) for key in OPTIONAL_SIZES if layer.has(key)}
    sizes |= {key: layer.flag(key) for key in FLAGS if layer.has(key)}
    heads, kv_heads = layer.count("num_attention_heads"), layer.get("num_key_value_heads")
    if kv_heads is not None and (not kv_heads or heads % kv_heads):
        raise layer.refusal("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    if layer.get("hidden_act") not in (None, "silu"):
        raise layer.refusal("hidden_act", "'silu'; heads with other activations are not run")
    return sizes


def rope_of(layer: Settings) -> dict[str, Any]:
    """Return the position encoding of a decoder layer under the keys that mlx-lm's classes read."""
    heads = layer.count("num_attention_heads")
    dim = layer.count("head_dim", layer.count("hidden_size") // heads or None)
    rope = read_rope(layer, dim, layer.count("max_position_embeddings", MAX_POSITIONS))
    given = layer.part("rope_scaling").over(layer.part("rope_parameters")).values
    found = {key: layer.values.get(key) for key in OF_ROPE} | {
        key: given[key] for key in OF_ROPE if given.get(key)
    }
    found = {key: value for key, value in found.items() if value is not None}
    scaling = rope.scaling or {"rope_type": "default"}
    if not found and rope.scaling is None:
        return {}
    parameters = {**found, **scaling, "type": scaling["rope_type"]}
    return {**found, "rope_scaling": rope.scaling, "rope_parameters": parameters}
