"""Models and drafters of published shapes with random weights, so that they can be timed without a download."""

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import _get_classes

from mlx_spec.checkpoints.settings import Settings
from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.dflash2.config import read_config
from mlx_spec.drafters.dflash2.drafter import DFlash2Drafter
from mlx_spec.drafters.draft_head import draft_head
from mlx_spec.drafters.eagle.head import EagleForward, EagleHead
from mlx_spec.drafters.eagle.spec import read_head_config, read_spec
from mlx_spec.drafters.mtp.head import MTPForward, MTPHead
from mlx_spec.drafters.mtp.spec import spec_of
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target import Target
from mlx_spec.target.families import family_of

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
    "Qwen3.5-35B-A3B": dict(
        model_type="qwen3_5_moe",
        hidden_size=2048,
        num_hidden_layers=40,
        intermediate_size=6144,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_value_heads=32,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        full_attention_interval=4,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        vocab_size=248320,
        max_position_embeddings=262144,
        tie_word_embeddings=False,
        rope_parameters=dict(type="default", rope_theta=10000000.0, partial_rotary_factor=0.25),
    ),
}
# What drafters of published sizes have in common whatever their target: layers, block, selector; an EAGLE head's
# vocabulary of its own.
DFLASH2 = dict(num_hidden_layers=5, block_size=16, mask_token_id=0, is_causal=False)
DFLASH2 |= dict(conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16)
EAGLE_VOCABULARY = 32000


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
    randomise(model, bits, group_size)
    return model, config


def randomise(model: nn.Module, bits: int | None, group_size: int = 64) -> None:
    """Give a module random weights in bfloat16, quantised where ``bits`` says so."""
    mx.random.seed(0)
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | SwitchLinear):
            *experts, rows, width = module.weight.shape
            # Small matrices that choose experts are never quantised.
            routes = path.endswith(("mlp.gate", "shared_expert_gate"))
            if bits is not None and width % group_size == 0 and not routes:
                quantized = random_quantized(module, (*experts, rows, width), bits, group_size)
                replace_module(model, path, quantized)
            else:
                module.weight = (mx.random.normal(module.weight.shape) * width**-0.5).astype(mx.bfloat16)
                mx.eval(module.parameters())
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())


def random_drafter(kind: str, target: Target, config: dict[str, Any], bits: int | None) -> Drafter:
    """Return a drafter of a published size for a target, with random weights.

    kind: dflash2, eagle or mtp.
    config: the target's.
    bits: to quantise to; None for bfloat16.
    """
    return {"dflash2": random_dflash2, "eagle": random_eagle, "mtp": random_mtp}[kind](target, config, bits)


def random_dflash2(target: Target, config: dict[str, Any], bits: int | None) -> Drafter:
    """Return a DFlash 2 drafter of five layers, each as wide as the target's; see ``random_drafter``."""
    layer = {key: config[key] for key in ("hidden_size", "intermediate_size", "rms_norm_eps", "vocab_size")}
    heads = (
        dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128)
        if config.get("head_dim")
        else {key: config[key] for key in ("num_attention_heads", "num_key_value_heads")}
    )
    positions = dict(rope_theta=1000000.0, max_position_embeddings=config["max_position_embeddings"])
    sizes = {**layer, **heads, **positions, "num_target_layers": config["num_hidden_layers"]}
    read = read_config({"architectures": ["DFlash2DraftModel"], **sizes, **DFLASH2}, "random DFlash 2")
    model = DraftModel(read)
    randomise(model, bits)
    return DFlash2Drafter(read, model, target)


def random_eagle(target: Target, config: dict[str, Any], bits: int | None) -> Drafter:
    """Return an EAGLE-3 head with an output head of its own; see ``random_drafter``."""
    settings = Settings({**config, "model_type": "llama"}, "random EAGLE-3", DrafterMismatch)
    sizes, spec = read_head_config(settings), read_spec(settings, True, target.num_layers)
    head = EagleHead(sizes, spec, ())
    head.lm_head = nn.Linear(sizes.hidden_size, min(EAGLE_VOCABULARY, sizes.vocab_size), bias=False)
    randomise(head, bits)
    ids = range(head.lm_head.weight.shape[0])
    scores = draft_head(head.lm_head, target, sizes.vocab_size, ids, None, settings.name)
    forward = EagleForward.of(head, sizes, spec, settings.name)
    return ChainDrafter("eagle", forward, spec.target_layer_ids, target, scores)


def random_mtp(target: Target, config: dict[str, Any], bits: int | None) -> Drafter:
    """Return an MTP head with a decoder layer as the target's; see ``random_drafter``."""
    head, name = MTPHead(config), "random MTP"
    randomise(head, bits)
    forward = MTPForward.of(head, spec_of(config, name), family_of(config, name), name)
    scores = draft_head(None, target, target.vocab_size, None, None, name)
    return ChainDrafter("mtp", forward, (target.num_layers,), target, scores)


def random_quantized(module: Any, shape: tuple[int, ...], bits: int, group_size: int) -> nn.Module:
    """Return the quantised form of a module with a matrix, or several, with uniform values around zero.

    module: to replace.
    shape: of its weight.
    bits, group_size: to quantise to.
    """
    # One row is enough to make the module; quantising all of them would take most of the time.
    *rows, width = shape
    module.weight = mx.zeros((*[1] * len(rows), width), dtype=mx.bfloat16)
    quantized = module.to_quantized(group_size=group_size, bits=bits)
    halves = mx.random.randint(0, 1 << 16, (*rows, width * bits // 16)).astype(mx.uint16)
    quantized.weight = halves.view(mx.uint32)
    # The standard deviation of n uniformly distributed integers is n / sqrt(12).
    scale = (12 / width) ** 0.5 / (1 << bits)
    quantized.scales = mx.full((*rows, width // group_size), scale, dtype=mx.bfloat16)
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
