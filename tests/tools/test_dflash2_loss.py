"""The training loss of a DFlash 2 drafter against its formula in float64, and its gradient against autodiff."""

import mlx.core as mx
import numpy as np
from tiny_drafters import dflash2_config

from metal_kernels.launching.implementations import using
from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.dflash2.config import read_config
from tools import dflash2_loss as dflash2
from tools.teacher import AFTER_A_MISS, Frozen, expected_head_rows

VOCAB, DRAFTED = 1300, 1024
FULL = {"layer_types": ["full_attention"] * 2, "vocab_size": VOCAB}


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def logsumexp(logits: np.ndarray) -> float:
    return float(np.log(np.exp(logits - logits.max()).sum()) + logits.max())


def frozen_target(width: int) -> Frozen:
    """A target whose tokens 100 .. 1123 can be drafted."""
    ids, index = np.arange(100, 100 + DRAFTED), np.full(VOCAB, -1, dtype=np.int32)
    index[ids] = np.arange(DRAFTED)
    rows = mx.random.normal((VOCAB, width))
    return Frozen(rows, 0.5 * rows[mx.array(ids)], mx.array(ids), mx.array(index))


def formula(
    selector: dict[str, np.ndarray],
    frozen: Frozen,
    k: int,
    blocks: tuple[np.ndarray, ...],
    hidden: np.ndarray,
    final_hidden: np.ndarray,
    hard: float,
) -> float:
    """Walk over every draft of every block: cross entropy of all logits, and of the k candidates' scores."""
    tokens, lengths, anchors, rows = blocks
    head, index = np.array(frozen.head, np.float64), np.array(frozen.draft_index)
    total = weight = 0.0
    for n, a in np.ndindex(anchors.shape):
        misses = 0
        for step in range(1, hidden.shape[2] + 1):
            at = anchors[n, a] + step
            exists = at < lengths[n] and step < rows[n, a]
            at = min(at, tokens.shape[1] - 1)
            state, gold, before = hidden[n, a, step - 1], index[tokens[n, at]], tokens[n, at - 1]
            counts = exists and gold >= 0
            gold = max(gold, 0)
            logits, teacher = head @ state, softmax(head @ final_hidden[n, at - 1])
            plain = logsumexp(logits) - hard * logits[gold] - (1 - hard) * teacher @ logits
            found = list(np.argsort(-logits)[:k])
            if gold not in found:
                found[-1] = gold
            edge = selector["predecessor"][before] * (selector["hidden"] @ state)
            scores = logits[found] + selector["successor"][np.array(found) + 100] @ edge
            shares = (1 - hard) * teacher[found] / teacher[found].sum() + hard * (np.array(found) == gold)
            if counts:
                total += AFTER_A_MISS**misses * (plain + logsumexp(scores) - shares @ scores)
                weight += AFTER_A_MISS**misses
            misses += found[int(np.argmax(scores))] != gold
    return total / weight


def test_the_loss_is_the_formula() -> None:
    """float32: one token in five cannot be drafted, sequences end inside blocks, blocks have few rows or all."""
    mx.random.seed(3)
    config = read_config(dflash2_config(**FULL), "tiny")
    model, frozen, size = DraftModel(config), frozen_target(config.hidden_size), 24
    tokens, rows = mx.random.randint(0, VOCAB, (2, size)), mx.array([[8, 5, 8], [3, 8, 4]])
    lengths, anchors = mx.array([24, 17]), mx.array([[3, 20, 9], [9, 2, 12]])
    final_hidden = mx.random.normal((2, size, config.hidden_size))
    aux_hidden_states = mx.random.normal((2, size, len(config.target_layer_ids) * config.hidden_size))
    expected = expected_head_rows(frozen, frozen.score(final_hidden))
    with using("stock"):
        got = dflash2.loss(
            model,
            config,
            frozen,
            tokens,
            lengths,
            anchors,
            rows,
            final_hidden,
            expected,
            aux_hidden_states,
            hard=0.3,
        )
        hidden = dflash2.block_hidden(model, config, frozen, tokens, anchors, rows, aux_hidden_states)[:, :, 1:]
    selector = model.candidate_selector
    weights = {
        "predecessor": selector.predecessor_codebook.weight,
        "successor": selector.successor_codebook.weight,
        "hidden": selector.hidden_projection.weight,
    }
    blocks = tuple(np.array(part) for part in (tokens, lengths, anchors, rows))
    wanted = formula(
        {name: np.array(weight, np.float64) for name, weight in weights.items()},
        frozen,
        config.selector_top_k,
        blocks,
        np.array(hidden, np.float64),
        np.array(final_hidden, np.float64),
        hard=0.3,
    )
    np.testing.assert_allclose(float(got.item()), wanted, rtol=1e-5)


def test_the_normaliser_has_the_value_and_the_gradient_of_logsumexp() -> None:
    mx.random.seed(4)
    frozen, hidden = frozen_target(32), mx.random.normal((3, 5, 32))

    def without_logits(hidden: mx.array) -> mx.array:
        return mx.sum(mx.arange(5) * dflash2.log_normaliser(frozen, hidden, frozen.score(hidden)))

    def plain(hidden: mx.array) -> mx.array:
        return mx.sum(mx.arange(5) * mx.logsumexp(frozen.score(hidden), axis=-1))

    (value, gradient), (wanted, reference) = (mx.value_and_grad(f)(hidden) for f in (without_logits, plain))
    np.testing.assert_allclose(value.item(), wanted.item(), rtol=1e-6)
    np.testing.assert_allclose(np.array(gradient), np.array(reference), atol=2e-5)
