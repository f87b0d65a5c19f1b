"""Trees of rows: their shapes, the walk through them, and that their rows are those of plain decoding.

The walk is compared with one written from the definition, a row at a time.
"""

from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from choosing import drawn_at
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import CONFIGS, HYBRIDS, tiny_target
from verified import accept

from metal_kernels.launching.implementations import using
from mlx_spec.decoding import noise
from mlx_spec.decoding.accept import AcceptRule, Coupled, Greedy, Rejection
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.drafters.base import Draft, stacked
from mlx_spec.drafters.siblings import with_siblings
from mlx_spec.drafters.tree import Tree, chain_of, rows_of_path, tree_of
from mlx_spec.engine.verify import emitted_by_rows
from mlx_spec.errors import ContextFull, PositionError, RequestError
from mlx_spec.target import Target

VOCAB, POSITION = 6, 17
TOKENS = [int(t) for t in np.random.default_rng(2).integers(0, 90, 60)]
PARENTS = (0, 1, 2, 0, 0, 1, 2, 2, 4, 9, 9, 6, 12, 3, 14)

trees = st.integers(0, 9).flatmap(
    lambda count: st.tuples(*(st.integers(0, row) for row in range(count))).map(tuple)
)


def path_to(parents: Sequence[int], row: int) -> list[int]:
    """Go up from a row to the anchor."""
    return [0] if row == 0 else [*path_to(parents, parents[row - 1]), row]


@settings(deadline=None)
@given(trees)
def test_a_tree_knows_its_paths(parents: tuple[int, ...]) -> None:
    tree = Tree(parents)
    assert tree.num_rows == len(parents) + 1
    assert [list(path) for path in tree.paths] == [path_to(parents, row) for row in range(tree.num_rows)]
    assert list(tree.depths) == [len(path) - 1 for path in tree.paths]
    assert [(parent, child) for parent, children in enumerate(tree.children) for child in children] == sorted(
        (parent, child) for child, parent in enumerate(parents, 1)
    )
    assert tree.is_chain == all(list(path) == list(range(row + 1)) for row, path in enumerate(tree.paths))
    for path in tree.paths:
        along = tree.along_chain(path)
        assert path[: along + 1] == tree.chain[: along + 1] and not set(path[along + 1 :]) & set(tree.chain)
        assert all(
            row == tree.children[parent][0] for parent, row in zip(tree.chain, tree.chain[1:], strict=False)
        )


def test_whether_the_runner_up_is_accepted() -> None:
    tree = tree_of((0, 1, 2, 0, 0, 2))
    assert tree.chain == (0, 1, 2, 3)
    found = {path: tree.runner_up(path) for path in ((0,), (0, 4), (0, 5), (0, 1), (0, 1, 2), (0, 1, 2, 6))}
    assert found == {(0,): False, (0, 4): True, (0, 5): False, (0, 1): None, (0, 1, 2): False, (0, 1, 2, 6): True}
    assert tree.runner_up((0, 1, 2, 3)) is None
    assert chain_of(3).runner_up((0, 1)) is None
    assert tree_of((0, 1, 2)) is chain_of(3)


def walk(parents: Sequence[int], drafts: Sequence[int], choices: Sequence[int]) -> list[int]:
    """Go from the anchor to the child whose token the target says there, the first one, as long as there is one.

    Siblings of one token are told apart by how far they lead, then by the row that they lead to.
    """

    def deepest(row: int) -> list[int]:
        ways = [
            deepest(child)
            for child, parent in enumerate(parents, 1)
            if parent == row and drafts[child - 1] == choices[row]
        ]
        return [row, *max(ways, key=lambda way: (len(way), -way[-1]), default=[])]

    return deepest(0)


@settings(deadline=None, max_examples=60)
@given(trees, st.integers(0, 2**32), st.sampled_from(["greedy", "coupled"]))
@example((0, 0, 0, 0, 0, 0, 3, 2), 245, "greedy")
def test_the_walk_is_that_of_the_definition(parents: tuple[int, ...], seed: int, kind: str) -> None:
    random, count = np.random.default_rng(seed), len(parents)
    # Few tokens: most rows have a child that is accepted.
    drafts, logits = random.integers(0, 2, count), random.normal(size=(count + 1, VOCAB))
    logits[:, 2:] -= 3
    finite = random.random(count + 1) < 0.8
    tree, scores = tree_of(parents), mx.array(logits, dtype=mx.float32)
    rule: AcceptRule = Greedy() if kind == "greedy" else Coupled(3, 0.5, VOCAB)
    if kind == "greedy":
        choices = logits.argmax(axis=1).tolist()
    else:
        drawn = {depth: noise.gumbel(3, POSITION + 1 + depth, noise.TOKEN, VOCAB) for depth in set(tree.depths)}
        choices = [int(mx.argmax(scores[row] + drawn[depth]).item()) for row, depth in enumerate(tree.depths)]
    expected = walk(parents, drafts.tolist(), choices)
    proposal = Draft(mx.array(drafts, dtype=mx.int32), mx.zeros((count, 1)), parents=parents)
    outcome = accept(rule, proposal, scores, POSITION, [mx.array([True, False])], mx.array(finite))
    values = outcome.tolist()
    assert outcome.dtype == mx.int32 and values[:count] == drafts.tolist()
    path = tree.paths[values[count]]
    assert [drafts[row - 1] for row in path[1:]] == [drafts[row - 1] for row in expected[1:]]
    assert values[count + 1] == choices[path[-1]]
    assert values[count + 2 :] == [0, int(finite[list(path)].all())]
    # Each row of the path emits the token after it.
    said = emitted_by_rows(outcome, tree).tolist()
    assert [said[row] for row in path] == [*(drafts[row - 1] for row in path[1:]), values[count + 1]]


def test_siblings_are_the_next_candidates_by_each_rules_own_order() -> None:
    ids = mx.array([[5, 3, 8, 1], [2, 7, 0, 4]], dtype=mx.int32)
    scores = mx.array([[0.1, 2.0, 1.5, -1.0], [0.3, 0.2, 0.5, 0.9]])
    for rule in (Greedy(), Coupled(4, 0.7, 9), Rejection(4, 0.7)):
        chosen = [drawn_at(rule, POSITION + i, ids[i], scores[i]) for i in range(2)]
        drawn, ranks = stacked([each.probabilities for each in chosen]), mx.stack([each.ranks for each in chosen])
        chain = Draft(mx.stack([each.token for each in chosen]), ids, drawn, {}, ranks)
        tree = with_siblings(chain, (1, 2))
        order = [np.array(ids[i])[np.argsort(-np.array(ranks[i]))].tolist() for i in range(2)]
        assert tree.parents == (0, 1, 0, 1, 1)
        assert tree.tokens.tolist() == [order[0][0], order[1][0], order[0][1], *order[1][1:3]]
        assert tree.candidates.tolist() == [ids.tolist()[i] for i in (0, 1, 0, 1, 1)]
        if drawn is not None and tree.probabilities is not None:
            assert tree.probabilities.tolist() == [drawn.tolist()[i] for i in (0, 1, 0, 1, 1)]
    # There are no more siblings than candidates, and none without ranks.
    assert with_siblings(chain, (9, 0)).parents == (0, 1, 0, 0, 0)
    assert with_siblings(chain, (0, 0)) is chain
    alone = Draft(chain.tokens, ids)
    assert with_siblings(alone, (1, 1)) is alone


def test_each_row_is_processed_with_the_history_of_its_path() -> None:
    seen: list[list[int]] = []

    def note(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    sampling, drafts = Sampling(logits_processors=(note,)), mx.array([4, 5, 6, 7], dtype=mx.int32)
    sampling.processed(mx.zeros((5, VOCAB)), [1, 2], drafts, tree_of((0, 1, 0, 3)))
    assert seen == [[1, 2], [1, 2, 4], [1, 2, 4, 5], [1, 2, 6], [1, 2, 6, 7]]


@cache
def target_of(family: str, bits: int | None) -> Target:
    return tiny_target(family, mx.bfloat16, bits)


def check_rows(target: Target, parents: tuple[int, ...], held: int) -> None:
    """Compare each row of a tree with plain decoding of its path, and commit one path as if it were plain."""
    tree, target_layer_ids, sequence = tree_of(parents), [0, target.num_layers], target.open()
    target.prefill(sequence, TOKENS[:held])
    tokens = mx.array(TOKENS[held : held + tree.num_rows], dtype=mx.int32)
    block = target.forward([(sequence, tokens)], target_layer_ids, tree.paths)
    logits = target.logits(block.hidden)
    for path in tree.paths:
        alone = sequence.fork()
        for row in path:
            one = target.forward([(alone, tokens[row : row + 1])], target_layer_ids)
            target.commit(alone, one)
        assert mx.array_equal(block.hidden[row], one.hidden[0]), path
        assert mx.array_equal(block.aux_hidden_states[row], one.aux_hidden_states[0]), path
        assert mx.array_equal(block.kv[row], one.kv[0]), path
        assert mx.array_equal(logits[row], target.logits(one.hidden)[0]), path
        together = sequence.fork()
        target.commit(together, block.path(0, path))
        assert together.length == alone.length == held + len(path)
        next_row = [target.forward([(each, tokens[:1])], target_layer_ids) for each in (together, alone)]
        assert mx.array_equal(next_row[0].hidden, next_row[1].hidden), path
        alone.free()
        together.free()
    sequence.free()


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("family", [family for family in CONFIGS if family not in HYBRIDS])
def test_a_row_of_a_tree_is_that_of_plain_decoding_and_its_path_is_committed_as_such(
    family: str, bits: int | None
) -> None:
    """After a text whose page the rows leave, and which leaves the window of 40."""
    check_rows(target_of(family, bits), PARENTS[:6] if bits else PARENTS[:9], 29 if bits else 37)


@settings(deadline=None, max_examples=8)
@given(trees, st.integers(0, 40))
def test_rows_of_any_tree_are_those_of_plain_decoding(parents: tuple[int, ...], held: int) -> None:
    check_rows(target_of("llama_sliding", None), parents, held)


def test_trees_of_several_sequences_run_in_one_pass() -> None:
    target, shapes = target_of("llama", None), (tree_of((0, 0, 1)), chain_of(2), tree_of((0, 0)))
    batch, alone = [], []
    for at, tree in enumerate(shapes):
        sequence = target.open()
        target.prefill(sequence, TOKENS[: 11 * at])
        batch.append((sequence, mx.array(TOKENS[40 + at : 40 + at + tree.num_rows], dtype=mx.int32)))
        alone.append(target.forward(batch[-1:], [1], tree.paths))
    together = target.forward(batch, [1], [path for tree in shapes for path in tree.paths])
    for index, (tree, own) in enumerate(zip(shapes, alone, strict=True)):
        for path in tree.paths:
            ours, theirs = together.path(index, path), own.path(0, path)
            for name in ("hidden", "aux_hidden_states", "kv"):
                assert mx.array_equal(getattr(ours, name), getattr(theirs, name)), (index, path, name)


def test_only_the_depth_of_a_tree_has_to_fit_into_the_context() -> None:
    target, tree = target_of("qwen3", None), tree_of((0, 0, 0, 1))
    sequence = target.open()
    sequence.length = target.context - 3
    tokens = mx.zeros((5,), dtype=mx.int32)
    with using("stock"):  # lazy: nothing reads the pages that the sequence lacks
        target.forward([(sequence, tokens)], paths=tree.paths)
    sequence.length += 1
    with pytest.raises(ContextFull, match="3 tokens after 510 do not fit"):
        target.forward([(sequence, tokens)], paths=tree.paths)


@pytest.mark.parametrize("family", HYBRIDS)
def test_recurrent_layers_take_no_trees(family: str) -> None:
    target = target_of(family, None)
    assert not target.takes_trees
    rows = target.forward([(target.open(), mx.array([1, 2, 3]))])
    with pytest.raises(RequestError, match="has recurrent layers, which step through rows in one order"):
        target.forward([(target.open(), mx.array([1, 2, 3]))], paths=tree_of((0, 0)).paths)
    with pytest.raises(PositionError, match=r"in order, not after \[0, 2\]"):
        rows.path(0, (0, 2))
    assert mx.array_equal(rows.path(0, (0, 1)).kv, rows.kv[:2])


def test_rows_of_a_path() -> None:
    x = mx.arange(10).reshape(5, 2)
    for path in ((0,), (0, 1, 2), (0, 3), (0, 2, 4)):
        assert rows_of_path(x, path).tolist() == [x.tolist()[row] for row in path]
