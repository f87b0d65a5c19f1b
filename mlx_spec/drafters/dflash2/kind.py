"""DFlash and DFlash 2 drafters, as the loader sees them."""

from collections.abc import Mapping
from typing import Any

from mlx_spec.drafters.dflash2.drafter import DFlash2Drafter
from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.drafters.kind import DrafterOptions, DrafterSource, Kind
from mlx_spec.target import Target

KEYS = {"dflash_config", "speculators_model_type"}


def load(source: DrafterSource, target: Target, options: DrafterOptions) -> DFlash2Drafter:
    """Load a checkpoint. Raises RequestError for options of heads."""
    options.refuse_for(source.name)
    return load_dflash2(source.place, target, source.name, dequantize=options.dequantize)


def claims(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` has a key that other checkpoints do not have."""
    return not KEYS.isdisjoint(config)


KIND = Kind(
    name="dflash2",
    title="DFlash 2 drafter",
    trainer="train_drafter",
    claims=claims,
    # The last that is asked: what no other kind takes is read as one, and refused with the reason.
    matches=lambda source, target_layers: True,
    load=load,
)
