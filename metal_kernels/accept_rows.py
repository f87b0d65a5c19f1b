"""What a round accepts, and all that the host needs to know of it, in one array."""

from collections.abc import Sequence

import mlx.core as mx

from metal_kernels.launching import cpu_library
from metal_kernels.launching.implementations import implementation
from metal_kernels.launching.launch import Kernel

MAX_FLAGS = 4
KERNEL = Kernel(
    "accept_rows",
    inputs=("drafts", "choices", "flags0", "flags1", "flags2", "flags3", "rows"),
    outputs=("outcome",),
)
NO_FLAG = mx.ones((1,), dtype=mx.bool_)


def accept_rows(
    drafts: mx.array, choices: mx.array, flags: Sequence[mx.array] = (), rows: mx.array | None = None
) -> mx.array:
    """Accept drafts as long as each equals the target's own choice.

    drafts: [k] int32, k >= 0.
    choices: [k + 1] int32, what the target chooses in place of each draft and after the last.
    flags: up to four bool arrays of any shape but an empty one.
    rows: bool [k + 1], a flag of the anchor and of each draft.

    Returns [k + 2 + len(flags)] int32: the drafts, how many of them are accepted, the target's choice after those,
    and for each flag whether all its entries are true; with ``rows`` one more: whether those of the anchor and of
    the accepted drafts are. Raises ValueError for other shapes and dtypes.
    """
    k = drafts.size
    if drafts.shape != (k,) or choices.shape != (k + 1,) or {drafts.dtype, choices.dtype} != {mx.int32}:
        raise ValueError(
            "accept_rows takes drafts [k] and choices [k + 1] in int32, "
            f"not {drafts.shape} {drafts.dtype} and {choices.shape} {choices.dtype}."
        )
    if len(flags) > MAX_FLAGS or any(flag.dtype != mx.bool_ or not flag.size for flag in flags):
        found = ", ".join(f"{flag.shape} {flag.dtype}" for flag in flags)
        raise ValueError(f"accept_rows takes at most {MAX_FLAGS} flags, bool and not empty, not {found}.")
    if rows is not None and (rows.shape != (k + 1,) or rows.dtype != mx.bool_):
        raise ValueError(f"accept_rows takes flags of rows in bool [{k + 1}], not {rows.dtype} {rows.shape}.")
    chosen = implementation()
    if chosen == "native":
        return _native(drafts, choices, flags, rows)
    if chosen == "cpu":
        return _cpu(drafts, choices, flags, rows)
    # Whole numbers: MLX's own operations are the reference as well.
    return reference_accept_rows(drafts, choices, flags, rows)


def reference_accept_rows(
    drafts: mx.array, choices: mx.array, flags: Sequence[mx.array] = (), rows: mx.array | None = None
) -> mx.array:
    """Do the same in MLX's operations."""
    accepted = mx.cumprod((drafts == choices[:-1]).astype(mx.int32)) if drafts.size else drafts
    count = mx.sum(accepted).astype(mx.int32)
    if rows is not None:
        flags = [*flags, rows | (mx.arange(rows.size) > count)]
    good = [mx.all(flag).astype(mx.int32)[None] for flag in flags]
    return mx.concatenate([drafts, count[None], choices[count][None], *good])


def _cpu(drafts: mx.array, choices: mx.array, flags: Sequence[mx.array], rows: mx.array | None) -> mx.array:
    outcome = cpu_library.empty((drafts.size + 2 + len(flags) + (rows is not None),), mx.int32)
    sized: list[mx.array | int | None] = [part for flag in flags for part in (flag, flag.size)]
    sized += [None, 0] * (MAX_FLAGS - len(flags))
    cpu_library.call("cpu_accept", drafts, drafts.size, choices, *sized, rows, outcome)
    return outcome


def _native(drafts: mx.array, choices: mx.array, flags: Sequence[mx.array], rows: mx.array | None) -> mx.array:
    k, missing = drafts.size, MAX_FLAGS - len(flags)
    sizes = [flag.size for flag in flags] + [0] * missing
    (outcome,) = KERNEL(
        # An empty buffer cannot be bound (without drafts none is read), and a scalar would not be a pointer.
        [
            drafts if k else choices,
            choices,
            *(flag.reshape(-1) for flag in flags),
            *[NO_FLAG] * missing,
            NO_FLAG if rows is None else rows,
        ],
        template=[
            ("K", k),
            *((f"SIZE{i}", size) for i, size in enumerate(sizes)),
            ("FLAGS", len(flags)),
            ("HAS_ROWS", rows is not None),
        ],
        groups=(1, 1, 1),
        threads=(32, 1, 1),
        shapes=[(k + 2 + len(flags) + (rows is not None),)],
        dtypes=[mx.int32],
    )
    return outcome
