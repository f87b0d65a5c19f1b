"""When few rows run on the tensor cores of NVIDIA GPUs, and how their products are cut: one tile for all."""

from dataclasses import dataclass

import mlx.core as mx

from metal_kernels.launching.launch import runs_on_cuda

INCLUDES = ("launching/tensor_cores.cuh",)
TILES, STAGES = 2, 2
# Bytes that a copy to shared memory moves at once, and the fewest that a warp takes of a row at a time.
PIECE, CHUNK = 16, 64
# From so many output columns on, blocks of half the warps fill the GPU better.
WIDE = 16384
STATIC_MEMORY = 48 * 1024


@dataclass(frozen=True)
class TensorCut:
    """How ``qmm_rows.cu`` and ``gemm_rows.cu`` cut a product; row_tiles: how many times 8 rows of x there are.

    All else depends on the weights alone, so a row gets the same bits among any number of others.
    """

    row_tiles: int
    warps: int
    groups: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def template(self) -> list[tuple[str, int]]:
        """The kernel's template values for this cut."""
        return [("ROW_TILES", self.row_tiles), ("TILES", TILES), ("WARPS", self.warps), ("STAGES", STAGES)]


def has_tensor_cores(dtype: mx.Dtype) -> bool:
    """Whether rows of a dtype are multiplied by tensor cores here."""
    return runs_on_cuda() and dtype != mx.float32


def tensor_cut(x: mx.array, outputs: int, row_bytes: int, chunk: int, gated: bool) -> TensorCut | None:
    """Cut a product with ``outputs`` weight rows of ``row_bytes`` bytes; a warp takes ``chunk`` of them at a time.

    None where tensor cores cannot do it: on other machines, for weight rows that are no whole number of pieces,
    and for float32 rows, the only ones whose scales and biases may have another dtype.
    """
    if not has_tensor_cores(x.dtype) or row_bytes % PIECE:
        return None
    columns = 16 * TILES
    warps = 8
    if outputs >= WIDE or warps * STAGES * columns * chunk > STATIC_MEMORY:
        warps = 4
    width = outputs // 2 if gated else outputs
    return TensorCut(-(-x.shape[0] // 8), warps, -(-width // (columns // 2 if gated else columns)))
