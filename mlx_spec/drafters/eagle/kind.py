"""EAGLE heads, as the loader sees them."""

from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.eagle.load import load_eagle
from mlx_spec.drafters.eagle.reference import formulas
from mlx_spec.drafters.eagle.spec import is_eagle
from mlx_spec.drafters.eagle.variants import variants
from mlx_spec.drafters.kind import GROUP_SIZE, DrafterOptions, DrafterSource, Kind
from mlx_spec.target import Target

DEFAULT_BITS = 4


def load(source: DrafterSource, target: Target, options: DrafterOptions) -> ChainDrafter:
    """Load a head, quantised to 4 bits unless something else is asked for."""
    return load_eagle(
        source.place,
        target,
        source.name,
        dequantize=options.dequantize,
        quantization=options.quantization({"group_size": GROUP_SIZE, "bits": DEFAULT_BITS}),
        draft_ids=options.draft_ids,
    )


KIND = Kind(
    name="eagle",
    title="EAGLE head",
    trainer="train_eagle",
    claims=is_eagle,
    matches=lambda source, target_layers: is_eagle(source.config, source.tensors),
    load=load,
    variants=variants,
    formulas=formulas,
)
