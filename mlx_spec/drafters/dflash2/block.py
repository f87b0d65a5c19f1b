"""The one-pass block forward of DFlash and DFlash 2: its modules, as checkpoints and training have them.

Rows of a block are the anchor token and mask tokens; all run through the layers at once. Committed positions never
do: they are seen only as the keys and values that the context writer made from the target's hidden states.
``forward.py`` has the same over joined weights, for drafting.
Source: research code of Z Lab (PyPI ``dflash`` 0.1.0); module names are the checkpoint's tensor names.
"""

from collections.abc import Callable

import mlx.core as mx
from mlx import nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.rope_utils import initialize_rope

from metal_kernels import Rope, dynamic_conv
from mlx_spec.drafters.dflash2.config import DFlash2Config
from mlx_spec.drafters.dflash2.selector import CandidateSelector
from mlx_spec.target.linears import module_rows
from mlx_spec.target.rope import rope_frequencies

Attend = Callable[[int, mx.array, mx.array, mx.array], mx.array]
"""Attention of layer l: (l, queries [N, B, H, D], keys, values, both [N, B, KV, D]) to [N, B, H, D]."""


class GroupedDynamicCausalConv(nn.Module):
    """The convolution around a sublayer; both its sides take their kernels from the sublayer's normed input."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        width, taps = config.hidden_size, config.conv_kernel_size
        self._shape = (2, taps, width // config.conv_group_size)
        self.base_kernel = mx.zeros((2, taps, width))
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // config.conv_group_size), bias=False)

    def prepare(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Convolve a sublayer's input [..., B, H]; also returns the kernels [..., B, 2, T, G] for ``finish``."""
        dynamic = module_rows(x, self.kernel_projection).reshape(*x.shape[:-1], *self._shape)
        return dynamic_conv(x, self.base_kernel, dynamic, side=0), dynamic

    def finish(self, x: mx.array, dynamic: mx.array, residual: mx.array) -> mx.array:
        """Convolve a sublayer's output [..., B, H] with the kernels of ``prepare``, and add the residual."""
        return dynamic_conv(x, self.base_kernel, dynamic, residual, side=1)


class Attention(nn.Module):
    """Projections of a draft layer, for block rows here and for committed rows in the context writer."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        width, dim = config.hidden_size, config.head_dim
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, self._heads * dim, bias=False)
        self.k_proj = nn.Linear(width, self._kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, self._kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self._heads * dim, width, bias=False)
        self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)

    def queries(self, x: mx.array) -> mx.array:
        """Return normed queries [..., H, D], without position encoding, of rows [..., hidden]."""
        return self.q_norm(module_rows(x, self.q_proj).reshape(*x.shape[:-1], self._heads, -1))

    def keys_values(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return normed keys, without position encoding, and values, both [..., KV, D], of rows [..., hidden]."""
        keys = module_rows(x, self.k_proj).reshape(*x.shape[:-1], self._kv_heads, -1)
        values = module_rows(x, self.v_proj).reshape(*x.shape[:-1], self._kv_heads, -1)
        return self.k_norm(keys), values


class MLP(nn.Module):
    """The gated feed-forward sublayer: [..., hidden] to [..., hidden]."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return module_rows(swiglu(module_rows(x, self.gate_proj), module_rows(x, self.up_proj)), self.down_proj)


class DraftLayer(nn.Module):
    """One decoder layer over block rows; in DFlash 1 without convolutions."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.conv_kernel_size:
            self.attention_conv = GroupedDynamicCausalConv(config)
            self.mlp_conv = GroupedDynamicCausalConv(config)

    def __call__(self, x: mx.array, attend: Callable[[Attention, mx.array], mx.array]) -> mx.array:
        """Run rows [N, B, hidden]. attend: the attention sublayer without its output projection."""

        def attention(y: mx.array) -> mx.array:
            return module_rows(attend(self.self_attn, y).reshape(*y.shape[:-1], -1), self.self_attn.o_proj)

        x = self._around("attention_conv", attention, self.input_layernorm(x), x)
        return self._around("mlp_conv", self.mlp, self.post_attention_layernorm(x), x)

    def _around(
        self, conv_name: str, sublayer: Callable[[mx.array], mx.array], x: mx.array, residual: mx.array
    ) -> mx.array:
        if conv_name not in self:
            return residual + sublayer(x)
        prepared, kernels = self[conv_name].prepare(x)
        return self[conv_name].finish(sublayer(prepared), kernels, residual)


class DraftModel(nn.Module):
    """The drafter's own weights; embedding and output head are the target's.

    embedding_scale: what to multiply the target's embeddings with.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        width = config.hidden_size
        self.embedding_scale = config.input_embedding_scale
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.layers = [DraftLayer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        if config.selector_rank:
            self.candidate_selector = CandidateSelector(config)
        self._rope = initialize_rope(
            config.head_dim,
            base=config.rope_theta,
            traditional=False,
            scaling_config=config.rope_scaling,
            max_position_embeddings=config.max_position_embeddings,
        )

    def shrink(self, by: int) -> None:
        """Keep the residual stream, and the fused features, at one ``by``-th of their size.

        Both are only read through norms, and the norm of x / by with eps / by**2 is the norm of x with eps.

        by: a power of two, so that nothing is rounded but numbers that are too small for the type.
        Raises ValueError for quantised weights of other modes than affine.
        """
        self.embedding_scale /= by
        layers = self.layers
        for linear in (self.fc, *(x.self_attn.o_proj for x in layers), *(x.mlp.up_proj for x in layers)):
            divide_outputs(linear, by)
        norms = [norm for x in layers for norm in (x.input_layernorm, x.post_attention_layernorm)]
        for norm in (self.hidden_norm, *norms, self.norm):
            norm.eps /= by**2

    @property
    def rope(self) -> Rope:
        """The position encoding of ``rotate`` as plain data."""
        return rope_frequencies(self._rope)

    def rotate(self, x: mx.array, position: mx.array | int) -> mx.array:
        """Encode positions ``position .. position + B - 1`` into [N, B, heads, D]; a start for all, or each N."""
        return self._rope(x.swapaxes(1, 2), offset=position).swapaxes(1, 2)

    def context(self, features: mx.array) -> mx.array:
        """Fuse target features [..., T * H] into what context keys and values are made of: [..., H]."""
        return self.hidden_norm(module_rows(features, self.fc))

    def __call__(self, x: mx.array, position: mx.array | int, attend: Attend) -> mx.array:
        """Run blocks of rows and return the final-normed hidden states [N, B, H].

        x: [N, B, H], the scaled embeddings, the anchors' first.
        position: of the anchor, one for all blocks or int32 [N].
        attend: brings context and visibility.
        """
        for index, layer in enumerate(self.layers):

            def attention(module: Attention, y: mx.array, index: int = index) -> mx.array:
                keys, values = module.keys_values(y)
                queries = self.rotate(module.queries(y), position)
                return attend(index, queries, self.rotate(keys, position), values)

            x = layer(x, attention)
        return self.norm(x)


def divide_outputs(linear: nn.Module, by: int) -> None:
    """Divide the outputs of a linear module without bias, by way of its weights.

    Raises ValueError for quantised weights of other modes than affine.
    """
    quantized = "scales" in linear
    if quantized and "biases" not in linear:
        raise ValueError(f"Weights of mode {linear.mode} have no scales that can be divided.")
    linear.update({name: linear[name] / by for name in (("scales", "biases") if quantized else ("weight",))})
