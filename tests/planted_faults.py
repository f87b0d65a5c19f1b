"""Faults of published ports, planted in healthy drafters from outside: in a checkpoint, its config, or a wrapper.

    PYTHONPATH=.:tests python tests/planted_faults.py [WORD ...] [--results FILE] > table.md

probes every one, or those with a word in their names, and prints the table of ``docs/doctor.md``. With
``--results`` it can be stopped and begun again.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from trained_texts import TEXTS

from mlx_spec.demo import DRAFTERS
from mlx_spec.diagnose.probe import PART_TOKENS, Patient, Probe, probe, texts_of
from mlx_spec.diagnose.text import Text
from mlx_spec.diagnose.verdict import Verdict, verdict_of
from mlx_spec.drafters.kind import DrafterOptions, DrafterSource
from mlx_spec.drafters.reference import Float64Tensors
from mlx_spec.loading.drafter import KINDS, source_of
from mlx_spec.loading.load import load_target

Tensors = dict[str, mx.array]
Plant = Callable[[dict[str, Any], Tensors], None]
Wrap = Callable[[Any], None]
TESTS = Path(__file__).parent
# Healthy drafters: the model, the folder, the kind.
HEALTHY = {
    "demo dflash2": ("demo", DRAFTERS["dflash2"], "dflash2"),
    "demo mtp": ("demo", DRAFTERS["mtp"], "mtp"),
    "demo eagle": ("demo", DRAFTERS["eagle"], "eagle"),
    "tiny mtp": (str(TESTS / "tiny_pair" / "target"), TESTS / "tiny_pair" / "head", "mtp"),
    "tiny hybrid mtp": (str(TESTS / "tiny_hybrid"), TESTS / "tiny_hybrid", "mtp"),
    "tiny eagle 1": (str(TESTS / "tiny_eagles" / "target"), TESTS / "tiny_eagles" / "eagle1", "eagle"),
    "tiny eagle 3": (str(TESTS / "tiny_eagles" / "target"), TESTS / "tiny_eagles" / "eagle3", "eagle"),
}


@dataclass(frozen=True)
class Fault:
    """A fault.

    name: what was done.
    of: the healthy drafter.
    names: parts of the cause that a verdict has to name, each in one of these ways.
    plant: changes config and tensors of the checkpoint, unquantised.
    wrap: changes the loaded drafter, as a faulty loader or engine does.
    expected: the verdict that is right; ``names`` is for broken ports alone.
    text: number of the text to measure on, 0 for the one of all faults. Others are parts of this project's pages.
    """

    name: str
    of: str
    names: tuple[tuple[str, ...], ...]
    plant: Plant | None = None
    wrap: Wrap | None = None
    expected: tuple[str, ...] = ("broken port",)
    text: int = 0


def config_of(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the part of a config that holds a key."""
    parts = (
        config,
        *(config.get(name) or {} for name in ("dflash_config", "transformer_layer_config", "text_config")),
    )
    return next((part for part in parts if key in part), config)


def setting(key: str, value: Any) -> Plant:
    """Set a key of the config, wherever it is."""

    def plant(config: dict[str, Any], tensors: Tensors) -> None:
        config_of(config, key)[key] = value(config_of(config, key).get(key)) if callable(value) else value

    return plant


def rope(key: str, value: Any) -> Plant:
    """Set the base or the scaling of the rotary encoding."""

    def plant(config: dict[str, Any], tensors: Tensors) -> None:
        part = config_of(config, "rope_theta" if "rope_parameters" not in config else "rope_parameters")
        if "rope_parameters" in part:
            if key == "rope_theta":
                part["rope_parameters"]["rope_theta"] = value
            else:
                part["rope_parameters"].update({"rope_type": value["type"], "factor": value["factor"]})
        else:
            part[key] = value

    return plant


def weights(change: Callable[[mx.array], mx.array], *endings: str, without: tuple[str, ...] = ()) -> Plant:
    """Change the tensors whose names end so."""

    def plant(config: dict[str, Any], tensors: Tensors) -> None:
        found = [name for name in tensors if name.endswith(endings) and not name.endswith(without)]
        assert found, endings
        for name in found:
            tensors[name] = change(tensors[name])

    return plant


def exchanged(one: str, other: str) -> Plant:
    """Exchange tensors by the ends of their names."""

    def plant(config: dict[str, Any], tensors: Tensors) -> None:
        pairs = [(name, name.removesuffix(one) + other) for name in tensors if name.endswith(one)]
        assert pairs
        for a, b in pairs:
            tensors[a], tensors[b] = tensors[b], tensors[a]

    return plant


def both(*plants: Plant) -> Plant:
    """Plant several."""

    def plant(config: dict[str, Any], tensors: Tensors) -> None:
        for each in plants:
            each(config, tensors)

    return plant


def halves(x: mx.array) -> mx.array:
    """Exchange the halves of the inputs of a linear map."""
    return mx.concatenate(mx.split(x, 2, axis=-1)[::-1], axis=-1)


def interleaved(x: mx.array, dim: int) -> mx.array:
    """Put rows of a query or key projection, or entries of its norm, in the order of interleaved rotary pairs."""
    order = np.arange(dim).reshape(2, -1).T.reshape(-1)
    return x.reshape(-1, dim, *x.shape[1:])[:, mx.array(order)].reshape(x.shape)


def rope_pairs(dim: int) -> Plant:
    """Store query and key projections for interleaved pairs, as a conversion for another engine does."""
    names = ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")
    return weights(lambda x: interleaved(x, dim), *names)


def plus(by: float) -> Callable[[mx.array], mx.array]:
    """Return what adds a number."""
    return lambda x: (x.astype(mx.float32) + by).astype(x.dtype)


NORMS = (
    "norm.weight",
    "norm_embedding.weight",
    "norm_hidden.weight",
    "fc_norm.0.weight",
    "fc_norm.1.weight",
    "fc_norm.2.weight",
    "fc_norm.3.weight",
)
IDS = "eagle_aux_hidden_state_layer_ids"


def family(model_type: str, names: dict[str, str] = {}, prefix: str = "mtp.") -> Plant:  # noqa: B006
    """Publish an MTP head under a family whose heads are wired otherwise."""

    def plant(config: dict[str, Any], tensors: Tensors) -> None:
        config["model_type"] = model_type
        for old in list(tensors):
            bare = old.removeprefix("mtp.")
            new = next((names[n] + bare.removeprefix(n) for n in names if bare.startswith(n)), bare)
            value = tensors.pop(old)
            tensors[prefix + new] = value

    return plant


NEXTN = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "fc.": "eh_proj.",
    "norm.": "shared_head.norm.",
    "lm_head.": "shared_head.head.",
    "layers.0.": "",
}
MIMO = {
    "pre_fc_norm_embedding.": "token_layernorm.",
    "pre_fc_norm_hidden.": "hidden_layernorm.",
    "fc.": "input_proj.",
    "norm.": "final_layernorm.",
    "layers.0.": "",
}


def late_states(drafter: Any, by: int) -> None:
    """Let an engine give each row the hidden states of another row of the same commit."""
    extend = drafter.extend

    def shifted(updates: Sequence[Any]) -> None:
        moved = []
        for state, rows in updates:
            at = mx.clip(mx.arange(rows.tokens.size) + by, 0, rows.tokens.size - 1)
            moved.append((state, type(rows)(rows.position, rows.tokens, rows.aux_hidden_states[at])))
        extend(moved)

    drafter.extend = shifted


def nan_in_pass(drafter: Any) -> None:
    """Let activations overflow, as a cast to float16 does."""
    embed = drafter._embed if drafter.name == "dflash2" else drafter.embed
    huge = lambda ids: embed(ids) * mx.array(float("inf"), mx.float32).astype(mx.bfloat16)  # noqa: E731
    setattr(drafter, "_embed" if drafter.name == "dflash2" else "embed", huge)


def shift_loaded_norms(drafter: Any) -> None:
    """Let a loader add one to a norm that is whole already: only the post-attention norm of the head."""
    from dataclasses import replace

    from mlx_spec.target.layers import Norm

    norm = drafter.forward.post_norm
    drafter.forward = replace(drafter.forward, post_norm=Norm(norm.weight + 1, norm.eps))


def wrong_window(drafter: Any) -> None:
    """Let an engine forget the context: every row sees four positions only."""
    from dataclasses import replace

    if drafter.name == "dflash2":
        layers = tuple(replace(x, attention=replace(x.attention, window=4)) for x in drafter.forward.layers)
        drafter.forward = replace(drafter.forward, layers=layers)
    else:
        attention = replace(drafter.forward.attention, window=4)
        drafter.forward = replace(drafter.forward, attention=attention)


def scaled_attention(drafter: Any) -> None:
    """Let attention leave its scale out."""
    from dataclasses import replace

    if drafter.name == "dflash2":
        layers = tuple(replace(x, attention=replace(x.attention, scale=1.0)) for x in drafter.forward.layers)
        drafter.forward = replace(drafter.forward, layers=layers)
    else:
        drafter.forward = replace(drafter.forward, attention=replace(drafter.forward.attention, scale=1.0))


def other_embeddings(drafter: Any) -> None:
    """Let the embeddings be those of another target: noise of a third of their size is added."""
    embed = drafter.embed

    def other(ids: mx.array) -> mx.array:
        x = embed(ids)
        noise = mx.sin(ids[:, None] * (1.0 + mx.arange(x.shape[-1])) * 0.37)
        return (x + 0.5 * noise * mx.sqrt(mx.mean(mx.square(x)))).astype(x.dtype)

    drafter.embed = other


LOWER, HIGHER = ("one layer lower",), ("one layer higher",)
FAULTS = [
    Fault(
        "layer ids one too high",
        "demo dflash2",
        (LOWER,),
        setting("target_layer_ids", lambda ids: [i + 1 for i in ids]),
    ),
    Fault(
        "layer ids one too low",
        "demo dflash2",
        (HIGHER,),
        setting("target_layer_ids", lambda ids: [i - 1 for i in ids]),
    ),
    Fault(
        "layer ids last first",
        "demo dflash2",
        (("other order",),),
        setting("target_layer_ids", lambda ids: ids[::-1]),
    ),
    Fault("another mask token", "demo dflash2", (("mask token 0",),), setting("mask_token_id", 1)),
    Fault("rotary pairs interleaved", "demo dflash2", (("rotary pairs",),), rope_pairs(64)),
    Fault(
        "rotary scaling by 4",
        "demo dflash2",
        (("no rope scaling",),),
        rope("rope_scaling", {"type": "linear", "factor": 4.0}),
    ),
    Fault("norms without their one", "demo dflash2", (("one larger",),), weights(plus(-1), "norm.weight")),
    Fault("norms shifted again", "demo dflash2", (("one smaller",),), weights(plus(1), "norm.weight")),
    Fault(
        "gate and up exchanged",
        "demo dflash2",
        (("gate and up",),),
        exchanged("gate_proj.weight", "up_proj.weight"),
    ),
    Fault(
        "taps of convolutions turned",
        "demo dflash2",
        (("taps of the convolutions",),),
        both(
            weights(lambda x: x[:, ::-1], "base_kernel"),
            weights(
                lambda x: x.reshape(2, 2, -1, x.shape[-1])[:, ::-1].reshape(x.shape), "kernel_projection.weight"
            ),
        ),
    ),
    Fault(
        "sides of convolutions turned",
        "demo dflash2",
        (("sides of the convolutions",),),
        both(
            weights(lambda x: x[::-1], "base_kernel"),
            weights(lambda x: x.reshape(2, 2, -1, x.shape[-1])[::-1].reshape(x.shape), "kernel_projection.weight"),
        ),
    ),
    Fault(
        "codebooks exchanged",
        "demo dflash2",
        (("codebooks",),),
        exchanged("predecessor_codebook.weight", "successor_codebook.weight"),
    ),
    Fault("hidden states one row late", "demo dflash2", (("row after",),), wrap=lambda d: late_states(d, -1)),
    Fault("activations overflow", "demo dflash2", (("overflows",),), wrap=nan_in_pass),
    Fault("a window of four", "demo dflash2", (("attended", "attention"),), wrap=wrong_window),
    Fault("attention without scale", "demo dflash2", (("attended",),), wrap=scaled_attention),
    Fault(
        "layer ids too high, gate and up exchanged",
        "demo dflash2",
        (LOWER, ("gate and up",)),
        both(
            setting("target_layer_ids", lambda ids: [i + 1 for i in ids]),
            exchanged("gate_proj.weight", "up_proj.weight"),
        ),
    ),
    Fault(
        "norms without their one, rotary pairs",
        "demo dflash2",
        (("one larger",), ("rotary pairs",)),
        both(rope_pairs(64), weights(plus(-1), "norm.weight")),
    ),
    Fault("embedding and hidden state swapped", "demo mtp", (("swapped",),), weights(halves, "mtp.fc.weight")),
    Fault(
        "norms without their one",
        "demo mtp",
        (("one larger",),),
        both(
            family("deepseek_v3_mtp", NEXTN, "model.layers.30."), weights(plus(-1), "norm.weight", "hnorm.weight")
        ),
    ),
    Fault("norms shifted again", "demo mtp", (("one smaller",),), weights(plus(1), *NORMS)),
    Fault("norms shifted twice too often", "demo mtp", (("two smaller",),), weights(plus(2), *NORMS)),
    Fault(
        "input norms exchanged",
        "demo mtp",
        (("norms of embedding and hidden state",),),
        exchanged("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"),
    ),
    Fault("rotary pairs interleaved", "demo mtp", (("rotary pairs",),), rope_pairs(64)),
    Fault(
        "rotary scaling by 8",
        "demo mtp",
        (("no rope scaling",),),
        rope("rope_scaling", {"type": "linear", "factor": 8.0}),
    ),
    Fault(
        "gate and up exchanged", "demo mtp", (("gate and up",),), exchanged("gate_proj.weight", "up_proj.weight")
    ),
    Fault("hidden states one row late", "demo mtp", (("row after",),), wrap=lambda d: late_states(d, -1)),
    Fault("a norm shifted by the loader", "demo mtp", (("post_normed",),), wrap=shift_loaded_norms),
    Fault(
        "swapped, and gate and up exchanged",
        "demo mtp",
        (("swapped",), ("gate and up",)),
        both(weights(halves, "mtp.fc.weight"), exchanged("gate_proj.weight", "up_proj.weight")),
    ),
    Fault("layer ids one too high", "demo eagle", (LOWER,), setting(IDS, lambda ids: [i + 1 for i in ids])),
    Fault("layer ids one too low", "demo eagle", (HIGHER,), setting(IDS, lambda ids: [i - 1 for i in ids])),
    Fault("layer ids last first", "demo eagle", (("other order",),), setting(IDS, lambda ids: ids[::-1])),
    Fault(
        "embedding and hidden state swapped",
        "demo eagle",
        (("swapped",),),
        weights(halves, "q_proj.weight", "k_proj.weight", "v_proj.weight"),
    ),
    Fault("norms without their one", "demo eagle", (("one larger",),), weights(plus(-1), *NORMS)),
    Fault("norms shifted again", "demo eagle", (("one smaller",),), weights(plus(1), *NORMS)),
    Fault(
        "input norms exchanged",
        "demo eagle",
        (("norms of embedding and hidden state",),),
        exchanged("layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"),
    ),
    Fault("rotary pairs interleaved", "demo eagle", (("rotary pairs",),), rope_pairs(64)),
    Fault(
        "gate and up exchanged", "demo eagle", (("gate and up",),), exchanged("gate_proj.weight", "up_proj.weight")
    ),
    Fault(
        "chains that go on before the norm",
        "demo eagle",
        (("output after the norm",),),
        setting("norm_output", False),
    ),
    Fault("hidden states one row late", "demo eagle", (("row after",),), wrap=lambda d: late_states(d, -1)),
    Fault("attention without scale", "demo eagle", (("attended",),), wrap=scaled_attention),
    Fault(
        "ids too low, gate and up exchanged",
        "demo eagle",
        (HIGHER, ("gate and up",)),
        both(setting(IDS, lambda ids: [i - 1 for i in ids]), exchanged("gate_proj.weight", "up_proj.weight")),
    ),
    Fault(
        "the hidden state before the final norm",
        "tiny mtp",
        (("after the final norm",),),
        both(family("step3p5_mtp", NEXTN, "model.layers.2.")),
    ),
    Fault(
        "concatenated as MiMo",
        "tiny mtp",
        (("swapped",),),
        both(weights(plus(1), *NORMS), family("mimo_mtp", MIMO, "model.mtp_layers.0.")),
    ),
    Fault(
        "norms without their one",
        "tiny mtp",
        (("one larger",),),
        family("deepseek_v3_mtp", NEXTN, "model.layers.2."),
    ),
    Fault(
        "gate and up exchanged", "tiny mtp", (("gate and up",),), exchanged("gate_proj.weight", "up_proj.weight")
    ),
    Fault("rotary pairs interleaved", "tiny mtp", (("rotary pairs",),), rope_pairs(32)),
    Fault(
        "norm_before_residual",
        "tiny eagle 3",
        (("norm_before_residual false",),),
        setting("norm_before_residual", True),
    ),
    Fault(
        "gate and up exchanged",
        "tiny eagle 1",
        (("gate and up",),),
        exchanged("gate_proj.weight", "up_proj.weight"),
    ),
    Fault("embedding and hidden state swapped", "tiny eagle 1", (("swapped",),), weights(halves, "fc.weight")),
]


def jittered(seed: int) -> Plant:
    """Change every weight by about two per cent: another drafter, as good as the one that it is made from."""

    def plant(config: dict[str, Any], tensors: Tensors) -> None:
        mx.random.seed(seed)
        for name, value in tensors.items():
            if mx.issubdtype(value.dtype, mx.floating):
                tensors[name] = (value * (1 + 0.02 * mx.random.normal(value.shape))).astype(value.dtype)

    return plant


def quantised(bits: int) -> Plant:
    """Round all matrices to so few bits, in groups of 32."""

    def plant(config: dict[str, Any], tensors: Tensors) -> None:
        for name, value in tensors.items():
            if value.ndim == 2 and value.shape[1] % 32 == 0:
                parts = mx.quantize(value, group_size=32, bits=bits)
                tensors[name] = mx.dequantize(*parts, group_size=32, bits=bits).astype(value.dtype)

    return plant


def trained(steps: int, paths: Sequence[Path]) -> Plant:
    """Train the head of the tiny pair anew, for so many steps of the 700, on the texts of some files."""

    def plant(config: dict[str, Any], tensors: Tensors) -> None:
        import train_tiny_pair as tiny

        tokenizer = tiny.PreTrainedTokenizerFast(
            tokenizer_file=str(TESTS / "tiny_pair" / "target" / "tokenizer.json")
        )
        data = np.concatenate([tokenizer.encode(path.read_text(), add_special_tokens=False) for path in paths])
        mx.random.seed(3)
        pair, rng = tiny.Pair(tiny.CONFIGS["pair"]), np.random.default_rng(3)
        pair.target.load_weights(str(TESTS / "tiny_pair" / "target" / "model.safetensors"))
        optimizer = tiny.optimizers.AdamW(4e-3, betas=[0.9, 0.95], weight_decay=0.01, bias_correction=True)

        def loss(head: Any, tokens: mx.array) -> mx.array:
            hidden = mx.stop_gradient(pair.target.model(tokens))
            embedding = mx.stop_gradient(pair.target.model.embed_tokens.weight)
            anchors, teacher = tiny.every_anchor(tokens), tiny.frozen(embedding)
            outputs = tiny.chains(head, tiny.QWEN, pair.config, embedding, tokens, hidden, anchors, tiny.CHAIN)
            lengths = mx.full((tokens.shape[0],), tokens.shape[1])
            return tiny.loss(outputs, teacher.score, teacher, tokens, lengths, anchors, hidden, hard=0.5)

        gradients_of = tiny.nn.value_and_grad(pair.head, loss)
        for _ in range(steps):
            starts = rng.integers(0, len(data) - tiny.LENGTH, tiny.BATCH)
            batch = mx.array(np.stack([data[at : at + tiny.LENGTH] for at in starts]).astype(np.int32))
            _, gradients = gradients_of(pair.head, batch)
            optimizer.update(pair.head, tiny.optimizers.clip_grad_norm(gradients, 1.0)[0])
            mx.eval(pair.head.parameters(), optimizer.state)
        head = {name: value.astype(mx.bfloat16) for name, value in tiny.tree_flatten(pair.head.parameters())}
        tensors.clear()
        tensors.update({f"mtp.{name}": value for name, value in tiny.zero_centred(head).items()})

    return plant


FINE = "healthy", "weak drafter"
PAGES = sorted((TESTS.parent / "docs").glob("*.md"))
# Of another style: the licences that come with Python.
OTHER_TEXTS = [Path(json.__file__).parent / "decoder.py", Path(json.__file__).parent.parent / "LICENSE.txt"]
NOTHING = [
    Fault("nothing", of, (), expected=("weak drafter",) if "eagle " in of else ("healthy",)) for of in HEALTHY
]
TINY = [of for of in HEALTHY if of.startswith("tiny")]
SEEDS = [
    Fault(f"seed {seed}", TINY[seed % len(TINY)], (), jittered(seed), expected=FINE, text=seed)
    for seed in range(1, 21)
]
WEAK = [
    Fault("60 of 700 steps", "tiny mtp", (), trained(60, PAGES), expected=("weak drafter",)),
    Fault("trained on other text", "tiny mtp", (), trained(150, OTHER_TEXTS), expected=("weak drafter",)),
    *(
        Fault("2 bits", of, (), quantised(2), expected=("weak drafter",))
        for of in (*TINY, "demo mtp", "demo eagle", "demo dflash2")
    ),
]

# Planted after the doctor was finished, to see what it makes of faults that it was not made for.
FURTHER = [
    Fault(
        "keys and values exchanged", "tiny mtp", (("k_proj", "keys"),), exchanged("k_proj.weight", "v_proj.weight")
    ),
    Fault("output projection transposed", "tiny mtp", (("o_proj",),), weights(lambda x: x.T, "o_proj.weight")),
    Fault("a rotary base of 10,000,000", "tiny mtp", (("rope_theta 10000",),), rope("rope_theta", 1e7)),
    Fault(
        "input norm and final norm exchanged",
        "tiny mtp",
        (("norm",),),
        exchanged("mtp.norm.weight", "mtp.layers.0.input_layernorm.weight"),
    ),
    Fault(
        "norm of hidden states left out",
        "tiny mtp",
        (("norm",),),
        weights(lambda x: mx.zeros_like(x), "pre_fc_norm_hidden.weight"),
    ),
    Fault(
        "up projection rolled by one row",
        "tiny mtp",
        (("up",),),
        weights(lambda x: mx.roll(x, 1, axis=0), "up_proj.weight"),
    ),
    Fault(
        "query heads in another order",
        "tiny mtp",
        (("q_proj", "heads"),),
        weights(lambda x: mx.roll(x, 32, axis=0), "q_proj.weight"),
    ),
    Fault("bias of fc left out", "tiny eagle 1", (("bias",),), weights(lambda x: mx.zeros_like(x), "fc.bias")),
    Fault(
        "inputs of fc rolled by one layer",
        "tiny eagle 3",
        (("order",),),
        weights(lambda x: mx.roll(x, x.shape[-1] // 3, axis=-1), "fc.weight"),
    ),
    Fault(
        "embeddings of another revision",
        "tiny eagle 3",
        (("another revision", "embedding"),),
        wrap=lambda d: other_embeddings(d),
    ),
]


@cache
def target_of(model: str) -> tuple[Any, Any, DrafterSource]:
    """Load a target once."""
    return load_target(model, {})


@cache
def texts(model: str, kind: str, number: int = 0) -> list[Text]:
    """Read the texts of a target once, with all layers."""
    target, tokenizer, source = target_of(model)
    patient = Patient(target, None, KINDS[0], source, tokenizer)
    own = None if model == "demo" else [int(token) for text in TEXTS for token in tokenizer.encode(text)]
    if number:
        page = PAGES[number % len(PAGES)].read_text()
        own = [int(token) for token in tokenizer.encode(page[: 8 * PART_TOKENS])][: 2 * PART_TOKENS]
    found = texts_of(patient, range(target.num_layers + 1), own)
    return found[::2]


def stored(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """Return config and tensors of a drafter, unquantised."""
    config = json.loads((folder / "config.json").read_text())
    held = mx.load(str(folder / "model.safetensors"))
    plain = Float64Tensors(held, config)
    config.pop("quantization", None)

    def read(name: str) -> mx.array:
        whole = not mx.issubdtype(held[name].dtype, mx.floating) and held[name].dtype != mx.uint32
        return held[name] if whole else mx.array(plain[name].astype(np.float32)).astype(mx.bfloat16)

    return config, {name: read(name) for name in plain}


def patient_with(fault: Fault, folder: Path) -> Patient:
    """Write a healthy drafter's checkpoint with a fault, load it, and wrap it."""
    model, place, kind_name = HEALTHY[fault.of]
    target, tokenizer, model_source = target_of(model)
    config, tensors = stored(place)
    if fault.plant is not None:
        fault.plant(config, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    source = source_of(folder, fault.name, model_source.config)
    kind = next(kind for kind in KINDS if kind.name == kind_name)
    drafter = kind.load(source, target, DrafterOptions(draft_bits=None if kind_name == "dflash2" else 16))
    if fault.wrap is not None:
        fault.wrap(drafter)
    return Patient(target, drafter, kind, source, tokenizer, folder=model_source.place)


def probed(fault: Fault, folder: Path) -> tuple[Probe, Verdict]:
    """Probe a drafter with a fault."""
    found = Probe(texts=list(texts(HEALTHY[fault.of][0], HEALTHY[fault.of][2], fault.text)))
    probe(patient_with(fault, folder), found)
    return found, verdict_of(found)


def is_named(fault: Fault, verdict: Verdict) -> bool:
    """Whether a verdict is right, and names all parts of the planted cause."""
    return verdict.status in fault.expected and all(
        any(way in verdict.cause for way in ways) for ways in fault.names
    )


def row_of(case: dict[str, Any]) -> str:
    """Write a row of the table of ``docs/doctor.md``."""
    cause = f"{case['status']}: {case['cause']}" if case["cause"] else case["status"]
    return f"| {case['of']} | {case['planted']} | {cause} | {'yes' if case['named'] else 'NO'} |"


def case_of(fault: Fault) -> dict[str, Any]:
    """Probe a drafter with a fault, and return what came out."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found, verdict = probed(fault, Path(folder))
    return {
        "of": fault.of,
        "planted": fault.name,
        "status": verdict.status,
        "cause": verdict.cause,
        "evidence": verdict.evidence,
        "named": is_named(fault, verdict),
        "acceptance": float(found.hits.right[:, 0].mean()) if found.hits is not None else None,
        "seconds": round(time.perf_counter() - started),
    }


def main() -> None:
    """Probe the faults that have no result yet, and print the table of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults whose drafter or name has one of these words")
    parser.add_argument("--results", type=Path, help="file of JSON lines: faults in it are not run again")
    args = parser.parse_args()
    done: dict[tuple[str, str], dict[str, Any]] = {}
    if args.results is not None and args.results.exists():
        for line in args.results.read_text().splitlines():
            case = json.loads(line)
            done[case["of"], case["planted"]] = case
    print("| drafter | planted | verdict | named |\n|---|---|---|---|", flush=True)
    for fault in NOTHING + SEEDS + WEAK + FAULTS + FURTHER:
        if args.words and not any(word in f"{fault.of}: {fault.name}" for word in args.words):
            continue
        case = done.get((fault.of, fault.name))
        if case is None:
            case = case_of(fault)
            if args.results is not None:
                with args.results.open("a") as out:
                    out.write(json.dumps(case) + "\n")
        print(row_of(case), flush=True)


if __name__ == "__main__":
    main()
