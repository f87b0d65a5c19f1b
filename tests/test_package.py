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
    "Engine",
    "GenerationResponse",
    "MlxSpecError",
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
