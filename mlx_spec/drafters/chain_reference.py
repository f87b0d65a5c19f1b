"""The decoder layer of a head that drafts in a chain, as formulas in float64 numpy."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from metal_kernels import Rope
from mlx_spec.drafters.reference import Array, Formula, attend, rms_norm, rotated, run_experts, silu

Step = str
"""What the names of a step's stages begin with: "" for the pending rows, "steps.0." and so on for the newest."""


@dataclass(frozen=True)
class LayerReference:
    """A head in float64.

    weights: the checkpoint's, by the names of the head's modules.
    eps: of all norms.
    heads, head_dim: of the queries.
    gated: each query head is followed by an output gate.
    window: how many of the newest positions a row sees; None for all.
    enters: computes the residual ``x`` and what attention reads, from a hidden state and an embedding.
    norm: name of the final norm; None where there is none.
    experts: how many a row goes through, and whether their gates are divided by their sum; None without experts.
    """

    weights: Mapping[str, Array]
    eps: float
    rope: Rope
    head_dim: int
    gated: bool
    window: int | None
    enters: Callable[[Array, Array], tuple[Array, Array]]
    recycles_normed: bool
    norm: str | None = "norm"
    experts: tuple[int, bool] | None = None

    def formulas(self, steps: int, rows: int) -> Iterator[Formula]:
        """Yield the stages of ``rows`` pending rows and ``steps`` steps after them.

        Their ``positions`` are among the stages.
        """
        for step in range(steps):
            own = f"steps.{step}."
            if step == 0:
                yield from self.until_attention("", "ctx_combined")
            else:
                before = f"steps.{step - 1}."
                recycled = before + ("hidden" if self.recycles_normed else "y")
                yield Formula(f"{own}recycled", (recycled,), lambda x: x)
                yield from self.until_attention(own, f"{own}recycled")
            yield self.attention(step, rows)
            yield from self.after_attention(step)

    def until_attention(self, own: Step, hidden: str) -> Iterator[Formula]:
        """Yield what comes before attention."""
        both = hidden, f"{own}embedded"
        yield Formula(f"{own}x", both, lambda h, e: self.enters(h, e)[0])
        yield Formula(f"{own}normed", both, lambda h, e: self.enters(h, e)[1])
        for side in "qkv":
            parts = (f"{own}normed", f"{own}positions") if side != "v" else (f"{own}normed",)
            yield Formula(f"{own}{side}", parts, self.projection(side))

    def projection(self, side: str) -> Callable[..., Array]:
        """Return the formula of queries, keys or values."""

        def compute(x: Array, positions: Array | None = None) -> Array:
            rows = self.linear(x, f"layers.0.self_attn.{side}_proj")
            if side == "q" and self.gated:
                rows = rows.reshape(len(x), -1, 2 * self.head_dim)[..., : self.head_dim]
            rows = rows.reshape(len(x), -1, self.head_dim)
            if positions is None:
                return rows
            norm = f"layers.0.self_attn.{side}_norm.weight"
            normed = rms_norm(rows, self.weights[norm], self.eps) if norm in self.weights else rows
            return rotated(normed, positions, self.rope)

        return compute

    def attention(self, step: int, rows: int) -> Formula:
        """Return the attention of the newest row of a step to the rows before it and to itself."""
        before = [f"steps.{i}." for i in range(1, step + 1)]

        def compute(*parts: Array) -> Array:
            count = len(before) + 1
            queries, keys, values = parts[0], parts[1 : 1 + count], parts[1 + count :]
            joined = np.concatenate(keys), np.concatenate(values)
            newest = rows - 1 + step
            visible = np.arange(newest + 1) > newest - (self.window or newest + 1)
            return attend(queries[-1:], joined[0], joined[1], visible[None], self.head_dim**-0.5)

        names = [f"{own}{side}" for side in "kv" for own in ["", *before]]
        query = f"steps.{step}.q" if step else "q"
        return Formula(f"steps.{step}.attended", (query, *names), compute)

    def after_attention(self, step: int) -> Iterator[Formula]:
        """Yield what comes after attention."""
        own = f"steps.{step}."
        start = own if step else ""

        def out(attended: Array, x: Array, normed: Array) -> Array:
            if self.gated:
                rows = self.linear(normed[-1:], "layers.0.self_attn.q_proj").reshape(1, -1, 2 * self.head_dim)
                attended = attended / (1 + np.exp(-rows[..., self.head_dim :]))
            return x[-1:] + self.linear(attended.reshape(1, -1), "layers.0.self_attn.o_proj")

        yield Formula(f"{own}out", (f"{own}attended", f"{start}x", f"{start}normed"), out)
        norm = "layers.0.post_attention_layernorm"
        yield Formula(f"{own}post_normed", (f"{own}out",), lambda x: self.normed(x, norm))
        if "layers.0.mlp.gate_proj.weight" in self.weights:
            for name in ("gate", "up"):
                place = f"layers.0.mlp.{name}_proj"
                yield Formula(f"{own}{name}", (f"{own}post_normed",), lambda x, p=place: self.linear(x, p))
            both = f"{own}gate", f"{own}up"
            yield Formula(f"{own}activation", both, lambda gate, up: silu(gate) * up)
            parts = f"{own}activation", f"{own}out"
            yield Formula(
                f"{own}y", parts, lambda x, residual: residual + self.linear(x, "layers.0.mlp.down_proj")
            )
        elif self.experts is not None:
            top_k, normalised = self.experts

            def mixed(x: Array, residual: Array) -> Array:
                return residual + run_experts(x, self.weights, "layers.0.mlp", top_k, normalised)

            yield Formula(f"{own}y", (f"{own}post_normed", f"{own}out"), mixed)
        last = self.norm
        yield Formula(f"{own}hidden", (f"{own}y",), lambda x: x if last is None else self.normed(x, last))

    def linear(self, x: Array, name: str) -> Array:
        """Apply a linear map, with its bias where it has one."""
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def normed(self, x: Array, name: str) -> Array:
        """Norm rows."""
        return rms_norm(x, self.weights[f"{name}.weight"], self.eps)
