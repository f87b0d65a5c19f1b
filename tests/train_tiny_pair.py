"""Make ``tests/tiny_pair`` or ``tests/tiny_hybrid``: a tiny model that has read this project, and its MTP head.

    PYTHONPATH=.:tests python tests/train_tiny_pair.py [pair | hybrid]

The pair is a Qwen3 and a head of its own; the hybrid is a Qwen3.5 as originally published, with recurrent layers:
one checkpoint that holds both. About half of the drafts are accepted, so that tests can see acceptance decrease. A
few minutes on two CPU cores for the pair, a quarter of an hour for the hybrid. The final norm and the head's norms
begin with weights that differ from entry to entry, as those of real models do: otherwise a hidden state before the
norm would serve as well as one after it.
"""

import argparse
import copy
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from tiny_folders import TOKENS, write_tokenizer
from tiny_heads import zero_centred
from transformers import PreTrainedTokenizerFast

from mlx_spec.checkpoints.settings import Settings
from mlx_spec.drafters.mtp.head import MTPHead
from mlx_spec.drafters.mtp.spec import QWEN, layer_config
from mlx_spec.errors import DrafterMismatch
from mlx_spec.target.layers import is_recurrent
from tools.chain_loss import accepted_drafts, every_anchor, loss
from tools.mtp_chains import chains
from tools.teacher import Frozen

ROOT = Path(__file__).parent.parent
FOLDERS = {kind: Path(__file__).parent / f"tiny_{kind}" for kind in ("pair", "hybrid")}
TEXT: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": len(TOKENS),
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "pair": {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "intermediate_size": 192,
        "rope_theta": 10000.0,
        **TEXT,
    },
    "hybrid": {
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "intermediate_size": 128,
            "full_attention_interval": 2,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            "mtp_num_hidden_layers": 1,
            **TEXT,
        },
    },
}
LENGTH, BATCH, STEPS, CHAIN = 64, 12, 700, 3


def texts() -> list[str]:
    """Return the project's own prose and code, the texts that the model is trained on."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("m*/**/*.py"), *ROOT.glob("tools/*.py")]
    return [path.read_text() for path in sorted(paths)]


def corpus(folder: Path) -> np.ndarray:
    """Return all texts as tokens, one after another; write the tokenizer that encodes them."""
    write_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return np.concatenate([[0, *tokenizer.encode(text, add_special_tokens=False)] for text in texts()])


class Pair(nn.Module):
    """Target and head, trained at once; the head's loss has no gradient in the target."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        model_class, args_class = _get_classes(config)
        self.config = dict(layer_config(Settings(config, "the new head", DrafterMismatch)).values)
        self.target = model_class(args_class.from_dict(copy.deepcopy(config)))
        self.head = MTPHead(copy.deepcopy(self.config))
        self.target.model.norm.weight = mx.exp(1.3 * mx.random.normal((self.config["hidden_size"],)))
        for layer in self.target.layers:
            if is_recurrent(layer):
                # mlx-lm begins with decays that forget everything within a few tokens.
                layer.linear_attn.A_log = mx.log(mx.random.uniform(0.02, 1.0, layer.linear_attn.A_log.shape))
        for name, value in tree_flatten(self.head.parameters()):
            if value.ndim == 1:
                mean, spread = (1.7, 0.3) if "self_attn" in name else (1.35, 0.8)
                weight = mx.maximum(mean + spread * mx.random.normal(value.shape), 0.1)
                self.head.load_weights([(name, weight)], strict=False)

    def losses(self, tokens: mx.array) -> mx.array:
        """Return the sum of the language model's loss and the head's, over sequences [N, S]."""
        hidden = self.target.model(tokens)
        embedding = self.target.model.embed_tokens.weight
        own = nn.losses.cross_entropy(hidden[:, :-1] @ embedding.T, tokens[:, 1:], reduction="mean")
        hidden, embedding = mx.stop_gradient(hidden), mx.stop_gradient(embedding)
        anchors = every_anchor(tokens)
        outputs = chains(self.head, QWEN, self.config, embedding, tokens, hidden, anchors, CHAIN)
        lengths = mx.full((tokens.shape[0],), tokens.shape[1])
        teacher = frozen(embedding)
        return own + loss(outputs, teacher.score, teacher, tokens, lengths, anchors, hidden, hard=0.5)


def frozen(embedding: mx.array) -> Frozen:
    """Return what the head's loss reads of the target, over the whole vocabulary."""
    ids = mx.arange(embedding.shape[0])
    return Frozen(embedding, embedding, ids, ids)


def train(config: dict[str, Any], data: np.ndarray, steps: int) -> Pair:
    """Train a pair, and print its loss."""
    mx.random.seed(1)
    rng, pair = np.random.default_rng(1), Pair(config)
    print(f"{len(data)} tokens, {sum(v.size for _, v in tree_flatten(pair.parameters()))} parameters")
    optimizer = optimizers.AdamW(
        optimizers.cosine_decay(4e-3, steps), betas=[0.9, 0.95], weight_decay=0.01, bias_correction=True
    )
    state = [pair.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(tokens: mx.array) -> mx.array:
        value, gradients = nn.value_and_grad(pair, lambda t: pair.losses(t))(tokens)
        optimizer.update(pair, optimizers.clip_grad_norm(gradients, 1.0)[0])
        return value

    started = time.perf_counter()
    for done in range(1, steps + 1):
        starts = rng.integers(0, len(data) - LENGTH, BATCH)
        value = step(mx.array(np.stack([data[s : s + LENGTH] for s in starts]).astype(np.int32)))
        mx.eval(state)
        if done % 50 == 0:
            print(f"step {done}: loss {value.item():.3f}, {time.perf_counter() - started:.0f} s", flush=True)
    return pair


def save(kind: str, pair: Pair) -> None:
    """Write target and head in bfloat16, the head as in an original checkpoint."""
    keep_precision = getattr(pair.target, "cast_predicate", lambda name: True)
    target = dict(tree_flatten(pair.target.parameters()))
    target = {n: v.astype(mx.bfloat16) if keep_precision(n) else v for n, v in target.items()}
    head = {n: v.astype(mx.bfloat16) for n, v in tree_flatten(pair.head.parameters())}
    head = {f"mtp.{n}": v for n, v in zero_centred(head).items()}
    if kind == "hybrid":
        write(FOLDERS[kind], original(target) | head, CONFIGS[kind], {"format": "pt"})
    else:
        write(FOLDERS[kind] / "target", target, CONFIGS[kind], {"format": "mlx"})
        head_config = {"model_type": "qwen3_5_mtp", "text_config": CONFIGS[kind]}
        write(FOLDERS[kind] / "head", head, head_config, {"format": "mlx"})


def original(target: dict[str, mx.array]) -> dict[str, mx.array]:
    """Give the weights of mlx-lm's Qwen3.5 the names, shapes and norms of original checkpoints."""
    out = {}
    for name, value in target.items():
        name = name.replace("language_model.model.", "model.language_model.")
        if name.endswith("conv1d.weight"):
            value = value.swapaxes(1, 2)
        out |= {name: value} if "linear_attn.norm" in name else zero_centred({name: value})
    return out


def write(folder: Path, tensors: dict[str, mx.array], config: dict[str, Any], metadata: dict[str, str]) -> None:
    """Write a checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=CONFIGS, default="pair", nargs="?")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    data = corpus(FOLDERS[args.kind] / ("target" if args.kind == "pair" else ""))
    pair = train(CONFIGS[args.kind], data, args.steps)
    tokens = mx.array(data[: 32 * LENGTH].reshape(32, LENGTH).astype(np.int32))
    hidden, embedding = pair.target.model(tokens), pair.target.model.embed_tokens.weight
    anchors = every_anchor(tokens)
    outputs = chains(pair.head, QWEN, pair.config, embedding, tokens, hidden, anchors, CHAIN)
    teacher, lengths = frozen(embedding), mx.full((32,), LENGTH)
    accepted = np.array(accepted_drafts(outputs, teacher.score, teacher, tokens, lengths, anchors))
    print("acceptance by depth:", [float((accepted > k).mean().round(3)) for k in range(CHAIN)])
    save(args.kind, pair)


if __name__ == "__main__":
    main()
