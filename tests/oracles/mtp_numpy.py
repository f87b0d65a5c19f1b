"""MTP heads in float64 numpy, from the formulas: one layer over [embedding; hidden state], drafted as a chain.

Nothing is cached: every step runs all rows from the first on.
"""

from typing import Any

import numpy as np

Array = np.ndarray


class MTPOracle:
    """A head over one sequence.

    config: of the decoder layer. tensors: under Qwen's names without prefix. offset: what to add to norm weights.
    gated: each query head is followed by its gate. hidden_first, recycles_normed: see the formulas.
    """

    def __init__(
        self,
        config: dict[str, Any],
        tensors: dict[str, Array],
        embedding: Array,
        head: Array,
        *,
        offset: float = 0.0,
        gated: bool = False,
        hidden_first: bool = False,
        recycles_normed: bool = True,
    ) -> None:
        self.c = config
        self.w = {name: np.asarray(value, dtype=np.float64) for name, value in tensors.items()}
        self.embedding, self.head = embedding.astype(np.float64), head.astype(np.float64)
        self.offset, self.gated = offset, gated
        self.hidden_first, self.recycles_normed = hidden_first, recycles_normed
        rope = config.get("rope_parameters") or {}
        self.theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        self.partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or config["hidden_size"] // self.heads

    def chain(self, hidden: Array, tokens: list[int], count: int) -> tuple[list[int], Array]:
        """Draft greedily after n rows of hidden states and next tokens: tokens and logits [count, V]."""
        hidden, tokens, logits = list(hidden), list(tokens), []
        for _ in range(count):
            y, normed = self.rows(np.array(hidden), self.embedding[tokens])
            logits.append(self.head @ normed[-1])
            hidden.append(normed[-1] if self.recycles_normed else y[-1])
            tokens.append(int(np.argmax(logits[-1])))
        return tokens[-count:], np.array(logits)

    def rows(self, hidden: Array, embedded: Array) -> tuple[Array, Array]:
        """Return the layer's output and the same after the norm, both [n, H], of all rows."""
        parts = [self.norm(embedded, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")]
        x = np.concatenate(parts[::-1] if self.hidden_first else parts, axis=-1) @ self.w["fc.weight"].T
        x = x + self.attention(self.norm(x, "layers.0.input_layernorm"))
        x = x + self.feed_forward(self.norm(x, "layers.0.post_attention_layernorm"))
        return x, self.norm(x, "norm")

    def norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.c["rms_norm_eps"])
        return x / scale * (self.w[f"{name}.weight"] + self.offset)

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.w[f"layers.0.{name}.weight"].T + self.w.get(f"layers.0.{name}.bias", 0.0)

    def attention(self, x: Array) -> Array:
        n = len(x)
        q = self.linear(x, "self_attn.q_proj").reshape(n, self.heads, -1)
        q, gate = (q[..., : self.dim], q[..., self.dim :])
        k = self.linear(x, "self_attn.k_proj").reshape(n, self.kv_heads, -1)
        v = self.linear(x, "self_attn.v_proj").reshape(n, self.kv_heads, -1)
        if "layers.0.self_attn.q_norm.weight" in self.w:
            q, k = self.norm(q, "layers.0.self_attn.q_norm"), self.norm(k, "layers.0.self_attn.k_norm")
        q, k = self.rotate(q), self.rotate(k)
        out = np.zeros_like(q)
        for i in range(n):
            for h in range(self.heads):
                shared = h * self.kv_heads // self.heads
                scores = k[: i + 1, shared] @ q[i, h] / np.sqrt(self.dim)
                weights = np.exp(scores - scores.max())
                out[i, h] = (weights / weights.sum()) @ v[: i + 1, shared]
        if self.gated:
            out = out * sigmoid(gate)
        return self.linear(out.reshape(n, -1), "self_attn.o_proj")

    def rotate(self, x: Array) -> Array:
        """Rotate the first part of each head; row i is at position i."""
        dims = int(self.dim * self.partial)
        angles = np.arange(len(x))[:, None] / self.theta ** (np.arange(0, dims, 2) / dims)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = x[..., : dims // 2], x[..., dims // 2 : dims]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., dims:]], axis=-1)

    def feed_forward(self, x: Array) -> Array:
        if "layers.0.mlp.gate.weight" not in self.w:
            return self.gated_mlp(x, "mlp.{}.weight")
        return np.array([self.experts(row) for row in x])

    def experts(self, x: Array) -> Array:
        scores = self.linear(x, "mlp.gate")
        shares = np.exp(scores - scores.max())
        shares = shares / shares.sum()
        chosen = np.argsort(-shares)[: self.c["num_experts_per_tok"]]
        total = shares[chosen].sum() if self.c.get("norm_topk_prob", True) else 1.0
        out = sum(shares[e] / total * self.gated_mlp(x, "mlp.switch_mlp.{}.weight", e) for e in chosen)
        if "layers.0.mlp.shared_expert_gate.weight" in self.w:
            shared = self.gated_mlp(x, "mlp.shared_expert.{}.weight")
            out = out + sigmoid(self.linear(x, "mlp.shared_expert_gate")) * shared
        return out

    def gated_mlp(self, x: Array, name: str, expert: int | None = None) -> Array:
        gate, up, down = (self.w["layers.0." + name.format(f"{part}_proj")] for part in ("gate", "up", "down"))
        if expert is not None:
            gate, up, down = gate[expert], up[expert], down[expert]
        gates = x @ gate.T
        return (gates * sigmoid(gates) * (x @ up.T)) @ down.T


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))
