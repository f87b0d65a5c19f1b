"""Models of published shapes with random weights, so that they can be timed without a download."""

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.utils import _get_classes

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": dict(
        model_type="qwen3",
        hidden_size=4096,
        num_hidden_layers=36,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        tie_word_embeddings=False,
    ),
    "SmolLM2-135M": dict(
        model_type="llama",
        hidden_size=576,
        num_hidden_layers=30,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    ),
    "Qwen3.5-27B": dict(
        model_type="qwen3_5",
        hidden_size=5120,
        num_hidden_layers=64,
        intermediate_size=17408,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_value_heads=48,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        full_attention_interval=4,
        rms_norm_eps=1e-6,
        vocab_size=248320,
        max_position_embeddings=262144,
        tie_word_embeddings=False,
        rope_parameters=dict(type="default", rope_theta=10000000.0, partial_rotary_factor=0.25),
    ),
}


def random_model(name: str, bits: int | None, group_size: int = 64, layers: int | None = None) -> tuple[Any, dict]:
    """Return mlx-lm's model of a published shape with random weights, and its config.

    name: a key of CONFIGS.
    bits: to quantise to; None for bfloat16.
    group_size: of quantised weights.
    layers: fewer than the shape has, for quick runs.
    Weights are made and quantised module by module, so that the unquantised model never exists as a whole. Norms
    are ones; other weights are noise that keeps rows near unit size.
    """
    config = dict(CONFIGS[name])
    if layers is not None:
        config["num_hidden_layers"] = layers
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    mx.random.seed(0)
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            rows, width = module.weight.shape
            if bits is not None and width % group_size == 0:
                replace_module(model, path, random_quantized(module, rows, width, bits, group_size))
            else:
                module.weight = (mx.random.normal((rows, width)) * width**-0.5).astype(mx.bfloat16)
                mx.eval(module.parameters())
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model, config


def random_quantized(module: nn.Module, rows: int, width: int, bits: int, group_size: int) -> nn.Module:
    """Return the quantised form of a linear or embedding module, with uniformly distributed values around zero.

    module: to replace.
    rows, width: of its weight.
    bits, group_size: to quantise to.
    """
    # One row is enough to make the module; quantising all of them would take most of the time.
    module.weight = mx.zeros((1, width), dtype=mx.bfloat16)
    quantized = module.to_quantized(group_size=group_size, bits=bits)
    halves = mx.random.randint(0, 1 << 16, (rows, width * bits // 16)).astype(mx.uint16)
    quantized.weight = halves.view(mx.uint32)
    # The standard deviation of n uniformly distributed integers is n / sqrt(12).
    scale = (12 / width) ** 0.5 / (1 << bits)
    quantized.scales = mx.full((rows, width // group_size), scale, dtype=mx.bfloat16)
    quantized.biases = quantized.scales * (0.5 - (1 << bits) / 2)
    return quantized


def replace_module(root: nn.Module, path: str, new: nn.Module) -> None:
    """Evaluate a module, and replace the one at ``path`` of ``root`` with it."""
    *parents, last = path.split(".")
    owner: Any = root
    for part in parents:
        owner = owner[int(part)] if isinstance(owner, list) else owner[part]
    mx.eval(new.parameters())
    owner[last] = new
