"""MTP heads, as the loader sees them: they may be part of a model's checkpoint."""

from collections.abc import Mapping
from typing import Any

from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.kind import DrafterOptions, DrafterSource, Kind
from mlx_spec.drafters.mtp.load import load_mtp, quantization_of
from mlx_spec.drafters.mtp.reference import formulas
from mlx_spec.drafters.mtp.source import indexed_files, is_mtp, is_mtp_config
from mlx_spec.drafters.mtp.spec import spec_of
from mlx_spec.drafters.mtp.variants import variants
from mlx_spec.target import Target
from mlx_spec.target.families import num_layers_of


def load(source: DrafterSource, target: Target, options: DrafterOptions) -> ChainDrafter:
    """Load a head, quantised like its model unless something else is asked for."""
    return load_mtp(
        source.place,
        target,
        source.name,
        model_config=dict(source.model_config),
        dequantize=options.dequantize,
        quantization=options.quantization(quantization_of(source.model_config)),
        draft_ids=options.draft_ids,
    )


def files(config: Mapping[str, Any], shards: Mapping[str, str], name: str) -> list[str]:
    """Return the shards of a repo that hold the head."""
    return indexed_files(shards, spec_of(config, name), num_layers_of(config))


KIND = Kind(
    name="mtp",
    title="MTP head",
    trainer="train_mtp",
    claims=lambda config, tensors: is_mtp_config(config),
    matches=lambda source, target_layers: is_mtp(source.place, source.config, target_layers, source.name),
    load=load,
    indexed_files=files,
    variants=variants,
    formulas=formulas,
    lies_in_model=True,
)
