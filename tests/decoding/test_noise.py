"""Noise belongs to (seed, position, purpose) and is Gumbel noise."""

import itertools
import subprocess
import sys

import mlx.core as mx
import numpy as np

from mlx_spec.decoding import noise

PURPOSES = (noise.TOKEN, noise.DRAFT, noise.ACCEPT, noise.RESIDUAL, noise.XTC)


def test_the_same_inputs_give_the_same_noise() -> None:
    first = noise.gumbel(3, 17, noise.TOKEN, 50)
    mx.random.seed(99)
    noise.gumbel(3, 18, noise.TOKEN, 50)
    assert mx.array_equal(noise.gumbel(3, 17, noise.TOKEN, 50), first)


def test_the_noise_is_the_same_in_another_process() -> None:
    """Python's own hash would differ from process to process."""
    code = "from mlx_spec.decoding import noise; print(noise.key(3, 17, 2).tolist())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(noise.key(3, 17, 2).tolist())


def test_keys_differ_by_seed_position_and_purpose() -> None:
    seeds = [0, 1, 2, 3, 2**31, 2**32, 2**63, 2**64 - 1, -2]
    places = list(itertools.product(seeds, range(40), PURPOSES))
    keys = mx.stack([noise.key(*place) for place in places]).tolist()
    assert len({tuple(key) for key in keys}) == len(places)


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    assert noise.key(-1, 5, 0).tolist() == noise.key(2**64 - 1, 5, 0).tolist()


def test_neighbouring_keys_give_unrelated_noise() -> None:
    """Correlations of 4096 pairs stay within 5 standard deviations of zero."""
    base = np.array(noise.gumbel(1, 10, noise.TOKEN, 4096))
    others = [(2, 10, 0), (1, 11, 0), (1, 9, 0), (1, 10, 1), (0, 11, 0), (2, 9, 0)]
    for place in others:
        other = np.array(noise.gumbel(*place, 4096))
        assert abs(np.corrcoef(base, other)[0, 1]) < 5 / 64, place


def test_the_noise_is_gumbel_distributed() -> None:
    """Kolmogorov-Smirnov against exp(-exp(-x)), over positions as well as within one."""
    within = np.array(noise.gumbel(5, 3, noise.TOKEN, 3000))
    across = np.array(mx.stack([noise.gumbel(5, p, noise.TOKEN, 2)[1] for p in range(3000)]))
    for values in (within, across):
        assert values.dtype == np.float32
        uniform = np.sort(np.exp(-np.exp(-values.astype(np.float64))))
        distance = np.abs(uniform - (np.arange(3000) + 0.5) / 3000).max()
        # 1.95 / sqrt(n) is exceeded with probability 0.001.
        assert distance < 1.95 / np.sqrt(3000)
