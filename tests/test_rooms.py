"""Where things are: every module in its room, and who may import whom."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("mlx_spec", "metal_kernels")

# From the top down. A room may import rooms of later lines, and modules of its own; rooms of one line do not know
# each other. Names without a folder are files of the package's root.
LEVELS: list[dict[str, str]] = [
    {
        "mlx_spec": "__init__ bench bisect chat check extract_mtp probe quantize_drafter serve",
        "mlx_spec.drafters": "__main__",
        "mlx_spec.generate": "__main__",
    },
    {
        "mlx_spec.cli": "bench bisect chat check command drafters extract_mtp generate generate_flags "
        "generate_options probe quantize_drafter serve",
    },
    {
        "mlx_spec.server": "anthropic_messages app body call_rules chat errors guard job memory metrics "
        "openai_chat openai_completions openai_responses prefix_store reply run service settings streams "
        "token_text tools worker",
    },
    {"mlx_spec.loading": "adapters draft_vocabulary drafter load model pair published_drafters weights"},
    {
        "mlx_spec.measure": "after_text costs exactness kept_costs random_models scripted store synthetic "
        "teacher_forced turns wiring workloads",
        "mlx_spec.generate": "best_branch conversation options stream text_stream",
    },
    {
        "mlx_spec.diagnose": "acceptance capture dump logits plot probe record replay report rows runs stages "
        "text variants verdict watch"
    },
    {
        "mlx_spec.engine": "at_rest costs draft_policy drafter_states engine generation learned_costs prompt "
        "request round scheduler statistics verify",
    },
    {"mlx_spec.decoding": "accept grammar logprobs noise sampling settings"},
    {
        "mlx_spec.drafters": "base chain chain_reference chain_variants draft_head kind known kv reference "
        "siblings stages tree variants",
        "mlx_spec.drafters.dflash2": "block config drafter forward kind load reference selector tensors variants "
        "writer",
        "mlx_spec.drafters.eagle": "head kind load reference spec tensors variants",
        "mlx_spec.drafters.lookup": "chances index lookup",
        "mlx_spec.drafters.mtp": "head kind load reference source spec tensors variants",
    },
    {"mlx_spec.checkpoints": "hub"},
    {
        "mlx_spec.demo": "gguf model",
        "mlx_spec.target": "batch_layout delta_net families graphs layers linears model_config pages recurrent "
        "rope target",
    },
    {"mlx_spec.checkpoints": "config rope_settings settings tensors torch_file"},
    {"mlx_spec": "cache_folder errors"},
    {"metal_kernels.checks": "cases self_check timing"},
    {
        "metal_kernels": "accept_rows argmax_rows attention_call attention_composed attention_prompt "
        "attention_rows causal_conv_rows dynamic_conv gated_delta_rows "
        "gather_rows gemm_rows limits linear linear_rows logprob_rows mask_rows moe_rows norm_rope qmm_rows "
        "rms_norm_rows rope row_products row_spans stack_rows "
        "topk_rows walk_rows",
    },
    {
        "metal_kernels.launching": "cache_folder constants cores cpu_build cpu_library cuda_dialect "
        "implementations launch tensor_cores",
    },
]
# The drafters do not know each other, though they are one room.
APART = [f"mlx_spec.drafters.{name}" for name in ("dflash2", "eagle", "lookup", "mtp")]
ROOT_FILES = {
    "__init__.py",
    "bench.py",
    "bisect.py",
    "chat.py",
    "cache_folder.py",
    "check.py",
    "errors.py",
    "extract_mtp.py",
    "probe.py",
    "quantize_drafter.py",
    "serve.py",
}


def level_of() -> dict[str, int]:
    """Return the level of every module that is named above."""
    return {
        f"{room}.{name}": i for i, level in enumerate(LEVELS) for room in level for name in level[room].split()
    }


def files() -> dict[str, Path]:
    """Return every module by its dotted name; ``__init__`` of folders, which only re-export, left out."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if path.name != "__init__.py" or name == "mlx_spec.__init__":
                found[name] = path
    return found


def imports(path: Path) -> set[str]:
    """Return the modules of ours that a file imports, functions' own imports included.

    A name out of a folder's ``__init__`` counts as the module that defines it.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{path}: imports are absolute"
            found |= {defined_in(node.module, alias.name) for alias in node.names}
    return {name for name in found if name.split(".")[0] in (*PACKAGES, "tools", "tests")}


def defined_in(module: str, name: str) -> str:
    """Return what ``from module import name`` reads: ``module``, a module in it, or where it re-exports from."""
    folder = ROOT / module.replace(".", "/")
    if (folder / f"{name}.py").is_file():
        return f"{module}.{name}"
    if (folder / "__init__.py").is_file():
        for node in ast.parse((folder / "__init__.py").read_text()).body:
            if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
                return defined_in(str(node.module), name)
    return module


def test_every_module_is_in_the_list() -> None:
    assert sorted(files()) == sorted(level_of())


def test_the_root_holds_a_handful_of_files() -> None:
    assert {path.name for path in (ROOT / "mlx_spec").glob("*.py")} == ROOT_FILES


@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_imports_go_one_way(level: int) -> None:
    """Down the list, or to a module of the same room."""
    levels, paths = level_of(), files()
    for room, names in LEVELS[level].items():
        for name in names.split():
            for other in imports(paths[f"{room}.{name}"]) & levels.keys():
                same_room = room_of(other) == room_of(f"{room}.{name}")
                allowed = levels[other] > level or (levels[other] == level and same_room)
                assert allowed, f"{room}.{name} imports {other}, which is not below it"


def room_of(module: str) -> str:
    """Return the room of a module: the folder below the package, whatever lies deeper."""
    return ".".join(module.split(".")[:-1][:2])


@pytest.mark.parametrize("room", APART)
def test_a_drafter_knows_no_other(room: str) -> None:
    for name, path in files().items():
        if name.startswith(f"{room}."):
            others = tuple(f"{other}." for other in APART if other != room)
            assert not [other for other in imports(path) if other.startswith(others)], name


def test_a_kind_of_drafter_is_one_folder_and_one_line() -> None:
    """Outside its folder nothing but the tuple of kinds, random ones, and what extracts MTP heads, names it."""
    named: dict[str, set[str]] = {room: set() for room in APART}
    for name, path in files().items():
        for room in APART:
            if not name.startswith(room) and any(other.startswith(f"{room}.") for other in imports(path)):
                named[room].add(name)
    every = {"mlx_spec.loading.drafter", "mlx_spec.measure.random_models"}
    assert named["mlx_spec.drafters.eagle"] == every
    assert named["mlx_spec.drafters.dflash2"] == every | {"mlx_spec.cli.quantize_drafter"}
    assert named["mlx_spec.drafters.mtp"] == every | {"mlx_spec.cli.extract_mtp"}


def test_packages_import_neither_tools_nor_tests() -> None:
    for name, path in files().items():
        assert not {other for other in imports(path) if other.split(".")[0] in ("tools", "tests")}, name


def test_kernels_know_arrays_only() -> None:
    for name, path in files().items():
        if name.startswith("metal_kernels."):
            tree = ast.parse(path.read_text())
            modules = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
            assert not [module for module in modules if module.startswith("mlx_lm")], name


def test_no_import_runs_in_a_circle() -> None:
    graph = {name: imports(path) - {name} for name, path in files().items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in graph[name] & graph.keys():
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    assert len(done) == len(graph) > 60
