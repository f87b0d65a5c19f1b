"""Warns when an MTP or EAGLE head drafts clearly better in another wiring than in its own."""

import warnings
from typing import Any

import mlx.core as mx

from mlx_spec.cache_folder import cache_folder
from mlx_spec.measure.costs import model_key, read_costs, write_costs
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.diagnose.eagle_wiring import measure as measure_eagle
from mlx_spec.diagnose.mtp_wiring import measure as measure_mtp
from mlx_spec.diagnose.wiring import TEXT, better_wiring
from mlx_spec.target import Target

MEASURES = {"mtp": measure_mtp, "eagle": measure_eagle}


def check_wiring(target: Target, drafter: ChainDrafter, tokenizer: Any, name: str) -> None:
    """Warn if another wiring fits a head better: measured once per machine, head and version, as costs are."""
    path = cache_folder() / "costs.json"
    key, known = model_key(target, f"wiring of {name}", fingerprint(target, drafter)), read_costs(path)
    entry = known.get(key)
    if not isinstance(entry, dict) or "better" not in entry:
        measured = MEASURES[drafter.name](target, drafter, list(tokenizer.encode(TEXT)))
        entry = known[key] = {"better": better_wiring(measured, name)}
        write_costs(path, known)
    if entry["better"]:
        warnings.warn(entry["better"], stacklevel=3)


def fingerprint(target: Target, drafter: ChainDrafter) -> str:
    """Tell heads apart that lie in the same place one after the other, by what they make of a row of ones."""
    rows, ones = drafter.rows, mx.ones((1, len(drafter.taps) * target.hidden_size), dtype=target.dtype)
    embedded, at = drafter.embed(mx.array([0])), mx.array([0], dtype=mx.int32)
    entered = rows.enter(embedded, rows.features(ones), at)
    scored, hidden = rows.leave(entered, entered.queries)
    sums = [mx.sum(x.astype(mx.float32)).item() for x in (drafter.head.score(scored), hidden, entered.keys_values)]
    return " ".join(map(str, sums))
