"""The target: the forward pass over rows of sequences, above the modules that mlx-lm loaded."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metal_kernels import MAX_ROWS, Cached, Linear, attention_rows, is_traceable, linear_rows
from mlx_spec.errors import ContextFull, RequestError
from mlx_spec.target.families import family_of
from mlx_spec.target.layers import Layer, Norm
from mlx_spec.target.pages import PAGE_SLOTS, PagePool, Sequence

DEFAULT_CONTEXT = 8192
# Page numbers in the smallest page table.
MIN_TABLE = 8


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
        family = family_of(config, name)
        if max_kv_size is not None and max_kv_size < 1:
            raise RequestError(f"max_kv_size must be at least 1, not {max_kv_size}.")
        self.name = name
        self.model = model
        self.layers = [
            Layer.of(module, family, model.model.sliding_window if is_sliding(module) else None, name)
            for module in model.model.layers
        ]
        self.norm = Norm.of(model.model.norm)
        self.num_layers = len(self.layers)
        self.hidden_size = int(model.args.hidden_size)
        self.vocab_size = int(model.args.vocab_size)
        self.context = int(config.get("max_position_embeddings") or DEFAULT_CONTEXT)
        self.dtype = self.norm.weight.dtype
        capacity = self.context if max_kv_size is None else max_kv_size
        first = self.layers[0]
        self.pool = PagePool(
            self.num_layers,
            first.kv_heads,
            sum(part.size for part in first.qkv) // (first.heads + 2 * first.kv_heads),
            self.embed(mx.array([0])).dtype,
            -(-capacity // PAGE_SLOTS),
        )
        self._compiled: dict[tuple[tuple[int, ...], tuple[int, ...]], Callable[..., tuple[mx.array, ...]]] = {}

    def open(self) -> Sequence:
        """Start an empty sequence in this target's pool."""
        return Sequence(self.pool)

    def embed(self, tokens: mx.array) -> mx.array:
        """Look up input embeddings: [R] to [R, H]."""
        return self.model.model.embed_tokens(tokens)

    def logits(self, hidden: mx.array) -> mx.array:
        """Apply the output head to final hidden states: [..., H] to [..., V]."""
        return linear_rows(hidden, self._head)

    def head_for(self, token_ids: mx.array) -> Callable[[mx.array], mx.array]:
        """Return the output head restricted to ``token_ids`` [N]: a function from [..., H] to [..., N]."""
        rows = self._head.rows(token_ids)
        mx.eval(*rows.tensors.values())
        return lambda x: linear_rows(x, rows)

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
        run = self._runner(counts, tuple(taps))
        hidden, features, kv = run(
            mx.concatenate([tokens for _, tokens in batch]),
            page_table([sequence.pages for sequence, _ in batch]),
            mx.array([sequence.length for sequence, _ in batch], dtype=mx.int32),
            self.pool.data,
        )
        return Pass(hidden, features, kv, tuple(sum(counts[:i]) for i in range(len(counts))))

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

    @property
    def _head(self) -> Linear:
        return Linear.of(getattr(self.model, "lm_head", None) or self.model.model.embed_tokens)

    def _runner(self, counts: tuple[int, ...], taps: tuple[int, ...]) -> Callable[..., tuple[mx.array, ...]]:
        """Return the pass for rows ``counts``: compiled, where its graph is the same round after round."""

        def run(
            tokens: mx.array, pages: mx.array, lengths: mx.array, pool: mx.array
        ) -> tuple[mx.array, mx.array, mx.array]:
            return self._run(tokens, Cached(pages, lengths, counts), pool, taps)

        if sum(counts) > MAX_ROWS or not is_traceable():
            return run
        if (counts, taps) not in self._compiled:
            self._compiled[counts, taps] = mx.compile(run)
        return self._compiled[counts, taps]

    def _run(
        self, tokens: mx.array, cached: Cached, pool: mx.array, taps: tuple[int, ...]
    ) -> tuple[mx.array, mx.array, mx.array]:
        positions, x = cached.positions(), self.embed(tokens)
        tapped, kv = {}, []
        for index, layer in enumerate(self.layers):
            queries, keys_values = layer.project(x, positions)
            # Splitting keeps a view; an index would copy.
            keys, values = (side.squeeze(0) for side in mx.split(keys_values, 2))
            attended = attention_rows(
                queries, keys, values, pool, index, cached, scale=layer.scale, window=layer.window
            )
            x = layer.finish(x, attended)
            kv.append(keys_values)
            if index in taps:
                tapped[index] = x
        hidden = tapped[self.num_layers] = self.norm(x)
        features = mx.concatenate([tapped[t] for t in taps], axis=-1) if taps else hidden[:, :0]
        return hidden, features, mx.stack(kv).transpose(2, 0, 1, 3, 4)


def is_sliding(layer: Any) -> bool:
    """Whether a decoder layer of mlx-lm sees the newest positions only."""
    return bool(getattr(layer, "use_sliding", False))


def page_table(pages: SequenceOf[SequenceOf[int]]) -> mx.array:
    """Return page numbers [S, P] int32, P a power of two, so that few shapes occur; unused places hold page 0."""
    size = MIN_TABLE
    while size < max(len(row) for row in pages):
        size *= 2
    return mx.array([[*row, *[0] * (size - len(row))] for row in pages], dtype=mx.int32)
