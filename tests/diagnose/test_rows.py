"""The row check: silent where rows are alike, and exact about the row that is not."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scripted_drafters import ScriptedDrafter, always_right, plain, right_then_wrong, run
from tiny_models import CONFIGS, HYBRIDS, tiny_target

from mlx_spec.decoding.sampling import Sampling
from mlx_spec.diagnose.rows import CONTEXT, RowCheck, check_rows, check_tree
from mlx_spec.engine import Engine, Request
from mlx_spec.errors import ContextFull
from mlx_spec.measure.exactness import check
from mlx_spec.target import Target

PROMPT = [int(t) for t in np.random.default_rng(24).integers(0, 90, 20)]


def checked_run(target: Target, text: list[int], request: Request, script: Any = always_right) -> RowCheck:
    """Run a request of 20 new tokens with the check on."""
    check = RowCheck(target)
    engine = Engine(target, ScriptedDrafter(target, text, script))
    done = run(engine, Request(**{**vars(request), "on_verified": check.check}))
    assert done.text == text
    return check


@pytest.mark.parametrize(
    ("family", "bits"),
    [*((family, None) for family in CONFIGS), ("llama", 4), ("qwen3_moe", 4), ("qwen3_next", 4)],
)
def test_bfloat16_rows_are_equal_bit_for_bit(family: str, bits: int | None) -> None:
    """On the CPU MLX's bfloat16 product reduces every row alike."""
    target, request = tiny_target(family, bits=bits), Request(PROMPT, 20)
    check = checked_run(target, plain(target, request).text, request, right_then_wrong(5))
    # Rounds of 8 rows that emit 6 tokens: 6 + 6 + 6, then 2 rows for the last 2 tokens.
    assert check.rows == 8 + 8 + 8 + 2
    assert check.differences == []
    assert str(check) == "Rows checked: 26, all equal to one-row passes bit for bit"
    assert target.pool.pages_in_use == 0


def test_raw_logits_are_compared_whatever_the_penalties_are() -> None:
    target = tiny_target("llama")
    request = Request(PROMPT, 20, sampling=Sampling(repetition_penalty=1.5, logit_bias={4: 9.0}))
    assert checked_run(target, plain(target, request).text, request).differences == []


def perturb(target: Target, row: int, token: int, by: float) -> None:
    """Let passes of several rows, if they have it, give row number ``row`` another logit for ``token``."""
    exact = target.logits

    def logits(hidden: mx.array) -> mx.array:
        found = exact(hidden)
        if hidden.shape[0] > max(row, 1):
            found[row, token] = found[row, token] + by
        return found

    target.logits = logits


def test_a_row_that_depends_on_its_neighbours_is_reported() -> None:
    target, request = tiny_target("llama"), Request(PROMPT, 20)
    text = plain(target, request).text
    # The token is the least likely one of that row, so that the text stays.
    token = int(mx.argmin(logits_after(target, text[: len(PROMPT) + 2])))
    perturb(target, row=2, token=token, by=-4.0)
    check = checked_run(target, text, request)
    # 8 + 8 + 4 rows.
    assert check.rows == 20
    assert len(check.differences) == 3
    first = check.differences[0]
    assert (first.position, first.row, first.rows, first.same_token) == (len(PROMPT) - 1 + 2, 2, 8, True)
    # bfloat16 rounds the perturbed logit to a step of 1/16 at most.
    assert first.largest == pytest.approx(4.0, abs=0.07)
    assert str(first).startswith("position 21: row 3 of 8 differs by up to ")
    assert str(first).endswith("from a one-row pass (same token)")
    assert [d.position for d in check.differences] == [21, 29, 37]
    assert check.differences[-1].rows == 4
    assert str(check).splitlines()[0] == "Rows checked: 20, 3 differ from one-row passes"
    assert len(str(check).splitlines()) == 4
    assert target.pool.pages_in_use == 0


def logits_after(target: Target, tokens: list[int]) -> mx.array:
    sequence = target.open()
    hidden = target.forward([(sequence, mx.array(tokens))]).hidden[-1:]
    return target.logits(hidden)[0]


def test_another_most_likely_token_is_named() -> None:
    target = tiny_target("llama")
    perturb(target, row=1, token=50, by=100.0)
    check, sequence = RowCheck(target), target.open()
    target.prefill(sequence, PROMPT)
    rows = mx.array([4, 5, 6])
    check.check(sequence, rows, target.logits(target.forward([(sequence, rows)]).hidden))
    assert [(d.row, d.same_token) for d in check.differences] == [(1, False)]
    assert "OTHER TOKEN" in str(check)


def test_the_check_keeps_sequence_and_pages_as_they_were() -> None:
    """The page that the sequence goes on in is shared with the check's own fork, and must not be written."""
    target = tiny_target("llama")
    sequence = target.open()
    target.prefill(sequence, PROMPT)
    rows = mx.array([4, 5, 6, 7])
    before = target.logits(target.forward([(sequence, rows)]).hidden)
    pages, length = list(sequence.pages), sequence.length
    RowCheck(target).check(sequence, rows, before)
    assert (sequence.pages, sequence.length) == (pages, length)
    assert target.pool.pages_in_use == 1
    assert not target.pool.is_shared(pages[0])
    assert mx.array_equal(target.logits(target.forward([(sequence, rows)]).hidden), before)


def test_pages_come_back_when_the_check_fails() -> None:
    """The check needs a page of its own; in a pool of one there is none."""
    target = tiny_target("llama", max_cached_tokens=32)
    sequence = target.open()
    target.prefill(sequence, PROMPT)
    rows = mx.array([4, 5])
    logits = target.logits(target.forward([(sequence, rows)]).hidden)
    with pytest.raises(ContextFull):
        RowCheck(target).check(sequence, rows, logits)
    assert not target.pool.is_shared(sequence.pages[0])
    sequence.free()
    assert target.pool.pages_in_use == 0


@pytest.mark.parametrize("family", CONFIGS)
def test_a_models_rows_are_equal(family: str) -> None:
    target = tiny_target(family)
    assert list(check_rows(target, range(1, 17))) == [None] * 16
    assert target.pool.pages_in_use == 0


def test_the_first_difference_of_each_pass_is_reported() -> None:
    target = tiny_target("llama")
    perturb(target, row=2, token=7, by=3.0)
    found = list(check_rows(target, [2, 3, 16]))
    assert target.pool.pages_in_use == 0
    assert found[0] is None
    for rows, difference in zip((3, 16), found[1:], strict=True):
        assert difference is not None
        assert (difference.position, difference.row, difference.rows) == (CONTEXT + 2, 2, rows)


def test_only_the_first_rows_may_be_compared() -> None:
    target = tiny_target("llama")
    passes: list[int] = []
    forward = target.forward

    def counting(batch: Any, target_layer_ids: Any = (), paths: Any = None) -> Any:
        passes.append(sum(tokens.size for _, tokens in batch))
        return forward(batch, target_layer_ids, paths)

    target.forward = counting
    perturb(target, row=2, token=7, by=3.0)
    assert list(check_rows(target, [2, 8], compared=2)) == [None, None]
    assert passes == [CONTEXT, 1, 1, 2, 8]


@pytest.mark.parametrize("size", [32, 64, 96])
def test_small_pools_are_checked_too(size: int) -> None:
    target = tiny_target("llama", max_cached_tokens=size)
    perturb(target, row=1, token=7, by=3.0)
    (difference,) = check_rows(target, [16])
    assert difference is not None
    assert difference.position == (CONTEXT if size == 96 else 0) + 1
    assert target.pool.pages_in_use == 0


def test_passes_that_do_not_fit_into_the_context_are_left_out() -> None:
    target = tiny_target("llama")
    target.context = 5
    assert list(check_rows(target, range(1, 17))) == [None] * 5


def test_an_unfinished_check_gives_its_pages_back() -> None:
    target = tiny_target("llama")
    checked = check_rows(target, [2, 8])
    next(checked)
    assert target.pool.pages_in_use > 0
    checked.close()
    assert target.pool.pages_in_use == 0


def test_no_numbers_are_equal_to_no_numbers() -> None:
    """A model of NaN is reported by the engine; its rows do not depend on each other."""
    target = tiny_target("llama")
    exact = target.logits
    target.logits = lambda hidden: exact(hidden) * mx.nan
    assert list(check_rows(target, [2, 4])) == [None, None]


@pytest.mark.parametrize("family", [family for family in CONFIGS if family not in HYBRIDS])
def test_a_models_trees_are_equal(family: str) -> None:
    target = tiny_target(family)
    assert check_tree(target, 4) is None
    assert target.pool.pages_in_use == 0


def test_a_row_that_sees_one_off_its_path_is_reported() -> None:
    """As if a kernel took the rows of a pass for a chain."""
    target = tiny_target("llama")
    forward = target.forward
    target.forward = lambda batch, target_layer_ids=(), paths=None: forward(batch, target_layer_ids)
    difference = check_tree(target, 4)
    assert difference is not None
    assert (difference.position, difference.row, difference.rows) == (CONTEXT + 1, 1, 5)
    assert check(tiny_target("llama"), [2]).holds
    assert not check(target, [2]).holds
    assert target.pool.pages_in_use == 0


def test_every_row_of_the_path_is_compared_and_no_other() -> None:
    """The path is every second row of nine."""
    for row in range(9):
        target = tiny_target("llama")
        perturb(target, row, token=7, by=3.0)
        difference = check_tree(target, 4)
        assert (difference is None) == (row % 2 == 1)
        if difference is not None:
            assert (difference.position, difference.row, difference.rows) == (CONTEXT + row // 2, row // 2, 5)


@pytest.mark.parametrize(("size", "context"), [(32, 512), (64, 512), (512, 3), (512, 1)])
def test_a_tree_is_checked_in_little_room(size: int, context: int) -> None:
    target = tiny_target("llama", max_cached_tokens=size)
    target.context = context
    assert check_tree(target, 4) is None
    assert target.pool.pages_in_use == 0
