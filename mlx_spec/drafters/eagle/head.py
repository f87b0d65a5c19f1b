"""The EAGLE head: one decoder layer over hidden states of the target and the embedding of the token after them.

For row i, at position i of the target, with token i + 1 known, EAGLE-1 and 2 compute from the target's last hidden
state h, after the final norm:

    z = fc([embedding of token i + 1; h])
    y = decoder layer(z) without a norm before attention, which gives the logits of token i + 2 and the next h

EAGLE-3 reads several hidden states a, b, c, the outputs of layers, before any norm:

    g = fc([a; b; c])                     some norm a, b and c first, each or all together
    x = g + attention([norm_e(embedding of token i + 1); norm_h(g)])
    y = x + mlp(norm(x)), the next g; norm(y) gives the logits of token i + 2 in a vocabulary of its own

Sources: SafeAILab/EAGLE and the ``speculators`` library 0.9.0; module names are their tensor names.
"""

from collections.abc import Collection
from dataclasses import dataclass

import mlx.core as mx
from mlx import nn
from mlx_lm.models.rope_utils import initialize_rope

from metal_kernels import Linear, linear_rows
from mlx_spec.drafters.chain import AttentionInputs
from mlx_spec.drafters.eagle.spec import EagleSpec, HeadConfig
from mlx_spec.drafters.stages import Record, record_feed_forward, record_stages
from mlx_spec.errors import UnsupportedModel
from mlx_spec.target.families import FeedForward, dense
from mlx_spec.target.layers import Attention, Norm
from mlx_spec.target.linears import joined_linears, linear_of
from mlx_spec.target.rope import rope_frequencies


class EagleHead(nn.Module):
    """The head's weights. What only some checkpoints have is built where ``names`` holds its tensor."""

    def __init__(self, config: HeadConfig, spec: EagleSpec, names: Collection[str]) -> None:
        super().__init__()
        width, fused = config.hidden_size, spec.fused
        read = len(spec.target_layer_ids) * config.target_hidden_size
        if not fused:
            self.fc = nn.Linear(2 * width, width, bias="fc.bias" in names)
        elif read != width or "fc.weight" in names:
            self.fc = nn.Linear(read, width, bias="fc.bias" in names)
        if "input_norm.weight" in names:
            self.input_norm = nn.RMSNorm(read, eps=config.eps)
        if "fc_norm.0.weight" in names:
            self.fc_norm = [nn.RMSNorm(config.target_hidden_size, eps=config.eps) for _ in spec.target_layer_ids]
        self.layers = [EagleLayer(config, fused, names)]
        if fused and spec.scores_normed:
            self.norm = nn.RMSNorm(width, eps=config.eps)


class EagleLayer(nn.Module):
    """A decoder layer whose attention reads, in EAGLE-3, embedding and hidden state side by side."""

    def __init__(self, config: HeadConfig, fused: bool, names: Collection[str]) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.eps
        if fused:
            self.input_layernorm, self.hidden_norm = nn.RMSNorm(width, eps=eps), nn.RMSNorm(width, eps=eps)
        self.self_attn = EagleAttention(config, 2 * width if fused else width, names)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.mlp = EagleMLP(width, config.intermediate_size, names)


class EagleAttention(nn.Module):
    """Projections of ``width`` inputs, query and key norms where there are any, and the position encoding."""

    def __init__(self, config: HeadConfig, width: int, names: Collection[str]) -> None:
        super().__init__()
        dim, place = config.head_dim, "layers.0.self_attn"

        def linear(name: str, inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=f"{place}.{name}.bias" in names)

        self.q_proj = linear("q_proj", width, config.heads * dim)
        self.k_proj = linear("k_proj", width, config.kv_heads * dim)
        self.v_proj = linear("v_proj", width, config.kv_heads * dim)
        self.o_proj = linear("o_proj", config.heads * dim, config.hidden_size)
        if f"{place}.q_norm.weight" in names:
            self.q_norm, self.k_norm = nn.RMSNorm(dim, eps=config.eps), nn.RMSNorm(dim, eps=config.eps)
        self.rope = initialize_rope(
            config.rope_dims, config.rope_base, False, config.rope_scaling, config.max_positions
        )


class EagleMLP(nn.Module):
    """The gated feed-forward."""

    def __init__(self, width: int, inner: int, names: Collection[str]) -> None:
        super().__init__()
        for name, sizes in (
            ("gate_proj", (width, inner)),
            ("up_proj", (width, inner)),
            ("down_proj", (inner, width)),
        ):
            self[name] = nn.Linear(*sizes, bias=f"layers.0.mlp.{name}.bias" in names)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class EagleForward:
    """The forward of a head over rows, as its spec wires it; what a head lacks is None or empty."""

    spec: EagleSpec
    config: HeadConfig
    fc: Linear | None
    all_norm: Norm | None
    each_norm: tuple[Norm, ...]
    embedding_norm: Norm | None
    hidden_norm: Norm | None
    attention: Attention
    post_norm: Norm
    feed_forward: FeedForward
    norm: Norm | None

    @staticmethod
    def of(head: EagleHead, config: HeadConfig, spec: EagleSpec, name: str) -> "EagleForward":
        """Read a loaded head; its modules become views of joined weights.

        Raises UnsupportedModel for weights or a position encoding that the rows forward does not know.
        """
        layer = head.layers[0]
        try:
            attention, feed_forward = read_attention(layer.self_attn, config), dense(layer.mlp)
        except (TypeError, ValueError) as error:
            raise UnsupportedModel(f"{name} has a layer that mlx_spec does not run: {error}") from error
        return EagleForward(
            spec,
            config,
            linear_of(head.fc) if "fc" in head else None,
            optional_norm(head, "input_norm"),
            tuple(Norm.of(norm) for norm in head.get("fc_norm", ())),
            optional_norm(layer, "input_layernorm"),
            optional_norm(layer, "hidden_norm"),
            attention,
            Norm.of(layer.post_attention_layernorm),
            feed_forward,
            optional_norm(head, "norm"),
        )

    @property
    def width(self) -> int:
        """H, the size of hidden states."""
        return self.config.hidden_size

    def features(self, aux_hidden_states: mx.array) -> mx.array:
        """Turn states of the target's layers [R, T * H] into hidden states [R, H]."""
        if not self.spec.fused:
            return aux_hidden_states
        if self.all_norm is not None:
            aux_hidden_states = self.all_norm(aux_hidden_states)
        if self.each_norm:
            parts = mx.split(aux_hidden_states, len(self.each_norm), axis=-1)
            aux_hidden_states = mx.concatenate(
                [norm(part) for norm, part in zip(self.each_norm, parts, strict=True)], axis=-1
            )
        return aux_hidden_states if self.fc is None else linear_rows(aux_hidden_states, self.fc)

    def pre_attention(
        self, embedded: mx.array, hidden: mx.array, positions: mx.array, record: Record | None = None
    ) -> AttentionInputs:
        """Run rows up to attention.

        embedded: [R, H], of the tokens after the rows.
        hidden: [R, H], from ``features`` or from the row before.
        positions: [R] int32.
        """
        if self.embedding_norm is None or self.hidden_norm is None:
            assert self.fc is not None
            x = residual = linear_rows(mx.concatenate([embedded, hidden], axis=-1), self.fc)
        else:
            normed = self.hidden_norm(hidden)
            x = mx.concatenate([self.embedding_norm(embedded), normed], axis=-1)
            residual = normed if self.spec.norm_before_residual else hidden
        inputs = AttentionInputs(residual, *self.attention.project(x, positions))
        record_stages(record, x=residual, normed=x, q=inputs.queries)
        record_stages(record, k=inputs.keys_values[0], v=inputs.keys_values[1])
        return inputs

    def post_attention(
        self, inputs: AttentionInputs, attended: mx.array, record: Record | None = None
    ) -> tuple[mx.array, mx.array]:
        """Finish rows after attention.

        inputs: of the rows.
        attended: [R, H, D], attention's output.
        Returns what the output head reads and the hidden state for the next row of a chain, both [R, H].
        """
        x = self.attention.finish(inputs.projected, attended, inputs.residual)
        post_normed = self.post_norm(x)
        record_stages(record, out=x, post_normed=post_normed)
        record_feed_forward(record, self.feed_forward, post_normed)
        x = self.feed_forward(post_normed, x)
        record_stages(record, y=x)
        normed = x if self.norm is None else self.norm(x)
        return normed, normed if self.spec.norm_output else x


def read_attention(module: EagleAttention, config: HeadConfig) -> Attention:
    """Read the attention of a head. Raises TypeError or ValueError, see ``Attention.of``."""
    norms = (module.q_norm.weight, module.k_norm.weight) if "q_norm" in module else None
    return Attention(
        index=0,
        qkv=joined_linears([module.q_proj, module.k_proj, module.v_proj]),
        qk_norm=norms,
        eps=config.eps,
        rope=rope_frequencies(module.rope),
        output=linear_of(module.o_proj),
        heads=config.heads,
        kv_heads=config.kv_heads,
        gated=False,
        scale=config.head_dim**-0.5,
        window=config.window,
    )


def optional_norm(module: nn.Module, name: str) -> Norm | None:
    """Take a norm of a module, or None where it has none of this name."""
    return Norm.of(module[name]) if name in module else None
