"""Recurrent state: exact after every number of accepted rows, and forked and rewound with its sequence.

In bfloat16, in which the CPU computes each row alike; "equal" means bit for bit.
"""

from contextlib import nullcontext
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher
from tiny_models import HYBRIDS, tiny_target
from traced import traced

import mlx_spec.target.graphs
import mlx_spec.target.target
from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import launching, noting_launches
from mlx_spec.errors import PositionError
from mlx_spec.target import CachedSequence, Pass, Target

TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 90, 240)]
PROMPT = 45

hybrids = pytest.mark.parametrize("family", HYBRIDS)


@cache
def target_of(family: str) -> Target:
    # Enough for the sequences of all tests, which are never freed.
    return tiny_target(family, max_cached_tokens=30000)


def advance(target: Target, sequence: CachedSequence, tokens: list[int], accepted: int | None = None) -> Pass:
    """Run rows and commit the first ``accepted`` of them, or all."""
    rows = target.forward([(sequence, mx.array(tokens))])
    target.commit(sequence, rows.prefix(0, len(tokens) if accepted is None else accepted))
    return rows


def opened(target: Target, tokens: list[int], **options: int) -> CachedSequence:
    sequence = target.open()
    target.prefill(sequence, tokens, **options)
    return sequence


def one_by_one(target: Target, tokens: list[int]) -> CachedSequence:
    """Prefill the prompt, then step row by row."""
    sequence = opened(target, tokens[:PROMPT])
    for token in tokens[PROMPT:]:
        advance(target, sequence, [token])
    return sequence


def probe(target: Target, sequence: CachedSequence) -> list[mx.array]:
    """Run two rows after a sequence; return their outputs, and the states before them."""
    rows = target.forward([(sequence, mx.array([7, 8]))])
    states = [array for layer in rows.recurrent[0].layers for array in (layer.state, layer.conv_state)]
    return [rows.hidden, rows.kv, *states]


def assert_equal_states(target: Target, one: CachedSequence, other: CachedSequence) -> None:
    assert one.length == other.length
    for a, b in zip(probe(target, one), probe(target, other), strict=True):
        assert a.shape == b.shape and mx.array_equal(a, b)


@hybrids
def test_every_number_of_accepted_rows_gives_the_state_of_rows_one_by_one(family: str) -> None:
    """0 to 16 of 16 rows, committed alone, or after all were committed and rewound."""
    target = target_of(family)
    stepped, start = opened(target, TOKENS[:PROMPT]), opened(target, TOKENS[:PROMPT])
    block = target.forward([(start, mx.array(TOKENS[PROMPT : PROMPT + 16]))])
    for count in range(17):
        committed, rewound = start.fork(), start.fork()
        target.commit(committed, block.prefix(0, count))
        target.commit(rewound, block)
        rewound.rewind(PROMPT + count)
        assert_equal_states(target, committed, stepped)
        assert_equal_states(target, rewound, stepped)
        advance(target, stepped, [TOKENS[PROMPT + count]])
    assert start.length == PROMPT


@hybrids
def test_a_rejected_row_of_nan_changes_no_other_row(family: str) -> None:
    """Neither the rows before it nor the state after these."""
    target = tiny_target(family)
    embedding = getattr(target.model, "language_model", target.model).model.embed_tokens
    embedding.weight = mx.where(mx.arange(96)[:, None] == 95, mx.nan, embedding.weight)
    block, stepped = opened(target, TOKENS[:PROMPT]), opened(target, TOKENS[:PROMPT])
    rows = TOKENS[PROMPT : PROMPT + 3]
    hidden = advance(target, block, [*rows, 95, 4], accepted=3).hidden
    alone = mx.concatenate([advance(target, stepped, [token]).hidden for token in rows])
    assert mx.array_equal(hidden[:3], alone) and bool(mx.all(mx.isnan(hidden[3:])))
    assert_equal_states(target, block, stepped)


@hybrids
def test_the_state_depends_on_distant_rows(family: str) -> None:
    """Otherwise a wrong state would soon be forgotten, and the tests here would not notice it."""
    target = target_of(family)
    other = opened(target, [TOKENS[0] + 1, *TOKENS[1:100]])
    for a, b in zip(probe(target, opened(target, TOKENS[:100])), probe(target, other), strict=True):
        assert a.ndim < 4 or not mx.array_equal(a, b)


@hybrids
def test_a_prompt_in_any_chunks_gives_the_state_of_rows_one_by_one(family: str) -> None:
    """Up to 110 rows in a pass; recurrent layers make the gates of 32 at a time."""
    target = target_of(family)
    stepped = one_by_one(target, TOKENS[:110])
    for step_size in (16, 33, 110):
        assert_equal_states(target, opened(target, TOKENS[:110], step_size=step_size), stepped)


@hybrids
def test_sequences_of_a_long_pass_do_not_mix(family: str) -> None:
    """Prompts of 70, 3 and 40 rows in one pass, the second after cached rows."""
    target = target_of(family)
    parts = [TOKENS[:70], TOKENS[100:110], TOKENS[150:190]]
    sequences = [target.open(), opened(target, parts[1][:7]), target.open()]
    new = [parts[0], parts[1][7:], parts[2]]
    both = target.forward([(s, mx.array(tokens)) for s, tokens in zip(sequences, new, strict=True)])
    for index, (sequence, tokens, rows) in enumerate(zip(sequences, parts, new, strict=True)):
        alone = sequence.fork()
        own = advance(target, alone, rows)
        part = both.prefix(index, len(rows))
        assert mx.array_equal(part.hidden, own.hidden) and mx.array_equal(part.kv, own.kv)
        target.commit(sequence, part)
        assert_equal_states(target, sequence, alone)
        assert_equal_states(target, sequence, opened(target, tokens))


@hybrids
def test_branches_with_their_own_accepted_rows_go_on_together(family: str) -> None:
    """Forks of one prefix with different numbers of accepted rows; another sequence joins, and a fork leaves."""
    target, random = target_of(family), np.random.default_rng(3)
    prefix = opened(target, TOKENS[:PROMPT])
    branches = [prefix.fork() for _ in range(3)]
    texts = [TOKENS[:PROMPT] for _ in branches]
    for step in range(6):
        if step == 2:
            branches.append(opened(target, TOKENS[100:120]))
            texts.append(TOKENS[100:120])
        if step == 4:
            del branches[0], texts[0]
        drawn = [[int(t) for t in random.integers(0, 90, size)] for size in random.integers(1, 5, len(branches))]
        rows = target.forward([(s, mx.array(t)) for s, t in zip(branches, drawn, strict=True)])
        for index, (branch, tokens) in enumerate(zip(branches, drawn, strict=True)):
            accepted = int(random.integers(0, len(tokens) + 1))
            target.commit(branch, rows.prefix(index, accepted))
            texts[index] = texts[index] + tokens[:accepted]
    for branch, text in zip(branches, texts, strict=True):
        alone = opened(target, text[:20])
        for token in text[20:]:
            advance(target, alone, [token])
        assert_equal_states(target, branch, alone)
    assert_equal_states(target, prefix, opened(target, TOKENS[:PROMPT]))


def test_an_impossible_rewind_names_the_possible_ones_and_changes_nothing() -> None:
    target = target_of("qwen3_5")
    sequence = opened(target, TOKENS[:PROMPT])
    snapshot = sequence.fork()
    advance(target, sequence, TOKENS[PROMPT : PROMPT + 8], accepted=5)
    with pytest.raises(PositionError, match="to position 44: .* from 50 to 45, or to 0. Fork the sequence"):
        sequence.rewind(PROMPT - 1)
    assert_equal_states(target, sequence, one_by_one(target, TOKENS[: PROMPT + 5]))
    sequence.rewind(PROMPT + 2)
    with pytest.raises(PositionError, match="position 48: the sequence holds 47"):
        sequence.rewind(PROMPT + 3)
    assert_equal_states(target, sequence, one_by_one(target, TOKENS[: PROMPT + 2]))
    sequence.rewind(PROMPT)
    assert_equal_states(target, sequence, snapshot)
    sequence.rewind(0)
    target.prefill(sequence, TOKENS[100:130])
    assert_equal_states(target, sequence, opened(target, TOKENS[100:130]))


def test_a_prompt_is_not_cut() -> None:
    target = target_of("qwen3_5")
    rows = target.forward([(target.open(), mx.array(TOKENS[:17]))])
    with pytest.raises(PositionError, match="forget up to 0 of the newest rows, not 1"):
        rows.prefix(0, 16)


def test_passes_after_prompts_of_any_length_have_one_shape() -> None:
    """Each shape would be another graph to compile."""
    target = target_of("qwen3_5")
    states = [opened(target, TOKENS[:count]).recurrent.layers[0] for count in (17, 40, 64, 101)]
    assert len({tuple(array.shape for array in each) for each in states}) == 1


def test_pages_hold_attention_layers_only() -> None:
    target = target_of("qwen3_5")
    assert target.pool.data.shape[1] == 1
    assert target_of("qwen3_5_moe").pool.data.shape[1] == 2
    assert target.forward([(target.open(), mx.array([1]))]).kv.shape[1] == 1


class Conversation:
    """Greedy decoding on one sequence over several turns, with drafts of which the first few are right."""

    def __init__(self, target: Target, depth: int, known: list[int] | None = None) -> None:
        self.target, self.depth, self.known = target, depth, known or []
        self.sequence, self.text = target.open(), []

    def turn(self, prompt: list[int], count: int) -> None:
        """Append a prompt, whose last token is the first anchor, and decode ``count`` tokens."""
        self.text += prompt
        self.target.prefill(self.sequence, self.text[self.sequence.length : -1], step_size=37)
        end = len(self.text) + count
        while len(self.text) < end:
            self._round(end - len(self.text))

    def _round(self, most: int) -> None:
        at, right = len(self.text), self.sequence.length % 4
        known = self.known[at : at + self.depth]
        drafts = [(token + (i >= right)) % self.target.vocab_size for i, token in enumerate(known)]
        rows = self.target.forward([(self.sequence, mx.array([self.text[-1], *drafts]))])
        choices = mx.argmax(self.target.logits(rows.hidden), axis=-1).tolist()
        accepted = next((i for i, draft in enumerate(drafts) if draft != choices[i]), len(drafts))
        # As at a stop token or a limit, tokens after the end are not committed.
        emitted = choices[: min(accepted + 1, most)]
        self.target.commit(self.sequence, rows.prefix(0, len(emitted)))
        self.text += emitted


@hybrids
def test_three_turns_on_one_sequence(family: str) -> None:
    """The same conversation without drafts, with drafts, and on a fork from before the last turn."""
    target = target_of(family)
    turns = [(TOKENS[:50], 17), (TOKENS[60:63], 9), (TOKENS[70:140], 14)]
    plain = Conversation(target, 0)
    for prompt, count in turns:
        plain.turn(prompt, count)
    assert len(set(plain.text)) > 20
    drafted, forked = Conversation(target, 6, plain.text), Conversation(target, 3, plain.text)
    for prompt, count in turns[:2]:
        drafted.turn(prompt, count)
    forked.sequence, forked.text = drafted.sequence.fork(), list(drafted.text)
    drafted.turn(*turns[2])
    forked.turn(*turns[2])
    assert drafted.text == forked.text == plain.text
    assert_equal_states(target, drafted.sequence, plain.sequence)
    assert_equal_states(target, forked.sequence, plain.sequence)


def test_a_compiled_pass_reads_and_returns_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: each number of rows has its own graph, and each graph takes any number of accepted rows."""
    for module in (mlx_spec.target.target, mlx_spec.target.graphs):
        monkeypatch.setattr(module, "is_traceable", lambda: True)
    monkeypatch.setattr(mx, "compile", traced)
    compiled = tiny_target("qwen3_5", mx.float32)
    sequence = compiled.open()
    with using("stock"):  # the CPU library is called at once
        for count, accepted in ((1, 1), (8, 3), (8, 8), (8, 0), (2, 1), (16, 5), (8, 6)):
            advance(compiled, sequence, TOKENS[sequence.length :][:count], accepted)
        assert len(compiled._graphs._compiled) == 4
        got = probe(compiled, sequence)
    monkeypatch.undo()
    target = tiny_target("qwen3_5", mx.float32)
    for a, b in zip(got, probe(target, opened(target, TOKENS[:24])), strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-4, atol=1e-4)


def test_the_kernels_agree_with_operations_of_mlx() -> None:
    """All Metal kernels of a pass in the emulator: a prompt in chunks, then a partial commit."""
    results = []
    for wrapped in (launching(lambda kernel: launcher(kernel, check=False)), nullcontext()):
        target = tiny_target("qwen3_next", mx.float32, bits=4)
        with wrapped:
            sequence = opened(target, TOKENS[:40])
            advance(target, sequence, TOKENS[40:46], accepted=4)
            results.append(probe(target, sequence))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-4, atol=1e-4)


def test_recurrent_layers_keep_their_kernels_when_exactness_is_turned_off() -> None:
    target = target_of("qwen3_5")
    with launching(lambda kernel: launcher(kernel, check=False)), using("stock"), noting_launches() as launched:
        opened(target, TOKENS[:20])
    names = {kernel.name for kernel in launched}
    assert names == {"causal_conv_advance", "gated_delta_advance"}
