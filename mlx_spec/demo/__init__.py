"""The demo: a small real chat model, and the drafters that were trained for it."""

from pathlib import Path

DRAFTERS = {name: Path(__file__).parent / name for name in ("dflash2", "mtp", "eagle")}
