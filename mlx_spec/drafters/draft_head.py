"""What binds a head to its target: the check of its sizes, and its output head over all tokens or some."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from metal_kernels import linear_rows
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target import Target
from mlx_spec.target.linears import linear_of


@dataclass(frozen=True)
class DraftHead:
    """The output head of drafts.

    score: maps hidden states [R, H] to draft logits [R, N].
    size: N.
    ids: [N] int32, the tokens that are scored; None for all, in order.
    """

    score: Callable[[mx.array], mx.array]
    size: int
    ids: mx.array | None = None

    def best(self, hidden: mx.array) -> mx.array:
        """Return the most likely tokens [R] of rows [R, H]."""
        best = mx.argmax(self.score(hidden), axis=-1)
        return best if self.ids is None else self.ids[best]


def check_target(hidden_size: int | None, vocab_size: int | None, target: Target, name: str) -> None:
    """Raise DrafterMismatch, with both numbers, where a head of these sizes does not fit the target."""
    for what, needed, found in (
        ("hidden size", hidden_size, target.hidden_size),
        ("vocabulary size", vocab_size, target.vocab_size),
    ):
        if needed != found:
            raise DrafterMismatch(
                f"{name} expects {what} {needed}; target {target.name} has {found}. "
                "Use the head that was trained with this target."
            )


def draft_head(
    module: Any, target: Target, own_ids: Sequence[int] | None, chosen_ids: Sequence[int] | None, name: str
) -> DraftHead:
    """Return the output head of drafts: the checkpoint's own or the target's, over all tokens or some.

    module: the checkpoint's output head; None for the target's.
    target: to draft for.
    own_ids: ids of the tokens that the checkpoint drafts from; None where it does not name them.
    chosen_ids: ids to draft from in this case; None for all.
    name: of the checkpoint, for the message.
    Raises DrafterMismatch where the head's size does not fit the ids.
    """
    chosen = chosen_ids if own_ids is None else own_ids
    ids = None if chosen is None else mx.array(list(chosen), dtype=mx.int32)
    if module is None:
        if ids is None:
            return DraftHead(target.logits, target.vocab_size)
        return DraftHead(target.head_for(ids), ids.size, ids)
    own, names = linear_of(module), "the target has" if own_ids is None else "d2t names"
    expected = target.vocab_size if ids is None or own_ids is None else ids.size
    if own.size != expected:
        raise DrafterMismatch(f"{name}: its output head scores {own.size} tokens, {names} {expected}.")
    rows = own.select_outputs(ids) if own_ids is None and ids is not None else own
    return DraftHead(partial(linear_rows, linears=rows), rows.size, ids)
