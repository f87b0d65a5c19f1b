"""The weights of a linear map as MLX holds them."""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Quantization:
    """How MLX quantised weights: ``mode`` affine has scales and biases, the others only scales."""

    group_size: int
    bits: int
    mode: str


@dataclass(frozen=True)
class Linear:
    """Weights [N, K], quantised where ``quantization`` is set, and what is added to the product, ``bias`` [N].

    Those of experts have one more axis in front, [E, N, K] and [E, N]; see ``moe_rows``.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bias: mx.array | None = None
    quantization: Quantization | None = None

    @staticmethod
    def affine(
        weight: mx.array,
        scales: mx.array,
        biases: mx.array,
        group_size: int,
        bits: int,
        bias: mx.array | None = None,
    ) -> "Linear":
        """Bundle what ``mx.quantize`` returns in its affine mode with the settings that it was called with."""
        return Linear(weight, scales, biases, bias, Quantization(group_size, bits, "affine"))

    def select_outputs(self, index: mx.array) -> "Linear":
        """Return a copy of some output rows.

        index: [M] integers from 0 to N - 1, in the order in which their rows come out.
        """
        tensors = {name: value[index] for name, value in self.tensors.items()}
        return Linear(**tensors, quantization=self.quantization)

    def dequantized(self, index: mx.array | None = None) -> mx.array:
        """Return the weights in float32 [N, K]; ``index`` chooses experts of [E, N, K], in any shape [...]."""
        chosen = {name: x if index is None else x[index] for name, x in self.tensors.items()}
        if self.quantization is None:
            return chosen["weight"].astype(mx.float32)
        return mx.dequantize(
            chosen["weight"],
            chosen["scales"].astype(mx.float32),
            chosen["biases"].astype(mx.float32),
            group_size=self.quantization.group_size,
            bits=self.quantization.bits,
        )

    @property
    def size(self) -> int:
        """Number of output rows N."""
        return self.weight.shape[-2]

    @property
    def tensors(self) -> dict[str, mx.array]:
        """The arrays that are there, by name."""
        return {n: v for n, v in vars(self).items() if isinstance(v, mx.array)}
