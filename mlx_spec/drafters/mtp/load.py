"""Loading an MTP head and binding it to its target."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import mlx.core as mx

from mlx_spec.checkpoints.config import read_config as read_config_file
from mlx_spec.checkpoints.settings import Settings
from mlx_spec.checkpoints.tensors import load_tensors, read_files, weight_files
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.draft_head import add_own_ends, check_target, draft_head, fit_to_target, fit_vocabulary
from mlx_spec.drafters.mtp.head import MTPForward, MTPHead
from mlx_spec.drafters.mtp.source import head_files, is_mtp_config
from mlx_spec.drafters.mtp.spec import HARMLESS, layer_config, read_sizes, rope_of, spec_of
from mlx_spec.drafters.mtp.tensors import head_tensors, own_draft_ids
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target import Target
from mlx_spec.target.families import family_of


def load_mtp(
    place: Path,
    target: Target,
    name: str,
    *,
    model_config: dict[str, Any] | None = None,
    dequantize: bool = False,
    quantization: dict[str, Any] | None = None,
    draft_ids: Sequence[int] | None = None,
) -> ChainDrafter:
    """Load an MTP head, alone or among other weights, and bind it to its target, whose floating type it takes.

    place: the folder or file.
    name: of the checkpoint, for messages.
    model_config: the target's ``config.json``, for a head that comes without one.
    dequantize: turn quantised weights into plain ones, which are faster on a CPU.
    quantization: group_size, bits and mode to quantise a head with that is not quantised.
    draft_ids: ascending token ids to draft from, None for all, or for those that the checkpoint names (``d2t``).
    Raises DrafterMismatch when there is no head, or it is incomplete or was made for another target;
    UnsupportedModel for a head that mlx_spec does not run.
    """
    own_config = place.is_dir() and (model_config is None or (place / "config.json").exists())
    raw = read_config_file(place, name, "drafter", DrafterMismatch) if own_config else model_config
    if raw is None:
        raise DrafterMismatch(f"{name} is a file: that needs the config.json of its model.")
    settings = Settings(raw, name, DrafterMismatch)
    spec, layer = spec_of(raw, name), layer_config(settings)
    family = family_of(layer.values, name)
    files = head_files(place, spec, target.num_layers, name)
    tensors = head_tensors(read_files(files, name), spec, target.num_layers, name)
    if not tensors:
        # A file that cannot be read is the better reason.
        read_files([] if place.is_file() else weight_files(place, name), name)
        raise DrafterMismatch(no_head(name))
    vocab_size = layer.count("vocab_size")
    check_target(layer.count("hidden_size"), vocab_size, target, name)
    d2t = tensors.pop("d2t", None)
    own_ids = None if d2t is None else own_draft_ids(d2t, target, name)
    tensors = fit_vocabulary(tensors, vocab_size, target)
    head = build_head(replace(layer, values={**layer.values, "vocab_size": target.vocab_size}), tensors)
    load_tensors(head, tensors, name)
    fit_to_target(head, target, name, quantization=quantization, dequantize=dequantize)
    scores = draft_head(head.get("lm_head"), target, vocab_size, own_ids, draft_ids, name)
    forward = MTPForward.of(head, spec, family, name)
    if is_mtp_config(raw):
        settings.warn_of_unread(HARMLESS | {field.name for field in fields(head.args)})
    target_layer_ids = (target.num_layers if spec.reads_normed else target.num_layers - 1,)
    return ChainDrafter("mtp", forward, target_layer_ids, target, scores, head.get("embed_tokens"))


def build_head(layer: Settings, tensors: dict[str, mx.array]) -> MTPHead:
    """Build the modules that a checkpoint has tensors for, an embedding and output head of its own included.

    layer: of a model whose decoder layer the head has, see ``layer_config``.
    Raises DrafterMismatch for a configuration that describes no decoder layer.
    """
    sizes = read_sizes(layer)
    try:
        head = MTPHead({**layer.values, **sizes, **rope_of(layer)})
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        reason = shorten(str(error), 200)
        raise DrafterMismatch(f"{layer.name}: config.json does not describe a decoder layer ({reason}).") from None
    add_own_ends(head, tensors, layer.count("vocab_size"), layer.count("hidden_size"))
    return head


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how a model is quantised by its ``config.json``, or None."""
    quantization = config.get("quantization") or {}
    return {key: quantization[key] for key in ("group_size", "bits", "mode") if key in quantization} or None


def no_head(name: str) -> str:
    """Return the message for a checkpoint without a head: where one could come from."""
    return (
        f"{name} holds no MTP weights (conversions by mlx-lm leave them out): give --drafter the model's original "
        "repo, of which only the files with MTP weights are fetched, or a folder that tools.extract_mtp wrote."
    )
