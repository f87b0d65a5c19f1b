"""A linear map over output rows that were cut out of a module, or joined out of several."""

from typing import Any

import mlx.core as mx


def linear_rows(x: mx.array, rows: dict[str, mx.array], packed_as: Any) -> mx.array:
    """Apply output rows: x [..., I] to [..., N].

    rows: ``weight`` [N, I], or its quantised triple ``weight``, ``scales``, ``biases``, packed as the quantised
    module ``packed_as`` says (group size, bits, mode).
    """
    if "scales" not in rows:
        return x @ rows["weight"].T
    return mx.quantized_matmul(
        x,
        rows["weight"],
        rows["scales"],
        rows.get("biases"),
        transpose=True,
        group_size=packed_as.group_size,
        bits=packed_as.bits,
        mode=packed_as.mode,
    )
