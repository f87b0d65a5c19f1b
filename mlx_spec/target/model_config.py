"""What a model's ``config.json`` says, read by transformers' own class, and what mlx-lm is given of it.

mlx-lm drops keys that its model class does not declare. So every key is known here as read, as fixed (one value is
computed, others are refused) or as harmless; any other one that is set is reported, since it may change numbers.
"""

import copy
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import transformers
from mlx_lm.models.qwen3_5 import TextModelArgs
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.utils import _get_classes

from metal_kernels import Rope
from mlx_spec.checkpoints.rope_settings import RopeSettings, read_rope
from mlx_spec.checkpoints.settings import VISION, Settings, is_harmless
from mlx_spec.errors import ModelWarning, UnsupportedModel
from mlx_spec.target.families import Family, family_of, text_config
from mlx_spec.target.rope import rope_frequencies

DEFAULT_CONTEXT = 8192
# What every model has to say; of other keys that are missing, transformers' class has a default.
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "full_attention_interval",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
# 0 where there are no experts.
EXPERTS = ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
# Read here, besides what the classes of transformers and mlx-lm declare.
READ = {
    *(
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    ),
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "full_attention_interval"),
    *("num_local_experts", "head_dim", "text_config", "model_file", "quantize_activations", "tie_word_embeddings"),
    # Text has one position of each kind, so these change nothing.
    *("mrope_section", "mrope_interleaved"),
}
# Not for the model classes, which would refuse or change them.
APART = {"model_type", "model_file", "text_config", "quantization", "quantization_config", "eos_token_id"}
# Of other parts of the checkpoint: vision, and heads that predict further tokens.
OTHER_PARTS = {
    *VISION,
    *("language_model_only", "num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    # Of generation, which has a file of its own.
    *("do_sample", "temperature", "top_k", "top_p", "max_length", "max_new_tokens", "repetition_penalty"),
    # Of programs: how they report or compute.
    *(
        "output_router_logits",
        "router_aux_loss_coef",
        "attn_implementation",
        "unsloth_fixed",
        "compression_config",
    ),
}
# Keys of which one value is computed, for every family.
FIXED: Mapping[str, Sequence[Any]] = {
    "hidden_act": ("silu", "swish"),
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "is_causal": (True,),
}
# For mlx-lm, whose position encodings are not used.
PLAIN_ROPE = {
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0},
    "partial_rotary_factor": 1.0,
}


@dataclass(frozen=True)
class ModelConfig:
    """A model's configuration.

    arguments: a ``config.json`` for mlx-lm, which builds the modules; windows and positions are not its affair.
    context: the most positions of a sequence.
    windows: of each layer, how many of the newest positions its attention sees; None for all.
    rope: the position encoding.
    is_tied: whether the embedding is the output head.
    unknown: keys that are set and that nothing here knows.
    """

    arguments: dict[str, Any]
    context: int
    windows: tuple[int | None, ...]
    rope: Rope
    is_tied: bool
    unknown: tuple[str, ...]

    @staticmethod
    def read(config: Mapping[str, Any], name: str, has_head: bool | None = None) -> "ModelConfig":
        """Read a ``config.json``.

        config: its content.
        name: of the model, for messages.
        has_head: whether the checkpoint holds an output head; None where that is not known.
        Raises UnsupportedModel for a family or a value that mlx_spec does not run; the message names the key.
        """
        family = family_of(config, name)
        text = text_config(config) if family.is_nested else config
        given = Settings(text, name, UnsupportedModel)
        check_sizes(given)
        positions = given.count("max_position_embeddings", DEFAULT_CONTEXT)
        size = head_size(given, family)
        rope = read_target_rope(given, family, size, positions)
        values = read_values(given, family)
        check_fixed(given, values, family)
        context = stretched_context(rope, positions)
        windows = [window if window and window < context else None for window in windows_of(given, values, family)]
        tied = is_tied((text, config), has_head)
        own = {
            **PLAIN_ROPE,
            "head_dim": size,
            "layer_types": ["full_attention"] * len(windows),
            "sliding_window": None,
            "full_attention_interval": attention_interval(given, values),
            "tie_word_embeddings": tied,
        }
        return ModelConfig(
            arguments=config_with(config, {**values, **own}, is_nested=text is not config),
            context=context,
            windows=tuple(windows),
            rope=build_rope(rope, positions, given.flag("rope_traditional", False)),
            is_tied=tied,
            unknown=tuple(unknown_keys(config, given, family)),
        )

    def warn(self, name: str) -> None:
        """Name the unknown keys, if there are any, in a ModelWarning."""
        if self.unknown:
            warnings.warn(
                f"{name}: config.json sets {', '.join(self.unknown)}, which mlx_spec does not know. If that "
                "changes what the model computes, its text is wrong here.",
                ModelWarning,
                stacklevel=3,
            )


def check_sizes(given: Settings) -> None:
    """Raise the error of the settings for sizes that are missing, no positive numbers, or do not divide."""
    for key in NEEDED:
        given.count(key)
    given.positive("rms_norm_eps")
    for key in SIZES:
        if given.has(key):
            given.count(key)
    for key in EXPERTS:
        if given.has(key):
            given.whole(key)
    heads, kv_heads = given.count("num_attention_heads"), given.get("num_key_value_heads")
    if kv_heads and heads % kv_heads:
        raise given.refusal("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    experts, chosen = given.get("num_experts") or given.get("num_local_experts"), given.get("num_experts_per_tok")
    if experts and chosen and chosen > experts:
        raise given.refusal("num_experts_per_tok", f"at most the number of experts, {experts}")


def head_size(given: Settings, family: Family) -> int:
    """Return the size of an attention head. Raises the error of the settings for one that is not run."""
    width, heads = given.count("hidden_size"), given.count("num_attention_heads")
    divided = width // heads
    # Some classes have a number of their own where none is given, and some divide.
    default = class_of(family)(hidden_size=width, num_attention_heads=heads).to_dict().get("head_dim")
    size = given.count("head_dim", default or divided)
    if size != divided and "head_dim" not in argument_names(family):
        raise given.refusal("head_dim", f"hidden_size / num_attention_heads ({divided}) in {family.model_type}")
    if size % 2:
        raise given.refusal("head_dim", "an even number")
    return size


def read_target_rope(given: Settings, family: Family, size: int, positions: int) -> RopeSettings:
    """Read the position encoding. Raises the error of the settings for one that is not run."""
    share = replace(given, values={"partial_rotary_factor": family.rotary_share})
    rope = read_rope(given.over(share), size, positions, getattr(class_of(family), "default_theta", 10000.0))
    if rope.dims != size and family.rotary_share == 1:
        raise given.refusal("partial_rotary_factor", f"1 in {family.model_type} models, which rotate whole heads")
    scaling = rope.scaling or {}
    if scaling.get("short_factor") != scaling.get("long_factor"):
        raise given.refusal("rope_parameters", "of a kind whose angles do not change with the length of the text")
    return rope


def class_of(family: Family) -> Any:
    """Return the class of transformers that reads the configuration of a family."""
    return getattr(transformers, family.config_class)


def read_values(given: Settings, family: Family) -> dict[str, Any]:
    """Return the settings that transformers' class and mlx-lm's know, complete and of the right types.

    Raises UnsupportedModel that names the key.
    """
    config_class = class_of(family)
    declared = config_class().to_dict().keys() | argument_names(family) | READ
    known = {key for key in declared - OTHER_PARTS - APART if not is_harmless(key)}
    theirs = {key: copy.deepcopy(value) for key, value in given.values.items() if key in known}
    try:
        read = config_class(**theirs)
    except Exception as error:  # of several classes, by what is wrong
        reason = str(error).strip().splitlines()[-1].strip().rstrip(".")
        raise UnsupportedModel(f"{given.name}: config.json cannot be read ({reason}).") from None
    return {key: getattr(read, key) for key in known if hasattr(read, key)}


def build_rope(settings: RopeSettings, positions: int, traditional: bool) -> Rope:
    """Build a position encoding from mlx-lm's."""
    module = initialize_rope(settings.dims, settings.base, traditional, settings.scaling, positions)
    return rope_frequencies(module)


def stretched_context(rope: RopeSettings, positions: int) -> int:
    """Return the most positions of a sequence: YaRN stretches the original ones."""
    scaling = rope.scaling or {}
    if scaling.get("rope_type") != "yarn":
        return positions
    return max(positions, int(scaling["original_max_position_embeddings"] * scaling["factor"]))


def argument_names(family: Family) -> set[str]:
    """Return the settings that mlx-lm's class of a family declares."""
    arguments = TextModelArgs if family.is_nested else _get_classes({"model_type": family.model_type})[1]
    return {field.name for field in dataclasses.fields(arguments)}


def check_fixed(given: Settings, values: Mapping[str, Any], family: Family) -> None:
    """Raise the error of the settings for one of which another value is computed here."""
    for key, computed in {**FIXED, **family.fixed}.items():
        found = values.get(key, given.get(key))
        if found is not None and found not in computed:
            raise given.refusal(key, f"{computed[0]!r}, with which mlx_spec computes {family.model_type} models")


def windows_of(given: Settings, values: Mapping[str, Any], family: Family) -> list[int | None]:
    """Return what each layer's attention sees, see ModelConfig. Raises the error of the settings."""
    layers, window = given.count("num_hidden_layers"), values.get("sliding_window")
    otherwise = "sliding_attention" if family.slides_everywhere and window else "full_attention"
    kinds = values.get("layer_types") or [otherwise] * layers
    if len(kinds) != layers or not {*kinds} <= {"full_attention", "sliding_attention", "linear_attention"}:
        raise given.refusal("layer_types", f"full_attention or sliding_attention for each of {layers} layers")
    if "sliding_attention" in kinds:
        window = given.count("sliding_window", window)
    return [window if kind == "sliding_attention" else None for kind in kinds]


def attention_interval(given: Settings, values: Mapping[str, Any]) -> int:
    """Return n where every n-th layer of a hybrid has attention. Raises the error of the settings for others."""
    kinds = values.get("layer_types") or []
    if "linear_attention" not in kinds:
        return 1
    interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    if [(i + 1) % interval == 0 for i in range(len(kinds))] != [kind == "full_attention" for kind in kinds]:
        raise given.refusal("layer_types", "full_attention in every n-th layer, linear_attention in others")
    return interval


def is_tied(parts: Sequence[Mapping[str, Any]], has_head: bool | None) -> bool:
    """Whether the output head is the embedding: by ``config.json``, and by the tensors where that is not clear.

    Wrapped models say it outside, inside, or differently in both.
    """
    said = [part.get("tie_word_embeddings") for part in parts]
    known = [bool(value) for value in said if value is not None]
    if not known:
        return has_head is False
    return any(known) if has_head is False else known[0]


def config_with(config: Mapping[str, Any], values: Mapping[str, Any], is_nested: bool) -> dict[str, Any]:
    """Return a configuration with settings of the language model replaced, where they lie in it."""
    if is_nested:
        return {**config, "text_config": {**config["text_config"], **values}}
    return {**config, **values}


def unknown_keys(config: Mapping[str, Any], given: Settings, family: Family) -> list[str]:
    """Return the keys that are set and that neither the model classes nor this file know."""
    known = argument_names(family) | READ | OTHER_PARTS | FIXED.keys() | family.fixed.keys()
    outside = Settings(config, given.name, given.error)
    return sorted({*given.unread(known), *outside.unread(known)})
