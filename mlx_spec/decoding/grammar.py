"""Grammars: which tokens may come next, by llguidance, at every row of a verify pass.

A place in a grammar never changes. Each row of a round has its own, and so has each fork; a rejected draft leaves
nothing behind, and a round that is taken back goes back to the place before it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, takewhile
from textwrap import shorten
from types import ModuleType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np

from mlx_spec.drafters.tree import Tree
from mlx_spec.errors import RequestError

NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}
# Without a bound a model may fill its text with blank lines.
JSON_OPTIONS = {"whitespace_pattern": r"[\x20\n\r\t]{0,32}"}
BITS = 32


@dataclass(frozen=True)
class Grammar:
    """What a text must match, as plain data; ``json_schema``, ``regex`` and ``lark`` make one.

    kind: how ``text`` is read.
    text: the schema, the expression, or the rules.
    after: the token, by text or id, after which the text must match; what comes before it is free, as thinking
        is. None where all of the text must match.
    Raises RequestError, with llguidance's own sentence for a text that is no grammar.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    after: str | int | None = None

    def __post_init__(self) -> None:
        if self.kind not in NAMES:
            raise RequestError(f"A grammar is of kind {', '.join(NAMES)}, not {self.kind!r}.")
        if not isinstance(self.text, str):
            raise RequestError(f"A {NAMES[self.kind]} is given as text, not {self.text!r}.")
        if self.kind == "json_schema" and not self.text.lstrip().startswith("{"):
            raise RequestError(f"A JSON schema is an object, as {{}}, not {shorten(self.text, 80)!r}.")
        self._refuse(llguidance().LLMatcher.validate_grammar(self._rules()))

    @staticmethod
    def json_schema(schema: Mapping[str, Any] | str, after: str | int | None = None) -> "Grammar":
        """Take JSON that a schema, or the JSON text of one, describes."""
        return Grammar("json_schema", json.dumps(dict(schema)) if isinstance(schema, Mapping) else schema, after)

    @staticmethod
    def regex(pattern: str, after: str | int | None = None) -> "Grammar":
        """Take a text that matches an expression from its beginning to its end."""
        return Grammar("regex", pattern, after)

    @staticmethod
    def lark(rules: str, after: str | int | None = None) -> "Grammar":
        """Take a text of the language of Lark rules, as llguidance reads them."""
        return Grammar("lark", rules, after)

    def start(self, tokenizer: Any, vocab_size: int) -> "Place":
        """Return the place before the first token of a text.

        tokenizer: whose tokens and end tokens they are.
        vocab_size: the width of the model's logits.
        Raises RequestError where tokenizer and grammar do not go together.
        """
        vocabulary = vocabulary_of(tokenizer, vocab_size)
        state = llguidance().LLMatcher(vocabulary, self._rules(), log_level=0)
        self._refuse(state.get_error())
        mark = None if self.after is None else one_token(tokenizer, self.after, vocab_size)
        return Place(state, vocab_size, frozenset(vocabulary.eos_tokens), mark)

    def _rules(self) -> str:
        """Return the grammar as llguidance takes it."""
        matcher = llguidance().LLMatcher
        if self.kind == "json_schema":
            try:
                return str(matcher.grammar_from_json_schema(self.text, defaults=JSON_OPTIONS))
            except ValueError as error:
                self._refuse(str(error))
        return str({"regex": matcher.grammar_from_regex, "lark": matcher.grammar_from_lark}[self.kind](self.text))

    def _refuse(self, problem: str) -> None:
        """Raise RequestError where there is a problem."""
        if problem:
            raise RequestError(f"This {NAMES[self.kind]} cannot be used: {' '.join(problem.split())}")


@dataclass(frozen=True)
class Place:
    """Where a text stands in a grammar. Engines that run in several threads at once need each its own.

    state: llguidance's, which only copies of it move on.
    vocab_size: the width of the logits.
    end_tokens: may come where the text is complete, and nothing else may where it cannot go on.
    mark: the token after which the grammar begins, None once it has begun.
    """

    state: Any
    vocab_size: int
    end_tokens: frozenset[int]
    mark: int | None = None

    def after(self, tokens: Sequence[int]) -> "Place | None":
        """Return the place after more tokens, or None where the grammar refuses one of them."""
        if self.mark is not None:
            if self.mark not in tokens:
                return self
            begun = tokens[list(tokens).index(self.mark) + 1 :]
            return replace(self, mark=None).after(begun)
        state = self.state.deep_copy()
        refused = tokens[state.try_consume_tokens(list(tokens)) :]
        if state.is_error():
            return None
        # Of a text that cannot go on llguidance takes no end token, though it allows one.
        is_end = state.is_stopped() and self.end_tokens.issuperset(refused)
        return replace(self, state=state) if is_end or not refused else None

    def forced(self) -> list[int]:
        """Return the tokens that come next whatever is chosen, as far as llguidance knows them."""
        return [] if self.mark is not None else list(self.state.deep_copy().compute_ff_tokens())

    def runs(self, drafts: Sequence[int], tree: Tree) -> list["Run"]:
        """Return the rows of a tree of drafts at which the grammar rules, as runs. There is one of a chain.

        Rows after a draft that is refused, or ends the text, belong to none: nothing comes of them.
        """
        firsts = [0, *(row for row, parent in enumerate(tree.parents, 1) if parent != row - 1), tree.num_rows]
        found = []
        for row, end in pairwise(firsts):
            path = [drafts[each - 1] for each in tree.paths[row][1:]]
            # A drafter whose numbers are not finite may draft anything, even what is no token.
            place = self if not path else self.after(path) if min(path) >= 0 else None
            following = drafts[row : end - 1]
            if place is not None and place.mark in following:
                begun = following.index(place.mark) + 1
                place, row, following = replace(place, mark=None), row + begun, following[begun:]
            if place is not None and place.mark is None:
                going_on = takewhile(lambda draft: draft >= 0 and draft not in self.end_tokens, following)
                found.append(Run(place, row, list(going_on)))
        return found


@dataclass(frozen=True)
class Run:
    """Rows of a sequence that follow each other.

    place: of the first one.
    row: its number among the rows of the sequence.
    drafts: the tokens of the others.
    """

    place: Place
    row: int
    drafts: list[int]

    def fill_one_by_one(self, bits: np.ndarray, leaves_some: np.ndarray) -> None:
        """Fill in what may come at these rows: words [n, W], and whether anything may, [n]."""
        place: Place | None = self.place
        for index in range(len(self.drafts) + 1):
            if index and place is not None:
                place = place.after(self.drafts[index - 1 : index])
            bits[index] = 2**BITS - 1
            if place is not None:
                state = place.state.deep_copy()
                state.unsafe_compute_mask_ptr(bits[index].ctypes.data, bits[index].nbytes)
                # A grammar that got too complex allows the end tokens; the text would end in its middle.
                if state.is_error():
                    bits[index], leaves_some[index] = 0, False


@dataclass(frozen=True)
class AllowedTokens:
    """What may come at each row of a pass.

    bits: a bit for each token, uint32 [R, ceil(V / 32)], see ``mask_rows``.
    leaves_some: whether anything may, for each row: bool [R].
    """

    bits: np.ndarray
    leaves_some: np.ndarray


def allowed_tokens(runs: Sequence[tuple[int, Run]], num_rows: int) -> AllowedTokens | None:
    """Return what grammars allow at the rows of a pass; None where that is everything at every row.

    runs: with the number of each one's first row among the ``num_rows`` of the pass. At other rows everything may
        come.
    The runs are computed in parallel, outside Python's lock.
    """
    if not runs:
        return None
    words = -(-runs[0][1].place.vocab_size // BITS)
    bits, leaves_some = np.full((num_rows, words), np.uint32(2**BITS - 1)), np.ones(num_rows, dtype=bool)
    # Copies, because another run, or another thread, may begin at the same place.
    states = [run.place.state.deep_copy() for _, run in runs]
    fill(bits, [(state, first, run.drafts) for state, (first, run) in zip(states, runs, strict=True)])
    for state, (first, run) in zip(states, runs, strict=True):
        if state.is_error():
            rows = slice(first, first + len(run.drafts) + 1)
            run.fill_one_by_one(bits[rows], leaves_some[rows])
    return AllowedTokens(bits, leaves_some)


def fill(bits: np.ndarray, runs: Sequence[tuple[Any, int, list[int]]]) -> None:
    """Let llguidance write what may come after states, and after the drafts that follow each.

    runs: (state, row, drafts).
    """
    shape = bits.ctypes.data, bits.itemsize * bits.shape[1], bits.shape[0]
    alone = [(state, row) for state, row, drafts in runs if not drafts]
    if len(runs) == len(alone) == 1:  # needs no other thread
        alone[0][0].unsafe_compute_mask_ptr(bits[alone[0][1]].ctypes.data, shape[1])
    elif alone:
        executor().unsafe_compute_mask_ptr(alone, *shape)
    if followed := [run for run in runs if run[2]]:
        executor().unsafe_compute_mask_ptr_with_draft_token(followed, *shape)


@cache
def executor() -> Any:
    """Return llguidance's threads."""
    return llguidance().LLExecutor()


# By tokenizer, then by width and end tokens: building one takes a second.
_vocabularies: WeakKeyDictionary[Any, dict[tuple[int, tuple[int, ...]], Any]] = WeakKeyDictionary()


def vocabulary_of(tokenizer: Any, vocab_size: int) -> Any:
    """Return llguidance's view of a tokenizer; it is built once. Raises RequestError where there can be none."""
    backend, ends = (getattr(tokenizer, name, None) for name in ("backend_tokenizer", "eos_token_ids"))
    if backend is None or ends is None:
        found = type(tokenizer).__name__
        raise RequestError(
            f"A grammar needs a tokenizer of mlx_spec.load with a tokenizer.json, not this {found}."
        )
    end_tokens = tuple(sorted(ends))
    built = _vocabularies.setdefault(backend, {})
    key = vocab_size, end_tokens
    if key not in built:
        try:
            built[key] = llguidance().LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=list(end_tokens))
        except ValueError as error:
            raise RequestError(f"A grammar cannot be used with this tokenizer: {error}.") from error
    return built[key]


def one_token(tokenizer: Any, token: str | int, vocab_size: int) -> int:
    """Return the id of a token, given by text or id. Raises RequestError for what is none."""
    ids = tokenizer.encode(token, add_special_tokens=False) if isinstance(token, str) else [token]
    if len(ids) != 1:
        raise RequestError(
            f"A grammar begins after one token, but {token!r} is {len(ids)} of this model: give one, or its id."
        )
    if type(ids[0]) is not int or not 0 <= ids[0] < vocab_size:
        raise RequestError(f"A grammar cannot begin after token {token!r}; the vocabulary has {vocab_size}.")
    return ids[0]


def llguidance() -> ModuleType:
    """Return the package. Raises RequestError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            'A grammar needs the package llguidance, which is not installed: pip install "mlx-spec[grammar]".'
        ) from None
    return llguidance
