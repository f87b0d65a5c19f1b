"""Loading a DFlash or DFlash 2 checkpoint and binding it to its target."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import dequantize_model

from mlx_spec.checkpoints.config import read_config as read_config_file
from mlx_spec.checkpoints.settings import Settings
from mlx_spec.checkpoints.tensors import load_tensors, read_tensors
from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.dflash2.config import HARMLESS, DFlash2Config, read_settings
from mlx_spec.drafters.dflash2.drafter import DFlash2Drafter
from mlx_spec.drafters.dflash2.tensors import native_names
from mlx_spec.drafters.draft_head import check_draft_ids, check_target, fit_rows, fit_to_target
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target import Target

# In float16 the residual stream is kept at an eighth of its size, so that numbers up to 5e5 fit.
SHRINK = 8
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def load_dflash2(folder: Path, target: Target, name: str, *, dequantize: bool = False) -> DFlash2Drafter:
    """Load a DFlash or DFlash 2 drafter from a folder and bind it to its target, whose floating type it takes.

    name: of the checkpoint, for messages.
    dequantize: turn quantised weights into plain ones, which are faster on a CPU.
    Raises DrafterMismatch when the checkpoint is incomplete or was made for another target.
    """
    raw = read_config_file(folder, name, "drafter", DrafterMismatch)
    settings = Settings(raw, name, DrafterMismatch)
    config = read_settings(settings)
    check_target(config.hidden_size, config.vocab_size, target, name, config.num_target_layers)
    check_config(config, target, name)
    tensors = native_names(read_tensors(folder, name), "speculators_model_type" in raw)
    check_layers(tensors, config.num_hidden_layers, name)
    # Codebooks have a row for every token of the target, whose vocabulary may have more padding, or less.
    model = DraftModel(replace(config, vocab_size=target.vocab_size))
    for codebook in CODEBOOKS:
        tensors = fit_rows(tensors, codebook, config.vocab_size, target.vocab_size)
    load_tensors(model, tensors, name)
    if target.dtype == mx.float16:
        shrink(model)
    fit_to_target(model, target, name, dequantize=dequantize)
    settings.warn_of_unread(HARMLESS)
    return DFlash2Drafter(config, model, target)


def check_layers(tensors: Iterable[str], layers: int, name: str) -> None:
    """Raise DrafterMismatch where a configuration has more layers than the names of tensors."""
    found = {tensor.split(".")[1] for tensor in tensors if tensor.startswith("layers.")}
    if len(found) < layers:
        raise DrafterMismatch(
            f"{name}: num_hidden_layers of config.json is {layers}, and its files hold tensors of {len(found)} "
            "layers; download it again."
        )


def check_config(config: DFlash2Config, target: Target, name: str) -> None:
    """Raise DrafterMismatch where numbers of a configuration do not fit each other or the target."""
    for what, named, limit in (
        ("target_layer_ids", config.target_layer_ids, target.num_layers),
        ("mask_token_id", [config.mask_token_id], target.vocab_size),
    ):
        wrong = [i for i in named if not 0 <= i < limit]
        if wrong:
            raise DrafterMismatch(f"{name}: {what} must lie in 0 .. {limit - 1}, found {wrong[:4]}.")
    count, what = config.vocab_size, "a vocabulary of"
    if config.draft_token_ids is not None:
        check_draft_ids(config.draft_token_ids, "draft_token_ids of config.json", target, name)
        count, what = len(config.draft_token_ids), "draft_token_ids has"
    if count < config.selector_top_k:
        raise DrafterMismatch(
            f"{name}: {what} {count} ids, fewer than selector_top_k {config.selector_top_k} of config.json."
        )


def shrink(model: DraftModel) -> None:
    """Let the block forward keep within float16, see ``DraftModel.shrink``."""
    if any("scales" in part and "biases" not in part for part in model.modules()):
        # Quantised weights without biases have scales in 8 bits, which cannot always be divided.
        dequantize_model(model)
    model.shrink(SHRINK)
