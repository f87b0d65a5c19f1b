"""Reading single settings of a config.json: values, missing ones, and wrong ones, which are named."""

from typing import Any

import pytest

from mlx_spec.checkpoints.settings import Settings
from mlx_spec.errors import DrafterMismatch, ModelWarning


def settings(**values: Any) -> Settings:
    return Settings(values, "some/drafter", DrafterMismatch)


GOOD = {
    "whole": (0, 3, 4.0),
    "count": (1, 3, 4.0),
    "number": (-1, 0.5, 0),
    "positive": (1, 0.5),
    "flag": (True, False),
    "text": ("a", ""),
    "wholes": ([], [1, -2]),
    "texts": ([], ["a", "b"]),
}
BAD = {
    "whole": (-1, 1 << 31, 1.5, "3", True, [3], {}, float("inf")),
    "count": (0, -1, 1.5, "3", True, [3], {}),
    "number": ("1", True, [1.0], {}, float("nan"), float("inf")),
    "positive": (0, -1, "1", True, [1.0], float("nan")),
    "flag": (0, 1, "true", []),
    "text": (1, ["a"], True),
    "wholes": (1, "12", [1.5], ["1"], [True], {"a": 1}),
    "texts": (1, [1], {"a": "b"}, True),
    "part": (1, [1], "x", True),
}
NEEDED = ("whole", "count", "number", "positive", "flag", "text")


@pytest.mark.parametrize("kind", GOOD)
def test_values_of_the_right_kind_are_read(kind: str) -> None:
    for value in GOOD[kind]:
        assert getattr(settings(key=value), kind)("key") == value


@pytest.mark.parametrize("kind", BAD)
def test_values_of_the_wrong_kind_are_named(kind: str) -> None:
    for value in BAD[kind]:
        with pytest.raises(DrafterMismatch) as error:
            getattr(settings(key=value), kind)("key")
        assert str(error.value).startswith(f"some/drafter: key in config.json is {value!r}, and must be ")


@pytest.mark.parametrize("kind", NEEDED)
def test_null_and_nothing_are_missing(kind: str) -> None:
    for found in (settings(), settings(key=None)):
        with pytest.raises(DrafterMismatch, match="some/drafter: config.json has no 'key', which is needed"):
            getattr(found, kind)("key")
        default = GOOD[kind][0]
        assert getattr(found, kind)("key", default) == default


def test_a_whole_float_is_a_whole_number() -> None:
    assert type(settings(key=4.0).count("key")) is int


def test_one_text_is_a_list_of_it() -> None:
    assert settings(key="a").texts("key") == ["a"] and settings().texts("key") == settings().wholes("key") == []


def test_a_list_of_numbers_has_its_length() -> None:
    assert settings(key=[1, 2.5]).positives("key", 2) == [1.0, 2.5]
    for value in ([1.0], [1.0, 0], ["a", 1], 3):
        with pytest.raises(DrafterMismatch, match="must be a list of 2 numbers above 0"):
            settings(key=value).positives("key", 2)


def test_parts_say_where_they_are_and_lie_over_each_other() -> None:
    outer = settings(a=1, inner={"a": 2, "b": None, "c": "x"}, b=3)
    inner = outer.part("inner")
    with pytest.raises(DrafterMismatch, match="c in inner of config.json is 'x'"):
        inner.count("c")
    both = inner.over(outer)
    assert (both.count("a"), both.count("b")) == (2, 3)
    with pytest.raises(DrafterMismatch, match="c in config.json is 'x'"):
        both.count("c")
    assert settings().part("inner").values == {}
    with pytest.raises(DrafterMismatch, match="has no 'inner'"):
        settings().part("inner", required=True)


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(DrafterMismatch) as error:
        settings(key=list(range(1000))).count("key")
    assert len(str(error.value)) < 300


def test_what_nothing_asked_for_and_is_not_harmless_is_named() -> None:
    config = settings(
        a=1,
        b=2,
        off=0,
        none=None,
        empty=[],
        dtype="bfloat16",
        attention_dropout=0.1,
        _own=3,
        known=4,
        inner={"a": 1, "d": 5},
    )
    config.count("a"), config.part("inner")
    assert config.unread({"known"}) == ["b", "d"]
    with pytest.warns(ModelWarning, match="some/drafter: b, d in config.json"):
        config.warn_of_unread({"known"})
    config.get("b"), config.get("d")
    config.warn_of_unread({"known"})
