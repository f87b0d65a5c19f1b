"""What binds a drafter to its target: checks of its sizes, its floating type, and the output head of drafts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from metal_kernels import linear_rows
from mlx_spec.checkpoints.tensors import is_finite, is_quantized, quantize_head, type_name
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target import Target
from mlx_spec.target.linears import linear_of

MAX_SHOWN = 4
# Embeddings are padded to multiples of 64 to 1,024, or hold spare tokens: published sizes of one tokenizer's
# vocabulary differ by 0.4 % and less.
MOST_PADDING, LEAST_SHARE = 2048, 128
# The whole numbers that floating types hold exactly.
EXACT_UP_TO = {mx.bfloat16: 1 << 8, mx.float16: 1 << 11, mx.float32: 1 << 24}


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


def check_target(
    hidden_size: int | None, vocab_size: int | None, target: Target, name: str, num_layers: int | None = None
) -> None:
    """Raise DrafterMismatch, with both numbers, where a drafter was made for another target.

    Vocabularies may differ by padding.

    hidden_size, vocab_size: of the target that the drafter was trained with.
    target: to draft for.
    name: of the drafter, for the message.
    num_layers: of that target; None where the checkpoint does not state it.
    """
    sizes = [("hidden size", hidden_size, target.hidden_size), ("vocabulary size", vocab_size, target.vocab_size)]
    if num_layers is not None:
        sizes.append(("number of target layers", num_layers, target.num_layers))
    for what, needed, found in sizes:
        if needed != found and not (what == "vocabulary size" and differ_by_padding(needed or 0, found)):
            raise DrafterMismatch(
                f"{name} expects {what} {needed}; target {target.name} has {found}. "
                "Use a drafter trained for this target."
            )


def differ_by_padding(one: int, other: int) -> bool:
    """Whether the sizes of two vocabularies differ by no more than rows that are there for alignment."""
    return abs(one - other) <= min(MOST_PADDING, min(one, other) // LEAST_SHARE)


def fit_rows(tensors: Mapping[str, mx.array], module: str, rows: int, wanted: int) -> dict[str, mx.array]:
    """Return tensors in which a module with a row for each token has as many as wanted, of zeros what it lacks.

    module: path of it, quantised or not.
    rows: that it has; with any other number it is left as it is.
    """
    fitted = dict(tensors)
    for name in (f"{module}.{part}" for part in ("weight", "scales", "biases")):
        if name in tensors and tensors[name].shape[0] == rows != wanted:
            value = tensors[name][:wanted]
            fitted[name] = mx.pad(value, [(0, wanted - value.shape[0])] + [(0, 0)] * (value.ndim - 1))
    return fitted


def fit_vocabulary(tensors: Mapping[str, mx.array], vocab_size: int, target: Target) -> dict[str, mx.array]:
    """Return a head's tensors with an embedding for every token of the target, and no scores of other tokens.

    vocab_size: of the checkpoint, which differs from the target's by padding at most.
    """
    embedded = fit_rows(tensors, "embed_tokens", vocab_size, target.vocab_size)
    return fit_rows(embedded, "lm_head", vocab_size, min(vocab_size, target.vocab_size))


def logits_of_first(count: int, target: Target) -> Callable[[mx.array], mx.array]:
    """Return the target's output head over its first ``count`` tokens, or over all that it has."""
    if count >= target.vocab_size:
        return target.logits
    return lambda hidden: target.logits(hidden)[..., :count]


def check_draft_ids(ids: Sequence[int], key: str, target: Target, name: str) -> None:
    """Raise DrafterMismatch for ids of draft tokens that the target does not have, or that come twice.

    A token that comes twice would be drawn with the sum of two probabilities and accepted by one of them.

    ids: the target's ids of the draft tokens, in any order.
    key: what the checkpoint calls them, for the message.
    """
    if not ids:
        raise DrafterMismatch(f"{name}: {key} names no token; at least one draft token is needed.")
    for place, token in enumerate(ids):
        if not 0 <= token < target.vocab_size:
            raise DrafterMismatch(
                f"{name}: {key} maps draft token {place} to {token}; the target has {target.vocab_size} tokens."
            )
    seen, doubled = set[int](), list[int]()
    for token in ids:
        (doubled.append if token in seen else seen.add)(token)
    if doubled:
        raise DrafterMismatch(
            f"{name}: {key} names {shown(sorted(set(doubled)))} more than once; every draft token must be another "
            "token of the target. Use a checkpoint whose draft tokens are all different."
        )


def whole_numbers(tensor: mx.array, key: str, name: str, expected: np.ndarray | None = None) -> np.ndarray:
    """Return the whole numbers [N] in a tensor, which a conversion may have cast to a floating type.

    key: of the tensor, for the message.
    expected: what they are by another tensor of the checkpoint; taken where rounding is all that differs.
    Raises DrafterMismatch where the type may have rounded them.
    """
    if not mx.issubdtype(tensor.dtype, mx.floating):
        return np.array(tensor).reshape(-1).astype(np.int64)
    values = np.array(tensor.astype(mx.float32)).reshape(-1)
    if expected is not None and np.array_equal(
        np.array(mx.array(expected).astype(tensor.dtype).astype(mx.float32)), values
    ):
        return expected
    if not np.all((np.abs(values) <= EXACT_UP_TO[tensor.dtype]) & (values == np.round(values))):
        raise DrafterMismatch(
            f"{name}: {key} is of type {type_name(tensor.dtype)}, which rounds whole numbers above "
            f"{EXACT_UP_TO[tensor.dtype]}; use a checkpoint whose {key} is of type int32 or int64."
        )
    return values.astype(np.int64)


def shown(ids: Sequence[int]) -> str:
    """Return the first few of some ids, for a message."""
    return ", ".join(str(i) for i in ids[:MAX_SHOWN]) + (" ..." if len(ids) > MAX_SHOWN else "")


def fit_to_target(
    module: nn.Module,
    target: Target,
    name: str,
    *,
    quantization: dict[str, Any] | None = None,
    dequantize: bool = False,
) -> None:
    """Give a drafter's loaded weights the target's floating type, scales and biases included.

    quantization: group_size, bits and mode to quantise with what is not quantised, or None.
    dequantize: turn quantised weights into plain ones, which are faster on a CPU.
    Raises DrafterMismatch for weights that the type cannot hold.
    """
    module.set_dtype(target.dtype)
    if quantization is not None and not is_quantized(module):
        quantize_head(module, **quantization)
    if dequantize:
        dequantize_model(module)
        # Some modes dequantise to bfloat16 whatever the other weights are.
        module.set_dtype(target.dtype)
    mx.eval(module.parameters())
    weights = dict(tree_flatten(module.parameters()))
    broken = [path for path, value in weights.items() if not is_finite(value)]
    if broken:
        raise DrafterMismatch(
            f"{name}: {', '.join(sorted(broken)[:MAX_SHOWN])} exceed what {type_name(target.dtype)}, the target's "
            "type, can hold. Load a target in bfloat16 or float32."
        )


def add_own_ends(head: nn.Module, tensors: Mapping[str, mx.array], vocab_size: int, hidden_size: int) -> None:
    """Add modules for an embedding and an output head of a checkpoint's own, where it has them.

    vocab_size: rows of the embedding.
    hidden_size: H, of the head's hidden states.
    """
    if "embed_tokens.weight" in tensors:
        head.embed_tokens = nn.Embedding(vocab_size, hidden_size)
    if "lm_head.weight" in tensors:
        head.lm_head = nn.Linear(hidden_size, tensors["lm_head.weight"].shape[0], bias=False)


def draft_head(
    module: Any,
    target: Target,
    vocab_size: int,
    own_ids: Sequence[int] | None,
    chosen_ids: Sequence[int] | None,
    name: str,
) -> DraftHead:
    """Return the output head of drafts: the checkpoint's own or the target's, over all tokens or some.

    module: the checkpoint's output head; None for the target's.
    target: to draft for.
    vocab_size: of the checkpoint.
    own_ids: ids of the tokens that the checkpoint drafts from; None where it does not name them.
    chosen_ids: ids to draft from in this case; None for all.
    name: of the checkpoint, for the message.
    Raises DrafterMismatch where the head's size does not fit the ids.
    """
    shared = min(vocab_size, target.vocab_size)
    chosen = own_ids
    if chosen is None and chosen_ids is not None:
        chosen = [token for token in chosen_ids if token < shared]
    ids = None if chosen is None else mx.array(list(chosen), dtype=mx.int32)
    if module is None:
        if ids is None:
            return DraftHead(logits_of_first(shared, target), shared)
        return DraftHead(target.head_for(ids), ids.size, ids)
    own, names = linear_of(module), "the target has" if own_ids is None else "d2t names"
    expected = shared if ids is None or own_ids is None else ids.size
    if own.size != expected:
        raise DrafterMismatch(f"{name}: its output head scores {own.size} tokens, {names} {expected}.")
    rows = own.select_outputs(ids) if own_ids is None and ids is not None else own
    return DraftHead(partial(linear_rows, linears=rows), rows.size, ids)
