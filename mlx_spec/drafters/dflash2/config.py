"""The configuration of a DFlash or DFlash 2 checkpoint, from both published layouts.

Sources: Z Lab's ``dflash`` 0.1.0 (native layout), the ``speculators`` library 0.9.0 (speculators layout).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    "attention_bias": (None, False),
    "hidden_act": (None, "silu"),
}
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


def read_config(config: dict[str, Any], name: str) -> DFlash2Config:
    """Read a drafter's configuration.

    config: its ``config.json``, in the native or in the speculators layout.
    name: of the checkpoint, for messages.
    Raises DrafterMismatch that names the key when one is missing, contradictory, or asks for something else than
    DFlash 1 or 2.
    """
    try:
        flat = _flatten_speculators(config) if "speculators_model_type" in config else _flatten_native(config)
        flat = {key: value for key, value in flat.items() if value is not None}
        _refuse_relatives(flat, name)
        return _build(flat, "DFlash2DraftModel" in (config.get("architectures") or []), name)
    except KeyError as missing:
        raise DrafterMismatch(f"{name}: config.json has no {missing.args[0]!r}.") from None
    except (TypeError, ValueError) as error:
        raise DrafterMismatch(f"{name}: config.json holds a value of the wrong kind ({error}).") from None


def _refuse_relatives(flat: dict[str, Any], name: str) -> None:
    for key, plain in UNSUPPORTED.items():
        if flat.get(key) not in plain:
            raise DrafterMismatch(
                f"{name} sets {key} to {flat[key]!r}, which DFlash 1 and 2 do not have; "
                "mlx_spec runs only their plain forms."
            )
    draft_vocab = flat.get("draft_vocab_size")
    if draft_vocab not in (None, flat.get("vocab_size")):
        raise DrafterMismatch(
            f"{name} has a vocabulary of its own (draft_vocab_size {draft_vocab}, vocab_size "
            f"{flat.get('vocab_size')}); only drafters over the target's vocabulary are supported."
        )


def _flatten_native(config: dict[str, Any]) -> dict[str, Any]:
    flat = {**config, **(config.get("dflash_config") or {})}
    if flat.get("is_causal") is None:
        flat["is_causal"] = flat.get("causal")
    return flat


def _flatten_speculators(config: dict[str, Any]) -> dict[str, Any]:
    flat = {**QWEN3_DEFAULTS, **config["transformer_layer_config"], **config}
    if config.get("aux_hidden_state_layer_ids") is None:
        raise KeyError("aux_hidden_state_layer_ids")
    # speculators counts the embedding's output as hidden state 0, the native layout does not count it.
    flat["target_layer_ids"] = [i - 1 for i in config["aux_hidden_state_layer_ids"]]
    non_causal = config.get("sliding_window_non_causal", config["speculators_model_type"] == "dflash2")
    flat["is_causal"] = False if non_causal else None
    return flat


def _build(flat: dict[str, Any], is_dflash2: bool, name: str) -> DFlash2Config:
    layers = int(flat["num_hidden_layers"])
    layer_types = list(flat.get("layer_types") or ["full_attention"] * layers)
    if len(layer_types) != layers or not set(layer_types) <= {"full_attention", "sliding_attention"}:
        raise DrafterMismatch(
            f"{name}: layer_types must name full_attention or sliding_attention for each of {layers} layers, "
            f"found {layer_types}."
        )
    sliding = [kind == "sliding_attention" for kind in layer_types]
    window = int(flat["sliding_window"]) if any(sliding) else None
    is_causal = flat.get("is_causal")
    rope = flat.get("rope_parameters") or flat.get("rope_scaling")
    cap = flat.get("final_logit_softcapping")
    layer_ids = flat.get("target_layer_ids") or default_layer_ids(int(flat["num_target_layers"]), layers)
    draft_ids = flat.get("draft_token_ids")
    return DFlash2Config(
        hidden_size=int(flat["hidden_size"]),
        intermediate_size=int(flat["intermediate_size"]),
        num_hidden_layers=layers,
        num_attention_heads=int(flat["num_attention_heads"]),
        num_key_value_heads=int(flat["num_key_value_heads"]),
        head_dim=int(flat.get("head_dim") or flat["hidden_size"] // flat["num_attention_heads"]),
        vocab_size=int(flat["vocab_size"]),
        rms_norm_eps=float(flat["rms_norm_eps"]),
        max_position_embeddings=int(flat["max_position_embeddings"]),
        rope_theta=float(flat.get("rope_theta") or (rope or {}).get("rope_theta", 10000.0)),
        rope_scaling=rope,
        block_size=int(flat["block_size"]),
        mask_token_id=int(flat["mask_token_id"]),
        target_layer_ids=tuple(int(i) for i in layer_ids),
        num_target_layers=flat.get("num_target_layers"),
        causal=tuple(bool(s if is_causal is None else is_causal) for s in sliding),
        windows=tuple(window if s else None for s in sliding),
        conv_kernel_size=int(flat["conv_kernel_size"]) if is_dflash2 else 0,
        conv_group_size=int(flat["conv_group_size"]) if is_dflash2 else 0,
        selector_rank=int(flat["selector_rank"]) if is_dflash2 else 0,
        selector_top_k=int(flat["selector_top_k"]) if is_dflash2 else 16,
        input_embedding_scale=float(flat.get("input_embedding_scale", 1.0)),
        output_multiplier=float(flat.get("output_multiplier", 1.0)),
        final_logit_softcapping=float(cap) if cap and cap > 0 else None,
        draft_token_ids=tuple(int(i) for i in draft_ids) if draft_ids else None,
    )


def default_layer_ids(target_layers: int, draft_layers: int) -> list[int]:
    """Return the target_layer_ids of a checkpoint that names none: evenly from layer 1 to 3 before the last.

    target_layers, draft_layers: how many layers the target and the drafter have.
    """
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]
