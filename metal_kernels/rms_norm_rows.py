"""RMSNorm of rows."""

import mlx.core as mx

from metal_kernels.launching import cpu_library
from metal_kernels.launching.implementations import implementation


def rms_norm_rows(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Norm rows [..., H] by their root mean square, and scale them by ``weight`` [H].

    MLX's own operation gives a row a threadgroup of its own, so rows are independent on GPUs as well.
    """
    types, is_cpu = cpu_library.TYPES, implementation() == "cpu"
    if not is_cpu or not x.size or x.dtype not in types or weight.dtype != x.dtype:
        if is_cpu and x.size:
            cpu_library.leave(f"norms of {x.dtype} rows by {weight.dtype} weights".replace("mlx.core.", ""))
        return mx.fast.rms_norm(x, weight, eps)
    out, code, width = cpu_library.empty(x.shape, x.dtype), types[x.dtype], x.shape[-1]
    cpu_library.call("cpu_rms_norm", x, code, weight, code, x.size // width, width, eps, out)
    return out
