"""DFlash and DFlash 2 in float64 numpy, written from their published description with plain loops.

The context is a list of keys and values for each layer, indexed by absolute position; visibility is computed for
every pair of positions. Nothing of ``mlx_spec`` is used: it reads the native ``config.json`` and tensor names.
"""

from typing import Any

import numpy as np

Array = np.ndarray


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Divide by the root mean square over the last axis; the weight is used as it is."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: Array, position: int, theta: float) -> Array:
    """Rotate one row of heads [heads, D]: dimension i is paired with i + D / 2."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=-1
    )


def convolve(y: Array, base: Array, dynamic: Array) -> Array:
    """Convolve rows [B, H] with base [T, H] plus the row's own kernel [B, T, G]; row -1 is zero."""
    rows, width = y.shape
    taps, groups = dynamic.shape[1:]
    group_of = np.arange(width) // (width // groups)
    out = np.zeros_like(y)
    for i in range(rows):
        for t in range(min(taps, i + 1)):
            out[i] += (base[t] + dynamic[i, t, group_of]) * y[i - t]
    return out


class DFlash2Oracle:
    """One drafter with one sequence. ``embedding`` and ``head`` are the target's, [V, H]."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Array], embedding: Array, head: Array) -> None:
        self.c = config
        self.d = config["dflash_config"]
        self.w = {name: np.asarray(value, dtype=np.float64) for name, value in tensors.items()}
        self.embedding = np.asarray(embedding, dtype=np.float64)
        self.head = np.asarray(head, dtype=np.float64)
        self.theta = config["rope_parameters"]["rope_theta"]
        self.kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        self.is_dflash2 = "DFlash2DraftModel" in config["architectures"]
        self.context: list[list[tuple[Array, Array]]] = [[] for _ in self.kinds]
        self.margin = float("inf")
        self.peak = 0.0

    def commit(self, features: Array) -> None:
        """Append context keys and values made from target features [n, T * H]."""
        for row in np.asarray(features, dtype=np.float64):
            fused = self.norm(self.w["fc.weight"] @ row, "hidden_norm")
            for layer, kept in enumerate(self.context):
                kept.append(self.key_value(layer, fused, len(kept)))

    def hidden(self, anchor: int, rows: int) -> Array:
        """Return the final-normed hidden states [rows, H] of a block whose anchor is the next position.

        ``peak`` becomes the largest number of the residual stream after a layer.
        """
        x = self.embedding[[anchor] + [self.d["mask_token_id"]] * (rows - 1)]
        x = x * self.d.get("input_embedding_scale", 1.0)
        for layer in range(len(self.kinds)):
            x = x + self.around(layer, "attention_conv", "input_layernorm", x, self.attention)
            x = x + self.around(layer, "mlp_conv", "post_attention_layernorm", x, self.feed_forward)
            self.peak = max(self.peak, float(np.abs(x).max()))
        return self.norm(x, "norm")

    def path(self, hidden: Array, anchor: int) -> list[int]:
        """Walk greedily through the candidates of the mask rows, given hidden states [rows, H] of a block.

        ``margin`` becomes the smallest gap between a choice and its runner-up, or between the last candidate and
        the next token.
        """
        previous, chosen, self.margin = anchor, [], float("inf")
        for h in hidden[1:]:
            logits = self.logits(h)
            order, count = np.argsort(-logits, kind="stable"), self.d.get("selector_top_k", 16)
            candidates = order[:count]
            scores = logits[candidates].copy()
            if self.is_dflash2:
                gate = self.w["candidate_selector.hidden_projection.weight"] @ h
                predecessor = self.w["candidate_selector.predecessor_codebook"][previous]
                for i, b in enumerate(candidates):
                    scores[i] += np.sum(predecessor * gate * self.w["candidate_selector.successor_codebook"][b])
            best, second = -np.sort(-scores)[:2]
            cut = logits[order[count - 1]] - logits[order[count]]
            self.margin = min(self.margin, best - second, cut)
            previous = int(candidates[np.argmax(scores)])
            chosen.append(previous)
        return chosen

    def logits(self, h: Array) -> Array:
        """Apply the target's head, the multiplier, then the soft cap."""
        z = self.head @ h * self.d.get("output_multiplier", 1.0)
        cap = self.d.get("final_logit_softcapping", self.c.get("final_logit_softcapping"))
        return cap * np.tanh(z / cap) if cap is not None and cap > 0 else z

    def around(self, layer: int, conv: str, norm: str, x: Array, sublayer: Any) -> Array:
        """Norm, convolve, run the sublayer, convolve again; both kernels come from the normed input."""
        x = self.norm(x, f"layers.{layer}.{norm}")
        if not self.is_dflash2:
            return sublayer(layer, x)
        base = self.w[f"layers.{layer}.{conv}.base_kernel"]
        dynamic = x @ self.w[f"layers.{layer}.{conv}.kernel_projection.weight"].T
        groups = self.c["hidden_size"] // self.d["conv_group_size"]
        dynamic = dynamic.reshape(x.shape[0], 2, self.d["conv_kernel_size"], groups)
        return convolve(sublayer(layer, convolve(x, base[0], dynamic[:, 0])), base[1], dynamic[:, 1])

    def attention(self, layer: int, x: Array) -> Array:
        """Attend from every block row to the context and to the block, then project."""
        start, heads, dim = len(self.context[layer]), self.c["num_attention_heads"], self.c["head_dim"]
        block = [self.key_value(layer, row, start + i) for i, row in enumerate(x)]
        all_keys = self.context[layer] + block
        out = np.zeros((x.shape[0], heads * dim))
        for i, row in enumerate(x):
            q = (self.w[f"layers.{layer}.self_attn.q_proj.weight"] @ row).reshape(heads, dim)
            q = rotate(self.norm(q, f"layers.{layer}.self_attn.q_norm"), start + i, self.theta)
            seen = [all_keys[p] for p in range(len(all_keys)) if self.sees(layer, start + i, p, start)]
            for h in range(heads):
                group = h // (heads // self.c["num_key_value_heads"])
                scores = np.array([q[h] @ k[group] for k, _ in seen]) / np.sqrt(dim)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[i, h * dim : (h + 1) * dim] = sum(
                    a * v[group] for a, (_, v) in zip(weights, seen, strict=True)
                )
        return out @ self.w[f"layers.{layer}.self_attn.o_proj.weight"].T

    def sees(self, layer: int, q: int, p: int, start: int) -> bool:
        """Whether position q of the block that begins at ``start`` sees position p."""
        sliding = self.kinds[layer] == "sliding_attention"
        if p >= start:
            causal = self.c.get("is_causal")
            return not (sliding if causal is None else causal) or p <= q
        return not sliding or q - p < self.c["sliding_window"]

    def feed_forward(self, layer: int, x: Array) -> Array:
        """Run the gated feed-forward."""
        gate, up, down = (self.w[f"layers.{layer}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        z = x @ gate.T
        return (z / (1 + np.exp(-z)) * (x @ up.T)) @ down.T

    def key_value(self, layer: int, x: Array, position: int) -> tuple[Array, Array]:
        """Return key and value [KV, D] of one row, context or block, at its absolute position."""
        shape = (self.c["num_key_value_heads"], self.c["head_dim"])
        key = (self.w[f"layers.{layer}.self_attn.k_proj.weight"] @ x).reshape(shape)
        value = (self.w[f"layers.{layer}.self_attn.v_proj.weight"] @ x).reshape(shape)
        return rotate(self.norm(key, f"layers.{layer}.self_attn.k_norm"), position, self.theta), value

    def norm(self, x: Array, name: str) -> Array:
        """Apply the RMS norm of that name."""
        return rms_norm(x, self.w[f"{name}.weight"], self.c["rms_norm_eps"])
