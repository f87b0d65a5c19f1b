"""The stages of a draft pass by name, for who diagnoses a drafter. Without a record nothing of it is computed."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from metal_kernels import linear_rows
from mlx_spec.target.families import Dense

Record = Callable[[str, mx.array], None]
"""Takes a stage of a draft pass: its name, and its value."""


def within(part: str, record: Record | None) -> Record | None:
    """Return what records the stages of a part of a pass, under its name; None where nothing is recorded."""
    return None if record is None else lambda stage, value: record(f"{part}.{stage}", value)


def record_stages(record: Record | None, **stages: mx.array) -> None:
    """Record values that a pass computes anyway."""
    if record is not None:
        for stage, value in stages.items():
            record(stage, value)


def record_feed_forward(record: Record | None, feed_forward: Any, x: mx.array) -> None:
    """Record gate, up and activation of normed rows [R, H], each [R, I]; nothing of experts."""
    if record is not None and isinstance(feed_forward, Dense):
        gate, up = mx.split(linear_rows(x, feed_forward.gate_up), 2, axis=-1)
        record_stages(record, gate=gate, up=up, activation=feed_forward.activation(x))
