"""Gated DeltaNet over rows of several sequences, with the weights and settings of a module of mlx-lm."""

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs

from metal_kernels import (
    DeltaInputs,
    Gates,
    Heads,
    Linear,
    causal_conv_advance,
    gated_delta_advance,
    linear_rows,
    rms_norm_rows,
)
from metal_kernels.launching.implementations import implementation, using
from mlx_spec.target.batch_layout import PassContext, is_prompt
from mlx_spec.target.linears import joined_linears, linear_of
from mlx_spec.target.recurrent import LayerState


@dataclass(frozen=True)
class DeltaNet:
    """A short convolution, the gated delta rule, a gated norm and a projection (see ``metal_kernels``).

    Source: Yang et al., "Gated Delta Networks" (arXiv:2412.06464), as Qwen3-Next and Qwen3.5 use it.

    index: the layer's number among the recurrent ones.
    projections: of queries, keys and values, of the output gate z, of the update rate b and of the decay a, in
        this order side by side.
    heads: numbers and sizes of key and value heads.
    conv: [C, W], the convolution's taps.
    gates: decay parameters, and the columns of a and b in the joined projection.
    norm: [Dv], weight of the gated norm.
    eps: of that norm.
    output: the output projection.
    """

    index: int
    projections: tuple[Linear, ...]
    heads: Heads
    conv: mx.array
    gates: Gates
    norm: mx.array
    eps: float
    output: Linear

    @staticmethod
    def of(module: Any, index: int) -> "DeltaNet":
        """Read a ``GatedDeltaNet`` of mlx-lm's qwen3_5, the recurrent layer number ``index``.

        Raises TypeError for weights that are no linear maps, ValueError for head sizes that the kernels lack.
        """
        heads = Heads(module.num_k_heads, module.head_k_dim, module.num_v_heads, module.head_v_dim)
        heads.require()
        rate = heads.channels + heads.value_heads * heads.value_size
        parts = [module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a]
        return DeltaNet(
            index,
            joined_linears(parts),
            heads,
            module.conv1d.weight.squeeze(-1),
            Gates(module.A_log, module.dt_bias, a_column=rate + heads.value_heads, b_column=rate),
            module.norm.weight,
            module.norm.eps,
            linear_of(module.out_proj),
        )

    def __call__(self, x: mx.array, residual: mx.array, context: PassContext) -> tuple[mx.array, LayerState]:
        """Run normed rows [R, hidden]; return the sum with ``residual``, and the state for the next pass."""
        projected = linear_rows(x, self.projections)
        mixed, kept = self._advance(projected, context.states[self.index], context)
        return linear_rows(self._gated(mixed, projected), self.output, residual=residual), kept

    def empty(self, dtype: mx.Dtype) -> LayerState:
        """Return the state of an empty sequence, with one dummy row."""
        heads, taps = self.heads, self.conv.shape[1]
        return LayerState(
            mx.zeros((1, heads.value_heads, heads.value_size, heads.key_size)),
            mx.zeros((1, taps - 1, heads.channels), dtype=dtype),
            mx.zeros((1, sum(part.size for part in self.projections)), dtype=dtype),
            mx.zeros((1, heads.key_heads, heads.key_size), dtype=dtype),
            mx.zeros((1, heads.value_heads, heads.value_size), dtype=dtype),
        )

    def _advance(self, projected: mx.array, kept: LayerState, context: PassContext) -> tuple[mx.array, LayerState]:
        """Step through the accepted rows of the last pass, then through new ones.

        projected: [R, N], the new rows' joined projections.
        kept: the states, and the rows of the last pass.
        Returns the outputs [R, Hv, Dv], and the states before the new rows with these; after a prompt, whose rows
        all stay, the states after them with a dummy row, so that the next pass has the same shapes for any length.
        """
        accepted, after = context.accepted, is_prompt(context.cached.counts)
        rows: dict[str, Any] = {"spans": context.spans, "slots": context.slots, "after": after}
        with kernels_wherever_they_run():
            q, k, v, conv_state = causal_conv_advance(
                projected, kept.projected, accepted, kept.conv_state, self.conv, self.heads, **rows
            )
            new = DeltaInputs(k, v, projected, projected)
            out, state = gated_delta_advance(q, new, kept.rows, accepted, kept.state, gates=self.gates, **rows)
        last = 1 if after else projected.shape[0]
        return out, LayerState(state, conv_state, projected[:last], k[:last], v[:last])

    def _gated(self, mixed: mx.array, projected: mx.array) -> mx.array:
        """Norm heads [R, Hv, Dv] and multiply them by silu(z) in float32, as mlx-lm does: [R, Hv * Dv]."""
        z = projected[:, self.heads.channels : self.gates.b_column].reshape(mixed.shape)
        normed = rms_norm_rows(mixed, self.norm, self.eps)
        gated = nn.silu(z.astype(mx.float32)) * normed.astype(mx.float32)
        return gated.astype(projected.dtype).reshape(mixed.shape[0], -1)


def kernels_wherever_they_run() -> AbstractContextManager[None]:
    """Choose the native implementation even where ``--exact off`` chooses MLX's operations.

    The number of accepted rows is known on the device only; MLX's operations would need several launches a row.
    """
    return using("native") if implementation() == "stock" else nullcontext()


def separated(module: Any) -> Any:
    """Return a Gated DeltaNet of mlx-lm in qwen3_5's layout, with the weights of ``module``.

    qwen3_next has two projections, of queries, keys, values and z, and of b and a, interleaved by key head.
    """
    if not hasattr(module, "in_proj_qkvz"):
        return module
    sizes = dict(
        linear_num_key_heads=module.num_k_heads,
        linear_num_value_heads=module.num_v_heads,
        linear_key_head_dim=module.head_k_dim,
        linear_value_head_dim=module.head_v_dim,
        linear_conv_kernel_dim=module.conv_kernel_size,
    )
    new = GatedDeltaNet(TextModelArgs(hidden_size=module.hidden_size, rms_norm_eps=module.norm.eps, **sizes))
    for name in ("conv1d", "dt_bias", "A_log", "norm", "out_proj"):
        new[name] = module[name]
    keys, values = module.head_k_dim, module.num_v_heads // module.num_k_heads * module.head_v_dim
    q, k, v, z = interleaved([keys, keys, values, values], module.num_k_heads)
    b, a = interleaved([module.num_v_heads // module.num_k_heads] * 2, module.num_k_heads)
    new.in_proj_qkv, new.in_proj_z = rows_of(module.in_proj_qkvz, q + k + v), rows_of(module.in_proj_qkvz, z)
    new.in_proj_b, new.in_proj_a = rows_of(module.in_proj_ba, b), rows_of(module.in_proj_ba, a)
    return new


def interleaved(sizes: list[int], groups: int) -> list[list[int]]:
    """Return the indices of each part in an axis of ``groups`` groups, each of which holds all parts in turn."""
    each, parts, begin = sum(sizes), [], 0
    for size in sizes:
        parts.append([group * each + begin + i for group in range(groups) for i in range(size)])
        begin += size
    return parts


def rows_of(module: Any, index: list[int]) -> Any:
    """Return a linear module with the output rows ``index`` of another, quantised or not."""
    part = copy.copy(module)
    part.update({name: value[mx.array(index)] for name, value in module.parameters().items()})
    return part
