"""EAGLE heads in float64 numpy, from the formulas: a layer over embeddings and hidden states, drafted as a chain.

Nothing is cached: every step runs all rows from the first on.
"""

from typing import Any

import numpy as np

Array = np.ndarray


class EagleOracle:
    """A head over one sequence.

    config: as SafeAILab publishes it. tensors: under its names, with ``layers.0.`` for ``midlayer.``.
    embedding: [V, H]. head: [N, H], of the draft vocabulary, whose tokens are ``ids`` [N].
    normed_residual, normed_feedback: what attention is added to, and what the next row reads, is normed.
    window: how many of the newest rows a row sees.
    """

    def __init__(
        self,
        config: dict[str, Any],
        tensors: dict[str, Array],
        embedding: Array,
        head: Array,
        ids: list[int],
        *,
        normed_residual: bool = False,
        normed_feedback: bool = False,
        window: int = 1 << 30,
    ) -> None:
        self.c, self.ids, self.window = config, ids, window
        self.w = {name: np.asarray(value, dtype=np.float64) for name, value in tensors.items()}
        self.embedding, self.head = embedding.astype(np.float64), head.astype(np.float64)
        self.normed_residual, self.normed_feedback = normed_residual, normed_feedback
        self.third = "layers.0.hidden_norm.weight" in self.w
        self.heads, self.kv_heads, self.dim = (
            config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )

    def chain(self, aux_hidden_states: Array, tokens: list[int], count: int) -> tuple[list[int], Array]:
        """Draft greedily after n rows of the target's hidden states and the tokens after them.

        Returns tokens and logits [count, N].
        """
        hidden, tokens, logits = list(self.features(aux_hidden_states)), list(tokens), []
        for _ in range(count):
            scored, following = self.rows(np.array(hidden), self.embedding[tokens])
            logits.append(self.head @ scored[-1])
            hidden.append(following[-1])
            tokens.append(self.ids[int(np.argmax(logits[-1]))])
        return tokens[-count:], np.array(logits)

    def features(self, aux_hidden_states: Array) -> Array:
        """EAGLE-3's fusion of several hidden states; EAGLE-1 takes one as it is."""
        aux_hidden_states = aux_hidden_states.astype(np.float64)
        if not self.third:
            return aux_hidden_states
        if "input_norm.weight" in self.w:
            aux_hidden_states = self.norm(aux_hidden_states, "input_norm")
        if "fc_norm.0.weight" in self.w:
            count = sum(name.startswith("fc_norm.") for name in self.w)
            parts = np.split(aux_hidden_states, count, axis=-1)
            aux_hidden_states = np.concatenate(
                [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], axis=-1
            )
        return self.linear(aux_hidden_states, "fc") if "fc.weight" in self.w else aux_hidden_states

    def rows(self, hidden: Array, embedded: Array) -> tuple[Array, Array]:
        """Return what the output head reads and what the next row of a chain reads, both [n, H], of all rows."""
        if self.third:
            normed = self.norm(hidden, "layers.0.hidden_norm")
            x = np.concatenate([self.norm(embedded, "layers.0.input_layernorm"), normed], axis=-1)
            y = normed if self.normed_residual else hidden
        else:
            x = y = self.linear(np.concatenate([embedded, hidden], axis=-1), "fc")
        y = y + self.attention(x)
        y = y + self.gated_mlp(self.norm(y, "layers.0.post_attention_layernorm"))
        scored = self.norm(y, "norm") if "norm.weight" in self.w else y
        return scored, scored if self.normed_feedback else y

    def norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.c["rms_norm_eps"])
        return x / scale * self.w[f"{name}.weight"]

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def attention(self, x: Array) -> Array:
        n, place = len(x), "layers.0.self_attn"
        q = self.linear(x, f"{place}.q_proj").reshape(n, self.heads, -1)
        k = self.linear(x, f"{place}.k_proj").reshape(n, self.kv_heads, -1)
        v = self.linear(x, f"{place}.v_proj").reshape(n, self.kv_heads, -1)
        if f"{place}.q_norm.weight" in self.w:
            q, k = self.norm(q, f"{place}.q_norm"), self.norm(k, f"{place}.k_norm")
        q, k = self.rotate(q), self.rotate(k)
        out = np.zeros_like(q)
        for i in range(n):
            seen = slice(max(0, i + 1 - self.window), i + 1)
            for h in range(self.heads):
                shared = h * self.kv_heads // self.heads
                scores = k[seen, shared] @ q[i, h] / np.sqrt(self.dim)
                weights = np.exp(scores - scores.max())
                out[i, h] = (weights / weights.sum()) @ v[seen, shared]
        return self.linear(out.reshape(n, -1), f"{place}.o_proj")

    def rotate(self, x: Array) -> Array:
        """Rotate each head; row i is at position i."""
        angles = np.arange(len(x))[:, None] / self.theta() ** (np.arange(0, self.dim, 2) / self.dim)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def theta(self) -> float:
        """The base of the rotation: the head's own, 10000 where it names none."""
        return float(self.c.get("rope_theta", 10000.0))

    def gated_mlp(self, x: Array) -> Array:
        gates = self.linear(x, "layers.0.mlp.gate_proj")
        inner = gates / (1 + np.exp(-gates)) * self.linear(x, "layers.0.mlp.up_proj")
        return self.linear(inner, "layers.0.mlp.down_proj")
