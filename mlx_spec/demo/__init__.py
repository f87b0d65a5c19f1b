"""The demo: a small real chat model, and the drafters that were trained for it."""

from pathlib import Path

HELD_OUT = Path(__file__).parent / "heldout40.jsonl"
"""40 prompts that none of the drafters saw in training: JSON lines with prompt, kind and system."""

WORKLOADS = Path(__file__).parent / "workloads.jsonl"
"""Tasks by kind of work: JSON lines as above; of edits and quotes, with the reply that a target is made to say."""

DRAFTERS = {name: Path(__file__).parent / name for name in ("dflash2", "mtp", "eagle")}
"""Folders of the drafters, by the name of their kind."""
