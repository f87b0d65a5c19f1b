"""Writes tiny random EAGLE-3 heads by the speculators library, and the draft logits that it computes from them.

    pip install torch transformers && pip install --no-deps speculators==0.9.0
    pip install hs-connectors openai datasets pydantic-settings psutil loguru
    cd tests && python -m oracles.write_speculators

The folders that it writes are in the repository, so that the tests need none of these. Weights are stored in
bfloat16; the logits are those of a float32 model with these weights. ``torch_bin`` holds one head as torch saves
it, under SafeAILab's names.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent / "speculators"
ROWS, STEPS, DRAFT_VOCAB = 40, 3, 32
LAYER: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
# Kind of the layer, changes of its configuration, and changes of the head's.
HEADS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", dict(rope_parameters=LLAMA3), dict(norm_before_residual=False)),
    "qwen3": (
        "qwen3",
        dict(rope_parameters=dict(rope_type="default", rope_theta=1e6)),
        dict(norm_before_residual=True, fc_norm=True, norm_output=True),
    ),
    "windowed": (
        "qwen3",
        dict(
            layer_types=["sliding_attention"],
            use_sliding_window=True,
            sliding_window=12,
            max_window_layers=0,
            rope_parameters=dict(rope_type="default", rope_theta=1e4),
        ),
        dict(norm_before_residual=True, norm_before_fc=True, eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]),
    ),
}


def build(kind: str, layer: dict[str, Any], head: dict[str, Any]) -> Any:
    """Build a head with random weights, norms included, in numbers that bfloat16 holds."""
    import torch
    import transformers as hf
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    config_class = {"llama": hf.LlamaConfig, "qwen3": hf.Qwen3Config}[kind]
    layer_config = config_class(**{**LAYER, **layer}, attn_implementation="eager")
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config,
        draft_vocab_size=DRAFT_VOCAB,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **head,
    )
    model = Eagle3DraftModel(config)
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape) * 0.15
        if weight.ndim == 1:
            drawn = 1.2 + 2 * drawn
        weight.data = drawn.bfloat16().float() if "verifier" not in name else torch.ones(weight.shape)
    ids = torch.sort(torch.randperm(LAYER["vocab_size"])[:DRAFT_VOCAB]).values
    marked = torch.zeros(LAYER["vocab_size"], dtype=torch.bool)
    marked[ids] = True
    model.load_vocab_mappings(marked, ids - torch.arange(DRAFT_VOCAB))
    return model.eval()


def logits_of(model: Any, hidden: Any, tokens: Any) -> np.ndarray:
    """Return the draft logits [steps, rows, draft vocabulary] of chains that read the text's tokens.

    model: the head.
    hidden: [rows, layers * H], of the target.
    tokens: [rows + 1], the text.
    """
    import torch

    seen: list[Any] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0].clone()))
    with torch.no_grad():
        documents = torch.zeros(1, len(hidden), dtype=torch.long)
        model(hidden[None], tokens[None, 1:], documents, ttt_steps=STEPS)
    hook.remove()
    return torch.stack(seen).numpy()


def main() -> None:
    """Write all folders."""
    import torch

    torch.manual_seed(0)
    for name, (kind, layer, head) in HEADS.items():
        model, folder = build(kind, layer, head), HERE / name
        hidden = torch.randn(ROWS, model.fc.in_features).half().float()
        tokens = torch.randint(0, LAYER["vocab_size"], (ROWS + 1,))
        logits = logits_of(model, hidden, tokens)
        model.bfloat16().save_pretrained(folder)
        (folder / "config.py").unlink(missing_ok=True)
        arrays = dict(tokens=tokens.numpy(), hidden=hidden.half().numpy(), logits=logits)
        np.savez_compressed(folder / "expected.npz", **arrays)
        print(name, sum(path.stat().st_size for path in folder.iterdir()), "bytes", logits.std())
        if name == "llama":
            write_bin(model, HERE / "torch_bin", arrays)


def write_bin(model: Any, folder: Path, arrays: dict[str, Any]) -> None:
    """Write a head as SafeAILab publishes it, with tensors of several types and one that shares a storage."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name.replace("layers.0.", "midlayer."): value for name, value in model.state_dict().items()}
    tensors = {name: value for name, value in tensors.items() if "verifier" not in name}
    both = torch.stack(
        [tensors["midlayer.hidden_norm.weight"], tensors["midlayer.input_layernorm.weight"]]
    ).float()
    tensors |= {"midlayer.hidden_norm.weight": both[0], "midlayer.input_layernorm.weight": both[1]}
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous().T
    torch.save(tensors, folder / "pytorch_model.bin")
    layer = {**LAYER, "rope_theta": LLAMA3["rope_theta"]}
    layer["rope_scaling"] = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **layer}
    config["draft_vocab_size"] = DRAFT_VOCAB
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    np.savez_compressed(folder / "expected.npz", **arrays)


if __name__ == "__main__":
    main()
