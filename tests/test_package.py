"""The package as others meet it: its names and its wheel."""

import ast
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mlx_spec

ROOT = Path(__file__).parent.parent
PACKAGES = ("mlx_spec", "metal_kernels")
NAMES = [
    "BestBranch",
    "Branch",
    "Conversation",
    "Engine",
    "GenerationResponse",
    "Grammar",
    "MlxSpecError",
    "ModelWarning",
    "Sampling",
    "Statistics",
    "best_branch",
    "generate",
    "load",
    "stream_generate",
]
SHIPPED = [
    "metal_kernels/__init__.py",
    "metal_kernels/py.typed",
    "mlx_spec/__init__.py",
    "mlx_spec/py.typed",
    "mlx_spec/generate/__main__.py",
    "mlx_spec/demo/heldout40.jsonl",
    "metal_kernels/_row_products.h",
    "metal_kernels/cpu/products.c",
    "metal_kernels/launching/tensor_cores.cuh",
    *(
        f"mlx_spec/demo/{drafter}/{name}"
        for drafter in ("dflash2", "mtp", "eagle")
        for name in ("README.md", "config.json", "model.safetensors")
    ),
]


def test_exported_names() -> None:
    """Names that ``__init__`` re-exports as ``x as x``, and nothing else."""
    tree = ast.parse((ROOT / "mlx_spec/__init__.py").read_text())
    imported = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.asname == alias.name for alias in imported)
    assert sorted(alias.name for alias in imported) == NAMES
    assert all(callable(getattr(mlx_spec, name)) for name in NAMES)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason='needs `pip install ".[test]"`')
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("mlx_spec-*-py3-none-any.whl")
    return built


def test_the_wheel_holds_both_packages_whole(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert set(SHIPPED) <= names
    sources = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == set(PACKAGES)


def test_the_installed_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, capture_output=True, timeout=120)
    code = (
        "import json, metal_kernels, mlx_spec; from mlx_spec.demo import DRAFTERS; folder = DRAFTERS['dflash2'];"
        "print(json.dumps([metal_kernels.__file__, mlx_spec.__file__, str(folder), repr(mlx_spec.load)]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(target), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    kernels, package, drafter, load = json.loads(done.stdout)
    assert Path(kernels).is_relative_to(target) and Path(package).is_relative_to(target)
    assert (Path(drafter) / "model.safetensors").is_file()
    assert load.startswith("<function load at ")


def test_the_commands_run_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """As modules and as console scripts, in one process; the scripts have the names of the modules."""
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    code = """
import contextlib, io, json, runpy, sys
from importlib.metadata import distribution

def usage(call):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        call()
    return out.getvalue().split(" [")[0]

sys.argv = ["command", "--help"]
scripts = {script.name: script for script in distribution("mlx-spec").entry_points}
print(json.dumps({
    name: [usage(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)), usage(script.load())]
    for name, script in scripts.items()
}))
"""
    environment = {"PYTHONPATH": str(target), "PATH": ""}
    line = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    files = sorted((ROOT / "mlx_spec/cli").glob("[!_]*.py"))
    commands = [f"mlx_spec.{path.stem}" for path in files if "\ndef main(" in path.read_text()]
    assert len(commands) == 9
    expected = {name: [f"usage: python -m {name}"] * 2 for name in commands}
    found = json.loads(done.stdout)
    assert {name: [text.split(" -h")[0].strip() for text in texts] for name, texts in found.items()} == expected
