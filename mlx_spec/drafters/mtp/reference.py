"""An MTP head as formulas in float64 numpy, on the tensors of the checkpoint."""

from collections.abc import Mapping

import numpy as np

from mlx_spec.checkpoints.rope_settings import read_rope
from mlx_spec.checkpoints.settings import Settings
from mlx_spec.checkpoints.tensors import read_files
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.chain_reference import LayerReference
from mlx_spec.drafters.kind import DrafterSource
from mlx_spec.drafters.mtp.source import head_files
from mlx_spec.drafters.mtp.spec import MAX_POSITIONS, layer_config, spec_of
from mlx_spec.drafters.mtp.tensors import head_tensors
from mlx_spec.drafters.reference import Array, Float64Tensors, Formula, rms_norm, rope_formula
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target import Target


def experts_of(layer: Settings, weights: Mapping[str, Array]) -> tuple[int, bool] | None:
    """Return how rows choose experts; None without experts, and with a shared one, which has no formula here."""
    if "layers.0.mlp.gate.weight" not in weights or "layers.0.mlp.shared_expert.gate_proj.weight" in weights:
        return None
    return layer.count("num_experts_per_tok"), layer.flag("norm_topk_prob", True)


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
        experts=experts_of(layer, weights),
    )
    rope = read_rope(layer, attention.head_dim, layer.count("max_position_embeddings", MAX_POSITIONS))
    capture = Formula("ctx_combined", ("capture",), lambda x: x)
    return [*rope_formula(rope.dims, rope.base, rope.scaling), capture, *reference.formulas(steps, rows)]
