"""Rotary position encodings as configurations describe them, read by transformers' rules."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.models.rope_utils import initialize_rope

from metal_kernels import Rope
from mlx_spec.target.rope import rope_frequencies


@dataclass(frozen=True)
class Kind:
    """A kind of position encoding: the settings that it must have, and those that it may have."""

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


KINDS = {
    "default": Kind(),
    "linear": Kind(("factor",)),
    "llama3": Kind(("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": Kind(
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "longrope": Kind(
        ("short_factor", "long_factor"), ("original_max_position_embeddings", "factor", "attention_factor")
    ),
}
# Qwen's vision models give text, image and video positions of their own; text alone has one of each.
TEXT_ALIKE = {"mrope": "default", "su": "longrope"}
# Every kind may have these. Those of M-RoPE say which entries turn by which position.
COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
LISTS = ("short_factor", "long_factor")


@dataclass(frozen=True)
class RopeSettings:
    """How positions are encoded.

    dims: entries of a head that are rotated.
    theta: the base.
    kind: a key of KINDS.
    scaling: the settings of that kind, complete.
    positions: the model's ``max_position_embeddings``.
    traditional: whether neighbouring entries are a pair.
    unknown: settings that are not known here.
    """

    dims: int
    theta: float
    kind: str
    scaling: Mapping[str, Any]
    positions: int
    traditional: bool = False
    unknown: tuple[str, ...] = ()

    @staticmethod
    def read(given: Mapping[str, Any], dims: int, positions: int, traditional: bool = False) -> "RopeSettings":
        """Read ``rope_parameters`` as transformers 5 writes them, ``rope_theta`` included.

        given: the settings.
        dims: entries of a head that are rotated.
        positions: ``max_position_embeddings``.
        Raises ValueError, in a sentence that names the key, for settings that cannot be computed.
        """
        named = given.get("rope_type") or given.get("type") or "default"
        kind = TEXT_ALIKE.get(str(named), named)
        if kind not in KINDS:
            raise ValueError(f"rope_type is {named!r}; known are {', '.join(KINDS)}")
        if missing := [key for key in KINDS[kind].needed if given.get(key) is None]:
            raise ValueError(f"rope_type {named!r} needs {' and '.join(missing)}")
        known = COMMON | {*KINDS[kind].needed, *KINDS[kind].optional}
        scaling = {
            key: checked(key, value, dims)
            for key, value in given.items()
            if key in known - COMMON and value is not None
        }
        if scaling.get("truncate") is False:
            raise ValueError("truncate is false; only rounded YaRN ranges are known")
        unknown = tuple(sorted(key for key, value in given.items() if key not in known and value))
        theta = checked("rope_theta", given.get("rope_theta"), dims)
        if kind in ("llama3", "yarn", "longrope"):
            scaling.setdefault("original_max_position_embeddings", positions)
        if kind == "longrope" and scaling["short_factor"] != scaling["long_factor"]:
            raise ValueError(
                "short_factor and long_factor differ; encodings that change with the text are not known"
            )
        return RopeSettings(dims, theta, kind, scaling, positions, traditional, unknown)

    @property
    def context(self) -> int:
        """The most positions that a model runs with these settings: YaRN stretches the original ones."""
        if self.kind != "yarn":
            return self.positions
        return max(self.positions, int(self.scaling["original_max_position_embeddings"] * self.scaling["factor"]))

    def build(self) -> Rope:
        """Build the encoding from mlx-lm's, with the attention factor of transformers."""
        scaling = {"rope_type": self.kind, **self.scaling}
        module = initialize_rope(self.dims, self.theta, self.traditional, scaling, self.positions)
        rope = rope_frequencies(module)
        return rope if self.kind not in ("yarn", "longrope") else replace(rope, scale=self.attention_factor)

    @property
    def attention_factor(self) -> float:
        """The factor on rotated queries and keys: given, or that of the papers."""
        given, scaling = self.scaling.get("attention_factor"), self.scaling
        if given is not None:
            return float(given)
        original = scaling["original_max_position_embeddings"]
        if self.kind == "longrope":
            factor = scaling.get("factor") or self.positions / original
            return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        stretch, mscale, all_dim = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and all_dim:
            return yarn_scale(stretch, mscale) / yarn_scale(stretch, all_dim)
        return yarn_scale(stretch, 1.0)


def yarn_scale(factor: float, mscale: float) -> float:
    """Return 0.1 m ln(s) + 1, YaRN's attention temperature for a stretch s (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def checked(key: str, value: Any, dims: int) -> Any:
    """Return a setting. Raises ValueError where it is not the positive number, flag or list that is needed."""
    if key == "truncate":
        needed, good = "true or false", isinstance(value, bool)
    elif key in LISTS:
        needed = f"a list of {dims // 2} numbers"
        good = isinstance(value, list) and len(value) == dims // 2 and all(map(is_positive, value))
    elif key in ("mscale", "mscale_all_dim"):
        needed, good = "a number", is_positive(value) or value == 0
    elif key == "rope_theta":
        needed, good = "a number above 1", is_positive(value) and value > 1
    else:
        needed, good = "a positive number", is_positive(value)
    if not good:
        raise ValueError(f"{key} is {value!r}, not {needed}")
    return value


def is_positive(value: Any) -> bool:
    """Whether a value is a positive, finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
