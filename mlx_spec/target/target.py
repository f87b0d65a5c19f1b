"""The target: the forward pass over rows of sequences, above the modules that mlx-lm loaded."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from metal_kernels import MAX_ROWS, Cached, Linear, RowSpans, ints, is_traceable, linear_rows
from mlx_spec.errors import ContextFull, PositionError, RequestError
from mlx_spec.target.delta_net import DeltaNet
from mlx_spec.target.families import Family, family_of
from mlx_spec.target.layers import Attention, Layer, Norm, is_recurrent
from mlx_spec.target.pages import PAGE_SLOTS, PagePool, Sequence, append_rows
from mlx_spec.target.recurrent import (
    PIECE_ROWS,
    Held,
    Layout,
    Past,
    Paths,
    Recurrent,
    bounds_of,
    is_prompt,
    pieces_of,
    running,
    side_by_side,
)

DEFAULT_CONTEXT = 8192


@dataclass(frozen=True)
class Pass:
    """What one forward pass computed for its R rows.

    hidden: [R, H] after the final norm. taps: [R, T * H], the asked hidden states side by side (empty without
    taps). kv: [R, attention layers, 2, KV, D], keys with position encoding, and values; not yet part of any
    sequence. counts: rows of each sequence of the pass. recurrent: what recurrent layers keep of each sequence
    behind these rows; empty for models without such layers.
    """

    hidden: mx.array
    taps: mx.array
    kv: mx.array
    counts: tuple[int, ...]
    recurrent: tuple[Recurrent, ...] = ()

    def rows(self, index: int, count: int) -> "Pass":
        """Return the first ``count`` rows of sequence number ``index`` of the pass.

        Raises PositionError where that cuts a prompt, more than 16 rows, of a model with recurrent layers.
        """
        start = sum(self.counts[:index])
        part, refused = slice(start, start + count), self.counts[index] - count
        recurrent = tuple(past.without(refused) for past in self.recurrent[index : index + 1])
        return Pass(self.hidden[part], self.taps[part], self.kv[part], (count,), recurrent)

    def path(self, index: int, rows: SequenceOf[int]) -> "Pass":
        """Return those ``rows`` of sequence number ``index`` of the pass that one path of its tree leads through.

        rows: from 0 on, numbered within the sequence; each stands behind the one before it.
        Raises PositionError as ``rows`` does, and for a path that branches in a model with recurrent layers.
        """
        if tuple(rows) == tuple(range(len(rows))):
            return self.rows(index, len(rows))
        if self.recurrent:
            raise PositionError(f"Recurrent layers hold the states behind rows in order, not behind {list(rows)}.")
        part = ints(*(sum(self.counts[:index]) + row for row in rows))
        return Pass(self.hidden[part], self.taps[part], self.kv[part], (len(rows),))

    @property
    def arrays(self) -> list[mx.array]:
        """All that a drafter or a commit needs, for ``mx.eval``."""
        return [self.hidden, self.taps, self.kv, *(self.recurrent[0].arrays if self.recurrent else ())]


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
        self._language = getattr(model, "language_model", model)
        args, decoder = self._language.args, self._language.model
        self.layers = read_layers(decoder, family, args, name)
        self.norm = Norm.of(decoder.norm)
        self.num_layers = len(self.layers)
        self.hidden_size = int(args.hidden_size)
        self.vocab_size = int(args.vocab_size)
        self.context = int(text_config(config).get("max_position_embeddings") or DEFAULT_CONTEXT)
        self.dtype = self.norm.weight.dtype
        capacity, dtype = self.context if max_kv_size is None else max_kv_size, self.embed(mx.array([0])).dtype
        attentions = [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]
        kv_heads, head_dim = attentions[0].kv_heads, attentions[0].head_dim
        self.pool = PagePool(len(attentions), kv_heads, head_dim, dtype, -(-capacity // PAGE_SLOTS))
        # Layers of one shape share the arrays of an empty sequence.
        nets = [layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaNet)]
        self._empty = Recurrent((nets[0].empty(dtype),) * len(nets) if nets else ())
        self._compiled: dict[
            tuple[tuple[int, ...], int, tuple[int, ...], bool], Callable[..., tuple[Any, ...]]
        ] = {}

    @property
    def takes_trees(self) -> bool:
        """Whether rows of a pass may form a tree: recurrent layers step through rows in one order."""
        return not self._empty.layers

    def open(self) -> Sequence:
        """Start an empty sequence in this target's pool."""
        return Sequence(self.pool)

    def embed(self, tokens: mx.array) -> mx.array:
        """Look up input embeddings: [R] to [R, H]."""
        return self._language.model.embed_tokens(tokens)

    def logits(self, hidden: mx.array) -> mx.array:
        """Apply the output head to final hidden states: [..., H] to [..., V]."""
        return linear_rows(hidden, self._head)

    def head_for(self, token_ids: mx.array) -> Callable[[mx.array], mx.array]:
        """Return the output head restricted to ``token_ids`` [N]: a function from [..., H] to [..., N]."""
        rows = self._head.rows(token_ids)
        mx.eval(*rows.tensors.values())
        return lambda x: linear_rows(x, rows)

    def forward(
        self,
        batch: SequenceOf[tuple[Sequence, mx.array]],
        taps: SequenceOf[int] = (),
        paths: Paths | None = None,
    ) -> Pass:
        """Run the next rows of one or more sequences; nothing becomes part of a sequence.

        batch: (sequence, tokens [n]) pairs; the tokens stand at the positions behind what the sequence holds.
        paths: of the rows of all sequences, where they form trees; a row stands as far behind as its path is long.
        Lazy. Raises ContextFull when a row would stand behind the model's last position, RequestError for trees in
        a model with recurrent layers.
        """
        if paths is not None and not self.takes_trees:
            raise RequestError(
                f"{self.name} has recurrent layers, which step through rows in one order: no trees."
            )
        counts = tuple(tokens.size for _, tokens in batch)
        for index, (sequence, tokens) in enumerate(batch):
            first = sum(counts[:index])
            more = tokens.size if paths is None else max(map(len, paths[first : first + tokens.size]))
            if sequence.length + more > self.context:
                raise ContextFull(
                    f"{self.name} has {self.context} positions; {more} tokens behind {sequence.length} do not fit."
                )
        pasts = [sequence.recurrent or self._empty for sequence, _ in batch]
        held, places = side_by_side(pasts)
        run = self._runner(counts, tuple(taps), max(1, *(past.accepted for past in pasts)), paths is not None)
        hidden, features, kv, kept = run(
            mx.concatenate([tokens for _, tokens in batch]),
            Layout.packed(
                counts, [each.length for each, _ in batch], places, [each.pages for each, _ in batch], paths
            ),
            self.pool.data,
            held,
        )
        return Pass(hidden, features, kv, counts, behind(kept, counts))

    def commit(self, sequence: Sequence, accepted: Pass) -> None:
        """Make the accepted rows of a pass part of their sequence (lazily, see PagePool.write).

        Raises ContextFull, with nothing changed, when the pool has too few free pages.
        """
        self.commit_all([(sequence, accepted)])

    def commit_all(self, batch: SequenceOf[tuple[Sequence, Pass]]) -> None:
        """Make accepted rows part of several sequences. Raises ContextFull, see ``append_rows``."""
        append_rows(
            [(sequence, part.kv, part.recurrent[0] if part.recurrent else None) for sequence, part in batch]
        )

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
            mx.eval(sequence.arrays)
            on_progress(start + chunk.size, len(tokens))

    @property
    def _head(self) -> Linear:
        return Linear.of(getattr(self._language, "lm_head", None) or self._language.model.embed_tokens)

    def _runner(
        self, counts: tuple[int, ...], taps: tuple[int, ...], most_accepted: int, has_paths: bool
    ) -> Callable[..., tuple[Any, ...]]:
        """Return the pass for rows ``counts``: compiled, where its graph is the same round after round."""
        if sum(counts) > MAX_ROWS or not is_traceable():
            return partial(self._pass, counts, None, taps, most_accepted, has_paths)
        # How the rows are shared out, and a number of accepted rows, would be other graphs if they were in it.
        bounds = bounds_of(counts)
        key = bounds, sum(counts), taps, has_paths
        if key not in self._compiled:
            graph = partial(self._pass, bounds, max(bounds), taps, PIECE_ROWS, has_paths)
            self._compiled[key] = mx.compile(graph)
        return self._compiled[key]

    def _pass(
        self,
        counts: tuple[int, ...],
        longest: int | None,
        taps: tuple[int, ...],
        most_accepted: int,
        has_paths: bool,
        tokens: mx.array,
        numbers: mx.array,
        pool: mx.array,
        held: Any,
    ) -> tuple[Any, ...]:
        """Run rows ``counts``; with ``longest``, counts are bounds, and the layout says the numbers."""
        # mx.compile hands over plain tuples.
        layout = Layout.unpacked(numbers, tokens.size, len(counts), has_paths)
        layers = tuple(Held(*each) for each in held)
        cached = Cached(layout.pages, layout.lengths, counts, None if longest is None else layout.starts)
        rows = min(most_accepted, layers[0].k.shape[0]) if layers else 1
        spans = RowSpans(layout.first, layout.accepted, rows)
        pieces = pieces_of(counts) if longest is None else layout.pieces(longest)
        past = Past(layout.positions, cached, pool, layers, layout.slots, spans, pieces, layout.paths)
        return self._run(tokens, past, taps)

    def _run(
        self, tokens: mx.array, past: Past, taps: tuple[int, ...]
    ) -> tuple[mx.array, mx.array, mx.array, list[Held]]:
        x = self.embed(tokens)
        tapped, kv, held = {}, [], []
        for index, layer in enumerate(self.layers):
            x, kept = layer(x, past)
            if isinstance(kept, Held):
                held.append(kept)
            else:
                kv.append(kept)
            if index in taps:
                tapped[index] = x
        hidden = tapped[self.num_layers] = self.norm(x)
        features = mx.concatenate([tapped[t] for t in taps], axis=-1) if taps else hidden[:, :0]
        return hidden, features, mx.stack(kv).transpose(2, 0, 1, 3, 4), held


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a ``config.json`` that describes the language model."""
    return config.get("text_config", config)


def read_layers(decoder: Any, family: Family, args: Any, name: str) -> list[Layer]:
    """Read the layers of a decoder of mlx-lm. Raises UnsupportedModel as ``Layer.of`` does."""
    layers: list[Layer] = []
    recurrent = [is_recurrent(module) for module in decoder.layers]
    for i, module in enumerate(decoder.layers):
        window = decoder.sliding_window if is_sliding(module) else None
        layers.append(Layer.of(module, family, args, recurrent[:i].count(recurrent[i]), window, name))
    return layers


def behind(held: SequenceOf[Any], counts: tuple[int, ...]) -> tuple[Recurrent, ...]:
    """Return what recurrent layers keep of each sequence behind all rows of a pass."""
    if not held:
        return ()
    layers = tuple(Held(*each) for each in held)
    if is_prompt(counts):
        return tuple(Recurrent(layers, slot) for slot in range(len(counts)))
    firsts = running(counts)
    return tuple(Recurrent(layers, slot, firsts[slot], count) for slot, count in enumerate(counts))


def is_sliding(layer: Any) -> bool:
    """Whether a decoder layer of mlx-lm sees the newest positions only."""
    return bool(getattr(layer, "use_sliding", False))
