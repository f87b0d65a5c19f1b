"""Fine-tuned adapters, as ``mlx_lm.lora`` writes them, merged into a model's weights."""

from pathlib import Path
from textwrap import shorten

from mlx import nn
from mlx.utils import tree_unflatten
from mlx_lm.utils import load_adapters

from mlx_spec.checkpoints.hub import expanded
from mlx_spec.errors import ModelError


def merge_adapters(model: nn.Module, folder: str | Path) -> None:
    """Add the adapters (LoRA, DoRA, or whole layers) of a folder to the weights that they change.

    A layer that they change is held in 16 bits even where the model is quantised: quantised again, it would lose
    much of what the adapter adds. Raises ModelError for a folder without adapters, or with those of another model.
    """
    place = expanded(str(folder))
    if not (place / "adapter_config.json").is_file():
        raise ModelError(f"{folder} holds no adapters: it has no adapter_config.json, which mlx_lm.lora writes.")
    try:
        load_adapters(model, str(place))
        merged = [
            (n, module.fuse(dequantize=True)) for n, module in model.named_modules() if hasattr(module, "fuse")
        ]
        model.update_modules(tree_unflatten(merged))
    except Exception as error:
        raise ModelError(
            f"The adapters in {folder} cannot be used: {shorten(str(error) or repr(error), 400)}"
        ) from error
