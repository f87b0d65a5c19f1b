"""What a ``config.json`` states of an EAGLE head: its sizes, which hidden states it reads, and where it norms.

Two conventions number hidden states, and layouts differ in what a missing key means. A wrong choice drafts
fluently and is seldom accepted. Sources: SafeAILab/EAGLE, SpecForge, vLLM, SGLang, ``speculators`` 0.9.0.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_spec.checkpoints.rope_settings import read_rope
from mlx_spec.checkpoints.settings import Settings
from mlx_spec.drafters.eagle.tensors import is_head
from mlx_spec.errors import DrafterMismatch, UnsupportedModel

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Of a head that names none, whatever its target's is.
DEFAULT_ROPE_BASE = 10000.0
# Heads are trained on texts of two to four thousand tokens, and draft badly after longer ones: they see no more.
MAX_CONTEXT = 4096
# Settings of decoder layers and their values in the heads that are run here.
PLAIN: dict[str, tuple[Any, ...]] = {"hidden_act": (None, "silu"), "use_mtp_layernorm": (None, False)}
# What changes nothing here: tensors say which parts there are, and the target is given.
HARMLESS = {
    *("attention_bias", "mlp_bias", "bias", "draft_vocab_size", "num_hidden_layers", "has_lm_head"),
    *("use_input_layernorm_in_first_layer", "use_last_layernorm", "next_layer_regular"),
    *("parallel_draft_step", "parallel_draft_heads_num_layers", "eagle_decoder_type"),
    *("num_eagle_features", "num_aux_hidden_states", "n_predict", "target_model_type", "modal_type"),
    *("embed_requires_grad", "sliding_window", "use_sliding_window", "max_window_layers"),
}
# Heads that are no chain of one decoder layer.
OTHER_HEADS = {
    "peagle": "a P-EAGLE head drafts all tokens in one pass of several layers",
    "eagle4": "an EAGLE-4 head scores its vocabulary through a factorisation of its own",
}


@dataclass(frozen=True)
class EagleSpec:
    """What a head reads and how it goes on.

    fused: EAGLE-3, which reads several hidden states through ``fc``; else EAGLE-1 or 2, which reads the last one.
    target_layer_ids: the hidden states, as the target numbers them.
    norm_before_residual: attention's output is added to the normed hidden state, else to the state itself.
    norm_output: a chained step reads the head's output after its norm, else before it.
    scores_normed: the output head reads it after the norm, as it always does but in some SpecForge checkpoints.
    """

    fused: bool
    target_layer_ids: tuple[int, ...]
    norm_before_residual: bool = False
    norm_output: bool = False
    scores_normed: bool = True


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a head and of its target's hidden states, and its position encoding, as mlx-lm takes it.

    window: how many of the newest positions a row sees, itself included.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    vocab_size: int
    rope_dims: int
    rope_base: float
    rope_scaling: dict[str, Any] | None
    max_positions: int
    window: int


def is_eagle(config: Mapping[str, Any], tensors: Collection[str]) -> bool:
    """Whether a checkpoint is an EAGLE head, by its ``config.json`` or by the names of its tensors.

    Many heads call themselves what their target is called.
    """
    return "eagle" in declared_kind(config) or "eagle_config" in config or is_head(tensors)


def declared_kind(config: Mapping[str, Any]) -> str:
    """Return what a ``config.json`` calls its model, as one text in lower case."""
    return " ".join(
        str(config.get(key)) for key in ("architectures", "speculators_model_type", "model_type")
    ).lower()


def read_spec(config: Settings, fused: bool, target_layers: int) -> EagleSpec:
    """Read how a head is wired.

    config: its ``config.json``.
    fused: whether it has EAGLE-3's tensors.
    target_layers: of the target.
    Raises UnsupportedModel for heads that work in another way, DrafterMismatch for layers that do not exist.
    """
    refuse_other_heads(config)
    if not fused:
        return EagleSpec(False, (target_layers,))
    from_speculators = config.has("speculators_model_type")
    return EagleSpec(
        True,
        resolve_layer_ids(config, target_layers),
        flag(config, "norm_before_residual", from_speculators),
        # In SpecForge the key means that there is a norm before the output head; what its heads read next is
        # their output before it.
        from_speculators and flag(config, "norm_output", False),
        from_speculators or flag(config, "norm_output", True),
    )


def refuse_other_heads(config: Settings) -> None:
    """Raise UnsupportedModel, with the reason, for heads that mlx_spec does not run."""
    for kind, reason in OTHER_HEADS.items():
        if kind in declared_kind(config.values):
            raise UnsupportedModel(f"{config.name}: {reason}, which mlx_spec does not run.")


def resolve_layer_ids(config: Settings, target_layers: int) -> tuple[int, ...]:
    """Return the hidden states that an EAGLE-3 head reads, each as the number of the layer that puts it out.

    Ids at the top level are those of ``speculators``: id j is what layer j reads. In ``eagle_config`` id i is what
    layer i puts out, unless one of them is the number of layers: then they count as in ``speculators``. Without
    ids it is what the layers 2, n // 2 and n - 3 read.
    """
    nested = config.part("eagle_config")
    if not nested.flag("use_aux_hidden_state", True):
        return (target_layers,)
    own, counted_from_output = config.wholes(LAYER_IDS), nested.wholes(LAYER_IDS)
    ids = own or counted_from_output or [2, target_layers // 2, target_layers - 3]
    shift = 0 if not own and counted_from_output and max(ids) != target_layers else -1
    target_layer_ids = tuple(i + shift for i in ids)
    if min(target_layer_ids) < 0 or max(target_layer_ids) >= target_layers:
        raise DrafterMismatch(
            f"{config.name}: {LAYER_IDS} is {list(ids)}; the target has {target_layers} layers. "
            "Use a head that was trained with this target."
        )
    return target_layer_ids


def declared_parts(config: Settings) -> set[str]:
    """Return the tensors that a head must have by its config, besides those that all have."""
    parts = {
        "norm_before_fc": "input_norm.weight",
        "fc_norm": "fc_norm.0.weight",
        "use_aux_norm": "fc_norm.0.weight",
    }
    return {tensor for key, tensor in parts.items() if flag(config, key, False)}


def flag(config: Settings, key: str, missing: bool) -> bool:
    """Return a setting of the top level or of ``eagle_config``, ``missing`` where it is in neither."""
    nested = config.part("eagle_config")
    return (nested if nested.has(key) and not config.has(key) else config).flag(key, missing)


def read_head_config(config: Settings) -> HeadConfig:
    """Read the sizes of a head. Raises DrafterMismatch that names the key where one is missing or wrong."""
    layer = config.part("transformer_layer_config") if config.has("transformer_layer_config") else config
    refuse_other_layers(layer)
    width, heads = layer.count("hidden_size"), layer.count("num_attention_heads")
    kv_heads = layer.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise layer.refusal("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    dim = layer.count("head_dim", width // heads or None)
    positions = layer.count("max_position_embeddings", MAX_CONTEXT)
    is_sliding = "sliding_attention" in layer.texts("layer_types")[:1]
    rope = read_rope(
        layer, dim, positions, DEFAULT_ROPE_BASE, "sliding_attention" if is_sliding else "full_attention"
    )
    return HeadConfig(
        hidden_size=width,
        target_hidden_size=config.count("target_hidden_size", width),
        intermediate_size=layer.count("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        eps=layer.positive("rms_norm_eps"),
        vocab_size=layer.count("vocab_size"),
        rope_dims=rope.dims,
        rope_base=rope.base,
        rope_scaling=rope.scaling,
        max_positions=positions,
        window=layer.count("sliding_window") if is_sliding else min(positions, MAX_CONTEXT),
    )


def refuse_other_layers(layer: Settings) -> None:
    """Raise DrafterMismatch for settings of decoder layers that the head's layer does not have."""
    for key, plain in PLAIN.items():
        if (value := layer.get(key)) not in plain:
            raise DrafterMismatch(
                f"{layer.name} sets {key} in {layer.place} to {value!r}; mlx_spec runs EAGLE heads with "
                f"{plain[-1]!r} only."
            )
