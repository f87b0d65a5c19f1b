"""From the tensors of a checkpoint to those of our head: names, experts, and whole norm weights."""

import re
from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from mlx_spec.drafters.draft_head import check_draft_ids, whole_numbers
from mlx_spec.drafters.mtp.spec import OWN_NAMES, MTPSpec
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target import Target

# Means that tell norm weights less one from whole ones, over published Qwen3.5 to 3.8 heads: query and key norms
# 0.73 to 0.75 against 1.73 and more, the others 0.30 to 0.39 against 0.87 and more. The final norm shows nothing.
HEAD_NORMS, HEAD_LIMIT = ("q_norm.weight", "k_norm.weight"), 1.25
INPUT_NORMS, INPUT_LIMIT = ("layernorm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"), 0.5


def belongs_to_head(name: str, spec: MTPSpec, target_layers: int) -> bool:
    """Whether a tensor of a whole checkpoint is the head's.

    name: of the tensor.
    target_layers: of the target.
    """
    found = re.fullmatch(spec.pattern, name)
    return found is not None and _number(found, spec, target_layers) >= 0


def head_tensors(
    tensors: dict[str, mx.array], spec: MTPSpec, target_layers: int, name: str
) -> dict[str, mx.array]:
    """Pick the head's tensors, under the names of our modules, experts stacked, norm weights whole.

    tensors: of a whole checkpoint, of some of its files, or of a file that holds the head alone, with or without
        prefix.
    target_layers: of the target.
    name: of the checkpoint, for messages.
    Returns an empty dictionary where there is no head.
    Raises DrafterMismatch for heads of more than one layer, for which no family has a rule that we run.
    """
    found = {key: re.fullmatch(spec.pattern, key) for key in tensors}
    ours: dict[str, mx.array] = {}
    layers = set()
    for key, match in found.items():
        if match is not None and (number := _number(match, spec, target_layers)) >= 0:
            layers.add(number)
            ours[_our_name(match["name"], spec)] = tensors[key]
    if not ours and is_bare(tensors):
        ours = {_our_name(key, spec): value for key, value in tensors.items()}
    numbered = {key.split(".")[1] for key in ours if key.startswith("layers.")}
    if max(len(layers), len(numbered)) > 1:
        raise DrafterMismatch(
            f"{name} has {max(len(layers), len(numbered))} MTP layers; mlx_spec runs heads of one layer, "
            "whose output it feeds back, and has no rule for more."
        )
    ours = stack_experts(ours)
    if spec.zero_centred and norms_lack_one(ours):
        ours = shift_norms(ours, 1.0)
    return ours


def own_draft_ids(d2t: mx.array, target: Target, name: str) -> list[int]:
    """Return the target's ids of the draft tokens, in any order: that of draft token j is d2t[j].

    Raises DrafterMismatch for ids that the target does not have, or that come twice.
    """
    ids = [int(i) for i in whole_numbers(d2t, "d2t", name)]
    check_draft_ids(ids, "d2t", target, name)
    return ids


def is_bare(tensors: Iterable[str]) -> bool:
    """Whether these are the names of a checkpoint that is all head, without a prefix."""
    return any(key.startswith(("pre_fc_norm_embedding.", "enorm.", "token_layernorm.")) for key in tensors)


def norms_lack_one(tensors: dict[str, mx.array]) -> bool:
    """Whether the norm weights of a head are stored less one, decided for all of them by their means.

    A set without query and key norms holds whole weights: every family that stores them less one has these norms.
    """
    heads = [_mean(value) for key, value in tensors.items() if key.endswith(HEAD_NORMS)]
    inputs = [_mean(value) for key, value in tensors.items() if key.endswith(INPUT_NORMS)]
    return bool(heads and inputs) and max(heads) < HEAD_LIMIT and min(inputs) < INPUT_LIMIT


def shift_norms(tensors: dict[str, mx.array], by: float) -> dict[str, mx.array]:
    """Add a number to every norm weight."""
    return {key: value + by if is_norm(key) else value for key, value in tensors.items()}


def is_norm(key: str) -> bool:
    """Whether a tensor is the weight of an RMSNorm."""
    return key.endswith("norm.weight") or key.startswith("pre_fc_norm_")


def stack_experts(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Rename experts to mlx-lm's stacked layout, from fused tensors or from one tensor for each expert."""
    out: dict[str, mx.array] = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for key, value in tensors.items():
        single = re.fullmatch(r"(.+\.mlp)\.experts\.(\d+)\.(.+)", key)
        if single is not None:
            experts.setdefault(f"{single[1]}.switch_mlp.{single[3]}", {})[int(single[2])] = value
        elif key.endswith(".mlp.experts.gate_up_proj"):
            place = key.removesuffix("experts.gate_up_proj") + "switch_mlp"
            out[f"{place}.gate_proj.weight"], out[f"{place}.up_proj.weight"] = mx.split(value, 2, axis=-2)
        elif key.endswith(".mlp.experts.down_proj"):
            out[key.removesuffix("experts.down_proj") + "switch_mlp.down_proj.weight"] = value
        else:
            out[key] = value
    return out | {key: mx.stack([each[i] for i in sorted(each)]) for key, each in experts.items()}


def _our_name(name: str, spec: MTPSpec) -> str:
    for theirs, ours in (spec.names | OWN_NAMES).items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return f"layers.0.{name}"


def _number(match: re.Match[str], spec: MTPSpec, target_layers: int) -> int:
    layer = int(match.groupdict().get("layer") or 0)
    return layer - target_layers if spec.after_target else layer


def _mean(value: mx.array) -> float:
    return float(np.array(mx.mean(value.astype(mx.float32))))
