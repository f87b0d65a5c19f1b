"""Loading a DFlash or DFlash 2 checkpoint and binding it to its target."""

from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import dequantize_model

from mlx_spec.checkpoints.config import read_config as read_config_file
from mlx_spec.checkpoints.tensors import load_tensors, read_tensors
from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.dflash2.config import DFlash2Config, read_config
from mlx_spec.drafters.dflash2.drafter import DFlash2Drafter
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target import Target

# Tensors that the speculators layout may carry although they are the target's own.
TARGET_TENSORS = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")


def load_dflash2(folder: Path, target: Target, name: str, dequantize: bool = False) -> DFlash2Drafter:
    """Load a DFlash or DFlash 2 checkpoint and bind it to its target.

    ``dequantize`` turns quantised weights into bfloat16 ones, which are faster on a CPU.
    Raises DrafterMismatch when the checkpoint is incomplete or was made for another target.
    """
    raw = read_config_file(folder, name, "drafter", DrafterMismatch)
    config = read_config(raw, name)
    check_target(config, target, name)
    model = DraftModel(config)
    load_tensors(model, native_names(read_tensors(folder, name), "speculators_model_type" in raw), name)
    if dequantize:
        dequantize_model(model)
    return DFlash2Drafter(config, model, target)


def native_names(tensors: dict[str, mx.array], from_speculators: bool = False) -> dict[str, mx.array]:
    """Rename tensors of every known layout to the native one, and name codebooks as the modules do."""
    renamed = {}
    for name, value in tensors.items():
        if from_speculators and name in TARGET_TENSORS:
            continue
        name = name.removeprefix("model.")
        for old, new in (
            ("midlayer.", "layers.0."),
            ("encoder.fc.", "fc."),
            ("encoder.output_norm_enc.", "hidden_norm."),
        ):
            if name.startswith(old):
                name = new + name.removeprefix(old)
        renamed[f"{name}.weight" if name.endswith("_codebook") else name] = value
    return renamed


def check_target(config: DFlash2Config, target: Target, name: str) -> None:
    """Raise DrafterMismatch, with both numbers, when a drafter was made for another target."""
    for what, needed, found in (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary size", config.vocab_size, target.vocab_size),
        ("number of target layers", config.num_target_layers, target.num_layers),
    ):
        if needed is not None and needed != found:
            raise DrafterMismatch(
                f"{name} expects {what} {needed}; target {target.name} has {found}. "
                "Use a drafter trained for this target."
            )
    for what, ids, limit in (
        ("target_layer_ids", config.target_layer_ids, target.num_layers),
        ("mask_token_id", [config.mask_token_id], target.vocab_size),
        ("draft_token_ids", config.draft_token_ids or [], target.vocab_size),
    ):
        wrong = [i for i in ids if not 0 <= i < limit]
        if wrong:
            raise DrafterMismatch(f"{name}: {what} must lie in 0 .. {limit - 1}, found {wrong[:4]}.")
    if config.draft_token_ids and len(config.draft_token_ids) < config.selector_top_k:
        raise DrafterMismatch(
            f"{name}: draft_token_ids has {len(config.draft_token_ids)} ids, fewer than selector_top_k "
            f"{config.selector_top_k}."
        )
    if config.conv_kernel_size and config.hidden_size % config.conv_group_size:
        raise DrafterMismatch(
            f"{name}: hidden size {config.hidden_size} is no multiple of conv_group_size {config.conv_group_size}."
        )
