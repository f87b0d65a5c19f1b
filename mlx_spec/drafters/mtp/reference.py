"""An MTP head as formulas in float64 numpy, on the tensors of the checkpoint."""

import numpy as np

from mlx_spec.checkpoints.settings import Settings
from mlx_spec.checkpoints.tensors import read_files
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.chain_reference import LayerReference
from mlx_spec.drafters.kind import DrafterSource
from mlx_spec.drafters.mtp.source import head_files
from mlx_spec.drafters.mtp.spec import layer_config, spec_of
from mlx_spec.drafters.mtp.tensors import head_tensors
from mlx_spec.drafters.reference import Array, Float64Tensors, Formula, rms_norm
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target import Target


def formulas(source: DrafterSource, drafter: ChainDrafter, target: Target, steps: int, rows: int) -> list[Formula]:
    """Return the formulas of ``rows`` pending rows and ``steps`` steps, in the order of computing."""
    spec = spec_of(source.config, source.name)
    files = head_files(source.place, spec, target.num_layers, source.name)
    stored = head_tensors(read_files(files, source.name), spec, target.num_layers, source.name)
    weights = Float64Tensors(stored, source.config)
    layer = layer_config(Settings(source.config, source.name, DrafterMismatch))
    eps, attention = layer.positive("rms_norm_eps"), drafter.forward.attention

    def enters(hidden: Array, embedded: Array) -> tuple[Array, Array]:
        parts = [
            rms_norm(embedded, weights["pre_fc_norm_embedding.weight"], eps),
            rms_norm(hidden, weights["pre_fc_norm_hidden.weight"], eps),
        ]
        x = np.concatenate(parts[::-1] if spec.hidden_first else parts, axis=-1) @ weights["fc.weight"].T
        return x, rms_norm(x, weights["layers.0.input_layernorm.weight"], eps)

    reference = LayerReference(
        weights,
        eps,
        attention.rope,
        attention.head_dim,
        attention.gated,
        None,
        enters,
        spec.recycles_normed,
    )
    capture = Formula("ctx_combined", ("capture",), lambda x: x)
    return [capture, *reference.formulas(steps, rows)]
