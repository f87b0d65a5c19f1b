"""The demo: a small real chat model, and the drafters that were trained for it."""

from pathlib import Path

DRAFTER_FOLDER = Path(__file__).parent / "dflash2"
MTP_FOLDER = Path(__file__).parent / "mtp"
EAGLE_FOLDER = Path(__file__).parent / "eagle"
