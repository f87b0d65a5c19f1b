"""Stages of a draft pass: recorded only when asked for, equal to their formulas, and named where they are not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from oracles.dflash2_numpy import Array
from tiny_drafters import dflash2_config, write_drafter
from tiny_eagles import eagle_config, eagle_tensors, write_eagle
from tiny_heads import head_tensors, layer_of, write_head, zero_centred
from tiny_models import CONFIGS, tiny_target

from mlx_spec.diagnose.acceptance import request
from mlx_spec.diagnose.stages import DEPARTS, ROWS, StageNumbers, departures, observed
from mlx_spec.diagnose.text import read_text
from mlx_spec.drafters.kind import DrafterOptions
from mlx_spec.drafters.reference import Formula
from mlx_spec.loading.drafter import KINDS, source_of
from mlx_spec.target import Target
from mlx_spec.target.layers import Norm

FULL, STEPS = "full_attention", 3
DFLASH1 = dflash2_config(architectures=["DFlashDraftModel"], is_causal=...)
for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
    del DFLASH1["dflash_config"][key]


def dflash(**changes: Any) -> Callable[[Path, str], Path]:
    config = dflash2_config(**changes)
    return lambda folder, family: write_drafter(folder, config)


def mtp(folder: Path, family: str) -> Path:
    config = {"model_type": "qwen3_5_mtp", "text_config": layer_of(family)}
    return write_head(folder, config, zero_centred(head_tensors(family)))


def eagle(version: int, *parts: str, **changes: Any) -> Callable[[Path, str], Path]:
    def write(folder: Path, family: str) -> Path:
        config = eagle_config(family, version, **changes)
        return write_eagle(folder, config, eagle_tensors(config, version, ("fc", *parts)))

    return write


CASES: dict[str, tuple[str, str, Callable[[Path, str], Path]]] = {
    "DFlash 2, window": ("dflash2", "llama", dflash()),
    "DFlash 2, full and causal": ("dflash2", "llama", dflash(layer_types=[FULL] * 2, is_causal=True)),
    "DFlash 2, scaled embeddings": ("dflash2", "llama", dflash(input_embedding_scale=2.0)),
    "DFlash 1": ("dflash2", "llama", lambda folder, family: write_drafter(folder, DFLASH1)),
    "MTP": ("mtp", "qwen3", mtp),
    "MTP, gated attention": ("mtp", "qwen3_5", mtp),
    "MTP, experts": ("mtp", "qwen3_moe", mtp),
    "EAGLE 1": ("eagle", "llama", eagle(1)),
    "EAGLE 3": ("eagle", "llama", eagle(3)),
    "EAGLE 3, norms and biases": (
        "eagle",
        "llama",
        eagle(3, "fc_norm", "qk_norm", "q bias", norm_before_residual=True),
    ),
}


def loaded(case: str, folder: Path, dtype: mx.Dtype) -> tuple[Target, Any, Callable[[], list[Formula]]]:
    """Write a tiny drafter and load it; also what returns its formulas."""
    name, family, write = CASES[case]
    target = tiny_target(family, dtype=dtype)
    place = write(folder, family)
    kind = next(kind for kind in KINDS if kind.name == name)
    source = source_of(place, case, CONFIGS[family])
    drafter = kind.load(source, target, DrafterOptions(draft_bits=16))
    return target, drafter, lambda: kind.formulas(source, drafter, target, STEPS, ROWS)


def stages_of(target: Target, drafter: Any, begin: int = 0) -> dict[str, Array]:
    tokens = [(37 * i + 5) % target.vocab_size for i in range(begin + ROWS + STEPS + 2)]
    return observed(drafter, read_text(target, "text", tokens, 1, drafter.target_layer_ids), STEPS, begin)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("case", list(CASES))
def test_every_stage_is_what_its_formula_gives(case: str, dtype: mx.Dtype, tmp_path: Path) -> None:
    """At the start of a sequence and far into one."""
    target, drafter, formulas = loaded(case, tmp_path, dtype)
    for begin in (0, 40):
        stages = stages_of(target, drafter, begin)
        found = list(departures(stages, formulas(), dtype))
        wrong = {each.stage: each.units for each in found if each.departs}
        assert not wrong
        compared = {each.stage for each in found}
        left = {name for name in stages if name.rpartition(".")[2] not in BASIS} - compared
        assert not left, "stages that no formula is given for"


# What a pass begins with, the output head, and what follows from a draft.
BASIS = {"capture", "embedded", "positions", "ctx_positions", "logits"}


@pytest.mark.parametrize("case", list(CASES))
def test_observing_changes_no_draft(case: str, tmp_path: Path) -> None:
    target, drafter, _ = loaded(case, tmp_path, mx.float32)
    tokens = [(37 * i + 5) % target.vocab_size for i in range(30)]
    text = read_text(target, "text", tokens, 1, drafter.target_layer_ids)
    drafts = []
    for watched in (False, True):
        state = drafter.open()
        drafter.extend([(state, text.committed(0, 20, drafter.target_layer_ids))])
        asked = [request(state, tokens[20:24])]
        stages: dict[str, mx.array] = {}
        (draft,) = drafter.observe(asked, stages.__setitem__) if watched else drafter.propose(asked)
        drafts.append((np.array(draft.candidates), np.array(draft.ranks)))
        assert bool(stages) == watched
        state.free()
    np.testing.assert_array_equal(drafts[0][0], drafts[1][0])
    np.testing.assert_array_equal(drafts[0][1], drafts[1][1])


def first_departure(case: str, folder: Path, change: Callable[[Any], None]) -> str:
    """The first stage that departs after a change of the loaded drafter."""
    target, drafter, formulas = loaded(case, folder, mx.float32)
    change(drafter)
    found = departures(stages_of(target, drafter), formulas(), mx.float32)
    return next((each.stage for each in found if each.departs), "none")


def larger(norm: Norm) -> Norm:
    return Norm(norm.weight * 1.01, norm.eps)


def in_layer(number: int, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def apply(drafter: Any) -> None:
        layers = list(drafter.forward.layers)
        layers[number] = change(layers[number])
        drafter.forward = replace(drafter.forward, layers=tuple(layers))

    return apply


def in_head(**changes: Callable[[Any], Any]) -> Callable[[Any], None]:
    def apply(drafter: Any) -> None:
        new = {name: change(getattr(drafter.forward, name)) for name, change in changes.items()}
        drafter.forward = replace(drafter.forward, **new)

    return apply


@pytest.mark.parametrize(
    ("case", "change", "stage"),
    [
        (
            "DFlash 2, window",
            in_layer(1, lambda x: replace(x, input_norm=larger(x.input_norm))),
            "layers.1.attention.normed",
        ),
        (
            "DFlash 2, window",
            in_layer(0, lambda x: replace(x, post_norm=larger(x.post_norm))),
            "layers.0.mlp.normed",
        ),
        (
            "DFlash 2, window",
            in_layer(1, lambda x: replace(x, attention=replace(x.attention, scale=0.3))),
            "layers.1.attention.attended",
        ),
        ("DFlash 2, window", in_layer(0, lambda x: replace(x, sees_block=False)), "layers.0.attention.attended"),
        (
            "DFlash 2, window",
            in_layer(1, lambda x: replace(x, attention=replace(x.attention, window=8))),
            "layers.1.attention.attended",
        ),
        (
            "DFlash 2, window",
            in_layer(0, lambda x: replace(x, mlp_conv=replace(x.mlp_conv, base=x.mlp_conv.base[:, ::-1]))),
            "layers.0.mlp.conv_before",
        ),
        ("MTP", in_head(norm_hidden=larger), "x"),
        ("MTP", in_head(post_norm=larger), "steps.0.post_normed"),
        ("EAGLE 3", in_head(norm=larger), "steps.0.hidden"),
        ("EAGLE 3", in_head(attention=lambda a: replace(a, scale=0.3)), "steps.0.attended"),
        ("EAGLE 1", in_head(attention=lambda a: replace(a, window=3)), "steps.0.attended"),
    ],
)
def test_the_first_wrong_stage_is_named(
    case: str, change: Callable[[Any], None], stage: str, tmp_path: Path
) -> None:
    """A weight that a loader changes by 1 %, a scale, a window, a mask, the order of taps."""
    assert first_departure(case, tmp_path, change) == stage


def test_an_ill_conditioned_stage_is_no_alarm() -> None:
    """A sum of large numbers that cancel is rounded by much more than its size: that is expected."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(4, 64)) * 1e4
    x[:, 1::2] = -x[:, ::2] * (1 + rng.normal(size=(4, 32)) * 1e-3)
    rounded = np.array(mx.array(x.astype(np.float32)).astype(mx.bfloat16).astype(mx.float32), dtype=np.float64)
    formula = Formula("sum", ("x",), lambda x: x.sum(axis=1, keepdims=True))
    apart = {"x": x, "sum": rounded.sum(axis=1, keepdims=True)}
    # Far more than bfloat16 would round the sum by.
    assert (abs(apart["sum"] - x.sum(axis=1, keepdims=True)) > 10 * 2**-8 * abs(apart["sum"])).any()
    (found,) = departures(apart, [formula], mx.bfloat16)
    assert not found.departs
    (wrong,) = departures({**apart, "sum": apart["sum"] + 1e5}, [formula], mx.bfloat16)
    assert wrong.units > DEPARTS


def test_numbers_leave_out_what_is_not_finite() -> None:
    found = StageNumbers.of("x", np.array([1.0, np.nan, -3.0, np.inf]))
    assert (found.not_finite, found.least, found.most) == (2, -3.0, 1.0)
    assert found.rms == pytest.approx(5**0.5)
    assert StageNumbers.of("x", np.array([np.nan])).not_finite == 1
