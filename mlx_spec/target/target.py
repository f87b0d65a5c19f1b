"""The target: the forward pass over rows of sequences, above the modules that mlx-lm loaded."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metal_kernels import Cached, attention_rows, linear_rows
from mlx_spec.errors import ContextFull, RequestError
from mlx_spec.target.families import family_of
from mlx_spec.target.pages import PAGE_SLOTS, PagePool, Sequence

DEFAULT_CONTEXT = 8192


@dataclass(frozen=True)
class Pass:
    """What one forward pass computed for its R rows.

    hidden: [R, H] after the final norm. taps: [R, T * H], the asked hidden states side by side (empty without
    taps). kv: [R, layers, 2, KV, D], keys with position encoding, and values; not yet part of any sequence.
    starts: first row of each sequence of the pass.
    """

    hidden: mx.array
    taps: mx.array
    kv: mx.array
    starts: tuple[int, ...]

    def rows(self, index: int, count: int) -> "Pass":
        """Return the first ``count`` rows of sequence number ``index`` of the pass."""
        part = slice(self.starts[index], self.starts[index] + count)
        return Pass(self.hidden[part], self.taps[part], self.kv[part], (0,))


class Target:
    """A language model that verifies rows.

    A tap is the number of a decoder layer, whose output (after both residual additions) is read, or
    ``num_layers``, which reads the final norm's output.
    """

    def __init__(self, model: Any, config: dict[str, Any], name: str, max_kv_size: int | None = None) -> None:
        """Wrap a model that mlx-lm loaded, with its ``config.json``.

        ``max_kv_size`` is the number of token positions that all sequences together may cache.
        Raises UnsupportedModel for an architecture that the rows forward does not know, RequestError for a
        ``max_kv_size`` below 1.
        """
        self.family = family_of(config, name)
        self.name = name
        self.model = model
        self.layers = model.model.layers
        self.num_layers = len(self.layers)
        self.hidden_size = int(model.args.hidden_size)
        self.vocab_size = int(model.args.vocab_size)
        self.context = int(config.get("max_position_embeddings") or DEFAULT_CONTEXT)
        self.dtype = model.model.norm.weight.dtype
        attention = self.layers[0].self_attn
        if max_kv_size is not None and max_kv_size < 1:
            raise RequestError(f"max_kv_size must be at least 1, not {max_kv_size}.")
        capacity = self.context if max_kv_size is None else max_kv_size
        self.pool = PagePool(
            self.num_layers,
            attention.n_kv_heads,
            attention.k_proj.weight.shape[0] // attention.n_kv_heads,
            self.embed(mx.array([0])).dtype,
            -(-capacity // PAGE_SLOTS),
        )

    def open(self) -> Sequence:
        """Start an empty sequence in this target's pool."""
        return Sequence(self.pool)

    def embed(self, tokens: mx.array) -> mx.array:
        """Look up input embeddings: [R] to [R, H]."""
        return self.model.model.embed_tokens(tokens)

    def logits(self, hidden: mx.array) -> mx.array:
        """Apply the output head to final hidden states: [..., H] to [..., V]."""
        head = getattr(self.model, "lm_head", None)
        return self.model.model.embed_tokens.as_linear(hidden) if head is None else head(hidden)

    def head_for(self, token_ids: mx.array) -> Callable[[mx.array], mx.array]:
        """Return the output head restricted to ``token_ids`` [N]: a function from [..., H] to [..., N]."""
        head = getattr(self.model, "lm_head", None) or self.model.model.embed_tokens
        rows = {name: value[token_ids] for name, value in head.parameters().items()}
        mx.eval(rows)
        return lambda x: linear_rows(x, rows, head)

    def forward(self, batch: SequenceOf[tuple[Sequence, mx.array]], taps: SequenceOf[int] = ()) -> Pass:
        """Run the next rows of one or more sequences; nothing becomes part of a sequence.

        batch: (sequence, tokens [n]) pairs; the tokens stand at the positions behind what the sequence holds.
        Lazy. Raises ContextFull when a row would stand behind the model's last position.
        """
        for sequence, tokens in batch:
            if sequence.length + tokens.size > self.context:
                raise ContextFull(
                    f"{self.name} has {self.context} positions; {tokens.size} tokens behind "
                    f"{sequence.length} do not fit."
                )
        counts = tuple(tokens.size for _, tokens in batch)
        starts = tuple(sum(counts[:i]) for i in range(len(counts)))
        positions = mx.concatenate(
            [mx.arange(s.length, s.length + n) for (s, _), n in zip(batch, counts, strict=True)]
        )
        cached = _cached([sequence for sequence, _ in batch], counts)
        x = self.embed(mx.concatenate([tokens for _, tokens in batch]))
        tapped, kv = {}, []
        for index, layer in enumerate(self.layers):
            queries, keys, values = self._project(layer, x, positions)
            attended = self._attend(index, cached, queries, keys, values)
            x = x + layer.self_attn.o_proj(attended.reshape(x.shape[0], -1))
            x = x + self.family.feed_forward(layer.mlp, layer.post_attention_layernorm(x))
            kv.append(mx.stack([keys, values], axis=1))
            if index in taps:
                tapped[index] = x
        hidden = tapped[self.num_layers] = self.model.model.norm(x)
        features = mx.concatenate([tapped[t] for t in taps], axis=-1) if taps else hidden[:, :0]
        return Pass(hidden, features, mx.stack(kv, axis=1), starts)

    def commit(self, sequence: Sequence, accepted: Pass) -> None:
        """Make the accepted rows of a pass part of their sequence (lazily, see PagePool.write)."""
        sequence.append(accepted.kv)

    def prefill(
        self,
        sequence: Sequence,
        tokens: SequenceOf[int],
        taps: SequenceOf[int] = (),
        step_size: int = 512,
        on_rows: Callable[[Pass, mx.array], None] = lambda rows, tokens: None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Append ``tokens`` to a sequence in chunks of ``step_size``.

        ``on_rows`` gets the committed rows and tokens of each chunk, ``on_progress`` the tokens done and in all.
        The chunks depend on ``tokens`` alone, so every lane prefills alike. Raises ContextFull before any work.
        """
        if step_size < 1:
            raise RequestError(f"prefill_step_size must be at least 1, not {step_size}.")
        if sequence.length + len(tokens) > self.context:
            raise ContextFull(
                f"The prompt has {len(tokens)} tokens behind {sequence.length} cached ones; "
                f"{self.name} has {self.context} positions. Shorten the prompt."
            )
        on_progress(0, len(tokens))
        for start in range(0, len(tokens), step_size):
            chunk = mx.array(list(tokens[start : start + step_size]), dtype=mx.int32)
            rows = self.forward([(sequence, chunk)], taps)
            self.commit(sequence, rows)
            on_rows(rows, chunk)
            mx.eval(self.pool.data)
            on_progress(start + chunk.size, len(tokens))

    def _project(self, layer: Any, x: mx.array, positions: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        attention = layer.self_attn
        x = layer.input_layernorm(x)
        queries = attention.q_proj(x).reshape(x.shape[0], attention.n_heads, -1)
        keys = attention.k_proj(x).reshape(x.shape[0], attention.n_kv_heads, -1)
        values = attention.v_proj(x).reshape(x.shape[0], attention.n_kv_heads, -1)
        if self.family.qk_norm:
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        # mlx-lm's RoPE modules take one offset per batch entry: every row is a batch entry of length 1.
        queries = attention.rope(queries[:, :, None], offset=positions)[:, :, 0]
        keys = attention.rope(keys[:, :, None], offset=positions)[:, :, 0]
        return queries, keys, values

    def _attend(self, index: int, cached: Cached, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        return attention_rows(
            queries,
            keys,
            values,
            self.pool.data,
            index,
            cached,
            scale=self.layers[index].self_attn.scale,
            window=self.model.model.sliding_window if self._is_sliding(index) else None,
        )

    def _is_sliding(self, index: int) -> bool:
        return bool(getattr(self.layers[index], "use_sliding", False))


def _cached(sequences: SequenceOf[Sequence], counts: tuple[int, ...]) -> Cached:
    """Describe what sequences hold and how many new rows each has; the page table is padded to the longest."""
    most = max(len(s.pages) for s in sequences)
    pages = mx.array([s.pages + [0] * (most - len(s.pages)) for s in sequences], dtype=mx.int32)
    return Cached(pages.reshape(len(sequences), most), mx.array([s.length for s in sequences]), counts)
