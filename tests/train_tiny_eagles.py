"""Make ``tests/tiny_eagles``: a tiny Llama that has read this project's texts, and EAGLE heads trained with it.

    PYTHONPATH=.:tests python tests/train_tiny_eagles.py

About half of the drafts are accepted, so that tests can see acceptance decrease. Some minutes on two CPU cores.
What else tests have to notice: the target's rotary base differs from the heads', which name none, and some texts
repeat after nine tokens, so that positions matter; hidden states grow layer by layer, and norms begin with weights
that differ from entry to entry, as in real models, so that no layer's output serves as well as another's.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes
from tiny_folders import TOKENS, write_tokenizer
from train_tiny_pair import texts
from transformers import PreTrainedTokenizerFast

from mlx_spec.checkpoints.settings import Settings
from mlx_spec.drafters.eagle.head import EagleHead
from mlx_spec.drafters.eagle.spec import read_head_config, read_spec
from mlx_spec.errors import DrafterMismatch
from tools.chain_loss import accepted_drafts, every_anchor, loss
from tools.eagle_chains import chains
from tools.teacher import Frozen, run_target

FOLDER = Path(__file__).parent / "tiny_eagles"
TARGET: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": len(TOKENS),
    "max_position_embeddings": 512,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
HEAD = {**TARGET, "num_hidden_layers": 1, "intermediate_size": 160}
del HEAD["rope_theta"]
DRAFT_VOCAB = 112
# As SafeAILab publishes the first heads, and SpecForge the third.
CONFIGS: dict[str, dict[str, Any]] = {
    "eagle1": {**HEAD, "architectures": ["LlamaForCausalLM"], "bias": True},
    "eagle3": {
        **HEAD,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
    },
}
PARTS = {"eagle1": {"fc.weight", "fc.bias"}, "eagle3": {"fc.weight"}}
LENGTH, BATCH, STEPS, CHAIN = 64, 12, 700, 3
PERIOD, REPEATED, GROWTH = 9, 3, 2.0


def corpus() -> np.ndarray:
    """Return all texts as tokens, one after another."""
    write_tokenizer(FOLDER / "target")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "target" / "tokenizer.json"))
    return np.concatenate([[0, *tokenizer.encode(text, add_special_tokens=False)] for text in texts()])


def repeated(ids: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return sequences [count, LENGTH] of random tokens that repeat after PERIOD."""
    return np.tile(rng.choice(ids, (count, PERIOD)), -(-LENGTH // PERIOD))[:, :LENGTH]


class Drafting(nn.Module):
    """A head with its sizes and its spec."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        config, self.fused = CONFIGS[kind], kind == "eagle3"
        settings = Settings(config, kind, DrafterMismatch)
        self.sizes = read_head_config(settings)
        self.spec = read_spec(settings, self.fused, TARGET["num_hidden_layers"])
        self.head = EagleHead(self.sizes, self.spec, PARTS[kind])
        if self.fused:
            self.head.lm_head = nn.Linear(TARGET["hidden_size"], DRAFT_VOCAB, bias=False)

    def outputs(
        self, embedding: mx.array, tokens: mx.array, aux_hidden_states: mx.array, hidden: mx.array
    ) -> list[mx.array]:
        """Run chains from every row."""
        read = aux_hidden_states if self.fused else hidden
        return chains(self.head, self.spec, self.sizes, embedding, tokens, read, every_anchor(tokens), CHAIN)

    def frozen(self, embedding: mx.array, ids: mx.array) -> Frozen:
        """Return what the loss reads of the target: over ``ids`` in EAGLE-3, the whole vocabulary in EAGLE-1."""
        ids = ids if self.fused else mx.arange(len(TOKENS))
        index = mx.full((len(TOKENS),), -1, dtype=mx.int32)
        index[ids] = mx.arange(ids.size)
        return Frozen(embedding, embedding[ids], ids, index)

    def score(self, frozen: Frozen) -> Any:
        """Return the output head of drafts."""
        return self.head.lm_head if self.fused else frozen.score


class Trio(nn.Module):
    """Target and heads, trained at once; the heads' losses have no gradient in the target."""

    def __init__(self) -> None:
        super().__init__()
        model_class, args_class = _get_classes(TARGET)
        self.target = model_class(args_class.from_dict(TARGET))
        self.heads = {kind: Drafting(kind) for kind in CONFIGS}
        norms = [m for _, m in self.heads["eagle3"].named_modules() if isinstance(m, nn.RMSNorm)]
        for norm in (self.target.model.norm, *norms):
            norm.weight = mx.exp(0.8 * mx.random.normal(norm.weight.shape))
        for index, layer in enumerate(self.target.layers):
            for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
                part.weight = part.weight * GROWTH**index

    def losses(self, tokens: mx.array, ids: mx.array) -> mx.array:
        """Return the sum of the language model's loss and the heads', over sequences [N, S]."""
        embedding = self.target.model.embed_tokens.weight
        hidden, aux_hidden_states = run_target(self.target, tokens, self.heads["eagle3"].spec.target_layer_ids)
        total = nn.losses.cross_entropy(hidden[:, :-1] @ embedding.T, tokens[:, 1:], reduction="mean")
        embedding, aux_hidden_states, hidden = (
            mx.stop_gradient(x) for x in (embedding, aux_hidden_states, hidden)
        )
        lengths = mx.full((tokens.shape[0],), tokens.shape[1])
        anchors = every_anchor(tokens)
        for each in self.heads.values():
            frozen, outputs = (
                each.frozen(embedding, ids),
                each.outputs(embedding, tokens, aux_hidden_states, hidden),
            )
            total += loss(outputs, each.score(frozen), frozen, tokens, lengths, anchors, hidden, hard=0.5)
        return total


def train(steps: int, data: np.ndarray, ids: mx.array) -> Trio:
    """Train all three, and print their loss."""
    mx.random.seed(1)
    rng, trio = np.random.default_rng(1), Trio()
    print(f"{len(data)} tokens, {sum(v.size for _, v in tree_flatten(trio.parameters()))} parameters")
    optimizer = optimizers.AdamW(
        optimizers.cosine_decay(4e-3, steps), betas=[0.9, 0.95], weight_decay=0.01, bias_correction=True
    )
    state = [trio.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(tokens: mx.array) -> mx.array:
        value, gradients = nn.value_and_grad(trio, lambda t: trio.losses(t, ids))(tokens)
        optimizer.update(trio, optimizers.clip_grad_norm(gradients, 1.0)[0])
        return value

    started = time.perf_counter()
    for done in range(1, steps + 1):
        starts = rng.integers(0, len(data) - LENGTH, BATCH - REPEATED)
        rows = [*(data[s : s + LENGTH] for s in starts), *repeated(np.array(ids), REPEATED, rng)]
        value = step(mx.array(np.stack(rows).astype(np.int32)))
        mx.eval(state)
        if done % 50 == 0:
            print(f"step {done}: loss {value.item():.3f}, {time.perf_counter() - started:.0f} s", flush=True)
    return trio


def save(trio: Trio, ids: mx.array) -> None:
    """Write target and heads in bfloat16, under published names."""
    trio.update(tree_map(lambda w: w.astype(mx.bfloat16), trio.parameters()))
    write("target", TARGET, dict(tree_flatten(trio.target.parameters())))
    for kind, each in trio.heads.items():
        tensors = dict(tree_flatten(each.head.parameters()))
        if each.fused:
            marked = mx.zeros((len(TOKENS),), dtype=mx.bool_)
            marked[ids] = True
            tensors |= {"d2t": (ids - mx.arange(ids.size)).astype(mx.int64), "t2d": marked}
            tensors = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
        write(kind, CONFIGS[kind], tensors)


def write(name: str, config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    """Write one checkpoint."""
    (FOLDER / name).mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(FOLDER / name / "model.safetensors"), tensors, {"format": "mlx"})
    (FOLDER / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    data = corpus()
    frequent = np.argsort(-np.bincount(data, minlength=len(TOKENS)), kind="stable")[:DRAFT_VOCAB]
    ids = mx.array(np.sort(frequent).astype(np.int32))
    trio = train(parser.parse_args().steps, data, ids)
    tokens = mx.array(data[: 32 * LENGTH].reshape(32, LENGTH).astype(np.int32))
    hidden, aux_hidden_states = run_target(trio.target, tokens, trio.heads["eagle3"].spec.target_layer_ids)
    embedding = trio.target.model.embed_tokens.weight
    for kind, each in trio.heads.items():
        frozen, outputs = each.frozen(embedding, ids), each.outputs(embedding, tokens, aux_hidden_states, hidden)
        ends, anchors = mx.full((32,), LENGTH), every_anchor(tokens)
        accepted = np.array(accepted_drafts(outputs, each.score(frozen), frozen, tokens, ends, anchors))
        print(kind, "acceptance by depth:", [float((accepted > k).mean()) for k in range(CHAIN)])
    save(trio, ids)


if __name__ == "__main__":
    main()
