"""Random numbers that belong to a position of a text, not to the moment when they are drawn."""

import mlx.core as mx

# Purposes, so that draws for one position are independent of each other. ACCEPT + n judges draft n of a position.
TOKEN, DRAFT, RESIDUAL, XTC, ACCEPT = range(5)


def key(seed: int, position: int, purpose: int) -> mx.array:
    """Return the random key of (seed, position, purpose)."""
    mixed = seed & 0xFFFFFFFFFFFFFFFF
    for part in (position, purpose):
        # splitmix64: neighbouring seeds and positions must not give related keys.
        mixed = (mixed + 0x9E3779B97F4A7C15 * (part + 1)) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mx.random.key(mixed)


def gumbel(seed: int, position: int, purpose: int, size: int) -> mx.array:
    """Return Gumbel noise [size] in float32: the argmax of log-probabilities plus it is a draw."""
    return mx.random.gumbel((size,), key=key(seed, position, purpose))
