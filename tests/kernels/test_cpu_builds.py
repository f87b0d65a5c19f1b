"""The CPU library built for several CPUs: rows among others and alone, sanitizers, and arm64 by emulation."""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from metal_kernels.launching import cpu_build

DRIVER = Path(__file__).parent / "cpu_driver.c"
# 2,000 in each of three types; a long run has 10,000.
CASES, MANY_CASES, FEW_CASES = 6_000, 30_000, 900
# As large a part of the sums of 900 cases may be what libm and the order of sums make of them.
LIKE = 1e-3
FLAGS = [flag for flag in cpu_build.FLAGS if flag not in ("-shared", "-fPIC", "-fvisibility=hidden")]
# What ``-march`` takes, and what the CPU must have to run it.
BUILDS = {"x86-64-v3": "avx2", "x86-64-v4": "avx512f"} if platform.machine() == "x86_64" else {"": ""}
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what compiles the driver for a CPU, once for all tests, or skips where this one cannot run it."""
    folder = tmp_path_factory.mktemp("builds")

    @cache
    def of(march: str) -> Path:
        require_cpu(march)
        return compiled(folder / f"driver{march}", march)

    return of


def compiled(program: Path, march: str, *flags: str, compiler: str = "cc") -> Path:
    """Compile the library and its driver for a CPU; skip without the compiler."""
    sources = [str(path) for path in sorted(cpu_build.FOLDER.glob("*.c"))]
    line = [compiler, *FLAGS, *([f"-march={march}"] if march else []), *flags, *sources, str(DRIVER)]
    if not shutil.which(compiler):
        pytest.skip(f"needs a C compiler, {compiler}")
    subprocess.run([*line, "-o", str(program), *cpu_build.LIBRARIES], check=True, timeout=300)
    return program


def require_cpu(march: str) -> None:
    """Skip where the CPU cannot run what was built for ``march``."""
    if BUILDS[march] not in cpu_build.cpu_features().split() and march:
        pytest.skip(f"needs a CPU with {BUILDS[march]}")


def sums(line: list[str], cases: int, *flags: str, **environment: str) -> dict[str, float]:
    """Run the driver; return the sums that it prints, by operation and type."""
    line, settings = [*line, str(cases), *flags], os.environ | environment
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, env=settings, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines()}


@pytest.mark.parametrize("cases", [CASES, pytest.param(MANY_CASES, marks=pytest.mark.slow)])
@pytest.mark.parametrize("march", BUILDS)
def test_a_row_among_others_has_the_bits_of_the_row_alone(
    march: str, cases: int, driver: Callable[[str], Path]
) -> None:
    assert len(sums([str(driver(march))], cases, "--one-caller")) == 33


def test_builds_for_different_cpus_differ_by_roundings_alone(driver: Callable[[str], Path]) -> None:
    first, *others = (sums([str(driver(march))], FEW_CASES) for march in BUILDS)
    for other in others:
        assert other == pytest.approx(first, rel=LIKE)


@pytest.mark.parametrize(
    ("sanitizers", "march"),
    [*(("address,undefined", march) for march in BUILDS), ("thread", next(iter(BUILDS)))],
)
def test_sanitizers_find_nothing(sanitizers: str, march: str, tmp_path: Path) -> None:
    require_cpu(march)
    flags = ["-g", "-O0", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    empty, program = tmp_path / "empty.c", tmp_path / "driver"
    empty.write_text("int main(void) { return 0; }\n")
    trial = ["cc", *flags, str(empty), "-o", str(program)]
    if not shutil.which("cc") or subprocess.run(trial, capture_output=True, timeout=60).returncode:
        pytest.skip(f"needs a C compiler with {flags[2]}")
    if subprocess.run([str(program)], timeout=60).returncode:
        pytest.skip(f"programs with {flags[2]} do not run here")
    compiled(program, march, *flags)
    assert len(sums([str(program)], FEW_CASES, TSAN_OPTIONS="die_after_fork=0")) == 33


def test_an_arm64_cpu_gives_the_same_up_to_roundings(tmp_path: Path, driver: Callable[[str], Path]) -> None:
    """By emulation, which cannot fork with threads."""
    if not shutil.which(ARM_EMULATOR):
        pytest.skip(f"needs {ARM_EMULATOR}")
    arm = compiled(tmp_path / "arm", "", "-O1", "-static", compiler=ARM_COMPILER)
    here = sums([str(driver(next(iter(BUILDS))))], FEW_CASES)
    assert sums([ARM_EMULATOR, str(arm)], FEW_CASES, "--one-caller") == pytest.approx(here, rel=LIKE)
