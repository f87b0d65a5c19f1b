"""Text from tokens: characters stay whole, stop strings end the text wherever token borders fall."""

from collections.abc import Sequence
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer
from mlx_lm.utils import load_tokenizer
from tiny_folders import ALPHABET, BOS, EOS, SPECIAL, write_tokenizer

from mlx_spec.demo.model import demo_model_folder
from mlx_spec.generate.text_stream import ZERO_WIDTH_JOINER, TextStream

TEXTS = {
    "ascii": "Plain words, 12 numbers\nand\ttabs.",
    "umlauts": "naïve Übergröße – “quoted” … 5 €",
    "one emoji": "ok 🙂 fine",
    "emoji at the end": "ok 🙂",
    "emoji at the start": "🙂🙃 both",
    "skin tones": "👍🏽👋🏿🤞🏻 three",
    "family": "a 👨‍👩‍👧‍👦 family and a 🧑🏽‍🚀!",
    "heart on fire": "❤️‍🔥",
    "flags": "🇫🇷🇯🇵 and 🏴󠁧󠁢󠁳󠁣󠁴󠁿 and 🏳️‍🌈",
    "cjk": "日本語のテキスト、中文字符,한국어",
    "rare cjk": "𠮷野家 𩸽",
    "combining": "e\u0301a\u0308 नमस्ते",
}


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer of which every byte is a token."""
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("bytes"), merges=[]))


@pytest.fixture(scope="module")
def merged_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer with tokens of several letters."""
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("merged")))


@pytest.fixture(scope="module")
def demo_tokenizer() -> Any:
    return load_tokenizer(demo_model_folder())


def token_ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def stream(
    tokenizer: Any, tokens: Sequence[int], stop: Sequence[str] = (), then_eos: bool = False
) -> tuple[list[str], int | None]:
    """Return the segments, and the number of the token that ended the text by a stop string."""
    text = TextStream(tokenizer, stop)
    ended = next((i for i, token in enumerate(tokens) if text.add(token)), None)
    text.finish(stop_token=then_eos)
    return text.segments, ended


def assert_whole(tokenizer: Any, text: str) -> None:
    tokens = token_ids(tokenizer, text)
    segments, ended = stream(tokenizer, tokens)
    assert ended is None
    assert len(segments) == len(tokens)
    assert "".join(segments) == tokenizer.decode(tokens) == text
    for segment in segments:
        assert "\ufffd" not in segment
        assert not segment.endswith(ZERO_WIDTH_JOINER)


@pytest.mark.parametrize("case", TEXTS)
def test_characters_stay_whole_where_every_byte_is_a_token(byte_tokenizer: Any, case: str) -> None:
    text = TEXTS[case]
    assert len(token_ids(byte_tokenizer, text)) == len(text.encode())
    assert_whole(byte_tokenizer, text)


@pytest.mark.parametrize("case", TEXTS)
def test_characters_stay_whole_in_the_naive_detokenizer(byte_tokenizer: Any, case: str, monkeypatch: Any) -> None:
    """What mlx-lm takes for tokenizers that are neither byte-level nor SentencePiece."""
    naive = NaiveStreamingDetokenizer(byte_tokenizer._tokenizer)
    monkeypatch.setattr(byte_tokenizer, "_detokenizer", naive)
    assert_whole(byte_tokenizer, TEXTS[case])


@pytest.mark.real_model
@pytest.mark.parametrize("case", TEXTS)
def test_characters_stay_whole_with_the_demo_tokenizer(demo_tokenizer: Any, case: str) -> None:
    assert_whole(demo_tokenizer, TEXTS[case])


def test_every_ascii_character_comes_at_once(byte_tokenizer: Any) -> None:
    # mlx-lm's detokenizer holds a space until the next token, and takes byte 0 for its letter.
    for character in (chr(byte) for byte in range(1, 128) if byte != ord(" ")):
        assert stream(byte_tokenizer, token_ids(byte_tokenizer, f"x{character}y"))[0] == ["x", character, "y"]


def test_text_comes_as_soon_as_it_is_certain(byte_tokenizer: Any) -> None:
    segments, _ = stream(byte_tokenizer, token_ids(byte_tokenizer, "aé日b"))
    assert segments == ["a", "", "é", "", "", "日", "b"]


def test_a_character_that_never_completes_is_released_at_the_end(byte_tokenizer: Any) -> None:
    cut = token_ids(byte_tokenizer, "ab日")[:-1]
    assert "".join(stream(byte_tokenizer, cut)[0]) == byte_tokenizer.decode(cut) == "ab\ufffd"


def test_a_joiner_at_the_very_end_is_released(byte_tokenizer: Any) -> None:
    text = "a" + ZERO_WIDTH_JOINER
    assert "".join(stream(byte_tokenizer, token_ids(byte_tokenizer, text))[0]) == text


def test_bytes_that_are_no_text_do_not_stop_the_stream(byte_tokenizer: Any) -> None:
    broken = [len(SPECIAL) + ALPHABET.index("ÿ")] + token_ids(byte_tokenizer, "abc")  # ÿ is the byte 0xff
    segments, _ = stream(byte_tokenizer, broken)
    assert "".join(segments) == byte_tokenizer.decode(broken) == "\ufffdabc"
    assert segments[2:] == ["b", "c"]


def test_two_streams_of_one_tokenizer_do_not_mix(byte_tokenizer: Any) -> None:
    first, second = TextStream(byte_tokenizer), TextStream(byte_tokenizer)
    for a, b in zip(token_ids(byte_tokenizer, "日本"), token_ids(byte_tokenizer, "中文"), strict=True):
        first.add(a)
        second.add(b)
    assert ("".join(first.segments), "".join(second.segments)) == ("日本", "中文")


# (text, stop strings, text that is returned); the token that ends is where the returned text and the stop end.
STOPS: dict[str, tuple[str, list[str], str]] = {
    "in the middle": ("one two three", ["two"], "one "),
    "at the very beginning": ("one two", ["one"], ""),
    "at the very end": ("one two", ["two"], "one "),
    "never": ("one two", ["four"], "one two"),
    "begun but not completed": ("one tw", ["two"], "one tw"),
    "begun twice": ("aab aabaaab", ["aaab"], "aab aab"),
    "the first of two": ("x ENDy STOP", ["STOP", "END"], "x "),
    "the shorter of a prefix pair": ("xabcd", ["abc", "ab"], "x"),
    "the prefix pair in the other order": ("xabcd", ["ab", "abc"], "x"),
    "one that the other's end begins": ("xabcb", ["abd", "bc"], "xa"),
    "a newline": ("first\nsecond", ["\n"], "first"),
    "several characters of several bytes": ("ok 日本語 日本人", ["本人"], "ok 日本語 日"),
    "a whole emoji": ("a 🙂 b", ["🙂"], "a "),
    "a space": ("one two", [" "], "one"),
    "an empty one never": ("one two", [""], "one two"),
}


@pytest.mark.parametrize("kind", ["byte", "merged"])
@pytest.mark.parametrize("case", STOPS)
def test_stop_strings(case: str, kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(f"{kind}_tokenizer")
    text, stop, expected = STOPS[case]
    tokens = token_ids(tokenizer, text)
    segments, ended = stream(tokenizer, tokens, stop)
    assert "".join(segments) == expected
    assert (ended is None) == (expected == text)
    if ended is not None:
        # The token that ends completes a stop string, and the one before it does not.
        assert any(s in tokenizer.decode(tokens[: ended + 1]) for s in stop)
        before = tokenizer.decode(tokens[:ended])
        assert not any(s in before for s in stop) or before.endswith(" ")
        assert len(segments) == ended + 1


def test_a_stop_string_inside_one_token_cuts_the_token(merged_tokenizer: Any) -> None:
    tokens = token_ids(merged_tokenizer, "x the")
    assert [merged_tokenizer.decode([t]) for t in tokens] == ["x", " the"]
    assert stream(merged_tokenizer, tokens, ["h"]) == (["x", " t"], 1)
    assert stream(merged_tokenizer, tokens, [" t"]) == (["x", ""], 1)
    assert stream(merged_tokenizer, tokens, ["e", "t"]) == (["x", " "], 1), "the first of two in one token"


def test_a_stop_string_across_tokens_is_held_back_whole(byte_tokenizer: Any) -> None:
    segments, ended = stream(byte_tokenizer, token_ids(byte_tokenizer, "a<endz"), ["<end>"])
    assert segments == ["a", "", "", "", "", "<endz"]
    assert ended is None
    segments, ended = stream(byte_tokenizer, token_ids(byte_tokenizer, "a<end>z"), ["<end>"])
    assert segments == ["a", "", "", "", "", ""]
    assert ended == 5


def test_no_segment_ever_holds_a_beginning_that_turns_out_a_stop(byte_tokenizer: Any) -> None:
    text = TextStream(byte_tokenizer, ["abab", "bac"])
    for token in token_ids(byte_tokenizer, "xabac"):
        text.add(token)
    assert "".join(text.segments) == "xa"


def test_eos_adds_a_segment_without_text(byte_tokenizer: Any) -> None:
    segments, ended = stream(byte_tokenizer, token_ids(byte_tokenizer, "ab"), then_eos=True)
    assert (segments, ended) == (["a", "b", ""], None)


def test_what_is_held_comes_with_eos(byte_tokenizer: Any) -> None:
    segments, _ = stream(byte_tokenizer, token_ids(byte_tokenizer, "a<e"), ["<end>"], then_eos=True)
    assert segments == ["a", "", "", "<e"]


def test_special_tokens_inside_the_text_do_not_break_it(byte_tokenizer: Any) -> None:
    tokens = [*token_ids(byte_tokenizer, "日"), BOS, *token_ids(byte_tokenizer, "本")]
    assert EOS not in tokens
    assert "".join(stream(byte_tokenizer, tokens)[0]) == byte_tokenizer.decode(tokens)


def test_a_stop_string_completed_by_the_last_released_text_is_cut(byte_tokenizer: Any) -> None:
    """A space that mlx-lm's detokenizer holds back comes only when the stream is finished."""
    segments, ended = stream(byte_tokenizer, token_ids(byte_tokenizer, "ab "), ["b "])
    assert "".join(segments) == "a"
    assert ended is None


@pytest.mark.parametrize("text", [" the", "  two", " ", "  ", " \u65e5", " \nx", "the", ""])
@pytest.mark.parametrize("kind", ["byte", "merged"])
def test_a_text_may_begin_with_spaces(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    """mlx-lm's detokenizer drops the first one; the tokens say it."""
    tokenizer = request.getfixturevalue(f"{kind}_tokenizer")
    tokens = token_ids(tokenizer, text)
    segments, _ = stream(tokenizer, tokens)
    assert "".join(segments) == tokenizer.decode(tokens) == text
    assert len(segments) == len(tokens)


def test_a_stop_string_may_begin_with_the_first_space(merged_tokenizer: Any) -> None:
    tokens = token_ids(merged_tokenizer, " the end")
    assert stream(merged_tokenizer, tokens, [" the"]) == ([""], 0)
    assert stream(merged_tokenizer, tokens, ["  the"])[1] is None
