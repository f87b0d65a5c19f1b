"""The package as others meet it: its names, its wheel, and the direction of its imports."""

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
    "mlx_spec/generate.py",
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


def imports(path: Path) -> set[str]:
    """Return the dotted names of our modules that a file imports, functions' own imports included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            # What is imported may be a module itself.
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.split(".")[0] in (*PACKAGES, "tools", "tests")}


def modules(place: str) -> list[Path]:
    path = ROOT / place
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


# Who must not import what; a name stands for everything below it too.
ABOVE_ENGINE = ["text", "generation", "generate", "models", "row_check", "exactness", "check", "demo", "costs"]
FORBIDDEN: dict[str, list[str]] = {
    "metal_kernels": ["mlx_spec", "tools", "tests"],
    "mlx_spec": ["tools", "tests"],
    **{
        f"mlx_spec/{part}": [f"mlx_spec.{name}" for name in ["engine", *ABOVE_ENGINE]]
        for part in ("drafters", "target", "accept", "policy", "sampling", "noise", "statistics", "errors")
    },
    "mlx_spec/engine": [f"mlx_spec.{name}" for name in ABOVE_ENGINE],
    "mlx_spec/text": [f"mlx_spec.{name}" for name in ("engine", "target", "drafters", "generation", "models")],
    "mlx_spec/generation": ["mlx_spec.cli.generate", "mlx_spec.loading.load"],
    "mlx_spec/models": ["mlx_spec.cli.generate", "mlx_spec.generate.stream", "mlx_spec.generate.text_stream"],
}


@pytest.mark.parametrize("place", FORBIDDEN)
def test_imports_go_one_way(place: str) -> None:
    for path in modules(place):
        for name in imports(path):
            wrong = [f for f in FORBIDDEN[place] if name == f or name.startswith(f"{f}.")]
            assert not wrong, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("part", ["drafters", "accept", "policy"])
def test_the_target_knows_nothing_of_drafting(part: str) -> None:
    for module in modules("mlx_spec/target"):
        assert not {name for name in imports(module) if name.startswith(f"mlx_spec.{part}")}


def test_no_import_runs_in_a_circle() -> None:
    """Among modules, package ``__init__`` files left out: they only re-export."""
    graph: dict[str, set[str]] = {}
    for place in PACKAGES:
        for path in modules(place):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if path.name != "__init__.py":
                graph[name] = imports(path)
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in graph[name] & graph.keys():
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    assert len(done) == len(graph) > 20
