"""What a chain drafter keeps of a sequence that is rewound, and NaN of one sequence among several."""

import mlx.core as mx
import numpy as np
import pytest
from steered import assert_like_fresh, fresh_state
from tiny_heads import head_tensors, write_layout
from tiny_models import tiny_target

from mlx_spec.decoding.accept import Greedy
from mlx_spec.drafters.base import DraftRequest
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.kv import ContextKV, context_pool
from mlx_spec.drafters.mtp.load import load_mtp
from mlx_spec.target import Target

TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 90, 12)]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


@pytest.fixture(scope="module")
def drafter(target: Target, tmp_path_factory: pytest.TempPathFactory) -> ChainDrafter:
    folder = tmp_path_factory.mktemp("head")
    write_layout(folder, "sidecar", "llama", head_tensors("llama", dtype=mx.bfloat16))
    return load_mtp(folder, target, "tiny head")


def test_pending_rows_are_rewound_with_the_tokens_after_them(target: Target, drafter: ChainDrafter) -> None:
    state = fresh_state(drafter, target, TOKENS[:8])
    assert drafter.rewind(state, 5) == 5
    assert_like_fresh(drafter, target, state, TOKENS[:6])


def test_nan_of_one_sequence_is_not_that_of_another(target: Target, drafter: ChainDrafter) -> None:
    states = [fresh_state(drafter, target, TOKENS[:length]) for length in (8, 6, 7)]
    states[1].hidden = states[1].hidden * mx.nan
    rule = Greedy()
    drafts = drafter.propose([DraftRequest(state, 5, 2, rule) for state in states])
    assert [draft.finite["draft logits"].item() for draft in drafts] == [True, False, True]


@pytest.mark.parametrize(
    ("keep", "position", "held"), [(None, 70, (0, 70)), (24, 95, (32, 95)), (24, 40, (16, 16))]
)
def test_a_context_begins_again_only_where_its_window_is_lost(
    keep: int | None, position: int, held: tuple[int, int]
) -> None:
    """Of 100 rows a window of 24 has dropped the first page."""
    rows = mx.zeros((100, 1, 2, 2, 16), dtype=mx.bfloat16)
    context = ContextKV(context_pool(rows), keep)
    context.append(0, rows)
    context.rewind_or_restart(position)
    assert (context.base, context.cursor) == held
