"""What a model's ``config.json`` says, read by transformers' own class, and what mlx-lm is given of it.

mlx-lm drops keys that its model class does not declare. So every key is known here as read, as fixed (one value is
computed, others are refused) or as harmless; any other one that is set is reported, since it may change numbers.
"""

import copy
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import transformers
from mlx_lm.models.qwen3_5 import TextModelArgs
from mlx_lm.utils import _get_classes

from mlx_spec.errors import ModelWarning, UnsupportedModel
from mlx_spec.target.families import Family, family_of, text_config
from mlx_spec.target.rope_settings import RopeSettings, is_positive

DEFAULT_CONTEXT = 8192
# What every model has to say; of other keys that are missing, transformers' class has a default.
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps")
SIZES = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "full_attention_interval",
    "num_experts_per_tok",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
# Read here, besides what the classes of transformers and mlx-lm declare.
READ = {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "full_attention_interval",
    "num_local_experts",
    "head_dim",
    "text_config",
    "model_type",
    "model_file",
    "quantization",
    "quantization_config",
    "quantize_activations",
    "eos_token_id",
    "mrope_section",
    "mrope_interleaved",
}
# Of these, not of the model class.
NOT_FOR_CLASSES = {
    "model_type",
    "model_file",
    "text_config",
    "quantization",
    "quantization_config",
    "eos_token_id",
}
HARMLESS = {
    # what the files are and who wrote them
    "_name_or_path",
    "name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "mlx_lm_version",
    "unsloth_fixed",
    "unsloth_version",
    "compression_config",
    # special tokens, and settings of generation, which have a file of their own
    "bos_token_id",
    "pad_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "max_length",
    "max_new_tokens",
    "repetition_penalty",
    "task_specific_params",
    # training
    "attention_dropout",
    "hidden_dropout",
    "initializer_range",
    "output_router_logits",
    "router_aux_loss_coef",
    "pretraining_tp",
    "rope_init_function",
    # how a program computes or reports, not what
    "use_cache",
    "attn_implementation",
    "_attn_implementation",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "id2label",
    "label2id",
    "problem_type",
    "tie_encoder_decoder",
    "torchscript",
    "_scalar_scales",
    # other parts of the checkpoint: vision, and heads that predict further tokens
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "language_model_only",
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
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
    unknown: keys that are set and that nothing here knows.
    """

    arguments: dict[str, Any]
    context: int
    windows: tuple[int | None, ...]
    rope: RopeSettings
    unknown: tuple[str, ...]

    @staticmethod
    def read(config: Mapping[str, Any], name: str, has_head: bool | None = None) -> "ModelConfig":
        """Read a ``config.json``.

        config: its content.
        name: of the model, for messages.
        has_head: whether the checkpoint holds an output head; None where that is not known.
        Raises UnsupportedModel for a family or a value that mlx_spec does not run; the message names the key.
        """
        family, text = family_of(config, name), text_config(config)
        try:
            values = read_values(text, family)
            check_sizes(values, family)
            check_fixed({**text, **values}, family)
            rope, windows = read_rope(text, values, family), windows_of(values, family)
            interval = {"full_attention_interval": attention_interval(values)}
        except ValueError as error:
            raise UnsupportedModel(f"{name}: config.json cannot be run: {error}.") from None
        plain = {**PLAIN_ROPE, "layer_types": ["full_attention"] * len(windows), "sliding_window": None}
        tied = {"tie_word_embeddings": is_tied(config, has_head)}
        return ModelConfig(
            arguments=merged(config, {**values, **plain, **interval, **tied}),
            context=rope.context,
            windows=tuple(window if window and window < rope.context else None for window in windows),
            rope=rope,
            unknown=(*unknown_keys(config, family), *(f"rope_parameters.{key}" for key in rope.unknown)),
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


def read_values(text: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the settings of a model that transformers' class and mlx-lm's know, complete and of the right types.

    text: the configuration of the language model.
    Raises ValueError that names the key.
    """
    if missing := [key for key in NEEDED if text.get(key) is None]:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(text.get(key), Mapping | None):
            raise ValueError(f"{key} is {text[key]!r}, not an object")
    config_class, arguments = getattr(transformers, family.config_class), argument_names(family)
    known = (config_class().to_dict().keys() | arguments | READ) - HARMLESS
    given = {key: copy.deepcopy(value) for key, value in text.items() if key in known - NOT_FOR_CLASSES}
    try:
        read = config_class(**given)
    except Exception as error:  # of several classes, by what is wrong
        raise ValueError(str(error).strip().splitlines()[-1].strip().rstrip(".")) from None
    values = {key: getattr(read, key) for key in known if hasattr(read, key)}
    return {**{key: text[key] for key in arguments & text.keys()}, **values}


def argument_names(family: Family) -> set[str]:
    """Return the settings that mlx-lm's class of a family declares."""
    arguments = TextModelArgs if family.is_nested else _get_classes({"model_type": family.model_type})[1]
    return {field.name for field in dataclasses.fields(arguments)}


def check_sizes(values: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError for sizes that are no positive numbers or do not divide each other."""
    for key in SIZES:
        value = values.get(key)
        if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            raise ValueError(f"{key} is {value!r}, not a positive whole number")
    if not is_positive(values["rms_norm_eps"]):
        raise ValueError(f"rms_norm_eps is {values['rms_norm_eps']!r}, not a positive number")
    heads, kv_heads = values["num_attention_heads"], values.get("num_key_value_heads")
    if kv_heads and heads % kv_heads:
        raise ValueError(f"num_attention_heads ({heads}) is no multiple of num_key_value_heads ({kv_heads})")
    size = values["hidden_size"] // heads
    if "head_dim" not in argument_names(family) and head_dim(values) != size:
        raise ValueError(
            f"head_dim is {values['head_dim']}; {family.model_type} heads have hidden_size / heads = {size}"
        )


def check_fixed(values: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError for a setting of which another value is computed here."""
    for key, computed in {**FIXED, **family.fixed}.items():
        found = values.get(key)
        if found is not None and found not in computed:
            raise ValueError(
                f"{key} is {found!r}; mlx_spec computes {family.model_type} with {computed[0]!r} only"
            )


def read_rope(text: Mapping[str, Any], values: Mapping[str, Any], family: Family) -> RopeSettings:
    """Read the position encoding. Raises ValueError that names the key."""
    given = values["rope_parameters"]
    if nested := [key for key in given if key.endswith("_attention")]:
        raise ValueError(f"rope_parameters differ by layer ({', '.join(nested)}); one for all layers is known")
    part = given.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    part = 1.0 if part is None else part
    if not is_positive(part) or part > 1 or (part != 1 and not family.partial_rotary):
        raise ValueError(f"partial_rotary_factor is {part!r}; {family.model_type} models rotate whole heads")
    positions = text.get("max_position_embeddings") or DEFAULT_CONTEXT
    dims = int(head_dim(values) * part)
    return RopeSettings.read(given, dims, positions, bool(text.get("rope_traditional")))


def head_dim(values: Mapping[str, Any]) -> int:
    """Return the size of an attention head."""
    return int(values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"])


def windows_of(values: Mapping[str, Any], family: Family) -> list[int | None]:
    """Return what each layer's attention sees, see ModelConfig. Raises ValueError for kinds that are not known."""
    layers, window = values["num_hidden_layers"], values.get("sliding_window")
    otherwise = "sliding_attention" if family.slides_everywhere and window else "full_attention"
    kinds = values.get("layer_types") or [otherwise] * layers
    if len(kinds) != layers or not {*kinds} <= {"full_attention", "sliding_attention", "linear_attention"}:
        raise ValueError(f"layer_types is {kinds!r}; needed is a known kind for each of {layers} layers")
    if "sliding_attention" in kinds and not (isinstance(window, int) and window > 0):
        raise ValueError(f"sliding_window is {window!r}; layers of sliding_attention need a positive number")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def attention_interval(values: Mapping[str, Any]) -> int:
    """Return n where every n-th layer of a hybrid has attention. Raises ValueError for other orders."""
    kinds = values.get("layer_types") or []
    if "linear_attention" not in kinds:
        return 1
    interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    if [(i + 1) % interval == 0 for i in range(len(kinds))] != [kind == "full_attention" for kind in kinds]:
        raise ValueError(f"layer_types is {kinds!r}; full_attention has to be every n-th layer")
    return interval


def is_tied(config: Mapping[str, Any], has_head: bool | None) -> bool:
    """Whether the output head is the embedding: by ``config.json``, and by the tensors where that is not clear.

    Wrapped models say it outside, inside, or differently in both.
    """
    said = [part.get("tie_word_embeddings") for part in (text_config(config), config)]
    known = [bool(value) for value in said if value is not None]
    if not known:
        return has_head is False
    return any(known) if has_head is False else known[0]


def merged(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with settings of the language model replaced, where they lie in it."""
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], **values}}
    return {**config, **values}


def unknown_keys(config: Mapping[str, Any], family: Family) -> list[str]:
    """Return the keys that are set and that neither the model classes nor this file know."""
    known = argument_names(family) | READ | HARMLESS | FIXED.keys() | family.fixed.keys()
    return sorted(
        {key for part in (config, text_config(config)) for key in part if key not in known and part[key]}
    )
