"""The CPU library: how it is compiled and kept, its calls over MLX's memory, threads and forks."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import Cached, attention_rows
from metal_kernels.launching import cores, cpu_build, cpu_library, implementations
from metal_kernels.launching.cores import usable_cores, wanted_threads
from metal_kernels.launching.cpu_library import address, copied, dense, empty, missing, set_threads
from metal_kernels.launching.implementations import VARIABLE, implementation, in_words, is_traceable
from metal_kernels.linear import Linear, Quantization
from metal_kernels.linear_rows import linear_rows
from metal_kernels.rms_norm_rows import rms_norm_rows

TYPES = (mx.bfloat16, mx.float16, mx.float32)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Let the library be looked for again, inside the test and after it."""
    cpu_library._loaded.cache_clear()
    implementations._warn.cache_clear()
    yield
    cpu_library._loaded.cache_clear()
    implementations._warn.cache_clear()


def test_it_is_what_runs_on_a_cpu() -> None:
    assert missing() is None
    assert implementation() == "cpu"
    assert not is_traceable()


def test_words_for_people_name_what_ran_and_what_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "_left", {})
    set_threads(1)
    assert re.fullmatch(r"cpu \(C for (AVX2|AVX-512|NEON), 1 thread\)", in_words("cpu"))
    set_threads(3)
    packed, scales = mx.quantize(mx.ones((8, 64)), group_size=32, bits=4, mode="mxfp4")
    linear_rows(mx.ones((1, 64)), Linear(packed, scales, quantization=Quantization(32, 4, "mxfp4")))
    rms_norm_rows(mx.ones((1, 64)), mx.ones((64,), dtype=mx.bfloat16), 0.0)
    left = "norms of float32 rows by bfloat16 weights, products of mxfp4 weights"
    assert in_words("cpu").endswith(f", 3 threads; by MLX: {left})")
    assert in_words("stock") == "stock (MLX's own operations)"
    assert in_words("reference") == "reference (plain formulas)"
    set_threads(wanted_threads())


# ---- what is relied on of MLX


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_new_array_is_evaluated_and_its_own(dtype: mx.Dtype) -> None:
    first, second = empty((3, 5), dtype), empty((3, 5), dtype)
    assert (first.shape, first.dtype) == ((3, 5), dtype)
    assert address(first) != address(second)
    np.frombuffer(first, np.uint8)[:] = 1
    assert not np.any(np.frombuffer(second, np.uint8))
    assert not np.any(np.frombuffer(empty((3, 5), dtype), np.uint8))
    assert mx.all(first == first[0, 0]).item() and first[0, 0].item() != 0


def test_an_address_is_that_of_evaluated_numbers() -> None:
    lazy = mx.arange(4, dtype=mx.float32) * 2
    assert np.array_equal(np.frombuffer(dense(lazy), np.float32), [0, 2, 4, 6])
    scheduled = mx.ones((256, 256)) @ mx.ones((256, 256))
    mx.async_eval(scheduled)
    assert np.all(np.frombuffer(dense(scheduled), np.float32) == 256)


def test_an_array_with_gaps_is_copied_and_any_other_is_not() -> None:
    x = mx.arange(24, dtype=mx.float32).reshape(4, 6)
    mx.eval(x)
    assert dense(x) is x
    part = x[1:3]
    assert address(dense(part)) == (address(x) or 0) + 24
    assert np.array_equal(np.frombuffer(dense(x[:, 1:3]), np.float32), np.array(x)[:, 1:3].reshape(-1))
    assert np.array_equal(np.frombuffer(dense(x.T), np.float32), np.array(x).T.reshape(-1))
    assert address(mx.zeros((0, 4))) is None


def test_operations_of_mlx_read_what_was_written_and_leave_it_alone() -> None:
    x = mx.ones((2, 8), dtype=mx.bfloat16)
    normed = rms_norm_rows(x, mx.full((8,), 3.0, dtype=mx.bfloat16), 0.0)
    before = bytes(memoryview(normed))
    updated = normed + 1
    updated[0] = 0
    mx.eval(updated)
    assert bytes(memoryview(normed)) == before and mx.all(normed == 3).item()
    assert mx.array_equal(copied(normed, (8,), 16), normed[1])


# ---- compiling


def test_it_is_compiled_once(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))
    commands = []

    def compiler(command: list[str], library: Path) -> None:
        commands.append(command)
        library.write_bytes(b"")

    monkeypatch.setattr(cpu_build, "compile_library", compiler)
    place = cpu_build.built()
    assert place == cpu_build.built() and len(commands) == 1
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    monkeypatch.setattr(cpu_build, "cpu_features", lambda: "another CPU")
    monkeypatch.setenv("CC", "cc -pipe")
    assert cpu_build.built() != place
    assert commands[1][:2] == ["cc", "-pipe"]


@pytest.mark.parametrize(
    "compiler, said",
    [
        ("no-such-compiler", "a C compiler is needed; no-such-compiler was not found (set CC to name another)."),
        ("false", "false cannot compile"),
    ],
)
def test_without_a_compiler_stock_operations_run(
    fresh: None, compiler: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    assert said in str(missing())
    with pytest.warns(UserWarning, match=f"{re.escape(said)}.*MLX's own operations run in its place"):
        assert implementation() == "stock"
    assert implementation() == "stock"  # it is said once
    assert said in in_words("stock")
    monkeypatch.setenv(VARIABLE, "cpu")
    with pytest.raises(ValueError, match=f"{VARIABLE} asks for cpu. The CPU library does not run: "):
        implementation()


def test_a_cache_that_cannot_be_written(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "file"))
    assert "a writable cache folder is needed" in str(missing())


def test_the_cache_folder_is_that_of_mlx_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_spec.cache_folder import cache_folder

    for name, value in (
        ("MLX_SPEC_CACHE", str(tmp_path)),
        ("MLX_SPEC_CACHE", ""),
        ("XDG_CACHE_HOME", str(tmp_path)),
    ):
        monkeypatch.setenv(name, value)
        assert cpu_build.cache_folder() == cache_folder()


# ---- threads


@pytest.mark.parametrize(
    "groups, files, quota",
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1),
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("4:cpu,cpuacct:/c", {"cpu/c/cpu.cfs_quota_us": "200000", "cpu/c/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("4:memory:/\n0::/gone", {}, 8),
    ],
)
def test_a_quota_bounds_the_threads(
    groups: str, files: dict[str, str], quota: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "self").write_text(f"{groups}\n")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    monkeypatch.setattr(cores, "MEMBERSHIP", tmp_path / "self")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert usable_cores() == quota


def test_the_environment_chooses_the_threads(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cores.VARIABLE, "")
    assert wanted_threads() == usable_cores()
    monkeypatch.setenv(cores.VARIABLE, "7")
    assert missing() is None and "7 threads" in in_words("cpu")


@pytest.mark.parametrize("wrong", ["0", "257", "two", "-1", "1.5", "²"])
def test_threads_that_are_no_number_are_refused(wrong: str, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cores.VARIABLE, wrong)
    with pytest.raises(ValueError, match=f"MLX_SPEC_THREADS is '{wrong}'; it takes a whole number from 1 to 256"):
        implementation()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_computes_after_a_fork_and_ends() -> None:
    code = """
import os, mlx.core as mx
from metal_kernels.launching import cpu_library
from metal_kernels.linear import Linear
from metal_kernels.row_products import cpu_product
assert cpu_library.missing() is None
cpu_library.set_threads(3)
x, linear = mx.ones((4, 256)), Linear(mx.ones((4096, 256)))
mx.eval(x, linear.weight)
run = lambda: bytes(memoryview(cpu_product(x, linear, None, False)))
before = run()
child = os.fork()
if child == 0:
    os._exit(0 if all(run() == before for _ in range(20)) else 1)
same = all(run() == before for _ in range(20))
print(same, os.waitpid(child, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("True 0\n", 0), done.stderr


def test_attention_reads_no_page_beyond_the_table() -> None:
    rows, pool = mx.zeros((1, 2, 32)), mx.zeros((1, 1, 2, 32, 2, 32))
    cached = Cached(mx.zeros((1, 1), dtype=mx.int32), mx.array([33], dtype=mx.int32), (1,))
    with pytest.raises(ValueError, match="Pages for 33 cached positions are needed; these hold 32"):
        attention_rows(rows, rows, rows, pool, 0, cached, scale=1.0)
