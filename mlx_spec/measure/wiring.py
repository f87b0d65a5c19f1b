"""Warns where a drafter drafts clearly better under another contract than the one that it declares."""

import warnings
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from mlx_spec.diagnose.acceptance import request
from mlx_spec.diagnose.variants import TEXT, better_at_load, measure_at_load
from mlx_spec.drafters.base import Committed, ObservedDrafter
from mlx_spec.drafters.variants import Variant
from mlx_spec.errors import ModelWarning
from mlx_spec.measure import store
from mlx_spec.target import Target


def check_wiring(
    target: Target,
    drafter: ObservedDrafter,
    variants: Sequence[Variant],
    tokenizer: Any,
    name: str,
    progress: bool = False,
) -> None:
    """Warn where another contract fits a drafter clearly better; measured once per machine, drafter and version.

    target: the drafter's.
    variants: the contracts that its checkpoint may mean; nothing is measured where ``load`` measures none of them.
    tokenizer: the target's.
    name: of the drafter.
    progress: show a bar.
    """
    if not any(variant.at_load for variant in variants):
        return
    key = store.key(target, f"wiring of {name}", fingerprint(target, drafter))
    entry = store.read().get(key)
    if not isinstance(entry, dict) or not isinstance(entry.get("better", 0), str | None):
        what = "Checking the head's wiring, once"
        with tqdm(desc=what, bar_format="{desc}", leave=False, disable=not progress):
            declared, found = measure_at_load(target, drafter, variants, list(tokenizer.encode(TEXT)))
        entry = {"better": better_at_load(declared, found, name)}
        store.write(key, entry)
    if entry["better"]:
        warnings.warn(entry["better"], ModelWarning, stacklevel=3)


def fingerprint(target: Target, drafter: ObservedDrafter) -> str:
    """Return what a drafter drafts after a row of ones, so that another one in the same folder has another key."""
    ones = mx.ones((2, len(drafter.target_layer_ids) * target.hidden_size), dtype=target.dtype)
    state = drafter.open()
    try:
        drafter.extend([(state, Committed(0, mx.array([0, 1]), ones))])
        (draft,) = drafter.propose([request(state, [0, 0])])
        parts = [draft.candidates, *([] if draft.probabilities is None else [draft.probabilities])]
        return " ".join(str(mx.sum(part.astype(mx.float32)).item()) for part in parts)
    finally:
        state.free()
