"""Loading DFlash checkpoints: layouts, names, quantisation, and what is refused."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from choosing import GREEDY
from mlx import nn
from mlx.utils import tree_flatten
from one_draft import block, extend, propose
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_models import tiny_target

from mlx_spec.drafters.base import Committed
from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.dflash2.config import read_config
from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.errors import DrafterMismatch

Tensors = dict[str, mx.array]
ANCHOR, PROMPT = 7, 30


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("qwen3", mx.float32)


def draft(folder: Path, target: Any) -> tuple[np.ndarray, list[int], np.ndarray]:
    """Return hidden states, tokens and probabilities of one round after a random prompt."""
    drafter = load_dflash2(folder, target, "tiny")
    state = drafter.open()
    features = mx.random.normal((PROMPT, 3 * 64), key=mx.random.key(1))
    extend(drafter, state, Committed(0, mx.zeros(PROMPT, dtype=mx.int32), features))
    proposal = propose(drafter, state, ANCHOR, drafter.max_draft, GREEDY)
    hidden = block(drafter, state, ANCHOR, drafter.config.block_size)
    return np.array(hidden), proposal.tokens.tolist(), np.array(proposal.ranks)


def assert_same(got: tuple[Any, ...], expected: tuple[Any, ...], atol: float = 0.0) -> None:
    np.testing.assert_allclose(got[0], expected[0], atol=atol, rtol=0)
    assert got[1] == expected[1]
    np.testing.assert_allclose(got[2], expected[2], atol=atol, rtol=0)


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    for old, new in pairs:
        assert any(name.startswith(old) for name in tensors)
        tensors = {(new + n.removeprefix(old) if n.startswith(old) else n): v for n, v in tensors.items()}
    return tensors


NAMES = {
    "model. prefix": (("", "model."),),
    "midlayer.": (("layers.0.", "midlayer."),),
    "model.midlayer.": (("layers.0.", "model.midlayer."),),
    "encoder aliases": (("fc.", "encoder.fc."), ("hidden_norm.", "encoder.output_norm_enc.")),
    "codebooks with .weight": (
        ("candidate_selector.predecessor_codebook", "candidate_selector.predecessor_codebook.weight"),
        ("candidate_selector.successor_codebook", "candidate_selector.successor_codebook.weight"),
    ),
}


@pytest.mark.parametrize("names", NAMES)
def test_other_names_load_to_the_same_drafter(names: str, tmp_path: Path, target: Any) -> None:
    config = dflash2_config()
    tensors = random_tensors(config)
    assert "candidate_selector.predecessor_codebook" in tensors
    other = renamed(tensors, *NAMES[names])
    assert other.keys() != tensors.keys()
    expected = draft(write_drafter(tmp_path / "native", config, tensors), target)
    assert_same(draft(write_drafter(tmp_path / "other", config, other), target), expected)


def test_different_tensors_load_to_a_different_drafter(tmp_path: Path, target: Any) -> None:
    config = dflash2_config()
    one = draft(write_drafter(tmp_path / "one", config, random_tensors(config, seed=0)), target)
    two = draft(write_drafter(tmp_path / "two", config, random_tensors(config, seed=1)), target)
    assert np.abs(one[0] - two[0]).max() > 0.1


def test_several_files_are_one_checkpoint(tmp_path: Path, target: Any) -> None:
    config = dflash2_config()
    tensors = random_tensors(config)
    expected = draft(write_drafter(tmp_path / "one", config, tensors), target)
    halves = [dict(list(tensors.items())[:20]), dict(list(tensors.items())[20:])]
    folder = write_drafter(tmp_path / "two", config, halves[0])
    mx.save_safetensors(str(folder / "model-00002.safetensors"), halves[1])
    assert_same(draft(folder, target), expected)


def speculators_config(native: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a native configuration as the speculators library would."""
    inner = {k: v for k, v in native.items() if k not in ("architectures", "dflash_config", "is_causal")}
    flat = dict(native["dflash_config"])
    return dict(
        flat,
        architectures=native["architectures"],
        speculators_model_type="dflash2",
        aux_hidden_state_layer_ids=[i + 1 for i in flat.pop("target_layer_ids")],
        sliding_window_non_causal=True,
        draft_vocab_size=native["vocab_size"],
        transformer_layer_config=inner,
    )


TARGETS_OWN = {
    "embed_tokens.weight": (96, 64),
    "lm_head.weight": (96, 64),
    "verifier_lm_head.weight": (96, 64),
    "verifier_norm.weight": (64,),
}


def test_speculators_layout_with_the_targets_tensors(tmp_path: Path, target: Any) -> None:
    config = dflash2_config()
    tensors = random_tensors(config)
    expected = draft(write_drafter(tmp_path / "native", config, tensors), target)
    more = tensors | {name: mx.ones(shape) for name, shape in TARGETS_OWN.items()}
    assert_same(draft(write_drafter(tmp_path / "other", speculators_config(config), more), target), expected)
    # The native layout carries no such tensors, so there they are an error.
    with pytest.raises(DrafterMismatch, match="unused embed_tokens.weight, lm_head.weight, verifier_lm_head"):
        draft(write_drafter(tmp_path / "mixed", config, more), target)


def quantised(config: dict[str, Any], bits: int, only: str = "") -> tuple[Tensors, Tensors]:
    """Return the tensors of a quantised drafter (group 32 where it divides), and the same ones dequantised."""
    model = DraftModel(read_config(config, "tiny"))
    plain = random_tensors(config)
    model.load_weights([(f"{n}.weight" if n.endswith("codebook") else n, v) for n, v in plain.items()])

    def fits(path: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0 and only in path

    nn.quantize(model, group_size=32, bits=bits, class_predicate=fits)
    packed = dict(tree_flatten(model.parameters()))
    dense = {n: v for n, v in packed.items() if not n.endswith((".scales", ".biases"))}
    for name in [n.removesuffix(".scales") for n in packed if n.endswith(".scales")]:
        weight, scales, biases = (packed[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
        dense[f"{name}.weight"] = mx.dequantize(weight, scales, biases, group_size=32, bits=bits)
    return packed, dense


@pytest.mark.parametrize("only", ["", "self_attn", "codebook"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_checkpoints_draft_like_their_dequantised_weights(
    bits: int, only: str, tmp_path: Path, target: Any
) -> None:
    """float32 activations, so that the packed and the dense product differ by rounding alone."""
    config = dflash2_config(selector_rank=32)
    packed, dense = quantised(config, bits, only)
    for part in ("self_attn.k_proj", "predecessor_codebook", "hidden_projection", "kernel_projection", "fc"):
        assert any(f"{part}.scales" in name for name in packed) == (only in part or part in ("", only)), part
    got = draft(write_drafter(tmp_path / "packed", config, packed), target)
    assert_same(got, draft(write_drafter(tmp_path / "dense", config, dense), target), atol=1e-4)
    unquantised = draft(write_drafter(tmp_path / "plain", config), target)
    assert np.abs(got[0] - unquantised[0]).max() > 1e-3 or only == "codebook"
    assert np.abs(got[2] - unquantised[2]).max() > 1e-5


def refuse(folder: Path, target: Any, match: str) -> None:
    with pytest.raises(DrafterMismatch, match=match):
        load_dflash2(folder, target, "some/drafter")


@pytest.mark.parametrize(
    "name",
    [
        "fc.weight",
        "norm.weight",
        "layers.1.self_attn.q_norm.weight",
        "layers.0.mlp_conv.base_kernel",
        "candidate_selector.hidden_projection.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path, target: Any) -> None:
    tensors = random_tensors(dflash2_config())
    del tensors[name]
    refuse(write_drafter(tmp_path, dflash2_config(), tensors), target, f"some/drafter.*missing {name}")


@pytest.mark.parametrize("name", ["layers.2.mlp.up_proj.weight", "mask_embedding", "markov_head.markov_w1.weight"])
def test_an_unused_tensor_is_named(name: str, tmp_path: Path, target: Any) -> None:
    tensors = random_tensors(dflash2_config()) | {name: mx.zeros((2, 2))}
    refuse(write_drafter(tmp_path, dflash2_config(), tensors), target, f"unused {name}")


def test_dflash_2_tensors_under_a_dflash_1_name_are_refused(tmp_path: Path, target: Any) -> None:
    """A converter once renamed the architecture and so dropped the selector without a word."""
    config = dflash2_config(architectures=["DFlashDraftModel"])
    tensors = random_tensors(dflash2_config())
    refuse(write_drafter(tmp_path, config, tensors), target, "unused candidate_selector.hidden_projection.weight")


@pytest.mark.parametrize(
    "name", ["fc.weight", "layers.1.mlp.down_proj.weight", "layers.0.attention_conv.base_kernel"]
)
def test_a_wrong_shape_is_named_with_both_shapes(name: str, tmp_path: Path, target: Any) -> None:
    tensors = random_tensors(dflash2_config())
    right, wrong = list(tensors[name].shape), [*tensors[name].shape[:-1], tensors[name].shape[-1] + 1]
    tensors[name] = mx.zeros(wrong)
    match = f"{name} is {wrong}, not {right}".replace("[", r"\[")
    refuse(write_drafter(tmp_path, dflash2_config(), tensors), target, match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(hidden_size=128), "some/drafter expects hidden size 128; target tiny qwen3 has 64"),
        (dict(vocab_size=97), "expects vocabulary size 97; target tiny qwen3 has 96"),
        (dict(num_target_layers=36), "expects number of target layers 36; target tiny qwen3 has 4"),
        (
            dict(num_target_layers=..., target_layer_ids=[0, 2, 4]),
            r"target_layer_ids must lie in 0 .. 3, found \[4\]",
        ),
        (dict(target_layer_ids=[-1, 2, 3]), r"target_layer_ids must lie in 0 .. 3, found \[-1\]"),
        (dict(mask_token_id=96), r"mask_token_id must lie in 0 .. 95, found \[96\]"),
        (dict(draft_token_ids=[3, 200]), "draft_token_ids of config.json maps draft token 1 to 200"),
        (dict(draft_token_ids=[*range(20), 7, 3, 7]), "draft_token_ids of config.json names 3, 7 more than once"),
        (dict(draft_token_ids=["a"]), r"draft_token_ids in config.json is \['a'\], and must be a list of whole"),
        (
            dict(conv_group_size=48),
            "conv_group_size in config.json is 48, and must be a divisor of hidden_size 64",
        ),
    ],
)
def test_a_drafter_for_another_target_is_refused(
    changes: dict[str, Any], match: str, tmp_path: Path, target: Any
) -> None:
    tensors = random_tensors(dflash2_config())
    refuse(write_drafter(tmp_path, dflash2_config(**changes), tensors), target, match)


def test_more_layers_than_tensors_are_refused_before_they_are_built(tmp_path: Path, target: Any) -> None:
    config = dflash2_config(num_hidden_layers=200, layer_types=...)
    folder = write_drafter(tmp_path, config, random_tensors(dflash2_config()))
    refuse(folder, target, "num_hidden_layers of config.json is 200, and its files hold tensors of 2 layers")


def test_draft_tokens_may_come_in_any_order(tmp_path: Path, target: Any) -> None:
    """The order decides between equal draft logits only, and random ones are not equal."""
    some, tensors = list(range(0, 96, 3)), random_tensors(dflash2_config())
    ascending = write_drafter(tmp_path / "a", dflash2_config(draft_token_ids=some), tensors)
    descending = write_drafter(tmp_path / "d", dflash2_config(draft_token_ids=some[::-1]), tensors)
    assert_same(draft(ascending, target), draft(descending, target), atol=1e-6)


@pytest.mark.parametrize("keep", [0, 5, 0.01, 0.5, 0.9999])
def test_a_truncated_file_is_named(keep: float, tmp_path: Path, target: Any) -> None:
    path = write_drafter(tmp_path, dflash2_config()) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(len(whole) * keep)])
    refuse(tmp_path, target, "some/drafter: model.safetensors cannot be read .* download it again")


def test_a_folder_without_tensors_is_refused(tmp_path: Path, target: Any) -> None:
    (write_drafter(tmp_path, dflash2_config()) / "model.safetensors").unlink()
    refuse(tmp_path, target, "some/drafter holds no safetensors file")


def test_a_folder_without_config_is_refused(tmp_path: Path, target: Any) -> None:
    (write_drafter(tmp_path, dflash2_config()) / "config.json").unlink()
    refuse(tmp_path, target, "some/drafter is no drafter: it has no config.json")


@pytest.mark.parametrize(
    ("text", "match"), [("{", "not valid JSON"), ("", "not valid JSON"), ("[1]", "holds a list, not an object")]
)
def test_a_broken_config_is_refused(text: str, match: str, tmp_path: Path, target: Any) -> None:
    (write_drafter(tmp_path, dflash2_config()) / "config.json").write_text(text)
    refuse(tmp_path, target, f"some/drafter: config.json .*{match}|some/drafter: config.json {match}")
