"""The target: the forward pass over rows of several sequences, with the weights of a model that mlx-lm loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from metal_kernels import (
    MAX_VERIFY_ROWS,
    Cached,
    Linear,
    RowSpans,
    ints,
    is_traceable,
    linear_rows,
    stack_rows,
)
from mlx_spec.errors import ContextFull, PositionError, RequestError
from mlx_spec.target.batch_layout import (
    BatchLayout,
    PassContext,
    Paths,
    bounds_of,
    first_rows,
    is_prompt,
)
from mlx_spec.target.delta_net import DeltaNet
from mlx_spec.target.families import Family, family_of
from mlx_spec.target.graphs import Graph, Graphs
from mlx_spec.target.layers import Attention, Layer, Norm, is_recurrent
from mlx_spec.target.linears import linear_of
from mlx_spec.target.model_config import ModelConfig
from mlx_spec.target.pages import PAGE_SLOTS, CachedSequence, PagePool, append_rows
from mlx_spec.target.recurrent import LayerState, RecurrentState, joined_states


@dataclass(frozen=True)
class Pass:
    """What one forward pass computed for its R rows.

    hidden: [R, H] after the final norm.
    aux_hidden_states: [R, T * H], the outputs of T target layers side by side; [R, 0] where none were requested.
    kv: [R, attention layers, 2, KV, D], keys with position encoding, and values; not yet part of any sequence.
    counts: rows of each sequence of the pass.
    recurrent: state of the recurrent layers of each sequence after these rows; empty for models without such.
    """

    hidden: mx.array
    aux_hidden_states: mx.array
    kv: mx.array
    counts: tuple[int, ...]
    recurrent: tuple[RecurrentState, ...] = ()

    def prefix(self, index: int, count: int) -> "Pass":
        """Return the first ``count`` rows of sequence number ``index`` of the pass.

        Raises PositionError where that cuts a prompt (more than MAX_VERIFY_ROWS rows) of a model with recurrent
        layers.
        """
        start = sum(self.counts[:index])
        part, rejected = slice(start, start + count), self.counts[index] - count
        recurrent = tuple(state.without(rejected) for state in self.recurrent[index : index + 1])
        return Pass(self.hidden[part], self.aux_hidden_states[part], self.kv[part], (count,), recurrent)

    def path(self, index: int, rows: Sequence[int]) -> "Pass":
        """Return the rows of one path through the tree of sequence number ``index`` of the pass.

        rows: numbers within the sequence, ascending from 0.
        Raises PositionError as ``prefix`` does, and for any path but the first rows in a model with recurrent
        layers.
        """
        if tuple(rows) == tuple(range(len(rows))):
            return self.prefix(index, len(rows))
        if self.recurrent:
            raise PositionError(f"Recurrent layers hold the states after rows in order, not after {list(rows)}.")
        part = ints(*(sum(self.counts[:index]) + row for row in rows))
        return Pass(self.hidden[part], self.aux_hidden_states[part], self.kv[part], (len(rows),))

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that a drafter or a commit needs, for ``mx.eval``."""
        states = self.recurrent[0].arrays if self.recurrent else []
        return [self.hidden, self.aux_hidden_states, self.kv, *states]


class Target:
    """A language model that verifies rows.

    A target layer id is the number of a decoder layer, whose output (after both residual additions) is read, or
    ``num_layers``, for the output of the final norm.

    name: of the model, for messages.
    model: the model of mlx-lm.
    layers: its decoder layers.
    num_layers, hidden_size, vocab_size: its sizes.
    context: the most positions of a sequence.
    dtype: of hidden states.
    pool: the pages of all sequences.
    """

    def __init__(
        self, model: Any, config: dict[str, Any], name: str, max_cached_tokens: int | None = None
    ) -> None:
        """Wrap a model of mlx-lm, whose modules become views of joined weights.

        model: the model.
        config: its ``config.json``.
        name: for messages.
        max_cached_tokens: positions that all sequences together may cache; None for the model's context.
        Raises UnsupportedModel for an architecture or weights that are not supported, RequestError for a
        ``max_cached_tokens`` below 1.
        """
        family, settings = family_of(config, name), ModelConfig.read(config, name)
        if max_cached_tokens is not None and max_cached_tokens < 1:
            raise RequestError(f"max_cached_tokens must be at least 1, not {max_cached_tokens}.")
        self.name = name
        self.model = model
        self._language = getattr(model, "language_model", model)
        args, decoder = self._language.args, self._language.model
        self.layers = read_layers(decoder, family, args, settings, name)
        self.norm = Norm.of(decoder.norm)
        self.num_layers = len(self.layers)
        self.hidden_size = int(args.hidden_size)
        self.vocab_size = int(args.vocab_size)
        self.context = settings.context
        self.dtype = self.norm.weight.dtype
        cache_dtype = self.embed(mx.array([0])).dtype
        capacity = self.context if max_cached_tokens is None else max_cached_tokens
        self.pool = pool_for(self.layers, cache_dtype, capacity)
        self._empty = empty_state(self.layers, cache_dtype)
        self._graphs = Graphs()

    @property
    def takes_trees(self) -> bool:
        """Whether rows of a pass may form a tree; recurrent layers step through rows in one order."""
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
        """Return the output head restricted to ``token_ids`` [N], a function from [..., H] to [..., N]."""
        rows = self._head.select_outputs(token_ids)
        mx.eval(*rows.tensors.values())
        return lambda x: linear_rows(x, rows)

    def forward(
        self,
        batch: Sequence[tuple[CachedSequence, mx.array]],
        target_layer_ids: Sequence[int] = (),
        paths: Paths | None = None,
    ) -> Pass:
        """Run the next rows of one or more sequences, lazily. They become part of no sequence: see ``commit``.

        batch: (sequence, tokens [n] int32) pairs; the tokens take the positions after the sequence's.
        target_layer_ids: layers whose outputs are returned, see Target.
        paths: of the rows of all sequences, where they form trees.
        Raises ContextFull when a row would come after the model's last position, RequestError for trees in a model
        with recurrent layers.
        """
        sequences, counts = [sequence for sequence, _ in batch], tuple(tokens.size for _, tokens in batch)
        self._check_fit(sequences, counts, paths)
        states = [sequence.recurrent or self._empty for sequence in sequences]
        layers, slots = joined_states(states)
        lengths, pages = [sequence.length for sequence in sequences], [sequence.pages for sequence in sequences]
        numbers = BatchLayout.packed(counts, lengths, slots, pages, paths)
        most_accepted = max(1, *(state.accepted for state in states))
        graph = self._graph(counts, tuple(lengths), tuple(target_layer_ids), most_accepted, paths is not None)
        tokens = mx.concatenate([tokens for _, tokens in batch])
        hidden, aux_hidden_states, kv, kept = graph(tokens, numbers, self.pool.data, layers)
        return Pass(hidden, aux_hidden_states, kv, counts, states_after(kept, counts))

    def commit(self, sequence: CachedSequence, accepted: Pass) -> None:
        """Append accepted rows of a pass to their sequence, lazily. Raises ContextFull, see ``append_rows``."""
        self.commit_all([(sequence, accepted)])

    def commit_all(self, batch: Sequence[tuple[CachedSequence, Pass]]) -> None:
        """Append accepted rows to several sequences, in one write. Raises ContextFull, see ``append_rows``."""
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
        """Append ``tokens`` to a sequence in chunks, which are the same for plain and speculative runs.

        sequence: to append to.
        tokens: ids.
        target_layer_ids: layers whose outputs ``on_rows`` gets, see Target.
        step_size: tokens of a chunk.
        on_rows: gets the committed rows and tokens [n] of each chunk.
        on_progress: gets how many tokens are done, and how many there are.
        Raises ContextFull before any work where the tokens do not fit into the model's context, and after some
        chunks where the pool runs out of pages; RequestError for a ``step_size`` below 1.
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

    def _check_fit(
        self, sequences: Sequence[CachedSequence], counts: tuple[int, ...], paths: Paths | None
    ) -> None:
        """Raise RequestError for trees that recurrent layers cannot run, ContextFull for rows that do not fit."""
        if paths is not None and not self.takes_trees:
            raise RequestError(
                f"{self.name} has recurrent layers, which step through rows in one order: no trees."
            )
        for sequence, count, first in zip(sequences, counts, first_rows(counts), strict=True):
            more = count if paths is None else max(map(len, paths[first : first + count]))
            if sequence.length + more > self.context:
                raise ContextFull(
                    f"{self.name} has {self.context} positions; {more} tokens after {sequence.length} do not fit."
                )

    def _graph(
        self,
        counts: tuple[int, ...],
        lengths: tuple[int, ...],
        target_layer_ids: tuple[int, ...],
        most_accepted: int,
        has_paths: bool,
    ) -> Graph:
        """Return the pass for rows ``counts``: compiled where it is small and MLX can trace our kernels.

        A compiled pass serves every split of as many rows and every number of accepted rows, so that few graphs
        are compiled: counts are replaced by bounds, and the numbers come as arrays.
        """
        if sum(counts) > MAX_VERIFY_ROWS or not is_traceable():
            return partial(self._pass, counts, None, lengths, target_layer_ids, most_accepted, has_paths)
        bounds = bounds_of(counts)
        graph = partial(self._pass, bounds, max(bounds), None, target_layer_ids, MAX_VERIFY_ROWS, has_paths)
        return self._graphs.of((bounds, sum(counts), target_layer_ids, has_paths), graph)

    def _pass(
        self,
        counts: tuple[int, ...],
        longest: int | None,
        held: tuple[int, ...] | None,
        target_layer_ids: tuple[int, ...],
        most_accepted: int,
        has_paths: bool,
        tokens: mx.array,
        numbers: mx.array,
        pool: mx.array,
        states: Any,
    ) -> tuple[Any, ...]:
        """Run rows ``counts``.

        counts: rows of each sequence, or bounds of these, where ``numbers`` alone holds them.
        longest: None for exact counts, otherwise the largest bound.
        held: see Cached.
        most_accepted: a bound of the rows that a sequence's recurrent layers step through first.
        tokens: [R] int32.
        numbers: see ``BatchLayout.packed``.
        pool: see ``PagePool.data``.
        states: of each recurrent layer, as plain tuples where ``mx.compile`` passes them on.
        """
        layout = BatchLayout.unpacked(numbers, tokens.size, len(counts), has_paths)
        layers = tuple(LayerState(*each) for each in states)
        starts = None if longest is None else layout.starts
        cached = Cached(layout.pages, layout.lengths, counts, starts, held)
        rows = min(most_accepted, layers[0].k.shape[0]) if layers else 1
        accepted = RowSpans(layout.first, layout.accepted, rows)
        spans = RowSpans(layout.starts[:-1], layout.counts, max(counts))
        context = PassContext(layout.positions, cached, pool, layers, layout.slots, accepted, spans, layout.paths)
        return self._run(self.embed(tokens), context, target_layer_ids)

    def _run(
        self, x: mx.array, context: PassContext, target_layer_ids: tuple[int, ...]
    ) -> tuple[mx.array, mx.array, mx.array, list[LayerState]]:
        """Run embedded rows [R, H] through all layers and the final norm; see Pass for what is returned."""
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
        requested = [outputs[layer] for layer in target_layer_ids]
        aux_hidden_states = mx.concatenate(requested, axis=-1) if requested else hidden[:, :0]
        return hidden, aux_hidden_states, stack_rows(kv), states


def read_layers(decoder: Any, family: Family, args: Any, settings: ModelConfig, name: str) -> list[Layer]:
    """Read the layers of a decoder of mlx-lm. Raises UnsupportedModel, see ``Layer.of``."""
    layers, rope = list[Layer](), settings.rope
    recurrent = [is_recurrent(module) for module in decoder.layers]
    for i, (module, window) in enumerate(zip(decoder.layers, settings.windows, strict=True)):
        layers.append(Layer.of(module, family, args, recurrent[:i].count(recurrent[i]), window, rope, name))
    return layers


def pool_for(layers: Sequence[Layer], dtype: mx.Dtype, max_cached_tokens: int) -> PagePool:
    """Return an empty pool for the attention layers among ``layers``."""
    attentions = [layer.mixer for layer in layers if isinstance(layer.mixer, Attention)]
    kv_heads, head_dim = attentions[0].kv_heads, attentions[0].head_dim
    return PagePool(len(attentions), kv_heads, head_dim, dtype, -(-max_cached_tokens // PAGE_SLOTS))


def empty_state(layers: Sequence[Layer], dtype: mx.Dtype) -> RecurrentState:
    """Return the state of an empty sequence; recurrent layers, all of one shape, share its arrays."""
    nets = [layer.mixer for layer in layers if isinstance(layer.mixer, DeltaNet)]
    return RecurrentState((nets[0].empty(dtype),) * len(nets) if nets else ())


def states_after(kept: Sequence[Any], counts: tuple[int, ...]) -> tuple[RecurrentState, ...]:
    """Return the recurrent state of each sequence after all rows of a pass.

    kept: what each recurrent layer returned.
    counts: rows of each sequence.
    """
    if not kept:
        return ()
    layers = tuple(LayerState(*each) for each in kept)
    if is_prompt(counts):
        return tuple(RecurrentState(layers, slot) for slot in range(len(counts)))
    firsts = first_rows(counts)
    return tuple(RecurrentState(layers, slot, firsts[slot], count) for slot, count in enumerate(counts))
