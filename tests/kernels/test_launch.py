"""How a kernel's text is put together, translated to CUDA and launched, and which implementation is chosen."""

import importlib
import io
import pkgutil
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cuda_text import compile_cuda, cuda_text, together
from emulator import generated, launcher
from emulator.generated import Specialisation

import metal_kernels
from metal_kernels.checks.cases import CASES
from metal_kernels.checks.self_check import check
from metal_kernels.launching import constants, cuda_dialect, implementations, launch
from metal_kernels.launching.implementations import VARIABLE, implementation, using
from metal_kernels.launching.launch import Kernel, can_launch, launching

# ---- the text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    return tmp_path


def test_text_is_helpers_and_body(folder: Path) -> None:
    (folder / "one.metal").write_text("float one();\n")
    (folder / "two.metal").write_text("float two();\n")
    (folder / "added.metal").write_text("// helpers\n// body\ny[0] = one() + two();\n")
    (folder / "added.cu").write_text("// twin\n// body\ny[0] = 3;\n")
    kernel = Kernel("added", inputs=(), outputs=("y",), includes=("one.metal", "two.metal"), cuda_twin="added.cu")
    assert kernel.text() == ("float one();\nfloat two();\n// helpers\n", "y[0] = one() + two();\n")
    assert kernel.text("added.cu") == ("float one();\nfloat two();\n// twin\n", "y[0] = 3;\n")


def test_a_file_without_a_body_is_an_error(folder: Path) -> None:
    (folder / "headless.metal").write_text("y[0] = 1;\n")
    with pytest.raises(ValueError):
        Kernel("headless", inputs=(), outputs=("y",)).text()


def test_the_package_knows_arrays_alone() -> None:
    """No module of mlx-lm, and of mlx.nn the function silu alone."""
    for path in launch.FOLDER.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"(?m)^\s*(?:import|from) (?:mlx_lm|mlx_spec)", text), path
        assert set(re.findall(r"\bnn\.(\w+)", text)) <= {"silu"}, path


# ---- CUDA

BODY = """threadgroup float a[32], b[2][K + 1];
  threadgroup uint c[(K + 31) / 32];
uint i = thread_index_in_threadgroup;
const device T* p = x + i;
threadgroup float* q = a;
float v = sum((const threadgroup float4*)(q), *(const device uint4*)(p));
"""
HELPERS = "template <typename P> inline float f(thread float& to, const constant int* n, P p) { return *p; }\n"


def test_address_spaces_disappear_and_arrays_are_shared() -> None:
    header, source = cuda_dialect.translate(HELPERS, BODY)
    assert header == cuda_dialect.HEADER.read_text() + (
        "template <typename P> inline float f(float& to, const int* n, P p) { return *p; }\n"
    )
    declared, plain = source.split(";\n", 1)
    assert declared.startswith("const uint thread_index_in_threadgroup = ")
    assert plain == (
        "__shared__ float a[32], b[2][K + 1];\n"
        "  __shared__ uint c[(K + 31) / 32];\n"
        "uint i = thread_index_in_threadgroup;\n"
        "const T* p = x + i;\n"
        "float* q = a;\n"
        "float v = sum((const float4*)(q), *(const uint4*)(p));\n"
    )


def test_attributes_that_a_body_names_are_declared() -> None:
    for name, (kind, value) in cuda_dialect.ATTRIBUTES.items():
        _, source = cuda_dialect.translate("", f"y[0] = {name};")
        assert source == f"const {kind} {name} = {value};\ny[0] = {name};"
    assert cuda_dialect.translate("", "y[0] = 1;")[1] == "y[0] = 1;"


# ---- the package's kernels

METAL_ATTRIBUTE = re.compile(
    r"\b(?:thread|threadgroup|threads|threadgroups|simdgroup|simdgroups|grid)_\w*(?:in|per)_\w+"
)


def texts() -> dict[str, tuple[str, str]]:
    found = {}
    for path in sorted([*launch.FOLDER.glob("*.metal"), *launch.FOLDER.glob("_*.h")]):
        helpers, _, body = path.read_text().partition(launch.BODY)
        found[path.name] = (helpers, body)
    return found


@pytest.mark.parametrize("name", texts())
def test_the_dialect_covers_the_texts(name: str) -> None:
    helpers, body = texts()[name]
    assert not METAL_ATTRIBUTE.findall(helpers), "attributes are known in the body alone"
    assert set(METAL_ATTRIBUTE.findall(body)) <= cuda_dialect.ATTRIBUTES.keys()
    header, source = cuda_dialect.translate(helpers, body)
    code = re.sub("//.*", "", header.removeprefix(cuda_dialect.HEADER.read_text()) + source)
    assert not re.findall(r"\b(?:device|constant|thread|threadgroup)\b", code)
    assert code.count("__shared__") == len(re.findall(r"(?m)^\s*threadgroup \w+ \w+\s*\[", body))


def kernels() -> list[Kernel]:
    """Find the kernels that the package's modules define, without the twins, which only NVIDIA GPUs run."""
    found = pkgutil.walk_packages(metal_kernels.__path__, "metal_kernels.")
    modules = [importlib.import_module(module.name) for module in found]
    defined = {value for module in modules for value in vars(module).values() if isinstance(value, Kernel)}
    return sorted((kernel for kernel in defined if kernel.cuda_twin is None), key=lambda kernel: kernel.name)


@pytest.fixture(scope="module")
def launched() -> dict[Kernel, Specialisation]:
    """What the cases of the self-check launch: they launch every kernel."""
    with launching(partial(launcher, check=False)):
        for case in CASES:
            check(case)
    return {one.kernel: one for one in generated.launched()}


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_nvcc_compiles_every_kernel(launched: dict[Kernel, Specialisation], tmp_path: Path) -> None:
    texts = {}
    for kernel in kernels():
        one = launched[kernel]
        template, dtypes = (
            [(name, value) for name, _, value in one.template],
            [dtype for dtype, _, _ in one.inputs],
        )
        text = cuda_dialect.translate(*one.text)
        texts[kernel.name] = cuda_text(kernel, text, template, dtypes, one.outputs)
    compile_cuda(together(texts), tmp_path)


# ---- launching


def test_a_signature_tells_apart_what_mlx_compiles_apart() -> None:
    def signature(size: int, dtype: mx.Dtype = mx.float32) -> int:
        return launch.signature([mx.zeros(size, dtype=dtype), mx.zeros(9)])

    assert signature(1) == signature(7) != signature(8) == signature(1000)
    assert signature(9) != signature(9, mx.bfloat16)
    assert signature(1) != launch.signature([mx.array(0.0), mx.zeros(9)])
    assert 0 <= signature(9) < 2**31


def test_fixed_numbers_are_made_once_and_kept() -> None:
    assert constants.ints(3, 5).tolist() == [3, 5] and constants.ints(3, 5) is constants.ints(3, 5)
    assert constants.floats(0.5).dtype == mx.float32 and constants.floats(0.5).shape == (1,)
    assert constants.resident(constants.ints(7)).tolist() == [7]


def test_fixed_numbers_are_no_work_of_a_compiled_pass() -> None:
    compiled = mx.compile(lambda x: x + constants.ints(901, 902))
    assert compiled(mx.array([1, 2])).tolist() == [902, 904]
    graph = io.StringIO()
    mx.export_to_dot(graph, constants.ints(901, 902))
    assert "Slice" not in graph.getvalue()


def test_a_kernel_is_launched_with_whole_threadgroups(folder: Path) -> None:
    calls: list[dict[str, Any]] = []

    def launcher(kernel: Kernel) -> launch.Launcher:
        def call(**settings: Any) -> list[mx.array]:
            calls.append({"kernel": kernel, **settings})
            return [mx.ones(3)]

        return call

    kernel = Kernel("counted", inputs=("x",), outputs=("y",))
    x = mx.zeros(1)
    with launching(launcher):
        (y,) = kernel(
            (x,), template=(("K", 2),), groups=(2, 3, 4), threads=(32, 2, 1), shapes=((3,),), dtypes=(mx.float32,)
        )
    assert y.tolist() == [1, 1, 1]
    assert calls == [
        {
            "kernel": kernel,
            "inputs": [x],
            "template": [("K", 2), ("SIGNATURE", launch.signature([x]))],
            "grid": (64, 6, 4),
            "threadgroup": (32, 2, 1),
            "output_shapes": [(3,)],
            "output_dtypes": [mx.float32],
        }
    ]


def test_launchers_nest() -> None:
    def first(kernel: Kernel) -> launch.Launcher:
        return lambda **_: [mx.array(1)]

    def second(kernel: Kernel) -> launch.Launcher:
        return lambda **_: [mx.array(2)]

    def launched() -> Any:
        sizes = {"groups": (1, 1, 1), "threads": (1, 1, 1)}
        (y,) = Kernel("nested", inputs=(), outputs=("y",))(
            [], template=[], **sizes, shapes=[()], dtypes=[mx.int32]
        )
        return y.tolist()

    with launching(first):
        with pytest.raises(KeyError), launching(second):
            assert launched() == 2
            raise KeyError
        assert launched() == 1


def test_kernels_run_on_gpus_and_through_launchers() -> None:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        assert not can_launch()
        with launching(lambda kernel: lambda **_: []):
            assert can_launch()
        assert not can_launch()
    finally:
        mx.set_default_device(before)


# ---- the choice of an implementation


@pytest.mark.parametrize("kernels_run", [True, False])
def test_the_implementation_is_chosen(monkeypatch: pytest.MonkeyPatch, kernels_run: bool) -> None:
    monkeypatch.setattr(implementations, "can_launch", lambda: kernels_run)
    native, best = ("native", "native") if kernels_run else ("stock", "cpu")
    monkeypatch.delenv(VARIABLE, raising=False)
    assert implementation() == best
    for asked, got in (
        ("", best),
        ("cpu", "cpu"),
        ("native", native),
        ("stock", "stock"),
        ("reference", "reference"),
    ):
        monkeypatch.setenv(VARIABLE, asked)
        assert implementation() == got


@pytest.mark.parametrize("asked", ["metal", "Native", "0"])
def test_an_unknown_implementation_is_an_error(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv(VARIABLE, asked)
    with pytest.raises(ValueError, match=f"{VARIABLE} is '{asked}'; it takes native, stock, reference or cpu"):
        implementation()


def test_using_wins_over_the_environment_until_its_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations, "can_launch", lambda: True)
    monkeypatch.setenv(VARIABLE, "stock")
    with using("reference"):
        assert implementation() == "reference"
        with pytest.raises(KeyError), using("native"):
            assert implementation() == "native"
            raise KeyError
        assert implementation() == "reference"
        with using(None):
            assert implementation() == "stock"
    assert implementation() == "stock"
