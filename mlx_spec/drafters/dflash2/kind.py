"""DFlash and DFlash 2 drafters, as the loader sees them."""

from mlx_spec.drafters.dflash2.config import is_dflash2
from mlx_spec.drafters.dflash2.drafter import DFlash2Drafter
from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.drafters.dflash2.reference import formulas
from mlx_spec.drafters.dflash2.variants import variants
from mlx_spec.drafters.kind import DrafterOptions, DrafterSource, Kind
from mlx_spec.target import Target


def load(source: DrafterSource, target: Target, options: DrafterOptions) -> DFlash2Drafter:
    """Load a drafter as it is. Raises RequestError for options that only heads have."""
    options.refuse_for(source.name)
    return load_dflash2(source.place, target, source.name, dequantize=options.dequantize)


KIND = Kind(
    name="dflash2",
    title="DFlash 2 drafter",
    trainer="train_drafter",
    claims=lambda config, tensors: is_dflash2(config),
    # The last that is asked: what no other kind takes is read as one, and refused with the reason.
    matches=lambda source, target_layers: True,
    load=load,
    variants=variants,
    formulas=formulas,
)
