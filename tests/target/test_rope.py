"""Position encodings that are read from mlx-lm's rope modules rotate heads as the modules do."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator import launcher
from mlx import nn
from mlx_lm.models.rope_utils import initialize_rope

from metal_kernels import qkv_norm_rope
from metal_kernels.launching.implementations import using
from metal_kernels.launching.launch import launching
from mlx_spec.target.rope import rope_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 512,
    "short_factor": [1.0] * 32,
    "long_factor": np.linspace(1, 8, 32).tolist(),
}
KINDS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"type": "linear", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "longrope": LONGROPE,
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "mrope": {"rope_type": "mrope", "mrope_section": [16, 8, 8]},
}


@pytest.fixture(params=["native", "stock", "reference", "cpu"])
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    with launching(launcher), using(request.param):
        yield request.param


def rope_module(kind: str, traditional: bool = False) -> nn.Module:
    return initialize_rope(64, 10_000.0, traditional, KINDS[kind], max_position_embeddings=4096)


@pytest.mark.parametrize(("kind", "traditional"), [*((kind, False) for kind in KINDS), ("default", True)])
def test_equals_the_module_of_mlx_lm(kind: str, traditional: bool, chosen: str) -> None:
    module = rope_module(kind, traditional)
    positions = mx.array([0, 1, 17, 900, 4000, 5, 6, 4095], dtype=mx.int32)
    heads = mx.random.normal((8, 4, 64), key=mx.random.key(1))
    expected = module(heads[:, :3, None], offset=positions)[:, :, 0]
    queries, kv = qkv_norm_rope(
        heads.reshape(8, -1), None, positions, rope_frequencies(module), heads=2, kv_heads=1
    )
    got = mx.concatenate([queries, kv[0]], axis=1)
    if chosen == "stock":
        assert mx.array_equal(got, expected)
    else:
        np.testing.assert_allclose(np.array(got), np.array(expected), atol=2e-3)
        np.testing.assert_allclose(np.array(got[:3]), np.array(expected[:3]), atol=3e-5)


def test_longrope_scales_what_it_rotates() -> None:
    assert rope_frequencies(rope_module("longrope")).scale > 1.05


@pytest.mark.parametrize(
    "module",
    [
        initialize_rope(64, 10_000.0, False, {"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=512),
        nn.ALiBi(),
    ],
)
def test_a_kind_without_a_fixed_table_is_refused_by_name(module: nn.Module) -> None:
    with pytest.raises(ValueError, match=type(module).__name__):
        rope_frequencies(module)
