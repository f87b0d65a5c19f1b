"""The table of published drafters: its names, and which of them fit a model by its shape."""

import re
from collections import Counter
from typing import Any

import pytest

from mlx_spec.loading.published_drafters import PUBLISHED, drafter_hint, fitting_drafters
from mlx_spec.target.families import FAMILIES

QWEN3_8B = {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936}
HYBRID = {"model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64, "vocab_size": 248320}


def test_every_line_names_a_repo_and_a_family_that_runs() -> None:
    for drafter in PUBLISHED:
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", name) for name in (drafter.repo, drafter.target))
        assert drafter.model_type in FAMILIES
        assert min(drafter.hidden_size, drafter.num_hidden_layers, drafter.vocab_size) > 0
    assert max(Counter(drafter.repo for drafter in PUBLISHED).values()) == 1


@pytest.mark.parametrize(
    "config, first",
    [
        (QWEN3_8B, "RedHatAI/Qwen3-8B-speculator.dflash2"),
        ({**QWEN3_8B, "hidden_size": 2560}, "RedHatAI/Qwen3-4B-speculator.dflash2"),
        (
            {"model_type": "qwen3_5", "text_config": {**HYBRID, "hidden_size": 2560, "num_hidden_layers": 32}},
            "mlx-",
        ),
        ({"model_type": "qwen3_5", "text_config": HYBRID}, "z-lab/Qwen3.5-27B-DFlash"),
        (HYBRID, "z-lab/Qwen3.5-27B-DFlash"),
    ],
)
def test_drafters_fit_by_architecture_and_shape(config: dict[str, Any], first: str) -> None:
    fitting = fitting_drafters(config)
    assert fitting[0].repo.startswith(first)
    text = config.get("text_config", config)
    assert {(d.hidden_size, d.num_hidden_layers, d.vocab_size) for d in fitting} == {
        (text["hidden_size"], text["num_hidden_layers"], text["vocab_size"])
    }


@pytest.mark.parametrize("key", list(QWEN3_8B))
def test_another_shape_has_none(key: str) -> None:
    for value in ("llama" if key == "model_type" else 7, None, "4096", [1]):
        assert fitting_drafters({**QWEN3_8B, key: value}) == [] and drafter_hint({**QWEN3_8B, key: value}) is None
    assert (
        fitting_drafters({})
        == fitting_drafters({"text_config": [1]})
        == fitting_drafters({"text_config": 1})
        == []
    )


def test_a_hint_is_one_line_with_the_option_to_give() -> None:
    hint = drafter_hint(QWEN3_8B)
    assert hint is not None and "\n" not in hint
    assert "--drafter RedHatAI/Qwen3-8B-speculator.dflash2 (DFlash 2)" in hint and "for Qwen/Qwen3-8B:" in hint


def test_a_hint_for_one_of_several_models_of_a_shape() -> None:
    hint, named = drafter_hint(HYBRID), drafter_hint(HYBRID, "mlx-community/Qwen3.8-27B-4bit")
    assert hint is not None and "one of 3 models of this shape" in hint
    assert named is not None and "--drafter z-lab/Qwen3.8-27B-DFlash2" in named and "one of" not in named
