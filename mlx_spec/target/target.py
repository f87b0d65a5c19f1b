"""The target: the forward pass over rows of sequences, above the modules that mlx-lm loaded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from metal_kernels import (
    MAX_CHUNK_ROWS,
    MAX_VERIFY_ROWS,
    Cached,
    Linear,
    RowSpans,
    ints,
    is_traceable,
    linear_rows,
)
from mlx_spec.errors import ContextFull, PositionError, RequestError
from mlx_spec.target.batch_layout import (
    BatchLayout,
    PassContext,
    Paths,
    bounds_of,
    chunks_of,
    first_rows,
    is_prompt,
)
from mlx_spec.target.delta_net import DeltaNet
from mlx_spec.target.families import Family, family_of
from mlx_spec.target.layers import Attention, Layer, Norm, is_recurrent
from mlx_spec.target.linears import linear_of
from mlx_spec.target.pages import PAGE_SLOTS, CachedSequence, PagePool, append_rows
from mlx_spec.target.recurrent import LayerState, RecurrentState, joined_states

DEFAULT_CONTEXT = 8192


@dataclass(frozen=True)
class Pass:
    """What one forward pass computed for its R rows.

    hidden: [R, H] after the final norm.
    aux_hidden_states: [R, T * H], the states of the T asked layers side by side; empty where none were asked.
    kv: [R, attention layers, 2, KV, D], keys with position encoding, and values; not yet part of any sequence.
    counts: rows of each sequence of the pass.
    recurrent: what recurrent layers keep of each sequence after these rows; empty for models without such layers.
    """

    hidden: mx.array
    aux_hidden_states: mx.array
    kv: mx.array
    counts: tuple[int, ...]
    recurrent: tuple[RecurrentState, ...] = ()

    def prefix(self, index: int, count: int) -> "Pass":
        """Return the first ``count`` rows of sequence number ``index`` of the pass.

        Raises PositionError where that cuts a prompt, more than 16 rows, of a model with recurrent layers.
        """
        start = sum(self.counts[:index])
        part, rejected = slice(start, start + count), self.counts[index] - count
        recurrent = tuple(state.without(rejected) for state in self.recurrent[index : index + 1])
        return Pass(self.hidden[part], self.aux_hidden_states[part], self.kv[part], (count,), recurrent)

    def path(self, index: int, rows: Sequence[int]) -> "Pass":
        """Return those ``rows`` of sequence number ``index`` of the pass that one path of its tree leads through.

        rows: from 0 on, numbered within the sequence; each follows the one before it.
        Raises PositionError as ``prefix`` does, and for a path that branches in a model with recurrent layers.
        """
        if tuple(rows) == tuple(range(len(rows))):
            return self.prefix(index, len(rows))
        if self.recurrent:
            raise PositionError(f"Recurrent layers hold the states after rows in order, not after {list(rows)}.")
        part = ints(*(sum(self.counts[:index]) + row for row in rows))
        return Pass(self.hidden[part], self.aux_hidden_states[part], self.kv[part], (len(rows),))

    @property
    def arrays(self) -> list[mx.array]:
        """All that a drafter or a commit needs, for ``mx.eval``."""
        return [
            self.hidden,
            self.aux_hidden_states,
            self.kv,
            *(self.recurrent[0].arrays if self.recurrent else ()),
        ]


class Target:
    """A language model that verifies rows.

    A target layer id is the number of a decoder layer, whose output (after both residual additions) is read, or
    ``num_layers``, which reads the final norm's output.
    """

    def __init__(
        self, model: Any, config: dict[str, Any], name: str, max_cached_tokens: int | None = None
    ) -> None:
        """Wrap a model that mlx-lm loaded, with its ``config.json``.

        ``max_cached_tokens`` is the number of token positions that all sequences together may cache.
        Raises UnsupportedModel for an architecture that the rows forward does not know, RequestError for a
        ``max_cached_tokens`` below 1.
        """
        family = family_of(config, name)
        if max_cached_tokens is not None and max_cached_tokens < 1:
            raise RequestError(f"max_cached_tokens must be at least 1, not {max_cached_tokens}.")
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
        capacity, dtype = (
            self.context if max_cached_tokens is None else max_cached_tokens,
            self.embed(mx.array([0])).dtype,
        )
        attentions = [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]
        kv_heads, head_dim = attentions[0].kv_heads, attentions[0].head_dim
        self.pool = PagePool(len(attentions), kv_heads, head_dim, dtype, -(-capacity // PAGE_SLOTS))
        # Layers of one shape share the arrays of an empty sequence.
        nets = [layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaNet)]
        self._empty = RecurrentState((nets[0].empty(dtype),) * len(nets) if nets else ())
        self._compiled: dict[
            tuple[tuple[int, ...], int, tuple[int, ...], bool], Callable[..., tuple[Any, ...]]
        ] = {}

    @property
    def takes_trees(self) -> bool:
        """Whether rows of a pass may form a tree: recurrent layers step through rows in one order."""
        return not self._empty.layers

    def open(self) -> CachedSequence:
        """Start an empty sequence in this target's pool."""
        return CachedSequence(self.pool)

    def embed(self, tokens: mx.array) -> mx.array:
        """Look up input embeddings: [R] to [R, H]. Quantised ones have the type of their scales."""
        return self._language.model.embed_tokens(tokens).astype(self.dtype)

    def logits(self, hidden: mx.array) -> mx.array:
        """Apply the output head to final hidden states: [..., H] to [..., V]."""
        return linear_rows(hidden, self._head)

    def head_for(self, token_ids: mx.array) -> Callable[[mx.array], mx.array]:
        """Return the output head restricted to ``token_ids`` [N]: a function from [..., H] to [..., N]."""
        rows = self._head.select_outputs(token_ids)
        mx.eval(*rows.tensors.values())
        return lambda x: linear_rows(x, rows)

    def forward(
        self,
        batch: Sequence[tuple[CachedSequence, mx.array]],
        target_layer_ids: Sequence[int] = (),
        paths: Paths | None = None,
    ) -> Pass:
        """Run the next rows of one or more sequences; nothing becomes part of a sequence.

        batch: (sequence, tokens [n]) pairs; the tokens take the positions after what the sequence holds.
        paths: of the rows of all sequences, where they form trees; the position of a row follows from the length of its path.
        Lazy. Raises ContextFull when a row would come after the model's last position, RequestError for trees in
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
                    f"{self.name} has {self.context} positions; {more} tokens after {sequence.length} do not fit."
                )
        states = [sequence.recurrent or self._empty for sequence, _ in batch]
        layers, places = joined_states(states)
        run = self._runner(
            counts, tuple(target_layer_ids), max(1, *(state.accepted for state in states)), paths is not None
        )
        hidden, aux_hidden_states, kv, kept = run(
            mx.concatenate([tokens for _, tokens in batch]),
            BatchLayout.packed(
                counts, [each.length for each, _ in batch], places, [each.pages for each, _ in batch], paths
            ),
            self.pool.data,
            layers,
        )
        return Pass(hidden, aux_hidden_states, kv, counts, states_after(kept, counts))

    def commit(self, sequence: CachedSequence, accepted: Pass) -> None:
        """Make the accepted rows of a pass part of their sequence (lazily, see PagePool.write).

        Raises ContextFull, with nothing changed, when the pool has too few free pages.
        """
        self.commit_all([(sequence, accepted)])

    def commit_all(self, batch: Sequence[tuple[CachedSequence, Pass]]) -> None:
        """Make accepted rows part of several sequences. Raises ContextFull, see ``append_rows``."""
        append_rows(
            [(sequence, part.kv, part.recurrent[0] if part.recurrent else None) for sequence, part in batch]
        )

    def prefill(
        self,
        sequence: CachedSequence,
        tokens: Sequence[int],
        target_layer_ids: Sequence[int] = (),
        step_size: int = 512,
        on_rows: Callable[[Pass, mx.array], None] = lambda rows, tokens: None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Append ``tokens`` to a sequence in chunks of ``step_size``.

        ``on_rows`` gets the committed rows and tokens of each chunk, ``on_progress`` the tokens done and in all.
        The chunks depend on ``tokens`` alone, so plain and speculative runs prefill alike. Raises ContextFull before any work.
        """
        if step_size < 1:
            raise RequestError(f"prefill_step_size must be at least 1, not {step_size}.")
        if sequence.length + len(tokens) > self.context:
            raise ContextFull(
                f"The prompt has {len(tokens)} tokens after {sequence.length} cached ones; "
                f"{self.name} has {self.context} positions. Shorten the prompt."
            )
        on_progress(0, len(tokens))
        for start in range(0, len(tokens), step_size):
            chunk = mx.array(list(tokens[start : start + step_size]), dtype=mx.int32)
            rows = self.forward([(sequence, chunk)], target_layer_ids)
            self.commit(sequence, rows)
            on_rows(rows, chunk)
            mx.eval(sequence.arrays)
            on_progress(start + chunk.size, len(tokens))

    @property
    def _head(self) -> Linear:
        return linear_of(getattr(self._language, "lm_head", None) or self._language.model.embed_tokens)

    def _runner(
        self, counts: tuple[int, ...], target_layer_ids: tuple[int, ...], most_accepted: int, has_paths: bool
    ) -> Callable[..., tuple[Any, ...]]:
        """Return the pass for rows ``counts``: compiled, where its graph is the same round after round."""
        if sum(counts) > MAX_VERIFY_ROWS or not is_traceable():
            return partial(self._pass, counts, None, target_layer_ids, most_accepted, has_paths)
        # How the rows are shared out, and a number of accepted rows, would be other graphs if they were in it.
        bounds = bounds_of(counts)
        key = bounds, sum(counts), target_layer_ids, has_paths
        if key not in self._compiled:
            graph = partial(self._pass, bounds, max(bounds), target_layer_ids, MAX_CHUNK_ROWS, has_paths)
            self._compiled[key] = mx.compile(graph)
        return self._compiled[key]

    def _pass(
        self,
        counts: tuple[int, ...],
        longest: int | None,
        target_layer_ids: tuple[int, ...],
        most_accepted: int,
        has_paths: bool,
        tokens: mx.array,
        numbers: mx.array,
        pool: mx.array,
        states: Any,
    ) -> tuple[Any, ...]:
        """Run rows ``counts``; with ``longest``, counts are bounds, and the layout says the numbers."""
        # mx.compile hands over plain tuples.
        layout = BatchLayout.unpacked(numbers, tokens.size, len(counts), has_paths)
        layers = tuple(LayerState(*each) for each in states)
        cached = Cached(layout.pages, layout.lengths, counts, None if longest is None else layout.starts)
        rows = min(most_accepted, layers[0].k.shape[0]) if layers else 1
        spans = RowSpans(layout.first, layout.accepted, rows)
        chunks = chunks_of(counts) if longest is None else layout.one_chunk(longest)
        context = PassContext(layout.positions, cached, pool, layers, layout.slots, spans, chunks, layout.paths)
        return self._run(tokens, context, target_layer_ids)

    def _run(
        self, tokens: mx.array, context: PassContext, target_layer_ids: tuple[int, ...]
    ) -> tuple[mx.array, mx.array, mx.array, list[LayerState]]:
        x = self.embed(tokens)
        outputs, kv, states = {}, [], []
        for index, layer in enumerate(self.layers):
            x, kept = layer(x, context)
            if isinstance(kept, LayerState):
                states.append(kept)
            else:
                kv.append(kept)
            if index in target_layer_ids:
                outputs[index] = x
        hidden = outputs[self.num_layers] = self.norm(x)
        asked = [outputs[layer] for layer in target_layer_ids]
        aux_hidden_states = mx.concatenate(asked, axis=-1) if asked else hidden[:, :0]
        return hidden, aux_hidden_states, mx.stack(kv).transpose(2, 0, 1, 3, 4), states


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
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


def states_after(kept: Sequence[Any], counts: tuple[int, ...]) -> tuple[RecurrentState, ...]:
    """Return what recurrent layers keep of each sequence after all rows of a pass."""
    if not kept:
        return ()
    layers = tuple(LayerState(*each) for each in kept)
    if is_prompt(counts):
        return tuple(RecurrentState(layers, slot) for slot in range(len(counts)))
    firsts = first_rows(counts)
    return tuple(RecurrentState(layers, slot, firsts[slot], count) for slot, count in enumerate(counts))


def is_sliding(layer: Any) -> bool:
    """Whether a decoder layer of mlx-lm sees the newest positions only."""
    return bool(getattr(layer, "use_sliding", False))
