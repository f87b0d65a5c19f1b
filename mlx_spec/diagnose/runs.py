"""Compares speculative runs with plain ones, and finds what differs first: a row, a layer, a cached position."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.diagnose.rows import logits_alone
from mlx_spec.engine import Engine, Request
from mlx_spec.target import CachedSequence, Target
from mlx_spec.target.layers import Attention

# Units in the last place between the two largest logits up to which either may be chosen.
TIE = 4


@dataclass(frozen=True)
class RowFault:
    """A row of a pass that differs from the row computed alone, and where in the model it begins to.

    layer: the first that differs; the number of layers for the final norm.
    operation: of that layer.
    gap: between the two largest logits of the row alone, in units in the last place of the target's type.
    """

    position: int
    row: int
    layer: int
    operation: str
    gap: float

    def __str__(self) -> str:
        return f"position {self.position}, row {self.row}: layer {self.layer}, {self.operation}"


@dataclass(frozen=True)
class CacheFault:
    """A cached position that differs from recomputation.

    round: of the run, from 0, before which it differs.
    """

    round: int
    position: int
    layer: int

    def __str__(self) -> str:
        return f"round {self.round}: the cache of attention layer {self.layer} differs at position {self.position}"


@dataclass
class Inspector:
    """Recomputes every round of a run from scratch; pass ``check`` to a request as ``on_verified``.

    tokens: of the prompt; those that are committed later are added.
    """

    target: Target
    tokens: list[int]
    rounds: int = 0
    cache_fault: CacheFault | None = None
    row_fault: RowFault | None = None
    clean: CachedSequence | None = None
    _rows: tuple[int, list[int]] = field(default_factory=lambda: (0, []))

    def check(self, sequence: CachedSequence, tokens: mx.array, logits: mx.array) -> None:
        """Compare what is cached, then the rows of the pass, until something was found."""
        if self.cache_fault or self.row_fault:
            return
        if self.clean is None:
            self.clean = self.target.open()
            self.target.prefill(self.clean, self.tokens[:-1])
        position, rows = self._rows
        for token in rows[: sequence.length - position] if rows else []:
            passed = self.target.forward([(self.clean, mx.array([token], dtype=mx.int32))])
            mx.eval(*passed.arrays)
            self.target.commit(self.clean, passed)
        self._rows = sequence.length, [int(token) for token in np.array(tokens)]
        self.cache_fault = differing_cache(sequence, self.clean, self.rounds)
        if self.cache_fault is None:
            self.row_fault = differing_row(self.target, self.clean, tokens, logits)
        self.rounds += 1

    def free(self) -> None:
        """Give the memory back."""
        if self.clean is not None:
            self.clean.free()


def differing_cache(sequence: CachedSequence, clean: CachedSequence, number: int) -> CacheFault | None:
    """Return the first position whose keys or values differ between two sequences of the same tokens."""
    if sequence.length != clean.length:
        return CacheFault(number, min(sequence.length, clean.length), 0)
    if not sequence.length:
        return None
    same = mx.all(cached(sequence) == cached(clean), axis=(2, 3, 4))
    wrong = np.argwhere(~np.array(same))
    return CacheFault(number, int(wrong[0][0]), int(wrong[0][1])) if len(wrong) else None


def cached(sequence: CachedSequence) -> mx.array:
    """Return the keys and values of a sequence: [positions, layers, 2, KV, D]."""
    pages = sequence.pool.data[mx.array(sequence.pages, dtype=mx.int32)]
    return pages.transpose(0, 3, 1, 2, 4, 5).flatten(0, 1)[: sequence.length]


def differing_row(target: Target, sequence: CachedSequence, tokens: mx.array, logits: mx.array) -> RowFault | None:
    """Return the first row of a pass after a sequence whose logits differ from those of the row alone."""
    for row, alone in enumerate(logits_alone(target, sequence, tokens)):
        if not mx.array_equal(logits[row], alone, equal_nan=True).item():
            layer, operation = first_difference(target, sequence, tokens, row)
            return RowFault(sequence.length + row, row, layer, operation, gap_of(alone))
    return None


def gap_of(logits: mx.array) -> float:
    """Return how far the two largest logits are apart, in units in the last place of their type."""
    top = np.sort(np.array(mx.topk(logits.astype(mx.float32), 2)))
    digits = {mx.bfloat16: 8, mx.float16: 11}.get(logits.dtype, 24)
    unit = 2.0 ** (np.floor(np.log2(max(abs(float(top[1])), 1e-30))) + 1 - digits)
    return float((top[1] - top[0]) / unit)


def first_difference(target: Target, sequence: CachedSequence, tokens: mx.array, row: int) -> tuple[int, str]:
    """Return the layer and operation in which a row of a pass first differs from the row alone."""
    every = range(target.num_layers + 1)
    together = mx.split(target.forward([(sequence, tokens)], every).aux_hidden_states[row], target.num_layers + 1)
    alone = mx.split(state_alone(target, sequence, tokens, row), target.num_layers + 1)
    for layer in every:
        if not mx.array_equal(together[layer], alone[layer]).item():
            if layer == target.num_layers:
                return layer, "final norm"
            before = target.embed(tokens) if layer == 0 else rows_before(target, sequence, tokens, layer)
            return layer, operation_of(target, layer, before, row)
    return target.num_layers, "output head"


def state_alone(target: Target, sequence: CachedSequence, tokens: mx.array, row: int) -> mx.array:
    """Return the outputs of all layers for a row, from passes of one row."""
    fork = sequence.fork()
    try:
        for index in range(row + 1):
            passed = target.forward([(fork, tokens[index : index + 1])], range(target.num_layers + 1))
            mx.eval(*passed.arrays)
            target.commit(fork, passed)
        return passed.aux_hidden_states[0]
    finally:
        fork.free()


def rows_before(target: Target, sequence: CachedSequence, tokens: mx.array, layer: int) -> mx.array:
    """Return what a layer reads in a pass: [R, H]."""
    return target.forward([(sequence, tokens)], [layer - 1]).aux_hidden_states


def operation_of(target: Target, number: int, x: mx.array, row: int) -> str:
    """Return the operation of a layer that by itself depends on the rows beside a row: [R, H] of its inputs."""
    layer = target.layers[number]

    def differs(compute: Any) -> bool:
        together, alone = compute(x)[row], compute(x[row : row + 1])[0]
        return not mx.array_equal(together, alone).item()

    if differs(layer.input_norm):
        return "input norm"
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        positions = mx.zeros((x.shape[0],), dtype=mx.int32)
        if differs(lambda y: mixer.project(layer.input_norm(y), positions[: y.shape[0]])[0]):
            return "query, key and value projections"
    if differs(lambda y: layer.feed_forward(layer.post_norm(y), y)):
        return "feed-forward"
    return "attention" if isinstance(mixer, Attention) else "recurrent layer"


@dataclass(frozen=True)
class Departure:
    """A speculative run that gives other tokens than the plain one.

    prompt: its number.
    depth: tokens drafted a round.
    index: of the first token that differs.
    """

    prompt: int
    depth: int
    index: int
    plain: int
    speculative: int


@dataclass(frozen=True)
class Finding:
    """What is wrong with a target, and where it begins.

    kind: "tie", "numerics" or "corrupted state".
    """

    kind: str
    where: str
    departures: tuple[Departure, ...]

    def __str__(self) -> str:
        at = ", ".join(f"token {each.index} at depth {each.depth}" for each in self.departures[:4])
        return f"{self.kind}: {self.where}" + (f"; the text differs from {at} on" if at else "")


def inspect_target(
    engine: Engine, prompts: Sequence[Sequence[int]], count: int, depths: Sequence[int], say: Any = lambda: None
) -> Finding | None:
    """Run prompts plainly and at several depths, and classify what differs first; None where nothing does.

    count: tokens of each text.
    depths: tokens drafted a round.
    say: called after each run.
    """
    departures: list[Departure] = []
    found: list[Inspector] = []
    for number, prompt in enumerate(prompts):
        plain = generated(engine, prompt, count, 0)
        for depth in depths:
            inspector = Inspector(engine.target, list(prompt))
            try:
                tokens = generated(engine, prompt, count, depth, inspector)
            finally:
                inspector.free()
            say()
            wrong = next((i for i, (a, b) in enumerate(zip(plain, tokens, strict=False)) if a != b), None)
            if wrong is not None:
                departures.append(Departure(number, depth, wrong, plain[wrong], tokens[wrong]))
            if inspector.cache_fault or inspector.row_fault:
                found.append(inspector)
    return classified(departures, found)


def generated(
    engine: Engine, prompt: Sequence[int], count: int, depth: int, inspector: Inspector | None = None
) -> list[int]:
    """Return the tokens of a greedy text."""
    check = None if inspector is None else inspector.check
    generation = engine.start(Request(prompt, max_tokens=count, num_draft_tokens=depth, on_verified=check))
    try:
        while generation.finish_reason is None:
            engine.step(generation)
        return generation.tokens[len(prompt) :]
    finally:
        engine.close(generation)


def classified(departures: Sequence[Departure], found: Sequence[Inspector]) -> Finding | None:
    """Say what differs: state before rows, because a corrupted cache makes rows differ; a tie is the mildest."""
    caches = [each.cache_fault for each in found if each.cache_fault is not None]
    if caches:
        return Finding("corrupted state", str(min(caches, key=lambda fault: fault.round)), tuple(departures))
    rows = [each.row_fault for each in found if each.row_fault is not None]
    if rows:
        first = min(rows, key=lambda fault: (fault.layer, fault.position))
        is_tie = bool(departures) and all(fault.gap <= TIE for fault in rows)
        return Finding("tie" if is_tie else "numerics", str(first), tuple(departures))
    if departures:
        depths: dict[int, list[Departure]] = {}
        for each in departures:
            depths.setdefault(each.prompt, []).append(each)
        runs = next(iter(depths.values()))
        is_rewind = len(runs) > 1 and runs[-1].index < runs[0].index
        how = "earlier with depth: rejected rows are not taken back" if is_rewind else "a right draft was rejected"
        return Finding("corrupted state", how, tuple(departures))
    return None
