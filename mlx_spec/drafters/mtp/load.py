"""Loading an MTP head and binding it to its target."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.utils import dequantize_model

from metal_kernels import Linear, linear_rows
from mlx_spec.config_file import read_config as read_config_file
from mlx_spec.drafters.checkpoint import load_tensors, read_tensors
from mlx_spec.drafters.mtp.contract import contract_of, plain_type
from mlx_spec.drafters.mtp.drafter import DraftHead, MTPDrafter
from mlx_spec.drafters.mtp.head import HeadRows, MTPHead
from mlx_spec.drafters.mtp.tensors import head_tensors
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target import Target
from mlx_spec.target.families import family_of


def load_mtp(
    folder: Path, target: Target, name: str, *, unpack: bool = False, draft_ids: Sequence[int] | None = None
) -> MTPDrafter:
    """Load an MTP head from a checkpoint that holds it, alone or among other tensors, and bind it to its target.

    ``unpack`` turns quantised weights into bfloat16 ones, which are faster on a CPU. draft_ids: token ids,
    ascending, that drafts are taken from; None for all, or for those that the checkpoint names (``d2t``).
    Raises DrafterMismatch when there is no head, or it is incomplete or was made for another target;
    UnsupportedModel for a head that mlx_spec does not run.
    """
    raw = read_config_file(folder, name, "drafter", DrafterMismatch)
    contract, config = contract_of(raw, name), layer_config(raw)
    family_of(config, name)
    tensors = head_tensors(read_tensors(folder, name), contract, target.num_layers, name)
    if not tensors:
        raise DrafterMismatch(f"{name} holds no MTP weights, no tensors that match {contract.pattern!r}.")
    check_target(config, target, name)
    d2t, head = tensors.pop("d2t", None), build_head(config, tensors, name)
    load_tensors(head, tensors, name)
    head.set_dtype(target.dtype)
    if unpack:
        dequantize_model(head)
    if d2t is not None:
        draft_ids = checked_ids(d2t, target, head, name)
    rows = HeadRows.of(head, contract, config, name)
    return MTPDrafter(rows, target, draft_head(head, target, draft_ids), head.get("embed_tokens"))


def layer_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a ``config.json`` that describes the head's decoder layer."""
    part = config.get("transformer_layer_config") or config.get("text_config") or config
    return {**part, "model_type": plain_type(part.get("model_type"))}


def check_target(config: dict[str, Any], target: Target, name: str) -> None:
    """Raise DrafterMismatch, with both numbers, when a head was made for another target."""
    for what, key, found in (
        ("hidden size", "hidden_size", target.hidden_size),
        ("vocabulary size", "vocab_size", target.vocab_size),
    ):
        if config.get(key) != found:
            raise DrafterMismatch(
                f"{name} expects {what} {config.get(key)}; target {target.name} has {found}. "
                "Use the head that was trained with this target."
            )


def build_head(config: dict[str, Any], tensors: dict[str, mx.array], name: str) -> MTPHead:
    """Build the modules that a checkpoint has tensors for, its own embedding and output head included."""
    try:
        head = MTPHead(config)
    except (KeyError, TypeError, ValueError) as error:
        raise DrafterMismatch(f"{name}: config.json does not describe a decoder layer ({error}).") from None
    vocab, width = int(config["vocab_size"]), int(config["hidden_size"])
    if "embed_tokens.weight" in tensors:
        head.embed_tokens = nn.Embedding(vocab, width)
    if "lm_head.weight" in tensors:
        head.lm_head = nn.Linear(width, tensors["lm_head.weight"].shape[0], bias=False)
    return head


def checked_ids(d2t: mx.array, target: Target, head: MTPHead, name: str) -> list[int]:
    """Return the target's ids of the draft tokens. Raises DrafterMismatch for one that does not exist."""
    ids = [int(i) for i in np.array(d2t).reshape(-1)]
    wrong = [(place, token) for place, token in enumerate(ids) if not 0 <= token < target.vocab_size]
    if wrong:
        place, token = wrong[0]
        raise DrafterMismatch(
            f"{name}: d2t maps draft token {place} to {token}; the target's vocabulary has {target.vocab_size}."
        )
    own = head.lm_head.weight.shape[0] if "lm_head" in head else len(ids)
    if own != len(ids):
        raise DrafterMismatch(f"{name}: d2t names {len(ids)} tokens, its output head scores {own}.")
    return ids


def draft_head(head: MTPHead, target: Target, draft_ids: Sequence[int] | None) -> DraftHead | None:
    """Return the output head of drafts, the checkpoint's own or the target's, restricted to ``draft_ids``."""
    ids = None if draft_ids is None else mx.array(list(draft_ids), dtype=mx.int32)
    if "lm_head" not in head:
        return None if ids is None else DraftHead(target.head_for(ids), ids.size, ids)
    own = Linear.of(head.lm_head)
    return DraftHead(lambda hidden: linear_rows(hidden, own), own.size, ids)
