"""What binds a head to its target: its sizes, and the output head of drafts, of all tokens or of some."""

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
    """What turns hidden states into draft logits: score maps [R, H] to [R, N]; ids: the N tokens, None for all."""

    score: Callable[[mx.array], mx.array]
    size: int
    ids: mx.array | None = None

    def best(self, hidden: mx.array) -> mx.array:
        """Return the most likely tokens [R] of rows [R, H]."""
        best = mx.argmax(self.score(hidden), axis=-1)
        return best if self.ids is None else self.ids[best]


def check_target(hidden_size: int | None, vocab_size: int | None, target: Target, name: str) -> None:
    """Raise DrafterMismatch, with both numbers, when a head of these sizes was made for another target."""
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
    """Return the output head of drafts: a checkpoint's own or the target's, of chosen tokens or of all.

    module: the checkpoint's output head, or None. own_ids: the target's ids of the draft tokens, by the
    checkpoint; chosen_ids: what to draft from where it does not say.
    Raises DrafterMismatch where they do not fit.
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
