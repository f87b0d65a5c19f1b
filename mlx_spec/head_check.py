"""Warns when an MTP head drafts clearly better in another wiring than in its own."""

import warnings
from typing import Any

import mlx.core as mx

from mlx_spec.cache_folder import cache_folder
from mlx_spec.costs import model_key, read_costs, write_costs
from mlx_spec.drafters.mtp.check import TEXT, better_wiring
from mlx_spec.drafters.mtp.drafter import MTPDrafter
from mlx_spec.target import Target


def check_wiring(target: Target, drafter: MTPDrafter, tokenizer: Any, name: str) -> None:
    """Warn if another wiring fits a head better: measured once per machine, head and version, as costs are."""
    path = cache_folder() / "costs.json"
    key, known = model_key(target, f"wiring of {name}", fingerprint(drafter)), read_costs(path)
    entry = known.get(key)
    if not isinstance(entry, dict) or "better" not in entry:
        entry = known[key] = {"better": better_wiring(target, drafter, list(tokenizer.encode(TEXT)), name)}
        write_costs(path, known)
    if entry["better"]:
        warnings.warn(entry["better"], stacklevel=3)


def fingerprint(drafter: MTPDrafter) -> str:
    """Tell heads apart that lie in the same place one after the other."""
    rows = drafter.rows
    weights = rows.fc.weight, rows.norm_embedding.weight, rows.norm_hidden.weight, rows.norm.weight
    return " ".join(str(mx.sum(weight.astype(mx.float32)).item()) for weight in weights)
