"""What products of few rows share: how their kernels are cut and launched, what they take, what is fused in."""

from dataclasses import dataclass

import mlx.core as mx

MAX_VERIFY_ROWS = 16
FLOATS = (mx.bfloat16, mx.float16, mx.float32)
# What the kernels index with an int.
MAX_WEIGHTS = 1 << 31


@dataclass(frozen=True)
class Geometry:
    """How ``row_products.metal`` cuts a product, and the launch that fits.

    rows: of x. columns: weight rows that one lane multiplies. splits: simdgroups that share K; the order of the
    sums depends on it, so it follows from K alone. teams: groups of simdgroups with columns of their own. steps:
    pieces of K that wait in threadgroup memory at once.
    """

    rows: int
    columns: int
    splits: int
    teams: int
    steps: int
    groups: int
    threads: int

    @property
    def template(self) -> list[tuple[str, int]]:
        """The kernel's template values for this cut."""
        names = ("R", "COLUMNS", "SPLITS", "TEAMS", "STEPS")
        values = (self.rows, self.columns, self.splits, self.teams, self.steps)
        return list(zip(names, values, strict=True))


def geometry(rows: int, outputs: int, depth: int, dtype: mx.Dtype, gated: bool) -> Geometry:
    """Cut a product of ``rows`` rows of ``depth`` values in ``dtype`` with ``outputs`` weight rows.

    Two columns to a lane where four would leave cores of a large GPU without simdgroups; few rows have less to do
    and need more of them.
    """
    splits, teams = (1 if depth < 1024 else 2), 2
    columns = 4 if outputs // 16 * splits >= (1024 if rows <= 2 else 256) else 2
    step_bytes = rows * splits * 256 * dtype.size
    steps = min(max(8192 // step_bytes, 1), -(-depth // (splits * 256)))
    width, group = (outputs // 2, teams * columns * 2) if gated else (outputs, teams * columns * 4)
    threads = 32 * splits * teams * (2 if rows > 8 else 1)
    return Geometry(rows, columns, splits, teams, steps, -(-width // group), threads)


def check_rows(name: str, x: mx.array) -> None:
    """Raise ValueError unless x is [R, K] with 1 to 16 rows of floats."""
    if x.ndim != 2 or not 1 <= x.shape[0] <= MAX_VERIFY_ROWS or x.dtype not in FLOATS:
        raise ValueError(
            f"{name} takes x [R, K] with 1 to {MAX_VERIFY_ROWS} rows in bfloat16, float16 or float32, "
            f"not {x.shape} in {x.dtype}."
        )


def check_dense(name: str, depth: int, dtype: mx.Dtype, weight: mx.array) -> None:
    """Raise ValueError unless weight [..., N, K] fits rows of ``depth`` values of ``dtype``."""
    if weight.shape[-1] != depth or weight.dtype != dtype:
        raise ValueError(
            f"{name} takes weights of {depth} values in {dtype}, like x, not {weight.shape} in {weight.dtype}."
        )
    if depth % 8 or not weight.size or weight.shape[-2] * depth >= MAX_WEIGHTS:
        raise ValueError(
            f"{name} takes weights [N, K] whose K is a multiple of 8 and that have 1 to 2^31 - 1 values, "
            f"not {weight.shape}."
        )


def check_packed(
    name: str,
    depth: int,
    dtype: mx.Dtype,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    group_size: int,
    bits: int,
) -> None:
    """Raise ValueError unless the affine triple [..., N, .] fits rows of ``depth`` values of ``dtype``."""
    if bits not in (2, 3, 4, 5, 6, 8) or group_size not in (32, 64, 128):
        raise ValueError(
            f"{name} takes 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128, not {bits} in {group_size}."
        )
    if depth % group_size:
        raise ValueError(f"{name} takes a K that is a multiple of the group, {group_size}, not {depth}.")
    outputs = weight.shape[:-1]
    if weight.dtype != mx.uint32 or weight.shape[-1] != depth * bits // 32:
        raise ValueError(
            f"{name}: {depth} values of {bits} bits are {depth * bits // 32} words in uint32, "
            f"not {weight.shape} in {weight.dtype}."
        )
    groups = (*outputs, depth // group_size)
    if scales.shape != groups or biases.shape != groups:
        raise ValueError(f"{name} takes scales and biases {groups}, not {scales.shape} and {biases.shape}.")
    if scales.dtype != biases.dtype or not _suits(scales.dtype, dtype):
        raise ValueError(
            f"{name} takes scales and biases of x's dtype, or of 16 bits beside float32, "
            f"not {scales.dtype} and {biases.dtype} beside {dtype}."
        )
    # MLX hands inputs of fewer than 8 elements to a kernel in another address space.
    if weight.size < 8 or weight.shape[-2] * depth >= MAX_WEIGHTS:
        raise ValueError(f"{name} takes at least 8 packed words of up to 2^31 - 1 values, not {weight.shape}.")


def check_fused(
    name: str, x: mx.array, outputs: int, bias: mx.array | None, residual: mx.array | None, gated: bool
) -> None:
    """Raise ValueError unless what is fused behind a product of x with ``outputs`` weight rows fits it."""
    if gated and outputs % 2:
        raise ValueError(f"{name}: gates and what they gate are two halves, so {outputs} outputs cannot be gated.")
    if bias is not None and (bias.shape != (outputs,) or not _suits(bias.dtype, x.dtype)):
        raise ValueError(
            f"{name} takes a bias [{outputs}] in {x.dtype}, or of 16 bits beside float32, "
            f"not {bias.shape} in {bias.dtype}."
        )
    shape = (x.shape[0], outputs // 2 if gated else outputs)
    if residual is not None and (residual.shape != shape or residual.dtype != x.dtype):
        raise ValueError(
            f"{name} takes a residual {shape} in {x.dtype}, not {residual.shape} in {residual.dtype}."
        )


def _suits(dtype: mx.Dtype, beside: mx.Dtype) -> bool:
    return dtype == beside or (beside == mx.float32 and dtype in FLOATS)


def finish(product: mx.array, bias: mx.array | None, residual: mx.array | None, gated: bool) -> mx.array:
    """Do in MLX's operations what the kernels fuse: add the bias, gate by silu, add the residual."""
    if bias is not None:
        product = product + bias
    if gated:
        gate, up = mx.split(product, 2, axis=-1)
        product = gate * mx.sigmoid(gate) * up
    return product if residual is None else product + residual
