"""Position encodings of a config.json: what transformers 5.24 computes for them, and what is refused."""

from typing import Any

import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from mlx_spec.checkpoints.rope_settings import RopeSettings, read_rope
from mlx_spec.checkpoints.settings import Settings
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target.rope import rope_frequencies

POSITIONS, DIM = 256, 16
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5]}
LONG |= {"original_max_position_embeddings": 64}
YARN_FREQUENCIES = [1.0, 0.237171, 0.05, 0.00790569, 0.0025, 0.000790569, 0.00025, 7.90569e-05]
# By transformers 5.24 for 16 entries, 256 positions and base 10,000: frequencies and the scale of attention.
JUDGED: dict[str, tuple[dict[str, Any], list[float], float]] = {
    "linear": (
        {"rope_type": "linear", "factor": 4.0},
        [0.25, 0.0790569, 0.025, 0.00790569, 0.0025, 0.000790569, 0.00025, 7.90569e-05],
        1.0,
    ),
    "llama3": (
        LLAMA3,
        [1.0, 0.244385, 0.0130423, 0.00395285, 0.00125, 0.000395285, 0.000125, 3.95285e-05],
        1.0,
    ),
    "yarn": (YARN, YARN_FREQUENCIES, 1.138629),
    "yarn without original_max_position_embeddings": (
        {"rope_type": "yarn", "factor": 4.0},
        [1.0, 0.256935, 0.0625, 0.013835, 0.0025, 0.000790569, 0.00025, 7.90569e-05],
        1.138629,
    ),
    "yarn without factor": ({**YARN, "factor": None}, YARN_FREQUENCIES, 1.138629),
    "yarn with attention_factor": ({**YARN, "attention_factor": 0.75}, YARN_FREQUENCIES, 0.75),
    "yarn with both scales": ({**YARN, "mscale": 0.7, "mscale_all_dim": 0.3}, YARN_FREQUENCIES, 1.053238),
    "yarn with one scale, which means nothing": ({**YARN, "mscale": 0.7}, YARN_FREQUENCIES, 1.138629),
    "yarn with other corrections": (
        {**YARN, "beta_fast": 8, "beta_slow": 2},
        [1.0, 0.197642, 0.025, 0.00790569, 0.0025, 0.000790569, 0.00025, 7.90569e-05],
        1.138629,
    ),
    "longrope": (
        LONG,
        [1.0, 0.210818, 0.05, 0.0126491, 0.00333333, 0.000903508, 0.00025, 7.02728e-05],
        1.154701,
    ),
}


def rope(**config: Any) -> RopeSettings:
    return read_rope(Settings(config, "some/drafter", DrafterMismatch), DIM, POSITIONS)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", JUDGED)
def test_frequencies_are_those_of_transformers(name: str, key: str) -> None:
    settings, frequencies, scale = JUDGED[name]
    found = rope(**{key: settings})
    module = rope_frequencies(initialize_rope(found.dims, found.base, False, found.scaling, POSITIONS))
    np.testing.assert_allclose(np.array(module.frequencies), frequencies, rtol=1e-5)
    assert module.scale == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize(
    ("config", "base"),
    [
        ({}, 1e4),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 1e6}}, 1e6),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_theta": 5e5}, 1e6),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": None, "rope_scaling": None, "rope_theta": 5e5}, 5e5),
        ({"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}, "rope_theta": 5e5}, 5e5),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 5e5}, 5e5),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 7e5}, "sliding_attention": {"rope_theta": 1}}},
            7e5,
        ),
    ],
)
def test_plain_frequencies_and_their_base(config: dict[str, Any], base: float) -> None:
    assert rope(**config) == RopeSettings(DIM, base, None)


@pytest.mark.parametrize("key", ["rope_parameters", None])
def test_a_part_of_a_head_is_rotated(key: str | None) -> None:
    share = {"partial_rotary_factor": 0.25}
    assert rope(**({key: share} if key else share)).dims == 4


def test_other_names_of_known_kinds() -> None:
    for name, kind in (("su", "longrope"), ("deepseek_yarn", "yarn")):
        scaling = rope(rope_scaling={**LONG, **YARN, "factor": None, "type": name, "rope_type": None}).scaling
        assert scaling is not None and scaling["rope_type"] == kind


WRONG = {
    "rope_type": ({"rope_type": "ntk-by-parts"}, {"rope_type": "dynamic", "factor": 2.0}, {"rope_type": 3}),
    "type": ({"type": "ntk-by-parts"},),
    "factor": (
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": "4"},
        {"rope_type": "yarn"},
        {**LLAMA3, "factor": -1},
        {**LONG, "factor": 3.0},
    ),
    "low_freq_factor": ({**LLAMA3, "low_freq_factor": None}, {**LLAMA3, "low_freq_factor": 4.0}),
    "high_freq_factor": ({**LLAMA3, "high_freq_factor": "4"},),
    "original_max_position_embeddings": (
        {**LLAMA3, "original_max_position_embeddings": None},
        {**YARN, "original_max_position_embeddings": 0},
    ),
    "beta_fast": ({**YARN, "beta_fast": 0},),
    "truncate": ({**YARN, "truncate": False}, {**YARN, "truncate": 1}),
    "attention_factor": (
        {**YARN, "attention_factor": 0},
        {**YARN, "factor": 1.0, "attention_factor": 2.0},
        {**LONG, "attention_factor": 1.2},
    ),
    "mscale": ({**YARN, "mscale": "1", "mscale_all_dim": 1},),
    "long_factor": (
        {**LONG, "long_factor": [1.0] * 5},
        {**LONG, "long_factor": None},
        {**LONG, "long_factor": 2.0},
    ),
    "short_factor": ({**LONG, "short_factor": [0.0] * 8},),
    "rope_theta": ({"rope_theta": 0}, {"rope_theta": "1e6"}, {"rope_theta": [1e6]}),
    "partial_rotary_factor": (
        {"partial_rotary_factor": 0},
        {"partial_rotary_factor": 1.5},
        {"partial_rotary_factor": 0.06},
        {"partial_rotary_factor": "half"},
    ),
}


@pytest.mark.parametrize("key", WRONG)
def test_wrong_settings_are_refused_by_key(key: str) -> None:
    for settings in WRONG[key]:
        for place in ("rope_parameters", "rope_scaling"):
            with pytest.raises(DrafterMismatch) as error:
                rope(**{place: settings})
            message = str(error.value)
            assert message.startswith("some/drafter: ") and key in message and place in message


def test_what_is_no_object_is_refused() -> None:
    for value in ([1], "yarn", 3, True):
        for place in ("rope_parameters", "rope_scaling"):
            with pytest.raises(
                DrafterMismatch, match=f"{place} in config.json is .*must be an object of settings"
            ):
                rope(**{place: value})
