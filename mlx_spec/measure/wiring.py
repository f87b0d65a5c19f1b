"""Warns where a head drafts clearly better in another wiring than in the one that it declares."""

import warnings
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from mlx_spec.diagnose.wiring import TEXT, better_wiring, measure_wirings
from mlx_spec.drafters.wiring import Wirings
from mlx_spec.errors import ModelWarning
from mlx_spec.measure import store
from mlx_spec.target import Target


def check_wiring(target: Target, wirings: Wirings, tokenizer: Any, name: str, progress: bool = False) -> None:
    """Warn where another wiring fits a head clearly better; measured once per machine, head and version.

    target: the head's.
    wirings: of the head.
    tokenizer: the target's.
    name: of the head.
    progress: show a bar.
    """
    key = store.key(target, f"wiring of {name}", fingerprint(target, wirings))
    entry = store.read().get(key)
    if not isinstance(entry, dict) or not isinstance(entry.get("better", 0), str | None):
        what = "Checking the head's wiring, once"
        with tqdm(desc=what, bar_format="{desc}", leave=False, disable=not progress):
            measured = measure_wirings(target, wirings, list(tokenizer.encode(TEXT)))
        entry = {"better": better_wiring(measured, name)}
        store.write(key, entry)
    if entry["better"]:
        warnings.warn(entry["better"], ModelWarning, stacklevel=3)


def fingerprint(target: Target, wirings: Wirings) -> str:
    """Return what a head computes for a row of ones, so that another head in the same folder has another key."""
    declared, forward = wirings.declared, wirings.declared.forward
    ones = mx.ones((1, len(declared.target_layer_ids) * target.hidden_size), dtype=target.dtype)
    embedded, at = wirings.embed(mx.array([0])), mx.array([0], dtype=mx.int32)
    inputs = forward.pre_attention(embedded, forward.features(ones), at)
    scored, hidden = forward.post_attention(inputs, inputs.queries)
    scores = declared.head.score(scored)
    sums = [mx.sum(x.astype(mx.float32)).item() for x in (scores, hidden, inputs.keys_values)]
    return " ".join(map(str, sums))
