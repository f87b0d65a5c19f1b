"""Loading an EAGLE head and binding it to its target."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.checkpoints.config import read_config as read_config_file
from mlx_spec.checkpoints.settings import Settings
from mlx_spec.checkpoints.tensors import load_tensors, read_tensors
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.draft_head import add_own_ends, check_target, draft_head, fit_to_target, fit_vocabulary
from mlx_spec.drafters.eagle.head import EagleForward, EagleHead
from mlx_spec.drafters.eagle.spec import (
    HARMLESS,
    EagleSpec,
    HeadConfig,
    declared_parts,
    read_head_config,
    read_spec,
    refuse_other_heads,
)
from mlx_spec.drafters.eagle.tensors import head_tensors, is_fused, is_targets_embedding, own_draft_ids
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target import Target


def load_eagle(
    folder: Path,
    target: Target,
    name: str,
    *,
    dequantize: bool = False,
    quantization: dict[str, Any] | None = None,
    draft_ids: Sequence[int] | None = None,
) -> ChainDrafter:
    """Load an EAGLE head from a folder and bind it to its target, whose floating type it takes.

    name: of the checkpoint, for messages.
    dequantize: turn quantised weights into plain ones, which are faster on a CPU.
    quantization: group_size and bits to quantise a head with that is not quantised.
    draft_ids: ascending token ids to draft from, None for all, or for those that the checkpoint names (``d2t``).
    Raises DrafterMismatch when there is no head, or it is incomplete or was made for another target;
    UnsupportedModel for a head that mlx_spec does not run.
    """
    raw = read_config_file(folder, name, "drafter", DrafterMismatch)
    settings = Settings(raw, name, DrafterMismatch)
    refuse_other_heads(settings)
    tensors = head_tensors(read_tensors(folder, name), name)
    config, spec = read_head_config(settings), read_spec(settings, is_fused(tensors), target.num_layers)
    check_target(config.target_hidden_size, config.vocab_size, target, name)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    own_ids = None if d2t is None else own_draft_ids(d2t, t2d, target, name)
    tensors = fit_vocabulary(tensors, config.vocab_size, target)
    if is_targets_embedding(tensors.get("embed_tokens.weight"), target):
        del tensors["embed_tokens.weight"]
    head = build_head(replace(config, vocab_size=target.vocab_size), spec, tensors, declared_parts(settings))
    check_borrowed(head, config, target, name)
    load_tensors(head, tensors, name)
    fit_to_target(head, target, name, quantization=quantization, dequantize=dequantize)
    scores = draft_head(head.get("lm_head"), target, config.vocab_size, own_ids, draft_ids, name)
    forward = EagleForward.of(head, config, spec, name)
    settings.warn_of_unread(HARMLESS)
    return ChainDrafter("eagle", forward, spec.target_layer_ids, target, scores, head.get("embed_tokens"))


def check_borrowed(head: EagleHead, config: HeadConfig, target: Target, name: str) -> None:
    """Raise DrafterMismatch where a head would borrow what its target has in another width."""
    if config.hidden_size != target.hidden_size:
        for part in ("embed_tokens", "lm_head"):
            if part not in head:
                raise DrafterMismatch(
                    f"{name}: a head of width {config.hidden_size} needs its own {part}.weight; "
                    f"that of {target.name} has width {target.hidden_size}."
                )


def build_head(config: HeadConfig, spec: EagleSpec, tensors: dict[str, mx.array], declared: set[str]) -> EagleHead:
    """Build the modules that a checkpoint has or declares, an embedding and output head of its own included.

    declared: paths of tensors that the configuration promises.
    """
    head = EagleHead(config, spec, tensors.keys() | declared)
    add_own_ends(head, tensors, config.vocab_size, config.hidden_size)
    return head
