"""The configuration of a DFlash or DFlash 2 checkpoint, from both published layouts.

Sources: Z Lab's ``dflash`` 0.1.0 (native layout), the ``speculators`` library 0.9.0 (speculators layout).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlx_spec.checkpoints.rope_settings import read_rope
from mlx_spec.checkpoints.settings import Settings
from mlx_spec.errors import DrafterMismatch

# Values that transformers' Qwen3Config leaves out of a saved configuration because they are its defaults.
QWEN3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}

# Settings of relatives and forks of DFlash whose computation differs from what the block forward does.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "", "linear"),
    "markov_rank": (None, 0),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
    "use_gemma_norm": (None, False),
    "use_swa": (None, False),
    "rope_is_neox_style": (None, True),
    "is_neox_style": (None, True),
    "sample_from_anchor": (None, False),
    "query_zero_predicts_next": (None, False),
    "shift_label": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "mlp_bias": (None, False),
    "attention_bias": (None, False),
    "hidden_act": (None, "silu"),
}
# What changes nothing here: layer types say where windows are, tensors what DFlash 2 has, and the target is given.
HARMLESS = {
    *("sliding_window", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    *("use_sliding_window", "max_window_layers", "target_hidden_size", "num_anchors"),
    *("swa_window_size", "mask_token", "target_model", "target_model_type"),
}
# Of a block, and of a drafter; published ones have 7 to 16 rows and 3 to 8 layers.
MOST_ROWS, MOST_LAYERS = 128, 256
# Keys that configurations of other drafters do not have, unless they are of a kind that is asked before.
KEYS = {"dflash_config", "speculators_model_type"}


@dataclass(frozen=True)
class DFlash2Config:
    """Settings of a drafter, by the names of the native layout. Those that are not:

    causal: per layer, whether a block row sees only the block rows before it.
    windows: per layer, the sliding window, or None.
    conv_kernel_size, selector_rank: 0 in DFlash 1.
    draft_token_ids: the target's ids of the draft tokens, each once; None for all. Their order matters only
        between equal draft logits, of which the first is drafted.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 16
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    draft_token_ids: tuple[int, ...] | None = None

    @property
    def context_window(self) -> int | None:
        """Committed rows that a block can look back on: the window less one, None where a layer sees all."""
        window = self.windows[0]
        return None if window is None or None in self.windows else window - 1


def is_dflash2(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` shows that its checkpoint is a DFlash or DFlash 2 drafter."""
    return not KEYS.isdisjoint(config)


def read_config(config: Mapping[str, Any], name: str) -> DFlash2Config:
    """Read a drafter's configuration.

    config: its ``config.json``, in the native or in the speculators layout.
    name: of the checkpoint, for messages.
    Raises DrafterMismatch that names the key when one is missing, contradictory, of the wrong kind, or asks for
    something else than DFlash 1 or 2.
    """
    return read_settings(Settings(config, name, DrafterMismatch))


def read_settings(settings: Settings) -> DFlash2Config:
    """Read a drafter's configuration, see ``read_config``."""
    flat = flat_speculators(settings) if settings.has("speculators_model_type") else flat_native(settings)
    refuse_relatives(flat)
    return build(flat, "DFlash2DraftModel" in settings.texts("architectures"))


def refuse_relatives(flat: Settings) -> None:
    """Raise DrafterMismatch for settings of relatives and forks of DFlash that change what is computed."""
    for key, plain in UNSUPPORTED.items():
        if (value := flat.get(key)) not in plain:
            raise DrafterMismatch(
                f"{flat.name} sets {key} to {value!r}, which DFlash 1 and 2 do not have; "
                "mlx_spec runs only their plain forms."
            )
    vocab_size = flat.count("vocab_size")
    if (draft_vocab := flat.count("draft_vocab_size", vocab_size)) != vocab_size:
        raise DrafterMismatch(
            f"{flat.name} has a vocabulary of its own (draft_vocab_size {draft_vocab}, vocab_size {vocab_size}); "
            "only drafters over the target's vocabulary are supported."
        )


def flat_native(config: Settings) -> Settings:
    """Lay ``dflash_config`` over the top level."""
    return config.part("dflash_config").over(config)


def flat_speculators(config: Settings) -> Settings:
    """Lay the top level of the ``speculators`` layout over its decoder layer, by native names."""
    layer = config.part("transformer_layer_config", required=True)
    ids = config.wholes("aux_hidden_state_layer_ids")
    if not ids:
        raise config.missing("aux_hidden_state_layer_ids")
    non_causal = config.flag("sliding_window_non_causal", config.get("speculators_model_type") == "dflash2")
    # speculators counts the embedding's output as hidden state 0, the native layout does not count it.
    ours = {"target_layer_ids": [i - 1 for i in ids], "is_causal": False if non_causal else None}
    defaults = replace(config, values=QWEN3_DEFAULTS)
    return replace(config, values=ours).over(config).over(layer).over(defaults)


def build(flat: Settings, is_dflash2: bool) -> DFlash2Config:
    """Build a configuration from flat settings."""
    layers, width, heads = (flat.count(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    if layers > MOST_LAYERS:
        raise flat.refusal("num_hidden_layers", f"a whole number from 1 to {MOST_LAYERS}")
    kv_heads, positions = flat.count("num_key_value_heads"), flat.count("max_position_embeddings")
    if heads % kv_heads:
        raise flat.refusal("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    head_dim = flat.count("head_dim", width // heads or None)
    sliding = sliding_layers(flat, layers)
    window = flat.count("sliding_window") if any(sliding) else None
    rope = read_rope(flat, head_dim, positions)
    block = flat.whole("block_size", least=2)
    if block > MOST_ROWS:
        raise flat.refusal("block_size", f"a whole number from 2 to {MOST_ROWS}")
    cap = flat.number("final_logit_softcapping", 0.0)
    return DFlash2Config(
        hidden_size=width,
        intermediate_size=flat.count("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=flat.count("vocab_size"),
        rms_norm_eps=flat.positive("rms_norm_eps"),
        max_position_embeddings=positions,
        rope_theta=rope.base,
        rope_scaling=rope.scaling,
        block_size=block,
        mask_token_id=flat.whole("mask_token_id"),
        target_layer_ids=tuple(layer_ids(flat, layers)),
        num_target_layers=flat.count("num_target_layers") if flat.has("num_target_layers") else None,
        causal=causal_layers(flat, sliding),
        windows=tuple(window if s else None for s in sliding),
        input_embedding_scale=flat.number("input_embedding_scale", 1.0),
        output_multiplier=flat.positive("output_multiplier", 1.0),
        final_logit_softcapping=cap if cap > 0 else None,
        draft_token_ids=tuple(flat.wholes("draft_token_ids")) or None,
        **(dflash2_sizes(flat, width) if is_dflash2 else {}),
    )


def dflash2_sizes(flat: Settings, width: int) -> dict[str, int]:
    """Read the sizes of what DFlash 2 has and DFlash 1 has not."""
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    sizes = {key: flat.count(key) for key in keys}
    if width % sizes["conv_group_size"]:
        raise flat.refusal("conv_group_size", f"a divisor of hidden_size {width}")
    return sizes


def sliding_layers(flat: Settings, layers: int) -> list[bool]:
    """Return which layers have a sliding window."""
    kinds = flat.texts("layer_types") or ["full_attention"] * layers
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise DrafterMismatch(
            f"{flat.name}: layer_types must name full_attention or sliding_attention for each of {layers} layers, "
            f"found {kinds}."
        )
    return [kind == "sliding_attention" for kind in kinds]


def causal_layers(flat: Settings, sliding: list[bool]) -> tuple[bool, ...]:
    """Return in which layers a block row sees only block rows before it: in sliding ones, if nothing is said."""
    for key in ("is_causal", "causal"):
        if flat.has(key):
            return (flat.flag(key),) * len(sliding)
    return tuple(sliding)


def layer_ids(flat: Settings, layers: int) -> list[int]:
    """Return the target layers whose outputs are read."""
    return flat.wholes("target_layer_ids") or default_layer_ids(flat.count("num_target_layers"), layers)


def default_layer_ids(target_layers: int, draft_layers: int) -> list[int]:
    """Return the target_layer_ids of a checkpoint that names none: evenly from layer 1 to 3 before the last.

    target_layers, draft_layers: how many layers the target and the drafter have.
    """
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]
