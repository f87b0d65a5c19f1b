"""Runs of every operation over fixed random rows, as data: what a machine's self-check and its timings go through.

A builder makes the inputs and says what a row alone is; the tables at the end name builders and sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from metal_kernels.accept_rows import accept_rows
from metal_kernels.argmax_rows import argmax_rows
from metal_kernels.attention_rows import Cached, attention_rows
from metal_kernels.causal_conv_rows import Heads, causal_conv_advance, causal_conv_replay, causal_conv_rows
from metal_kernels.dynamic_conv import dynamic_conv
from metal_kernels.gated_delta_rows import (
    DeltaInputs,
    Gates,
    gated_delta_advance,
    gated_delta_replay,
    gated_delta_rows,
)
from metal_kernels.gather_rows import gather_rows
from metal_kernels.gemm_rows import gemm_rows
from metal_kernels.limits import MAX_VERIFY_ROWS
from metal_kernels.logprob_rows import logprob_rows
from metal_kernels.mask_rows import mask_rows
from metal_kernels.norm_rope import context_kv, qkv_norm_rope
from metal_kernels.qmm_rows import qmm_rows
from metal_kernels.rope import Rope
from metal_kernels.row_spans import RowSpans
from metal_kernels.stack_rows import stack_rows
from metal_kernels.topk_rows import topk_rows
from metal_kernels.walk_rows import walk_rows

ROWS = MAX_VERIFY_ROWS
SLOTS = 32
DTYPE = mx.bfloat16

Outputs = tuple[mx.array, ...]


@dataclass(frozen=True)
class CaseRun:
    """An operation over fixed inputs of 16 rows.

    run: returns the outputs of the first 1 to 16 rows, rows on the first axis.
    alone: returns those of one row, by its number, computed as a pass of its own after the rows before it; None
        where a row sees later rows.
    """

    run: Callable[[int], Outputs]
    alone: Callable[[int], Outputs] | None


@dataclass(frozen=True)
class Case:
    """A name for people, which begins with that of the operation, and what prepares its run."""

    name: str
    make: Callable[[], CaseRun]


def each_row(operation: Callable[..., Outputs], *inputs: mx.array) -> CaseRun:
    """Return the run of an operation that takes row r from row r of every input."""
    return CaseRun(
        lambda count: operation(*(x[:count] for x in inputs)),
        lambda row: operation(*(x[row : row + 1] for x in inputs)),
    )


def random(seed: int, *shape: int, scale: float = 1.0, dtype: mx.Dtype = DTYPE) -> mx.array:
    """Return normal numbers that depend on the seed alone."""
    return (scale * mx.random.normal(shape, key=mx.random.key(seed))).astype(dtype)


def plain_rope(dims: int, base: float = 10000.0) -> Rope:
    """Return the rotation of whole heads of ``dims`` entries by the powers of one base."""
    frequencies = mx.array([1.0 / base ** (i / dims) for i in range(0, dims, 2)])
    return Rope(dims, False, 1.0, frequencies, {"base": base, "scale": 1.0, "freqs": None})


def qmm(outputs: int = 88, depth: int = 1152, bits: int = 4, fused: bool = False) -> CaseRun:
    """Quantised weights times rows; fused: with a bias, gated, and a residual added."""
    weight, scales, biases = mx.quantize(random(0, outputs, depth, scale=depth**-0.5), 64, bits)
    bias = random(1, outputs) if fused else None

    def operation(x: mx.array, residual: mx.array) -> Outputs:
        product = qmm_rows(
            x,
            weight,
            scales,
            biases,
            group_size=64,
            bits=bits,
            bias=bias,
            residual=residual if fused else None,
            gated=fused,
        )
        return (product,)

    return each_row(operation, random(2, ROWS, depth), random(3, ROWS, outputs // 2))


def gemm(outputs: int = 88, depth: int = 1152, fused: bool = False) -> CaseRun:
    """Plain weights times rows; fused: as for ``qmm``."""
    weight = random(0, outputs, depth, scale=depth**-0.5)
    bias = random(1, outputs) if fused else None

    def operation(x: mx.array, residual: mx.array) -> Outputs:
        return (gemm_rows(x, weight, bias=bias, residual=residual if fused else None, gated=fused),)

    return each_row(operation, random(2, ROWS, depth), random(3, ROWS, outputs // 2))


def gather(quantized: bool = True) -> CaseRun:
    """Two of six experts a row, quantised to 4 bits or plain, gated."""
    weight = random(0, 6, 44, 192, scale=192**-0.5)
    scales = biases = None
    if quantized:
        weight, scales, biases = mx.quantize(weight, 64, 4)
    experts = mx.array([[r % 6, (r * r + 1) % 6] for r in range(ROWS)], dtype=mx.int32)

    def operation(x: mx.array, chosen: mx.array) -> Outputs:
        return (gather_rows(x, weight, scales, biases, chosen, group_size=64, bits=4, gated=True),)

    return each_row(operation, random(1, ROWS, 192), experts)


def attention(
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    context: int = 150,
    sinks: bool = False,
    parents: tuple[int, ...] | None = None,
    **options: Any,
) -> CaseRun:
    """Rows after ``context`` positions, in pages out of order; parents: row r of a tree follows parents[r]."""
    queries = random(0, ROWS, heads, dim)
    keys, values = random(1, ROWS, kv_heads, dim), random(2, ROWS, kv_heads, dim)
    count = -(-(context + ROWS) // SLOTS)
    held = random(3, count, 2, 2, SLOTS, kv_heads, dim)
    # The pool also holds the rows themselves, after what is cached: nobody may read them before they are.
    places = [(p // SLOTS, p % SLOTS) for p in range(context, context + ROWS)]
    pages, slots = (mx.array(part) for part in zip(*places, strict=True))
    held[pages, 1, :, slots] = mx.stack([keys, values], axis=1)
    pool = mx.contiguous(held[::-1])
    table = mx.array([list(reversed(range(count)))], dtype=mx.int32)
    options |= {"scale": dim**-0.5, "sinks": random(4, heads) if sinks else None}

    def attend(rows: mx.array, length: int, paths: mx.array | None = None) -> Outputs:
        cached = Cached(table, mx.array([length], dtype=mx.int32), (rows.size,))
        return (attention_rows(queries[rows], keys[rows], values[rows], pool, 1, cached, paths=paths, **options),)

    if parents is not None:
        paths = [path_to(row, parents) for row in range(ROWS)]
        padded = mx.array([path + [-1] * (ROWS - len(path)) for path in paths], dtype=mx.int32)
        return CaseRun(
            lambda count: attend(mx.arange(count), context, padded[:count, :count]),
            # The path to a row, as a text without branches.
            lambda row: tuple(x[-1:] for x in attend(mx.array(paths[row]), context)),
        )
    return CaseRun(
        lambda count: attend(mx.arange(count), context),
        None if options.get("block") else lambda row: attend(mx.array([row]), context + row),
    )


def path_to(row: int, parents: tuple[int, ...]) -> list[int]:
    """Return the rows from a root, whose parent is -1, to ``row``."""
    return [*path_to(parents[row], parents), row] if row >= 0 else []


def projection(heads: int = 3, kv_heads: int = 1, dim: int = 64, gated: bool = False) -> CaseRun:
    """A joined projection cut, normed and rotated."""
    rope = plain_rope(dim)
    weights = random(0, dim) + 1, random(1, dim) + 1
    positions = mx.arange(1000, 1000 + ROWS, dtype=mx.int32)

    def operation(x: mx.array, at: mx.array) -> Outputs:
        queries, kv = qkv_norm_rope(x, weights, at, rope, heads=heads, kv_heads=kv_heads, eps=1e-6, gated=gated)
        return queries, kv[0], kv[1]

    return each_row(operation, random(2, ROWS, ((1 + gated) * heads + 2 * kv_heads) * dim), positions)


def context_keys(layers: int = 3, kv_heads: int = 2, dim: int = 64) -> CaseRun:
    """A drafter's context keys and values of all layers."""
    rope = plain_rope(dim)
    weights = random(0, layers, dim) + 1

    def operation(x: mx.array, at: mx.array) -> Outputs:
        return (context_kv(x, weights, at, rope, eps=1e-6),)

    return each_row(
        operation, random(1, ROWS, layers, 2, kv_heads * dim), mx.arange(70, 70 + ROWS, dtype=mx.int32)
    )


def conv(width: int = 96, groups: int = 6, taps: int = 3) -> CaseRun:
    """The second of two dynamic convolutions, with a residual."""
    x, residual = random(0, ROWS, width), random(1, ROWS, width)
    base, dynamic = random(2, 2, taps, width), random(3, ROWS, 2, taps, groups)

    def rows(part: slice) -> Outputs:
        return (dynamic_conv(x[part], base, dynamic[part], residual[part], side=1),)

    return CaseRun(
        lambda count: rows(slice(count)),
        # A row with the rows that its taps reach.
        lambda row: tuple(out[-1:] for out in rows(slice(max(0, row - taps + 1), row + 1))),
    )


def topk(vocabulary: int = 5000, k: int = 16) -> CaseRun:
    """The best entries of rows of logits, and whether all of them are finite."""

    def operation(logits: mx.array) -> Outputs:
        values, ids, finite = topk_rows(logits, k)
        return values, ids, mx.broadcast_to(finite, logits.shape[:1])

    return each_row(operation, random(0, ROWS, vocabulary, scale=13.0))


def argmax(vocabulary: int = 9000) -> CaseRun:
    """The best entry of rows of logits."""
    return each_row(argmax_rows, random(0, ROWS, vocabulary, scale=13.0))


def logprob(vocabulary: int = 9000) -> CaseRun:
    """The log-probability of a token of each row."""
    return each_row(
        logprob_rows, random(0, ROWS, vocabulary, scale=13.0), mx.arange(0, 16 * 500, 500, dtype=mx.int32)
    )


def mask(vocabulary: int = 9000) -> CaseRun:
    """Rows of logits of which half of the entries are forbidden; in place of minus infinity, what compares."""
    words = mx.random.randint(0, 1 << 31, (ROWS, -(-vocabulary // 32)), key=mx.random.key(1)).astype(mx.uint32)

    def operation(logits: mx.array, bits: mx.array) -> Outputs:
        return (mx.maximum(mask_rows(logits, bits), -100.0),)

    return each_row(operation, random(0, ROWS, vocabulary, scale=13.0), words)


def accept(drafts: int = 7) -> CaseRun:
    """Sixteen rounds of drafts, of which 0 to 7 are accepted."""
    choices = mx.broadcast_to(mx.arange(drafts + 1, dtype=mx.int32), (ROWS, drafts + 1))
    drafted = mx.where(mx.arange(drafts) < mx.arange(ROWS)[:, None] % (drafts + 1), choices[:, :-1], -1)
    finite = mx.arange(ROWS)[:, None] % 3 > 0

    def operation(drafted: mx.array, choices: mx.array, finite: mx.array) -> Outputs:
        rounds = zip(drafted, choices, finite, strict=True)
        return (mx.stack([accept_rows(d, c, [flag]) for d, c, flag in rounds]),)

    return each_row(operation, drafted.astype(mx.int32), choices, finite)


def walk(steps: int = 7, candidates: int = 16) -> CaseRun:
    """Sixteen blocks."""
    ranks = random(2, ROWS, steps, candidates, candidates, dtype=mx.float32)
    return each_row(lambda each: (walk_rows(each),), ranks)


def stack(layers: int = 24, kv_heads: int = 2, dim: int = 64) -> CaseRun:
    """Keys and values of more layers than one launch takes."""
    parts = [random(layer, ROWS, 2, kv_heads, dim) for layer in range(layers)]
    return each_row(lambda *rows: (stack_rows([part.swapaxes(0, 1) for part in rows]),), *parts)


def delta(
    key_heads: int = 2, value_heads: int = 4, dim: int = 32, raw: bool = False, advance: bool = False
) -> CaseRun:
    """Gated DeltaNet; a row alone starts from the replay of the rows before it, which ``advance`` does itself.

    raw: gates are made from their projections.
    """
    q, k = (unit(random(i, ROWS, key_heads, dim)) for i in (0, 1))
    projected = random(3, ROWS, 2 * value_heads)
    g, beta = (
        mx.exp(-mx.abs(projected[:, :value_heads].astype(mx.float32))),
        mx.sigmoid(projected[:, value_heads:]),
    )
    gates = None
    if raw:
        g = beta = projected
        a_log, dt_bias = (random(i, value_heads, dtype=mx.float32) for i in (4, 5))
        gates = Gates(a_log, dt_bias, a_column=0, b_column=value_heads)
    rows = DeltaInputs(k, random(2, ROWS, value_heads, dim), g, beta)
    state = random(6, 1, value_heads, dim, dim, scale=0.3, dtype=mx.float32)

    def part(place: slice) -> tuple[mx.array, DeltaInputs]:
        return q[place], DeltaInputs(rows.k[place], rows.v[place], rows.g[place], rows.beta[place])

    def alone(row: int) -> Outputs:
        before, one = first_rows(row), part(slice(row, row + 1))
        if advance:
            return gated_delta_advance(*one, rows, before, state, gates=gates)[:1]
        replayed = gated_delta_replay(rows, state, before, gates=gates)
        return (gated_delta_rows(*one, replayed, gates=gates),)

    def run(count: int) -> Outputs:
        if advance:
            return gated_delta_advance(*part(slice(count)), rows, first_rows(0), state, gates=gates)[:1]
        return (gated_delta_rows(*part(slice(count)), state, gates=gates),)

    return CaseRun(run, alone)


def causal_conv(advance: bool = False) -> CaseRun:
    """The convolution before the gated delta rule; a row alone as for ``delta``."""
    heads = Heads(key_heads=2, key_size=32, value_heads=4, value_size=32)
    x, weight = random(0, ROWS, heads.channels + 8), random(1, heads.channels, 4, scale=0.5)
    state = random(2, 1, 3, heads.channels)

    def run(place: slice, before: int) -> Outputs:
        if advance:
            return causal_conv_advance(x[place], x, first_rows(before), state, weight, heads, column=8)[:3]
        replayed = causal_conv_replay(x, state, first_rows(before), heads, column=8) if before else state
        return causal_conv_rows(x[place], replayed, weight, heads, column=8)

    return CaseRun(lambda count: run(slice(count), 0), lambda row: run(slice(row, row + 1), row))


def first_rows(count: int) -> RowSpans:
    """Return the spans of one sequence that keeps the first ``count`` of 16 rows."""
    return RowSpans(mx.array([0], dtype=mx.int32), mx.array([count], dtype=mx.int32), ROWS)


def unit(x: mx.array) -> mx.array:
    """Scale heads to length 1."""
    return x * mx.rsqrt(mx.sum(x * x, axis=-1, keepdims=True))


TREE = (-1, 0, 0, 1, 1, 2, 3, 3, 4, 5, 6, 6, 8, 9, 12, 14)
CASES = (
    *(Case(f"qmm_rows, {bits} bits", partial(qmm, bits=bits)) for bits in (2, 3, 4, 5, 6, 8)),
    Case("qmm_rows, 4 bits, gated", partial(qmm, fused=True)),
    Case("gemm_rows", gemm),
    Case("gemm_rows, gated", partial(gemm, fused=True)),
    Case("gather_rows, 4 bits", gather),
    Case("gather_rows", partial(gather, quantized=False)),
    Case("attention_rows", partial(attention, dim=128)),
    Case("attention_rows, window, sinks, softcap", partial(attention, window=70, softcap=20.0, sinks=True)),
    Case("attention_rows, tree", partial(attention, dim=128, parents=TREE)),
    Case("attention_rows, block", partial(attention, block=True, window=70)),
    Case("qkv_norm_rope", projection),
    Case("qkv_norm_rope, gated", partial(projection, gated=True)),
    Case("context_kv", context_keys),
    Case("dynamic_conv", conv),
    Case("topk_rows", topk),
    Case("argmax_rows", argmax),
    Case("logprob_rows", logprob),
    Case("mask_rows", mask),
    Case("accept_rows", accept),
    Case("walk_rows", walk),
    Case("stack_rows", stack),
    Case("gated_delta_rows", delta),
    Case("gated_delta_advance", partial(delta, raw=True, advance=True)),
    Case("causal_conv_rows", causal_conv),
    Case("causal_conv_advance", partial(causal_conv, advance=True)),
)
# Shapes of Qwen3-8B and, for the last, of Qwen3.5-27B.
TIMED = (
    Case("qmm_rows, 4 bits, 12288 x 4096", partial(qmm, outputs=12288, depth=4096)),
    Case("gemm_rows, 4096 x 4096", partial(gemm, outputs=4096, depth=4096)),
    Case("attention_rows, 1024 cached", partial(attention, heads=32, kv_heads=8, dim=128, context=1024)),
    Case("attention_rows, 32768 cached", partial(attention, heads=32, kv_heads=8, dim=128, context=32768)),
    Case("topk_rows, 151936 logits", partial(topk, vocabulary=151936)),
    Case("qkv_norm_rope, 32 + 8 heads", partial(projection, heads=32, kv_heads=8, dim=128)),
    Case("gated_delta_rows, 48 heads", partial(delta, key_heads=16, value_heads=48, dim=128)),
)
