"""Writes tiny random checkpoints by Hugging Face transformers, and the logits that it computes from them.

    pip install transformers torch
    cd tests && python -m oracles.write_transformers

The folders that it writes are in the repository, so that the tests need neither package. Weights are stored in
bfloat16; the logits are those of a float32 model with these weights.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent / "transformers"
TOKENS = 70
TEXT: dict[str, Any] = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    max_position_embeddings=128,
)
EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24
)
ROPE = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25)
MROPE = dict(ROPE, mrope_section=[2, 1, 1], mrope_interleaved=True)
VISION: dict[str, Any] = dict(
    depth=1,
    hidden_size=8,
    num_heads=1,
    intermediate_size=8,
    out_hidden_size=32,
    patch_size=2,
    temporal_patch_size=1,
    num_position_embeddings=4,
)
SMALL: dict[str, Any] = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=128,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
WINDOW: dict[str, Any] = dict(sliding_window=8, use_sliding_window=True)


def attention_models() -> dict[str, Any]:
    """Build models whose configurations set what changes numbers, as transformers 5 writes it."""
    import transformers as hf

    stretched = dict(YARN, original_max_position_embeddings=32, mscale=1.2, mscale_all_dim=0.7, beta_fast=16)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
    configs = [
        hf.LlamaConfig(**SMALL, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True),
        hf.MistralConfig(**SMALL, sliding_window=8, rope_parameters=dict(rope_type="default", rope_theta=1e6)),
        hf.Qwen2Config(**SMALL, **WINDOW, max_window_layers=1, rope_parameters=dict(YARN, attention_factor=1.0)),
        hf.Qwen3Config(
            **SMALL,
            **WINDOW,
            head_dim=32,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters=YARN,
        ),
        hf.Qwen3MoeConfig(**SMALL, **WINDOW, **experts, rope_parameters=stretched),
    ]
    return {f"{config.model_type}_settings": hf.AutoModelForCausalLM.from_config(config) for config in configs}


def models() -> dict[str, Any]:
    """Build one model of each hybrid family: vision models, as published, where the family is one."""
    import transformers as hf

    dense = hf.Qwen3_5Config(text_config=dict(TEXT, rope_parameters=MROPE), vision_config=VISION)
    experts = hf.Qwen3_5MoeConfig(text_config=dict(TEXT, **EXPERTS, rope_parameters=MROPE), vision_config=VISION)
    heads = dict(linear_num_key_heads=2, linear_num_value_heads=4)
    following = hf.Qwen3NextConfig(
        **{**TEXT, **heads, **EXPERTS}, rope_parameters=ROPE, mlp_only_layers=[1], tie_word_embeddings=True
    )
    return {
        "qwen3_5": hf.Qwen3_5ForConditionalGeneration(dense),
        "qwen3_5_moe": hf.Qwen3_5MoeForConditionalGeneration(experts),
        "qwen3_next": hf.Qwen3NextForCausalLM(following),
    }


def randomise(model: Any) -> None:
    """Draw all weights, norms included, so that each of them matters; in numbers that bfloat16 holds."""
    import torch

    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape) * 0.2
        if name.endswith("A_log"):
            drawn = torch.log(0.01 + 0.3 * torch.rand(weight.shape))
        elif weight.ndim == 1:
            # Steps of 1/64, so that bfloat16 also holds 1 + w: mlx-lm keeps the norms of most layers that way.
            drawn = torch.round(16 * torch.randn(weight.shape)) / 64
        if name.endswith("linear_attn.norm.weight"):
            drawn = 1 + drawn
        weight.data = drawn.bfloat16().float()


def write(name: str, model: Any) -> None:
    """Write one folder: the checkpoint as transformers saves it, tokens and their logits."""
    import torch

    randomise(model)
    model.eval()
    tokens = torch.randint(0, TEXT["vocab_size"], (1, TOKENS))
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[0]
    folder = HERE / name
    # The experts of qwen3_next are published one by one, those of qwen3_5_moe fused.
    model.bfloat16().save_pretrained(folder, save_original_format=name != "qwen3_5_moe")
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name == "qwen3_next":
        # Where published configurations, which are older, have them.
        path = folder / "config.json"
        older = {key: ROPE[key] for key in ("rope_theta", "partial_rotary_factor")}
        path.write_text(json.dumps(json.loads(path.read_text()) | older, indent=2) + "\n")
    np.savez_compressed(folder / "expected.npz", tokens=tokens[0].numpy(), logits=logits.numpy())
    print(name, sum(path.stat().st_size for path in folder.iterdir()), "bytes", logits.std().item())


def main() -> None:
    """Write all folders."""
    import torch

    torch.manual_seed(0)
    for name, model in (models() | attention_models()).items():
        write(name, model)


if __name__ == "__main__":
    main()
