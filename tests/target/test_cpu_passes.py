"""Whole passes by the CPU library: of 1 to 16 rows, in 1 to 3 threads, all with the same bits."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from tiny_models import tiny_target

from metal_kernels.launching.cores import wanted_threads
from metal_kernels.launching.cpu_library import set_threads
from metal_kernels.launching.implementations import using
from metal_kernels.limits import MAX_VERIFY_ROWS
from mlx_spec.diagnose.rows import check_rows, text_and_rows


@pytest.fixture(autouse=True)
def on_the_cpu_library() -> Iterator[None]:
    with using("cpu"):
        yield
    set_threads(wanted_threads())


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3_moe", "qwen3_5_moe"])
def test_rows_have_the_bits_of_one_row_passes_in_any_number_of_threads(family: str, bits: int | None) -> None:
    target, logits = tiny_target(family, bits=bits), []
    for threads in (1, 2, 3):
        set_threads(threads)
        differences = list(check_rows(target, range(1, MAX_VERIFY_ROWS + 1)))
        assert differences == [None] * MAX_VERIFY_ROWS
        with text_and_rows(target, MAX_VERIFY_ROWS) as (sequence, rows):
            hidden = target.forward([(sequence, rows[:MAX_VERIFY_ROWS])]).hidden
            logits.append(np.array(target.logits(hidden).astype(mx.float32)))
    assert all(np.array_equal(found, logits[0]) for found in logits)
