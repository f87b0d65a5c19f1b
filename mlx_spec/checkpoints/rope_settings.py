"""The position encoding that a ``config.json`` asks for, checked and complete, as mlx-lm takes it.

Sources: transformers' ``modeling_rope_utils``, whose defaults fill what is missing, and mlx-lm's ``rope_utils``.
"""

import math
from dataclasses import dataclass
from typing import Any

from mlx_spec.checkpoints.settings import Settings

# Beside "default", which has no settings, and "mrope", which is the same for text.
KINDS = ("linear", "llama3", "yarn", "longrope")
ALIASES = {"su": "longrope", "deepseek_yarn": "yarn", "telechat3-yarn": "yarn", "mrope": "default"}
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class RopeSettings:
    """A position encoding.

    dims: how many entries of a head are rotated.
    base: of the frequencies.
    scaling: what ``initialize_rope`` takes, complete; None for plain frequencies.
    """

    dims: int
    base: float
    scaling: dict[str, Any] | None


def read_rope(
    layer: Settings, head_dim: int, max_positions: int, base: float = 10000.0, layer_type: str = "full_attention"
) -> RopeSettings:
    """Read ``rope_parameters``, ``rope_scaling`` and ``rope_theta`` of a decoder layer.

    head_dim: of the layer.
    max_positions: that the layer is said to reach.
    base: of a configuration that names none.
    layer_type: of the layer; transformers 5 may have settings for each.
    Raises the error of the settings for a kind that is not known, and for values that are missing or wrong.
    """
    old, new = layer.part("rope_scaling"), layer.part("rope_parameters")
    rope = of_layer(new.over(old) if old.values else new, layer_type)
    named = rope.text("rope_type", "") or rope.text("type", "") or "default"
    kind = ALIASES.get(named, named)
    if kind != "default" and kind not in KINDS:
        key = "rope_type" if rope.has("rope_type") else "type"
        raise rope.refusal(key, f"default, mrope, {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    theta = rope if rope.has("rope_theta") else layer
    partial = rope if rope.has("partial_rotary_factor") else layer
    share = partial.positive("partial_rotary_factor", 1.0)
    dims = int(head_dim * share)
    if share > 1 or dims < 2 or dims % 2:
        raise partial.refusal("partial_rotary_factor", f"at most 1 and give an even part of {head_dim}")
    readers = {"linear": linear, "llama3": llama3, "yarn": yarn}
    if kind == "longrope":
        scaling = longrope(rope, layer, dims, max_positions)
    else:
        scaling = readers[kind](rope, max_positions) if kind in readers else {}
    if (base := theta.positive("rope_theta", base)) <= 1:
        raise theta.refusal("rope_theta", "a number above 1")
    return RopeSettings(dims, base, {"rope_type": kind, **scaling} if scaling else None)


def of_layer(rope: Settings, layer_type: str) -> Settings:
    """Return the settings of a layer's type, where there are some for each type."""
    for kind in (layer_type, *LAYER_TYPES):
        if rope.has(kind):
            return rope.part(kind)
    return rope


def linear(rope: Settings, max_positions: int) -> dict[str, Any]:
    """Read frequencies that are all divided by a factor."""
    return {"factor": rope.positive("factor")}


def llama3(rope: Settings, max_positions: int) -> dict[str, Any]:
    """Read the frequencies of Llama 3.1, of which the high ones stay."""
    scaling = {
        "factor": rope.positive("factor"),
        "low_freq_factor": rope.positive("low_freq_factor"),
        "high_freq_factor": rope.positive("high_freq_factor"),
        "original_max_position_embeddings": rope.count("original_max_position_embeddings"),
    }
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise rope.refusal("low_freq_factor", f"below high_freq_factor {scaling['high_freq_factor']}")
    return scaling


def yarn(rope: Settings, max_positions: int) -> dict[str, Any]:
    """Read YaRN. Both its scales of attention, mscale and attention_factor, come out as mlx-lm's mscale."""
    original = rope.count("original_max_position_embeddings", max_positions)
    factor = (
        rope.positive("factor") if rope.has("factor") or original == max_positions else max_positions / original
    )
    scaling = {
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": rope.positive("beta_fast", 32),
        "beta_slow": rope.positive("beta_slow", 1),
    }
    if not rope.flag("truncate", True):
        raise rope.refusal("truncate", "true; untruncated corrections are not run")
    if rope.has("attention_factor"):
        scale = rope.positive("attention_factor")
        if factor <= 1 and scale != 1:
            raise rope.refusal("attention_factor", "1 where factor is at most 1")
        return {
            **scaling,
            "mscale": 1.0 if factor <= 1 else (scale - 1) / (0.1 * math.log(factor)),
            "mscale_all_dim": 0,
        }
    # One of the two alone means nothing.
    scales = [rope.number(key, 0.0) for key in ("mscale", "mscale_all_dim")]
    return {**scaling, "mscale": scales[0], "mscale_all_dim": scales[1]} if all(scales) else scaling


def longrope(rope: Settings, layer: Settings, dims: int, max_positions: int) -> dict[str, Any]:
    """Read the frequencies of Phi-3, each with a factor of its own."""
    place = rope if rope.has("original_max_position_embeddings") else layer
    original = place.count("original_max_position_embeddings", max_positions)
    if rope.positive("factor", max_positions / original) != max_positions / original:
        raise rope.refusal("factor", f"{max_positions / original}, as its positions have it")
    if rope.has("attention_factor"):
        raise rope.refusal("attention_factor", "left out; a scale of its own is not run")
    return {
        "original_max_position_embeddings": original,
        "short_factor": rope.positives("short_factor", dims // 2),
        "long_factor": rope.positives("long_factor", dims // 2),
    }
