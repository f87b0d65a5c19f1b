"""Places in a grammar: which tokens may come at each row, and what is refused."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from mlx_lm.utils import load_tokenizer
from tiny_folders import EOS, TOKENS, write_tokenizer

from mlx_spec import Grammar
from mlx_spec.decoding.grammar import Place, Run, allowed_tokens, vocabulary_of
from mlx_spec.drafters.tree import chain_of, tree_of
from mlx_spec.errors import RequestError

# The logits are wider than the tokenizer, as in models whose vocabulary is padded.
WIDTH = len(TOKENS) + 40
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "there": {"type": "boolean"}},
    "required": ["name", "there"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    "regex": Grammar.regex("[0-9]{2,5}(the|in|an)*"),
    "lark": Grammar.lark('start: "a" start "b" | "the"'),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def moved(place: Place, tokens: list[int]) -> Place:
    found = place.after(tokens)
    assert found is not None
    return found


def allowed(place: Place) -> set[int]:
    """Every token that can be taken alone; of a text that is complete, the end token."""
    return {token for token in range(WIDTH) if place.after([token]) is not None}


def rows(place: Place, drafts: list[int], parents: tuple[int, ...] | None = None) -> list[set[int]]:
    """The tokens that a mask leaves at each row."""
    tree = chain_of(len(drafts)) if parents is None else tree_of(parents)
    return tokens_of([(run.row, run) for run in place.runs(drafts, tree)], tree.num_rows)


def tokens_of(runs: Sequence[tuple[int, Run]], num_rows: int) -> list[set[int]]:
    """The tokens that masks leave at the rows of a pass; one by one they are the same."""
    allowed = allowed_tokens(runs, num_rows)
    if allowed is None:
        return [set(range(WIDTH))] * num_rows
    again = np.full_like(allowed.bits, 2**32 - 1)
    for first, run in runs:
        run.fill_one_by_one(again[first : first + len(run.drafts) + 1], np.ones(num_rows, dtype=bool))
    assert np.array_equal(allowed.bits, again)
    bits = np.unpackbits(allowed.bits.view(np.uint8), axis=1, bitorder="little")[:, :WIDTH]
    assert allowed.leaves_some.tolist() == bits.any(axis=1).tolist()
    return [set(np.flatnonzero(row).tolist()) for row in bits]


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_row_is_left_the_tokens_that_the_drafts_before_it_allow(name: str, tokenizer: Any) -> None:
    """Random texts of the grammar, with a draft somewhere that it refuses."""
    random, start = np.random.default_rng(5), GRAMMARS[name].start(tokenizer, WIDTH)
    for _ in range(4):
        drafts, places = list[int](), [start]
        for _ in range(6):
            tokens = sorted(allowed(places[-1]) - {EOS}) or [EOS]
            drafts.append(int(random.choice(tokens)))
            places.append(moved(places[-1], drafts[-1:]))
        ended = drafts.index(EOS) + 1 if EOS in drafts else len(places)
        expected = [allowed(place) if row < ended else set(range(WIDTH)) for row, place in enumerate(places)]
        assert all(expected) and rows(start, drafts) == expected
        # Rows after a refused draft are left as they are.
        wrong = int(random.integers(0, min(6, ended)))
        refused = next(token for token in range(WIDTH) if token not in expected[wrong])
        broken = rows(start, [*drafts[:wrong], refused, *drafts[wrong + 1 :]])
        assert broken[: wrong + 1] == expected[: wrong + 1]
        assert broken[wrong + 1 :] == [set(range(WIDTH))] * (6 - wrong)
        assert rows(start, drafts) == expected


def test_rows_of_a_tree_follow_their_own_paths(tokenizer: Any) -> None:
    start = Grammar.regex("a(bc|the)d|xy").start(tokenizer, WIDTH)
    a, b, c, d, x, y, the = (ids(tokenizer, text)[0] for text in ("a", "b", "c", "d", "x", "y", "the"))
    # Row 3 is refused; 4 and 5 follow "a", 6 follows "ab", 7 "athe", 8 "x".
    found = rows(start, [a, x, d, b, the, c, d, y], (0, 0, 0, 1, 1, 4, 5, 2))
    first_of_the = ids(tokenizer, "t")[0], ids(tokenizer, "th")[0], the
    assert found[0] == {a, x}
    assert found[1] == {b, *first_of_the}
    assert found[2] == {y}
    assert found[3] == set(range(WIDTH))
    assert found[4:] == [{c}, {d}, {d}, {EOS}, {EOS}]


def test_rows_of_several_grammars_are_masked_together(tokenizer: Any) -> None:
    """With one that has none, and one whose grammar has not begun."""
    digits, one = GRAMMARS["regex"].start(tokenizer, WIDTH), ids(tokenizer, "1")
    waiting = Grammar.regex("ab", after="|").start(tokenizer, WIDTH)
    other = moved(GRAMMARS["lark"].start(tokenizer, WIDTH), ids(tokenizer, "a"))
    (chain,), (single,) = digits.runs([*one, *one], chain_of(2)), other.runs([], chain_of(0))
    assert waiting.runs(one, chain_of(1)) == []
    everything, after_one = set(range(WIDTH)), moved(digits, one)
    # Two sequences may stand at the same place.
    found = tokens_of([(0, chain), (5, single), (6, single)], 7)
    expected = [digits, after_one, moved(after_one, one), None, None, other, other]
    assert found == [everything if place is None else allowed(place) for place in expected]


def test_a_complete_text_is_followed_by_end_tokens_alone(tokenizer: Any) -> None:
    place = moved(Grammar.regex("ab").start(tokenizer, WIDTH), ids(tokenizer, "ab"))
    assert rows(place, []) == [{EOS}] == rows(moved(place, [EOS]), [])
    assert moved(Grammar.regex("ab").start(tokenizer, WIDTH), [*ids(tokenizer, "ab"), EOS]) is not None
    # A text that may end or go on ends for good with an end token.
    place = moved(Grammar.regex("[0-9]+").start(tokenizer, WIDTH), ids(tokenizer, "12"))
    assert rows(place, [])[0] > {EOS} and rows(place, [EOS])[1] == set(range(WIDTH))


def test_a_place_does_not_change(tokenizer: Any) -> None:
    start = GRAMMARS["schema"].start(tokenizer, WIDTH)
    first = rows(start, [])
    opened = moved(start, ids(tokenizer, '{"name": "in'))
    assert start.after(ids(tokenizer, '{"other')) is None
    assert opened.after([EOS]) is None
    assert rows(start, []) == first != rows(opened, [])


@pytest.mark.parametrize("after", ["|", TOKENS.index("|")])
def test_a_grammar_may_begin_behind_a_token(after: str | int, tokenizer: Any) -> None:
    """Before it everything is free, and where all rows are, nothing is masked."""
    start, mark = Grammar.regex("ab", after=after).start(tokenizer, WIDTH), TOKENS.index("|")
    x, a, b = (ids(tokenizer, text)[0] for text in "xab")
    everything = set(range(WIDTH))
    assert start.runs([x, x], chain_of(2)) == [] and allowed_tokens([], 3) is None
    assert rows(start, [x, mark, a, b]) == [everything, everything, {a}, {b}, {EOS}]
    assert rows(start, [mark, mark, x]) == [everything, {a}, everything, everything]
    assert rows(start, [x, mark, mark, a], (0, 0, 1, 2)) == [everything, everything, {a}, {a}, {b}]
    assert moved(start, [x, x]) is start
    assert rows(moved(start, [x, mark, a]), []) == [{b}]
    # The mark of a grammar that has begun is a token like any other.
    assert moved(start, [mark]).after([mark]) is None


def test_white_space_of_json_is_bounded(tokenizer: Any) -> None:
    start = Grammar.json_schema({"type": "object"}).start(tokenizer, WIDTH)
    assert start.after(ids(tokenizer, "{" + "\n" + " " * 31 + "}")) is not None
    assert start.after(ids(tokenizer, "{" + " " * 33 + "}")) is None
    free = {"type": "object", "x-guidance": {"whitespace_pattern": " *"}}
    assert Grammar.json_schema(free).start(tokenizer, WIDTH).after(ids(tokenizer, "{" + " " * 33 + "}"))


def test_a_grammar_that_got_too_complex_allows_nothing(tokenizer: Any) -> None:
    """llguidance itself allows the end tokens then, which would end a text in its middle."""
    rules = LLMatcher.grammar_from_regex("(a|b)*a(a|b){9}")
    limits = LLParserLimits(step_lexer_fuel=10)
    state = LLMatcher(vocabulary_of(tokenizer, WIDTH), rules, limits=limits, log_level=0)
    place = Place(state, WIDTH, frozenset([EOS]))
    assert rows(place, []) == [set()]
    assert place.after(ids(tokenizer, "ab")) is None


def test_the_vocabulary_of_a_tokenizer_is_built_once(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def build(*args: Any, **options: Any) -> Any:
        built.append(options)
        return LLTokenizer(*args, **options)

    monkeypatch.setattr("llguidance.LLTokenizer", build)
    other = load_tokenizer(write_tokenizer(tmp_path))
    for grammar in GRAMMARS.values():
        grammar.start(other, WIDTH)
    assert built == [{"n_vocab": WIDTH, "eos_token": [EOS]}]
    other.add_eos_token("|")
    place = moved(Grammar.regex("a").start(other, WIDTH), ids(other, "a"))
    assert rows(place, []) == [{EOS, TOKENS.index("|")}] and place.end_tokens == {EOS, TOKENS.index("|")}
    assert len(built) == 2


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Grammar.json_schema({"type": "strin"}), "This JSON schema cannot be used: Invalid type: strin"),
        (lambda: Grammar.json_schema({"not": {}}), 'Unimplemented keys: ["not"]'),
        (lambda: Grammar.json_schema('{"type"'), "This JSON schema cannot be used: EOF while parsing"),
        (lambda: Grammar.json_schema("[]"), "A JSON schema is an object, as {}, not '[]'"),
        (lambda: Grammar.json_schema([]), "A JSON schema is given as text, not []"),  # type: ignore[arg-type]
        (lambda: Grammar.regex("(a"), "This regular expression cannot be used: .*unclosed group"),
        (lambda: Grammar.regex(5), "A regular expression is given as text, not 5"),  # type: ignore[arg-type]
        (lambda: Grammar.lark("start: other"), 'This Lark grammar cannot be used: .*unknown name: "other"'),
        (lambda: Grammar("yaml", "a"), "A grammar is of kind json_schema, regex, lark, not 'yaml'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(make: Any, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence.replace("[", r"\[").replace("(", r"\(")) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_what_does_not_fit_the_tokenizer_is_refused(tokenizer: Any) -> None:
    for grammar, sentence in (
        (Grammar.lark("start: <|nope|>"), "This Lark grammar cannot be used: .*<|nope|>"),
        (Grammar.regex("a", after="much text"), "begins after one token, but 'much text' is 9 of this model"),
        (Grammar.regex("a", after=WIDTH), f"after token {WIDTH}; the vocabulary has {WIDTH}"),
        (Grammar.regex("a", after=-1), "after token -1"),
        (Grammar.regex("a", after=2.5), "after token 2.5"),  # type: ignore[arg-type]
    ):
        with pytest.raises(RequestError, match=sentence.replace("|", r"\|")):
            grammar.start(tokenizer, WIDTH)
    with pytest.raises(RequestError, match="cannot be used with this tokenizer: vocab size too small; 50 vs"):
        GRAMMARS["regex"].start(tokenizer, 50)
    with pytest.raises(RequestError, match=r"with a tokenizer\.json, not this object"):
        GRAMMARS["regex"].start(object(), WIDTH)


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r'not installed: pip install "mlx-spec\[grammar\]"'):
        Grammar.regex("a")


def test_a_grammar_is_plain_data() -> None:
    assert Grammar.json_schema(SCHEMA) == Grammar.json_schema(json.dumps(SCHEMA)) == GRAMMARS["schema"]
    assert len({*GRAMMARS.values(), Grammar.regex("a"), Grammar.regex("a", after="|")}) == 5
