"""Stages of a draft pass as formulas in float64 numpy, each from the stages before it."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from metal_kernels import Rope

Array = np.ndarray
# Tensors that are held in float64 at once.
HELD = 16
# Frequencies are powers in float32.
ROPE_ROUNDOFF = 2.0**-18


@dataclass(frozen=True)
class Formula:
    """How a stage follows from others.

    stage: its name, see ``ObservedDrafter.observe``.
    inputs: names of the stages that it is computed from.
    compute: the formula, from the inputs in float64.
    least_roundoff: of a stage that is rounded more than the type of the pass has it.
    """

    stage: str
    inputs: tuple[str, ...]
    compute: Callable[..., Array]
    least_roundoff: float = 0.0


class Float64Tensors(Mapping[str, Array]):
    """The tensors of a checkpoint in float64, quantised ones as what they stand for.

    They are converted when they are looked up, and only the last ones are held in this size.
    """

    def __init__(self, tensors: Mapping[str, mx.array], config: Mapping[str, Any]) -> None:
        """Take the tensors of a checkpoint and its ``config.json``, which says how they are quantised."""
        self._tensors = tensors
        self._settings = config.get("quantization") or config.get("quantization_config") or {}
        self._read = lru_cache(HELD)(self._convert)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._tensors if not name.endswith((".scales", ".biases")))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Array:
        return self._read(name)

    def _convert(self, name: str) -> Array:
        value, module = self._tensors[name], name.rpartition(".")[0]
        if f"{module}.scales" in self._tensors:
            value = self._dequantized(module, value)
        return np.array(value.astype(mx.float32), dtype=np.float64)

    def _dequantized(self, module: str, weight: mx.array) -> mx.array:
        own = self._settings.get(module)
        how = {**self._settings, **(own if isinstance(own, Mapping) else {})}
        scales, biases = self._tensors[f"{module}.scales"], self._tensors.get(f"{module}.biases")
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        mode = how.get("mode", "affine")
        return mx.dequantize(weight, scales, biases, group_size=how["group_size"], bits=how["bits"], mode=mode)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Divide by the root mean square over the last axis, and multiply by the weight."""
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps) * weight


def rope_formula(dims: int, base: float, scaling: Mapping[str, Any] | None) -> list[Formula]:
    """Return the formula of the frequencies of a rotary encoding, or none for a kind that has none here.

    dims, base, scaling: see RopeSettings.
    """
    kind = "default" if scaling is None else scaling["rope_type"]
    if kind not in ROPE_KINDS:
        return []

    def compute() -> Array:
        wavelengths = base ** (np.arange(0, dims, 2) / dims)
        return ROPE_KINDS[kind](wavelengths, dims, base, scaling or {})

    return [Formula("rope_frequencies", (), compute, ROPE_ROUNDOFF)]


def linear_frequencies(wavelengths: Array, dims: int, base: float, scaling: Mapping[str, Any]) -> Array:
    """Divide all by a factor. Wavelengths are in radians a position."""
    return 1 / (wavelengths * scaling["factor"])


def llama3_frequencies(wavelengths: Array, dims: int, base: float, scaling: Mapping[str, Any]) -> Array:
    """Divide the low ones by a factor, and go over smoothly to the high ones. Source: Llama 3.1."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / (2 * np.pi * wavelengths)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (kept + (1 - kept) / scaling["factor"]) / wavelengths


def yarn_frequencies(wavelengths: Array, dims: int, base: float, scaling: Mapping[str, Any]) -> Array:
    """Divide by a factor what turns seldom within the original context. Source: YaRN, arXiv 2309.00071."""
    original = scaling["original_max_position_embeddings"]

    def pair(turns: float) -> float:
        return float(dims * np.log(original / (2 * np.pi * turns)) / (2 * np.log(base)))

    low, high = max(np.floor(pair(scaling["beta_fast"])), 0), min(np.ceil(pair(scaling["beta_slow"])), dims - 1)
    divided = np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    return (1 - divided + divided / scaling["factor"]) / wavelengths


ROPE_KINDS: Mapping[str, Callable[..., Array]] = {
    "default": lambda wavelengths, dims, base, scaling: 1 / wavelengths,
    "linear": linear_frequencies,
    "llama3": llama3_frequencies,
    "yarn": yarn_frequencies,
}


def rotated(x: Array, positions: Array, rope: Rope) -> Array:
    """Encode positions [R] into rows of heads [R, heads, D]."""
    frequencies = np.array(rope.frequencies, dtype=np.float64)
    angles = positions[:, None, None] * frequencies
    turned, rest = x[..., : rope.dims], x[..., rope.dims :]
    if rope.traditional:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = np.split(turned, 2, axis=-1)
    both = first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)
    out = np.stack(both, axis=-1).reshape(turned.shape) if rope.traditional else np.concatenate(both, axis=-1)
    return np.concatenate([out * rope.scale, rest], axis=-1)


def attend(queries: Array, keys: Array, values: Array, visible: Array, scale: float) -> Array:
    """Attend from R rows to P positions.

    queries: [R, heads, D].
    keys, values: [P, KV, D].
    visible: [R, P] bool.
    Returns [R, heads, D].
    """
    group = queries.shape[1] // keys.shape[1]
    keys, values = (np.repeat(side, group, axis=1) for side in (keys, values))
    scores = np.einsum("rhd,phd->hrp", queries, keys) * scale
    scores = np.where(visible[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hrp,phd->rhd", weights / weights.sum(axis=-1, keepdims=True), values)


def convolve(x: Array, base: Array, dynamic: Array) -> Array:
    """Convolve rows [B, H] with base [T, H] plus their own kernels [B, T, G]; rows before the first are zero."""
    groups = np.repeat(dynamic, x.shape[1] // dynamic.shape[-1], axis=-1)
    out = np.zeros_like(x)
    for tap in range(base.shape[0]):
        shifted = np.concatenate([np.zeros((tap, x.shape[1])), x[: len(x) - tap]])
        out += (base[tap] + groups[:, tap]) * shifted
    return out


def silu(x: Array) -> Array:
    """Return x / (1 + exp(-x))."""
    return x / (1 + np.exp(-x))


def run_experts(x: Array, weights: Mapping[str, Array], place: str, top_k: int, normalised: bool) -> Array:
    """Run rows [R, H] through the experts with the largest gates, and add these up by their gates.

    place: of the experts' block among the weights.
    normalised: the gates of a row's experts are divided by their sum.
    """
    logits = x @ weights[f"{place}.gate.weight"].T
    gates = np.exp(logits - logits.max(axis=-1, keepdims=True))
    gates /= gates.sum(axis=-1, keepdims=True)
    out = np.zeros_like(x)
    for row, own in enumerate(gates):
        chosen = np.argsort(own)[-top_k:]
        total = own[chosen].sum() if normalised else 1.0
        for expert in chosen:
            gate, up, down = (
                weights[f"{place}.switch_mlp.{name}_proj.weight"][expert] for name in ("gate", "up", "down")
            )
            out[row] += own[expert] / total * (down @ (silu(gate @ x[row]) * (up @ x[row])))
    return out


def layer_of(stage: str) -> int | None:
    """Return the number of the layer that a stage belongs to, if it belongs to one."""
    found = re.search(r"layers\.(\d+)\.", stage)
    return int(found[1]) if found else None
