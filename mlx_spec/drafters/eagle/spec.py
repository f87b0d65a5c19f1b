"""What a ``config.json`` states of an EAGLE head: its sizes, which hidden states it reads, and where it norms.

Two conventions number hidden states, and layouts differ in what a missing key means. A wrong choice drafts
fluently and is seldom accepted. Sources: SafeAILab/EAGLE, SpecForge, vLLM, SGLang, ``speculators`` 0.9.0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_spec.errors import DrafterMismatch, UnsupportedModel

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Of a head that names none, whatever its target's is.
DEFAULT_ROPE_BASE = 10000.0
# Heads are trained on texts of two to four thousand tokens, and draft badly after longer ones: they see no more.
MAX_CONTEXT = 4096
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


def is_eagle(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` shows that its checkpoint is an EAGLE head.

    The first heads call themselves what their target is called, but have one layer.
    """
    names = [*(config.get("architectures") or []), config.get("speculators_model_type"), config.get("model_type")]
    if any("eagle" in str(name).lower() for name in names) or "eagle_config" in config:
        return True
    is_first = any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or [])
    return is_first and config.get("num_hidden_layers") == 1


def read_spec(config: dict[str, Any], fused: bool, target_layers: int, name: str) -> EagleSpec:
    """Read how a head is wired.

    config: its ``config.json``.
    fused: whether it has EAGLE-3's tensors.
    target_layers: of the target.
    name: of the checkpoint, for messages.
    Raises UnsupportedModel for heads that work in another way, DrafterMismatch for layers that do not exist.
    """
    refuse_other_heads(config, name)
    if not fused:
        return EagleSpec(False, (target_layers,))
    from_speculators = "speculators_model_type" in config
    return EagleSpec(
        True,
        resolve_layer_ids(config, target_layers, name),
        bool(flag(config, "norm_before_residual", from_speculators)),
        # In SpecForge the key means that there is a norm before the output head; what its heads read next is
        # their output before it.
        from_speculators and bool(flag(config, "norm_output", False)),
        from_speculators or bool(flag(config, "norm_output", True)),
    )


def refuse_other_heads(config: dict[str, Any], name: str) -> None:
    """Raise UnsupportedModel, with the reason, for heads that mlx_spec does not run."""
    names = " ".join([*(config.get("architectures") or []), str(config.get("speculators_model_type"))]).lower()
    for kind, reason in OTHER_HEADS.items():
        if kind in names:
            raise UnsupportedModel(f"{name}: {reason}, which mlx_spec does not run.")


def resolve_layer_ids(config: dict[str, Any], target_layers: int, name: str) -> tuple[int, ...]:
    """Return the hidden states that an EAGLE-3 head reads, each as the number of the layer that puts it out.

    Ids at the top level are those of ``speculators``: id j is what layer j reads. In ``eagle_config`` id i is what
    layer i puts out, unless one of them is the number of layers: then they count as in ``speculators``. Without
    ids it is what the layers 2, n // 2 and n - 3 read.
    """
    nested = config.get("eagle_config") or {}
    if not nested.get("use_aux_hidden_state", True):
        return (target_layers,)
    own, counted_from_output = config.get(LAYER_IDS), nested.get(LAYER_IDS)
    for given in (own, counted_from_output):
        if given is not None and not (isinstance(given, list) and all(type(i) is int for i in given)):
            raise DrafterMismatch(f"{name}: {LAYER_IDS} must be a list of layer numbers, not {given!r}.")
    ids = own or counted_from_output or (2, target_layers // 2, target_layers - 3)
    shift = 0 if not own and counted_from_output and max(ids) != target_layers else -1
    target_layer_ids = tuple(i + shift for i in ids)
    if min(target_layer_ids) < 0 or max(target_layer_ids) >= target_layers:
        raise DrafterMismatch(
            f"{name}: {LAYER_IDS} is {list(ids)}; the target has {target_layers} layers. "
            "Use a head that was trained with this target."
        )
    return target_layer_ids


def declared_parts(config: dict[str, Any]) -> set[str]:
    """Return the tensors that a head must have by its config, besides those that all have."""
    parts = {
        "norm_before_fc": "input_norm.weight",
        "fc_norm": "fc_norm.0.weight",
        "use_aux_norm": "fc_norm.0.weight",
    }
    return {tensor for key, tensor in parts.items() if flag(config, key, False)}


def flag(config: dict[str, Any], key: str, missing: Any) -> Any:
    """Return a setting of the top level or of ``eagle_config``, ``missing`` where it is in neither."""
    for place in (config, config.get("eagle_config") or {}):
        if place.get(key) is not None:
            return place[key]
    return missing


def read_head_config(config: dict[str, Any], name: str) -> HeadConfig:
    """Read the sizes of a head. Raises DrafterMismatch where a key is missing or no number."""
    layer = config.get("transformer_layer_config") or config
    rope = layer.get("rope_parameters") or {}
    rope = rope.get("sliding_attention", rope)
    scaling = layer.get("rope_scaling") or rope
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    try:
        width, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
        dim = int(layer.get("head_dim") or width // heads)
        partial = rope.get("partial_rotary_factor", layer.get("partial_rotary_factor", 1.0))
        positions = int(layer.get("max_position_embeddings") or MAX_CONTEXT)
        is_sliding = "sliding_attention" in (layer.get("layer_types") or [])[:1]
        return HeadConfig(
            hidden_size=width,
            target_hidden_size=int(config.get("target_hidden_size") or width),
            intermediate_size=int(layer["intermediate_size"]),
            heads=heads,
            kv_heads=int(layer.get("num_key_value_heads") or heads),
            head_dim=dim,
            eps=float(layer["rms_norm_eps"]),
            vocab_size=int(layer["vocab_size"]),
            rope_dims=int(dim * partial),
            rope_base=float(rope.get("rope_theta") or layer.get("rope_theta") or DEFAULT_ROPE_BASE),
            rope_scaling=None if kind in ("default", "mrope") else dict(scaling, rope_type=kind),
            max_positions=positions,
            window=int(layer["sliding_window"]) if is_sliding else min(positions, MAX_CONTEXT),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DrafterMismatch(f"{name}: config.json does not describe a decoder layer ({error!r}).") from None
