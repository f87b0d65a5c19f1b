"""attention_rows against the softmax formula in float64, position by position, and against itself bit by bit."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher

from metal_kernels import Cached, attention_prompt, attention_rows
from metal_kernels.attention_rows import split_of
from metal_kernels.launching import launch
from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import Kernel, launching

LAYERS, LAYER = 3, 1
NO_PAGE = 2**30
ROUNDING = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}


@contextmanager
def running(implementation: str) -> Iterator[None]:
    """Run attention by the kernel, in the emulator (``once``: in one order of threads), or by MLX's operations."""
    if implementation in ("native", "once"):
        with launching(partial(launcher, check=implementation == "native")):
            yield
    else:
        with using(implementation):  # type: ignore[arg-type]
            yield


@dataclass(frozen=True)
class Problem:
    """Rows of sequences, what is cached before them, and how they attend. past: [length, 2, KV, D] a sequence."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    past: tuple[mx.array, ...]
    counts: tuple[int, ...]
    options: dict[str, Any]
    slots: int = 32
    starts: mx.array | None = None
    held: tuple[int, ...] | None = None

    @staticmethod
    def random(
        lengths: tuple[int, ...],
        counts: tuple[int, ...],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 32,
        dtype: mx.Dtype = mx.float32,
        size: float = 1.0,
        **options: Any,
    ) -> "Problem":
        rng = np.random.default_rng([*lengths, *counts, dim])

        def numbers(*shape: int) -> mx.array:
            return mx.array(size * rng.standard_normal(shape).astype(np.float32)).astype(dtype)

        rows = sum(counts)
        return Problem(
            numbers(rows, heads, dim),
            numbers(rows, kv_heads, dim),
            numbers(rows, kv_heads, dim),
            tuple(numbers(length, 2, kv_heads, dim) for length in lengths),
            counts,
            {"scale": dim**-0.5, **options},
        )

    def run(self, *, seed: int = 0, padding: int = 0) -> mx.array:
        """Attend over shuffled pages of a pool that is NaN wherever no sequence has a position."""
        rng = np.random.default_rng(seed)
        held = [-(-past.shape[0] // self.slots) for past in self.past]
        numbers = list(rng.permutation(sum(held) + 3))
        pool = np.full((len(numbers), LAYERS, 2, self.slots, *self.keys.shape[1:]), np.nan, dtype=np.float32)
        # From 8 numbers on, inputs lie in another address space.
        table = np.full((len(held), max(8, *held) + padding), NO_PAGE, dtype=np.int32)
        for row, (count, past) in enumerate(zip(held, self.past, strict=True)):
            table[row, :count] = [numbers.pop() for _ in range(count)]
            for position, kv in enumerate(np.array(past.astype(mx.float32))):
                pool[table[row, position // self.slots], LAYER, :, position % self.slots] = kv
        pages = mx.array(pool).astype(self.keys.dtype)
        counts = self.counts if self.starts is None else (7,) * len(self.counts)
        lengths = mx.array([past.shape[0] for past in self.past])
        cached = Cached(mx.array(table), lengths, counts, self.starts, self.held)
        return attention_rows(
            self.queries,
            self.keys,
            self.values,
            pages,
            LAYER,
            cached,
            **self.options,
        )

    def rows(self, sequence: int, first: int, count: int) -> "Problem":
        """Return rows of one sequence as a problem of their own; the rows before them are cached."""
        start = sum(self.counts[:sequence])
        before, part = slice(start, start + first), slice(start + first, start + first + count)
        kv = mx.stack([self.keys, self.values], axis=1)
        past = mx.concatenate([self.past[sequence], kv[before]])
        return replace(
            self,
            queries=self.queries[part],
            keys=self.keys[part],
            values=self.values[part],
            past=(past,),
            counts=(count,),
        )

    def path(self, path: list[int]) -> "Problem":
        """Return the last row of a path through the only sequence, alone after the path's other rows."""
        kv = mx.stack([self.keys, self.values], axis=1)
        past = mx.concatenate([self.past[0], *(kv[row : row + 1] for row in path[:-1])])
        last = slice(path[-1], path[-1] + 1)
        options = {name: value for name, value in self.options.items() if name != "paths"}
        return replace(
            self,
            queries=self.queries[last],
            keys=self.keys[last],
            values=self.values[last],
            past=(past,),
            counts=(1,),
            options=options,
        )


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def bits(x: mx.array) -> np.ndarray:
    return np.array(x.view(mx.uint32 if x.dtype == mx.float32 else mx.uint16))


def formula(problem: Problem) -> tuple[np.ndarray, float]:
    """Return softmax(q k scale) v over what each row sees, and the largest score."""
    options, largest, start = problem.options, 0.0, 0
    q, k, v = float64(problem.queries), float64(problem.keys), float64(problem.values)
    out = np.zeros_like(q)
    for past, count in zip(map(float64, problem.past), problem.counts, strict=True):
        for row in range(count):
            path = list(range(row + 1))
            if "paths" in options:
                path = [j for j in np.array(options["paths"])[start + row] if j >= 0]
            at = len(past) + (row if options.get("block") else len(path) - 1)
            window = options.get("window") or at + 1
            old = past[max(0, at - window + 1) :]
            new = [j for d, j in enumerate(path) if at - (len(past) + d) < window]
            new = [start + j for j in (range(count) if options.get("block") else new)]
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // k.shape[1])
                seen_keys = np.concatenate([old[:, 0, kv_head], k[new, kv_head]])
                seen_values = np.concatenate([old[:, 1, kv_head], v[new, kv_head]])
                scores = seen_keys @ q[start + row, head] * options["scale"]
                largest = max(largest, np.abs(scores).max())
                if "softcap" in options:
                    scores = np.tanh(scores / options["softcap"]) * options["softcap"]
                sink = float64(options["sinks"])[head] if "sinks" in options else -np.inf
                weights = np.exp(scores - max(scores.max(), sink))
                total = weights.sum() + np.exp(sink - max(scores.max(), sink))
                out[start + row, head] = weights @ seen_values / total
        start += count
    return out, largest


def assert_equals_formula(problem: Problem, got: mx.array) -> None:
    assert (got.shape, got.dtype) == (problem.queries.shape, problem.queries.dtype)
    expected, largest = formula(problem)
    # A relative error of 2^-24 in a score s is an absolute one of s 2^-24 in the exponent of its weight.
    tolerance = np.abs(expected).max() * (ROUNDING[got.dtype] + 4e-7 * largest)
    np.testing.assert_allclose(float64(got), expected, atol=tolerance, rtol=0)


SHAPES = [  # head dim, heads, KV heads, dtype
    (64, 4, 2, mx.float32),
    (80, 3, 3, mx.float16),
    (96, 6, 2, mx.bfloat16),
    (128, 8, 1, mx.float32),
    (128, 7, 1, mx.bfloat16),
    (256, 2, 1, mx.float32),
    (16, 16, 1, mx.float16),
]
# Magnitudes of queries, keys and values.
SIZES = (0.1, 1.0, 13.0)
PLACES = [  # cached positions, rows, window
    (0, 1, 1),
    (0, 16, 20),
    (1, 1, 31),
    (31, 2, 33),
    (32, 1, 1),
    (33, 16, 64),
    (63, 3, 20),
    (64, 1, 64),
    # The last row alone has left the first key of a whole tile.
    (64, 3, 34),
    (70, 16, 45),
    (130, 5, 31),
]


@pytest.mark.parametrize(("dim", "heads", "kv_heads", "dtype"), SHAPES)
def test_kernel_equals_the_formula(dim: int, heads: int, kv_heads: int, dtype: mx.Dtype) -> None:
    for i, (length, rows, at_most) in enumerate(PLACES):
        for window, size in ((None, SIZES[i % 3]), (at_most, SIZES[(i + 1) % 3])):
            problem = Problem.random(
                (length,),
                (rows,),
                heads=heads,
                kv_heads=kv_heads,
                dim=dim,
                dtype=dtype,
                size=size,
                window=window,
            )
            with running("native"):
                assert_equals_formula(problem, problem.run(padding=i % 3))


@pytest.mark.parametrize("length", [2047, 2049, 6143, 14300, 14400])
def test_kernel_equals_the_formula_over_splits_of_every_length(length: int) -> None:
    problem = Problem.random((length,), (2,), heads=2, kv_heads=1, dim=16)
    with running("once"):
        assert_equals_formula(problem, problem.run())


@pytest.mark.parametrize("border", [32, 64, 2048, 2176])
def test_kernel_equals_the_formula_at_borders_of_tiles_and_splits(border: int) -> None:
    """With one row and with several, and with windows that begin there."""
    for length in (border - 16, border - 3, border - 1, border, border + 1):
        for rows in (1, 3, 16):
            problem = Problem.random((length,), (rows,), heads=2, kv_heads=1, dim=16)
            with running("once"):
                assert_equals_formula(problem, problem.run())
    for window in (33, 64, 65):
        problem = Problem.random((border + 62,), (3,), heads=2, kv_heads=1, dim=16, window=window)
        with running("once"):
            assert_equals_formula(problem, problem.run())


SPLITS = [64] * 32 + [128] * 32 + [256] * 32 + [512] * 40


def test_splits_are_consecutive() -> None:
    assert [split_of(p) for p in range(sum(SPLITS))] == [s for s, n in enumerate(SPLITS) for _ in range(n)]


def test_the_text_has_the_same_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first and the last position of every piece of 64, so that no boundary can be off by one."""
    shutil.copy(launch.FOLDER / "_attention_splits.h", tmp_path)
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    (tmp_path / "splits.metal").write_text(
        "// body\nconst int i = thread_position_in_grid.x;\n"
        "splits[i] = split_of(i / 2 * 64 + i % 2 * 63);\nbegins[i] = split_begin(i);\n"
    )
    kernel = Kernel("splits", inputs=("x",), outputs=("splits", "begins"), includes=("_attention_splits.h",))
    pieces = sum(SPLITS) // 64
    with launching(launcher):
        splits, begins = kernel(
            [mx.zeros(8)],
            template=[],
            groups=(2 * pieces // 32, 1, 1),
            threads=(32, 1, 1),
            shapes=[(2 * pieces,)] * 2,
            dtypes=[mx.int32] * 2,
        )
    assert splits.tolist() == [split_of(64 * piece + at) for piece in range(pieces) for at in (0, 63)]
    assert begins.tolist()[: len(SPLITS)] == [sum(SPLITS[:split]) for split in range(len(SPLITS))]


@pytest.mark.parametrize("options", [{}, {"block": True}], ids=str)
def test_counts_that_only_the_device_knows_give_the_same_bits(options: dict[str, Any]) -> None:
    """``starts`` shares the rows out; ``counts`` are bounds, larger than what sequences have."""
    problem = Problem.random((70, 0, 33), (5, 2, 4), **options)
    with running("native"):
        expected = bits(problem.run(padding=1))
        starts = mx.array([0, 5, 7, 11], dtype=mx.int32)
        np.testing.assert_array_equal(bits(replace(problem, starts=starts).run(padding=1)), expected)


# A tree of 16 rows: every row names its parent.
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 4, 6, 6, 9, 11, 12, -1, 14]


def paths_of(parents: list[int]) -> list[list[int]]:
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return paths


def path_table(*trees: list[list[int]]) -> mx.array:
    rows = [path for tree in trees for path in tree]
    return mx.array([path + [-1] * (len(rows) - len(path)) for path in rows], dtype=mx.int32)


TREE = path_table(paths_of(PARENTS))
SINKS = mx.array([0.5, -20.0, 3.0, 40.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "chain": {},
    "window": {"window": 19},
    "softcap": {"softcap": 2.5},
    "sinks": {"sinks": SINKS, "softcap": 1.5, "window": 40},
    "tree": {"paths": TREE},
    "tree and window": {"paths": TREE, "window": 5, "sinks": SINKS},
    "block": {"block": True},
    "block and window": {"block": True, "window": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("implementation", ["native", "stock", "reference", "cpu"])
def test_options_equal_the_formula(implementation: str, name: str) -> None:
    for length in (0, 30, 57):
        problem = Problem.random((length,), (16,), **OPTIONS[name])
        with running(implementation):
            assert_equals_formula(problem, problem.run(padding=1))


@pytest.mark.parametrize("heads", [2, 6])
def test_trees_equal_the_formula_where_rows_and_simdgroups_do_not_match(heads: int) -> None:
    """Of 8 queries, the last is a row of its own, or one of three heads of a row."""
    problem = Problem.random((30,), (16,), heads=heads, kv_heads=2, paths=TREE)
    with running("native"):
        assert_equals_formula(problem, problem.run())


@pytest.mark.parametrize("implementation", ["native", "stock", "reference", "cpu"])
@pytest.mark.parametrize("options", [{}, {"window": 10}, {"block": True}], ids=str)
def test_sequences_equal_the_formula(options: dict[str, Any], implementation: str) -> None:
    problem = Problem.random((70, 0, 33), (5, 2, 16), **options)
    with running(implementation):
        assert_equals_formula(problem, problem.run())


def test_pages_of_64_slots_give_the_bits_of_pages_of_32() -> None:
    problem = Problem.random((150, 33), (3, 2))
    with running("native"):
        np.testing.assert_array_equal(bits(replace(problem, slots=64).run()), bits(problem.run()))


@pytest.mark.parametrize("implementation", ["native", "stock", "cpu"])
def test_trees_of_sequences_equal_the_formula(implementation: str) -> None:
    # In the second problem, rows of the second tree alone reach the next split.
    for lengths, parents in (((37, 5), ([-1, 0, 0, 2], [-1, -1, 0])), ((5, 63), ([-1, -1, -1], [-1, 0, 1]))):
        paths = path_table(*map(paths_of, parents))
        problem = Problem.random(lengths, tuple(map(len, parents)), paths=paths)
        with running(implementation):
            assert_equals_formula(problem, problem.run())


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("slots", "rows"), [(8, 1), (8, 40), (32, 16)])
def test_stock_equals_the_formula(rows: int, slots: int, dtype: mx.Dtype) -> None:
    for length, window in ((0, None), (7, 3), (8, None), (40, 20)):
        problem = Problem.random((length,), (rows,), dim=16, dtype=dtype, window=window)
        with running("stock"):
            assert_equals_formula(problem, replace(problem, slots=slots).run())


def test_long_prompts_leave_short_rows_their_bits() -> None:
    problem = Problem.random((40, 20, 9), (3, 40, 2))
    with running("native"):
        together = problem.run()
        assert_equals_formula(problem, together)
        np.testing.assert_array_equal(bits(together[:3]), bits(problem.rows(0, 0, 3).run()))
        np.testing.assert_array_equal(bits(together[43:]), bits(problem.rows(2, 0, 2).run()))


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("options", [{}, {"window": 19}, {"window": 40, "sinks": SINKS}], ids=str)
def test_prompts_equal_the_formula(options: dict[str, Any], dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By fused attention; head size 256 in parts of few rows."""
    monkeypatch.setattr(attention_prompt, "MOST_SCORES", 4096)
    for length in (0, 20, 64, 70):
        problem = replace(Problem.random((length,), (37,), dim=dim, **options), held=(length,))
        with running("native"):
            assert_equals_formula(problem, problem.run(padding=1))


def test_prompts_beside_other_sequences_equal_the_formula() -> None:
    problem = replace(Problem.random((40, 20, 9), (3, 40, 2)), held=(40, 20, 9))
    with running("native"):
        assert_equals_formula(problem, problem.run())


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(64, 4, 2), (128, 8, 1), (256, 2, 1)])
def test_a_row_has_the_bits_of_the_same_row_alone(dim: int, heads: int, kv_heads: int, window: int | None) -> None:
    """Whatever rows come before or after it, whichever keys are cached, wherever pages lie."""
    for length in (0, 25, 57):
        problem = Problem.random((length,), (16,), heads=heads, kv_heads=kv_heads, dim=dim, window=window)
        with running("once"):
            alone = [bits(problem.rows(0, row, 1).run(seed=row, padding=row % 4))[0] for row in range(16)]
            for count in range(2, 17) if dim == 64 else (2, 7, 16):
                first = 16 - count if count % 2 else 0
                block = bits(problem.rows(0, first, count).run(seed=count))
                np.testing.assert_array_equal(block, alone[first : first + count])


@pytest.mark.parametrize(
    "options", [{}, {"window": 7}, {"softcap": 2.0, "sinks": SINKS}], ids=["", "window", "sinks"]
)
def test_a_row_of_a_tree_has_the_bits_of_plain_decoding(options: dict[str, Any]) -> None:
    for length in (0, 29, 62):
        problem = Problem.random((length,), (16,), paths=TREE, **options)
        with running("once"):
            tree = bits(problem.run())
            for row, path in enumerate(paths_of(PARENTS)):
                np.testing.assert_array_equal(tree[row], bits(problem.path(path).run())[0], str(path))


def test_a_sequence_has_the_bits_that_it_has_alone() -> None:
    problem = Problem.random((70, 0, 33, 64), (5, 1, 7, 3))
    with running("once"):
        together = bits(problem.run(padding=2))
        alone = [bits(problem.rows(s, 0, count).run()) for s, count in enumerate(problem.counts)]
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_what_a_row_does_not_see_may_be_infinite() -> None:
    """Later rows, and positions that the window has left."""
    problem = Problem.random((50,), (6,), window=10)
    spoiled = problem.past[0].at[:41].multiply(mx.inf)
    last = mx.array([0, 0, 0, 0, 0, mx.inf])[:, None, None]
    with running("native"):
        clean = problem.run()
        got = replace(problem, past=(spoiled,), values=problem.values + last, keys=problem.keys + last).run()
    np.testing.assert_array_equal(bits(got[:5]), bits(clean[:5]))
    assert not mx.any(mx.isfinite(got[5])).item()


@pytest.mark.parametrize("spoil", [mx.inf, mx.nan])
@pytest.mark.parametrize("kind", ["stock", "reference"])
def test_on_a_cpu_later_rows_may_be_infinite(kind: str, spoil: float) -> None:
    """Rows that see one are not numbers, also where its value alone is none."""
    problem = Problem.random((50,), (6,), dtype=mx.bfloat16)
    only = mx.arange(6)[:, None, None] == 3
    keys, values = (mx.where(only, spoil, x).astype(x.dtype) for x in (problem.keys, problem.values))
    with running(kind):
        clean = problem.run()
        for changed in (replace(problem, values=values), replace(problem, values=values, keys=keys)):
            got = changed.run()
            np.testing.assert_array_equal(bits(got[:3]), bits(clean[:3]))
            assert not mx.any(mx.isfinite(got[3:])).item()


def test_a_row_that_is_not_a_number_stays_so() -> None:
    problem = Problem.random((50,), (2,))
    spoiled = problem.queries * mx.array([1.0, mx.nan])[:, None, None]
    with running("native"):
        got = replace(problem, queries=spoiled).run()
    assert mx.all(mx.isfinite(got[0])).item()
    assert mx.all(mx.isnan(got[1])).item()


@pytest.mark.parametrize("length", [0, 5, 30])
@pytest.mark.parametrize("window", [None, 12])
def test_stock_rows_on_a_cpu_have_the_bits_of_the_same_row_alone(window: int | None, length: int) -> None:
    """In bfloat16: 1 row over what is cached, and rows of a block of 2 to 16, agree bit for bit."""
    problem = Problem.random((length,), (16,), dim=16, dtype=mx.bfloat16, window=window)
    with running("stock"):
        alone = [bits(problem.rows(0, row, 1).run())[0] for row in range(16)]
        for count in range(2, 17):
            np.testing.assert_array_equal(bits(problem.rows(0, 0, count).run()), alone[:count])


def arguments(**changes: Any) -> dict[str, Any]:
    shape = changes.pop("shape", (2, 4, 2, 32))
    rows, heads, kv_heads, dim = shape
    given = {
        "queries": mx.zeros((rows, heads, dim)),
        "keys": mx.zeros((rows, kv_heads, dim)),
        "values": mx.zeros((rows, kv_heads, dim)),
        "pool": mx.zeros((1, LAYERS, 2, changes.pop("slots", 32), kv_heads, dim)),
        "layer": LAYER,
        "cached": Cached(mx.zeros((1, 1), dtype=mx.int32), mx.array([3]), (rows,)),
        "scale": 1.0,
    }
    return given | changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"queries": mx.zeros((2, 128))}, r"\[R, H, D\]"),
        ({"keys": mx.zeros((3, 2, 32))}, "need keys and values"),
        ({"values": mx.zeros((2, 2, 16))}, "need keys and values"),
        ({"shape": (2, 3, 2, 32)}, "multiple of the 2 KV heads, not 3"),
        ({"keys": mx.zeros((2, 2, 32), dtype=mx.float16)}, "must all be bfloat16"),
        ({"pool": mx.zeros((1, LAYERS, 2, 32, 2, 32), dtype=mx.bfloat16)}, "must all be bfloat16"),
        ({"pool": mx.zeros((1, 32, LAYERS, 2, 2, 32))}, r"\[pages, layers, 2, slots, KV, D\]"),
        ({"layer": LAYERS}, "layers 0 to 2, not 3"),
        ({"window": 0}, "at least 1 position"),
        ({"sinks": mx.zeros((3,))}, "4 heads"),
        ({"paths": mx.zeros((2, 3), dtype=mx.int32)}, r"int32 \(2, 2\)"),
        ({"paths": mx.zeros((2, 2))}, r"int32 \(2, 2\)"),
        ({"paths": mx.zeros((2, 2), dtype=mx.int32), "block": True}, "without block"),
        ({"cached": Cached(mx.zeros((1, 1), dtype=mx.int32), mx.array([3]), (3,))}, "add up to the 2 rows"),
        ({"cached": Cached(mx.zeros((2, 1), dtype=mx.int32), mx.array([3]), (1, 1))}, r"lengths \[2\]"),
        ({"cached": Cached(mx.zeros((1, 1)), mx.array([3]), (2,))}, "must be int32"),
        (
            {"cached": Cached(mx.zeros((2, 1), dtype=mx.int32), mx.array([3, 3]), (2, 2), mx.array([0, 2]))},
            r"starts must be int32 \[3\]",
        ),
        (
            {"cached": Cached(mx.zeros((2, 1), dtype=mx.int32), mx.array([3, 3]), (2, 2), mx.array([0, 1, 2]))},
            "Only the kernel takes starts",
        ),
    ],
)
def test_raises_for_what_does_not_fit(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        attention_rows(**arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shape": (2, 4, 2, 120)}, "not 120; MLX_SPEC_KERNELS=stock"),
        ({"shape": (2, 4, 2, 288)}, "not 288; MLX_SPEC_KERNELS=stock"),
        ({"slots": 16}, "multiple of 32 slots, not 16"),
    ],
)
def test_kernel_raises_for_what_it_does_not_take(changes: dict[str, Any], said: str) -> None:
    with running("native"), pytest.raises(ValueError, match=said):
        attention_rows(**arguments(**changes))
