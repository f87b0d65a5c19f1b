"""How many kernels the demo's first reply compiles on a GPU: a first answer waits for each of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from metal_kernels.launching.launch import Kernel, Launcher, launching, noting_variants
from mlx_spec import load, stream_generate
from mlx_spec.cache_folder import cache_folder


def filling(kernel: Kernel) -> Launcher:
    """Take the place of a GPU: outputs are ones, and half of each draft is accepted."""

    def launch(**settings: Any) -> list[mx.array]:
        outputs = [
            mx.ones(shape, dtype=dtype)
            for shape, dtype in zip(settings["output_shapes"], settings["output_dtypes"], strict=True)
        ]
        if kernel.name == "accept_rows":
            drafts = dict(settings["template"])["K"]
            outputs[0][drafts] = drafts // 2
        return outputs

    return launch


@pytest.fixture
def unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache folder with the demo model in it, and nothing else."""
    for folder in cache_folder().glob("demo-*"):
        (tmp_path / folder.name).symlink_to(folder, target_is_directory=True)
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path))
    yield


# When costs and rows were still measured before the first token, these were 41, 74, 101 and 76.
@pytest.mark.parametrize(("drafter", "most"), [(None, 20), ("eagle", 32), ("dflash2", 40), ("mtp", 32)])
def test_a_first_token_compiles_few_kernels(drafter: str | None, most: int, unmeasured: None) -> None:
    with launching(filling), noting_variants() as variants:
        engine, tokenizer = load("demo", drafter)
        responses = stream_generate(engine, tokenizer, "Name the seven days of the week.", max_tokens=24)
        next(responses)
        to_first_token = len(variants)
        list(responses)
    assert 8 <= to_first_token <= most
