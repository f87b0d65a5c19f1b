"""From the tensors of a checkpoint to those of our head: names, and the tokens that it drafts from."""

import re
from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from mlx_spec.drafters.draft_head import check_draft_ids, shown, whole_numbers
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target import Target

# What checkpoints may hold although it is the target's, or can be computed.
NOT_THE_HEADS = re.compile(r"verifier_.+|.*rotary_emb\..+")
RENAMED = (
    (re.compile(r"midlayer\."), "layers.0."),
    (re.compile(r"fusion_fc\."), "fc."),
    (re.compile(r"transformer\."), "layers.0."),
    (re.compile(r"aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"aux_norm_high\."), "fc_norm.2."),
)
# Of an embedding that is the target's own, as the target's quantization rounded it, relative to its size.
QUANTIZATION_ERROR, COMPARED = 0.25, 64


def head_tensors(tensors: dict[str, mx.array], name: str) -> dict[str, mx.array]:
    """Return a head's tensors under the names of our modules, of whatever layout they are.

    Raises DrafterMismatch where there is no head, and for heads of more than one layer.
    """
    ours = {}
    for key, value in tensors.items():
        key = key.removeprefix("model.")
        if NOT_THE_HEADS.fullmatch(key):
            continue
        for theirs, own in RENAMED:
            if found := theirs.match(key):
                key = own + key[found.end() :]
        ours[key] = value
    layers = {key.split(".")[1] for key in ours if key.startswith("layers.")}
    if not layers:
        raise DrafterMismatch(
            f"{name} holds no EAGLE head: its files have no tensor of a midlayer or of layers.0."
        )
    if layers != {"0"}:
        raise DrafterMismatch(
            f"{name} has {len(layers)} EAGLE layers; mlx_spec runs heads of one layer, whose output it feeds back."
        )
    return ours


def is_head(names: Iterable[str]) -> bool:
    """Whether these are the names of a head's tensors.

    EAGLE-3 has a norm of hidden states in its layer, EAGLE-1 and 2 have none before attention; DFlash has one
    beside its layers, and an MTP head norms before ``fc``.
    """
    ours = {key.removeprefix("model.") for key in names}
    if any(key.startswith(("hidden_norm.", "pre_fc_norm_", "encoder.", "mtp")) for key in ours):
        return False
    if any(key.startswith("midlayer.") for key in ours) or "layers.0.hidden_norm.weight" in ours:
        return True
    first = {"fc.weight", "layers.0.self_attn.o_proj.weight"} <= ours
    return first and "layers.0.input_layernorm.weight" not in ours


def is_fused(tensors: dict[str, mx.array]) -> bool:
    """Whether these are EAGLE-3's tensors: EAGLE-1 and 2 norm nothing before attention."""
    return "layers.0.hidden_norm.weight" in tensors


def own_draft_ids(d2t: mx.array, t2d: mx.array | None, target: Target, name: str) -> list[int]:
    """Return the target's ids of the draft tokens, ascending: token j is target token j + d2t[j].

    d2t: [N], offsets.
    t2d: bool [V], marks the same tokens; None where the checkpoint has no such tensor.
    Raises DrafterMismatch where that gives no ascending ids of the target, or where the two differ.
    """
    marked = None if t2d is None else np.flatnonzero(np.array(t2d.astype(mx.bool_)))
    numbers = np.arange(d2t.size)
    expected = None if marked is None or marked.size != d2t.size else marked - numbers
    ids = whole_numbers(d2t, "d2t", name, expected) + numbers
    if ids.size and (np.any(np.diff(ids) <= 0) or ids[0] < 0 or ids[-1] >= target.vocab_size):
        raise DrafterMismatch(
            f"{name}: d2t must hold what to add to a draft token's number to get the target's; that gives "
            f"{shown(ids.tolist())}, no ascending ids below {target.vocab_size}."
        )
    if marked is not None and not np.array_equal(ids, marked):
        raise DrafterMismatch(
            f"{name}: d2t names {ids.size} tokens, {shown(ids.tolist())}, "
            f"and t2d {marked.size}, {shown(marked.tolist())}."
        )
    own_ids = [int(i) for i in ids]
    check_draft_ids(own_ids, "d2t", target, name)
    return own_ids


def is_targets_embedding(weight: mx.array | None, target: Target) -> bool:
    """Whether an embedding [V, H] is the target's, as far as the target's quantization lets one see."""
    if weight is None or weight.shape != (target.vocab_size, target.hidden_size):
        return False
    ids = mx.arange(COMPARED) * (target.vocab_size // COMPARED or 1) % target.vocab_size
    own, theirs = (x.astype(mx.float32) for x in (weight[ids], target.embed(ids)))
    return bool(mx.sum(mx.square(own - theirs)) <= QUANTIZATION_ERROR**2 * mx.sum(mx.square(theirs)))
