"""Stages of a pass in a file: read again elsewhere, and where two machines part."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from test_stages import loaded

from mlx_spec.diagnose.dump import Dump, parting, read_dump, stages_here, write_dump
from mlx_spec.errors import RequestError

CASES = ["DFlash 2, window", "MTP", "EAGLE 3"]
TOKENS = [(37 * i + 5) % 90 for i in range(20)]


@pytest.mark.parametrize("case", CASES)
def test_two_passes_part_where_one_departs(case: str, tmp_path: Path) -> None:
    target, drafter, formulas = loaded(case, tmp_path, mx.bfloat16)
    here = stages_here(target, drafter, TOKENS, "here")
    write_dump(here, tmp_path / "dump")
    there = read_dump(tmp_path / "dump")
    assert (there.tokens, there.device, list(there.stages)) == (here.tokens, "here", list(here.stages))
    assert parting(here, there, formulas(), 4, mx.bfloat16) is None
    name = next(stage for stage in there.stages if stage.endswith("gate"))
    found = parting(here, changed(there, name, 1.3), formulas(), 4, mx.bfloat16)
    assert found is not None and found.stage == name
    assert found.there > 4 > found.here and found.difference == pytest.approx(0.23, abs=0.02)
    found = parting(here, changed(there, "capture", 1.2), formulas(), 4, mx.bfloat16)
    assert found is not None and found.stage == "capture"
    with pytest.raises(RequestError, match="other tokens"):
        parting(here, replace(there, tokens=(1, 2)), formulas(), 4, mx.bfloat16)


def changed(dump: Dump, stage: str, by: float) -> Dump:
    return replace(dump, stages={**dump.stages, stage: dump.stages[stage] * by})


def test_what_is_no_dump_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no tensors")
    mx.save_safetensors(str(tmp_path / "y.safetensors"), {"x": mx.zeros(3)})
    for path in (tmp_path / "x", tmp_path / "y.safetensors"):
        with pytest.raises(RequestError, match="no dump"):
            read_dump(path)
