"""The tokens that drafts are taken from when the draft head is to be small."""

from collections.abc import Sequence
from typing import Any

from mlx_spec.errors import RequestError


def frequent_tokens(tokenizer: Any, wanted: int | Sequence[int] | None, vocab_size: int) -> list[int] | None:
    """Return the ids to draft from, ascending; None for the whole vocabulary.

    wanted: how many, or which. Byte-pair tokenizers number their tokens by how often they came up where they were
    trained, so the frequent ones are those with the lowest ids, and beside these the added tokens that chats use.
    Raises RequestError for a number or an id that makes no sense.
    """
    if wanted is None:
        return None
    if not isinstance(wanted, int):
        ids = sorted(set(wanted))
        if not ids or ids[0] < 0 or ids[-1] >= vocab_size:
            raise RequestError(f"draft_vocab must name tokens from 0 to {vocab_size - 1}, at least one.")
        return ids
    added = {*tokenizer.get_added_vocab().values(), *tokenizer.eos_token_ids}
    always = sorted(i for i in added if 0 <= i < vocab_size)
    if wanted <= len(always):
        raise RequestError(f"draft_vocab must be above {len(always)}, the number of added tokens, not {wanted}.")
    if wanted >= vocab_size:
        return None
    others = (i for i in range(vocab_size) if i not in added)
    return sorted([*always, *(i for i, _ in zip(others, range(wanted - len(always)), strict=False))])
