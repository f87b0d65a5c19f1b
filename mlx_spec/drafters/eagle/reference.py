"""An EAGLE head as formulas in float64 numpy, on the tensors of the checkpoint."""

import numpy as np

from mlx_spec.checkpoints.settings import Settings
from mlx_spec.checkpoints.tensors import read_tensors
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.chain_reference import LayerReference
from mlx_spec.drafters.eagle.spec import read_head_config, read_spec
from mlx_spec.drafters.eagle.tensors import head_tensors, is_fused
from mlx_spec.drafters.kind import DrafterSource
from mlx_spec.drafters.reference import Array, Float64Tensors, Formula, rms_norm, rope_formula
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target import Target


def formulas(source: DrafterSource, drafter: ChainDrafter, target: Target, steps: int, rows: int) -> list[Formula]:
    """Return the formulas of ``rows`` pending rows and ``steps`` steps, in the order of computing."""
    stored = head_tensors(read_tensors(source.place, source.name), source.name)
    weights = Float64Tensors(stored, source.config)
    settings = Settings(source.config, source.name, DrafterMismatch)
    config, spec = read_head_config(settings), read_spec(settings, is_fused(stored), target.num_layers)
    eps, attention = config.eps, drafter.forward.attention

    def norm(x: Array, name: str) -> Array:
        return rms_norm(x, weights[f"{name}.weight"], eps)

    def fuse(x: Array) -> Array:
        if not spec.fused:
            return x
        if "input_norm.weight" in weights:
            x = norm(x, "input_norm")
        if "fc_norm.0.weight" in weights:
            parts = np.split(x, len(spec.target_layer_ids), axis=-1)
            x = np.concatenate([norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], axis=-1)
        return x @ weights["fc.weight"].T + weights.get("fc.bias", 0.0) if "fc.weight" in weights else x

    def enters(hidden: Array, embedded: Array) -> tuple[Array, Array]:
        if not spec.fused:
            x = np.concatenate([embedded, hidden], axis=-1) @ weights["fc.weight"].T + weights.get("fc.bias", 0.0)
            return x, x
        normed = norm(hidden, "layers.0.hidden_norm")
        both = np.concatenate([norm(embedded, "layers.0.input_layernorm"), normed], axis=-1)
        return normed if spec.norm_before_residual else hidden, both

    last = "norm" if spec.fused and spec.scores_normed else None
    reference = LayerReference(
        weights,
        eps,
        attention.rope,
        attention.head_dim,
        False,
        config.window,
        enters,
        spec.norm_output,
        last,
    )
    rope = rope_formula(config.rope_dims, config.rope_base, config.rope_scaling)
    return [*rope, Formula("ctx_combined", ("capture",), fuse), *reference.formulas(steps, rows)]
