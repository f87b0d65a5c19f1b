"""Where heads are, how norm weights are stored, trimmed vocabularies, and what is refused."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from one_draft import extend, propose
from tiny_heads import MIMO, Tensors, head_tensors, renamed, write_head, write_layout, zero_centred
from tiny_models import CONFIGS, tiny_target

from mlx_spec.drafters.base import Committed
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.mtp.head import MTPHead
from mlx_spec.drafters.mtp.load import load_mtp
from mlx_spec.drafters.mtp.spec import OTHER_HEADS, SPECS
from mlx_spec.drafters.mtp.tensors import norms_lack_one, own_draft_ids
from mlx_spec.errors import DrafterMismatch, ModelError, ModelWarning, UnsupportedModel
from mlx_spec.target import Target

SIDECAR = {"model_type": "qwen3_5_mtp", "text_config": CONFIGS["qwen3"]}
TOKENS = mx.array([5, 17, 3, 88, 41, 9], dtype=mx.int32)


@cache
def target() -> Target:
    return tiny_target("qwen3")


@cache
def tensors() -> Tensors:
    return head_tensors("qwen3", dtype=mx.bfloat16)


def candidates(drafter: ChainDrafter, on: Target | None = None) -> tuple[list[list[int]], list[list[float]]]:
    """Candidates and their scores of three chained drafts after a short text: equal weights give equal ones."""
    on, scores = on or target(), []
    state = drafter.open()
    rows = on.forward([(on.open(), TOKENS)], drafter.target_layer_ids)
    extend(drafter, state, Committed(0, TOKENS, rows.aux_hidden_states))

    def choose(position: int, ids: mx.array, values: mx.array) -> tuple[mx.array, None]:
        scores.append(values.tolist())
        return ids[0], None

    return propose(drafter, state, 7, 3, choose).candidates.tolist(), scores


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], list[list[float]]]:
    folder = write_layout(tmp_path_factory.mktemp("plain"), "sidecar", "qwen3", tensors())
    return candidates(load_mtp(folder, target(), "sidecar"))


def refusal(kind: type[ModelError], place: Path, *words: str, on: Target | None = None, **options: Any) -> str:
    """Check that a head is refused in one short line that holds these words."""
    with pytest.raises(ModelError) as error:
        load_mtp(place, on or target(), "the head", **options)
    message = str(error.value)
    assert type(error.value) is kind, repr(error.value)
    assert "\n" not in message and len(message) < 400 and "the head" in message
    assert all(word in message for word in words), message
    return message


def write_shards(folder: Path) -> Path:
    """An original checkpoint of three shards of which only the two with the head are here."""
    head = renamed(zero_centred(tensors()), {}, "mtp.")
    names = sorted(head)
    write_head(folder, CONFIGS["qwen3"], {n: head[n] for n in names[:4]}, "model-00002-of-3.safetensors")
    rest = {n: head[n] for n in names[4:]}
    write_head(folder, None, rest | {"model.norm.weight": mx.ones(64)}, "model-00003-of-3.safetensors")
    shards = {n: f"model-0000{2 + (i >= 4)}-of-3.safetensors" for i, n in enumerate(names)}
    shards |= {
        "model.embed_tokens.weight": "model-00001-of-3.safetensors",
        "model.norm.weight": "model-00003-of-3.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return folder


def test_only_the_shards_with_the_head_are_needed(tmp_path: Path, expected: Any) -> None:
    assert candidates(load_mtp(write_shards(tmp_path), target(), "shards")) == expected


@pytest.mark.parametrize(
    "file", ["mtp.safetensors", "mtp/weights.safetensors", "model-mtp.safetensors", "model-mtp-head.safetensors"]
)
def test_a_file_beside_the_model(file: str, tmp_path: Path, expected: Any) -> None:
    trunk = {"model.norm.weight": mx.ones(64), "model.layers.0.mlp.down_proj.weight": mx.ones((64, 96))}
    write_head(tmp_path, CONFIGS["qwen3"], trunk)
    write_head(tmp_path, None, tensors(), file)
    assert candidates(load_mtp(tmp_path, target(), "model")) == expected


def test_a_file_alone_has_the_layer_of_its_model(tmp_path: Path, expected: Any) -> None:
    write_head(tmp_path, None, renamed(tensors(), {}, "mtp."), "head.safetensors")
    loaded = load_mtp(tmp_path / "head.safetensors", target(), "file", model_config=CONFIGS["qwen3"])
    assert candidates(loaded) == expected
    refusal(DrafterMismatch, tmp_path / "head.safetensors", "config.json")


def test_a_folder_without_config_has_the_layer_of_its_model(tmp_path: Path, expected: Any) -> None:
    write_head(tmp_path, None, tensors())
    assert candidates(load_mtp(tmp_path, target(), "folder", model_config=CONFIGS["qwen3"])) == expected
    refusal(DrafterMismatch, tmp_path, "no config.json")


def test_a_head_among_the_models_own_tensors(tmp_path: Path, expected: Any) -> None:
    trunk = {f"model.{name}": value for name, value in tree_flatten(target().model.model.parameters())}
    write_head(tmp_path, CONFIGS["qwen3"], trunk | renamed(tensors(), {}, "mtp."))
    assert candidates(load_mtp(tmp_path, target(), "model")) == expected


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_heads(bits: int, tmp_path: Path) -> None:
    """They draft as their dequantised weights do, unpacked or not."""
    head = MTPHead(CONFIGS["qwen3"])
    head.load_weights(list(tensors().items()))
    nn.quantize(head, group_size=32, bits=bits)
    packed = dict(tree_flatten(head.parameters()))
    assert packed["fc.weight"].dtype == mx.uint32
    plain = {
        name: mx.dequantize(value, packed[name[:-6] + "scales"], packed[name[:-6] + "biases"], 32, bits)
        if value.dtype == mx.uint32
        else value
        for name, value in packed.items()
        if not name.endswith(("scales", "biases"))
    }
    folder = write_head(tmp_path / "packed", SIDECAR, packed)
    unpacked = candidates(load_mtp(write_head(tmp_path / "plain", SIDECAR, plain), target(), "plain"))
    assert candidates(load_mtp(folder, target(), "packed", dequantize=True)) == unpacked
    ids, _ = candidates(load_mtp(folder, target(), "packed"))
    assert len(set(ids[0]) & set(unpacked[0][0])) >= 14


def test_a_head_takes_the_targets_type(tmp_path: Path) -> None:
    folder = write_layout(tmp_path, "original", "qwen3", head_tensors("qwen3"))
    drafter = load_mtp(folder, target(), "float32 head")
    assert drafter.forward.fc.weight.dtype == mx.bfloat16


def means(qk: float, low: float, final: float = 2.4) -> Tensors:
    """Norm weights of a head with these means."""
    layer = {f"layers.0.self_attn.{n}_norm.weight": mx.full(8, qk) for n in "qk"}
    inputs = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "pre_fc_norm_embedding")
    low_set = {f"{name}.weight": mx.full(8, low) for name in (*inputs, "pre_fc_norm_hidden")}
    return layer | low_set | {"norm.weight": mx.full(8, final)}


@pytest.mark.parametrize(
    "stored, lack",
    [
        (means(0.73, 0.30), True),
        (means(0.75, 0.39), True),
        (means(1.73, 0.87), False),
        (means(1.75, 1.39), False),
        # One kind of norm alone decides nothing, nor does the final norm.
        (means(1.73, 0.30), False),
        (means(0.73, 0.87), False),
        (means(0.73, 0.30, final=1.0), True),
        ({n: v for n, v in means(0.73, 0.30).items() if "self_attn" not in n}, False),
    ],
)
def test_norm_weights_are_judged_as_a_set(stored: Tensors, lack: bool) -> None:
    assert norms_lack_one(stored) is lack


def test_families_with_plain_norms_are_never_shifted(tmp_path: Path) -> None:
    low = {n: v - 1 if "norm" in n else v for n, v in tensors().items()}
    config = {"model_type": "deepseek_v3_mtp", "text_config": CONFIGS["qwen3"]}
    folder = write_head(
        tmp_path,
        config,
        renamed(
            low,
            {
                "layers.0.": "",
                "pre_fc_norm_embedding.": "enorm.",
                "pre_fc_norm_hidden.": "hnorm.",
                "fc.": "eh_proj.",
                "norm.": "shared_head.norm.",
            },
            "model.layers.4.",
        ),
    )
    assert mx.allclose(load_mtp(folder, target(), "DeepSeek").forward.norm.weight, low["norm.weight"])


def test_a_trimmed_vocabulary_of_the_checkpoints_own(tmp_path: Path) -> None:
    """FastMTP: an output head of its own over some of the target's tokens."""
    ids = mx.array([3, 4, 8, 15, 16, 23, 42, 50, 51, 52, 60, 61, 70, 71, 80, 90, 91, 95], dtype=mx.int32)
    own = {"lm_head.weight": target().model.lm_head.weight[ids], "d2t": ids}
    folder = write_head(tmp_path, SIDECAR, renamed(tensors() | own, {}, "mtp."))
    drafted, _ = candidates(load_mtp(folder, target(), "FastMTP"))
    assert set(sum(drafted, [])) <= set(ids.tolist())
    without_head = write_head(tmp_path / "b", SIDECAR, tensors() | {"d2t": ids})
    assert candidates(load_mtp(without_head, target(), "FastMTP"))[0] == drafted


@pytest.mark.parametrize("bits", [None, 4])
def test_a_vocabulary_trimmed_at_load_scores_as_the_whole_head_does(bits: int | None, tmp_path: Path) -> None:
    on = tiny_target("qwen3", bits=bits)
    folder = write_layout(tmp_path, "sidecar", "qwen3", tensors())
    whole_ids, whole_scores = candidates(load_mtp(folder, on, "whole"), on)
    some = sorted({*whole_ids[0][::2], *range(0, 96, 3)})
    ids, scores = candidates(load_mtp(folder, on, "trimmed", draft_ids=some), on)
    score = dict(zip(ids[0], scores[0], strict=True))
    both = [(s, score[i]) for i, s in zip(whole_ids[0], whole_scores[0], strict=True) if i in some]
    assert len(both) >= 8 and all(mine == other for mine, other in both)
    assert set(sum(ids, [])) <= set(some)


def test_a_whole_output_head_of_the_checkpoints_own_can_be_trimmed(tmp_path: Path) -> None:
    own = {"lm_head.weight": target().model.lm_head.weight[::-1]}
    folder, some = write_head(tmp_path, SIDECAR, tensors() | own), list(range(0, 96, 3))
    whole = candidates(load_mtp(folder, target(), "own head"))
    ids, scores = candidates(load_mtp(folder, target(), "own head", draft_ids=some))
    assert set(ids[0]) >= set(whole[0][0]) & set(some)
    assert whole != candidates(load_mtp(write_head(tmp_path / "b", SIDECAR, tensors()), target(), "the target's"))


def test_an_embedding_of_the_heads_own(tmp_path: Path) -> None:
    shuffled = target().model.model.embed_tokens.weight[::-1]
    folder = write_head(tmp_path, SIDECAR, tensors() | {"embed_tokens.weight": shuffled})
    found = load_mtp(folder, target(), "dedicated").embed(mx.array([4]))
    assert mx.array_equal(found[0], shuffled[4])


def test_no_weights(tmp_path: Path) -> None:
    write_head(tmp_path, CONFIGS["qwen3"], {"model.norm.weight": mx.ones(64), "fc.weight": mx.ones((4, 4))})
    refusal(DrafterMismatch, tmp_path, "no MTP weights", "original repo", "extract_mtp")


def test_a_flag_without_tensors_is_no_head(tmp_path: Path) -> None:
    write_head(tmp_path, {**CONFIGS["qwen3"], "mtp_num_hidden_layers": 1}, {"model.norm.weight": mx.ones(64)})
    refusal(DrafterMismatch, tmp_path, "no MTP weights")


@pytest.mark.parametrize("prefix", ["mtp.", "model.layers.4."])
def test_more_than_one_layer(prefix: str, tmp_path: Path) -> None:
    if prefix == "mtp.":
        more = {n.replace("layers.0", "layers.1"): v for n, v in tensors().items() if n.startswith("layers.0")}
        folder = write_head(tmp_path, SIDECAR, renamed(tensors() | more, {}, prefix))
    else:
        named = renamed(tensors(), {"layers.0.": "", "pre_fc_norm_embedding.": "enorm."}, prefix)
        config = {"model_type": "deepseek_v3_mtp", "text_config": CONFIGS["qwen3"]}
        folder = write_head(tmp_path, config, named | {"model.layers.5.enorm.weight": mx.ones(64)})
    refusal(DrafterMismatch, folder, "2 MTP layers", "one layer")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_size": 32}, ("hidden size 32", "has 64")),
        ({"vocab_size": 100}, ("vocabulary size 100", "has 96")),
        ({"hidden_size": None}, ("config.json has no 'hidden_size'",)),
        ({"num_attention_heads": None}, ("config.json",)),
        ({"rms_norm_eps": ...}, ("config.json", "rms_norm_eps")),
    ],
)
def test_configurations_that_do_not_fit(changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    text = {k: v for k, v in {**CONFIGS["qwen3"], **changes}.items() if v is not ...}
    folder = write_head(tmp_path, {"model_type": "qwen3_5_mtp", "text_config": text}, tensors())
    refusal(DrafterMismatch, folder, *words)


WRONG = {
    **dict.fromkeys(
        ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"), (0, "64", [64], 1.5)
    ),
    "num_key_value_heads": (0, 3, "2"),
    "head_dim": (0, "16", -16, 1e30),
    "rms_norm_eps": (0, -1e-6, "small", [1e-6], True),
    "max_position_embeddings": (0, -1, "512", [512]),
    "rope_theta": (0, "10000", [1e4]),
    "rope_scaling": ([1], "yarn", 3),
    "rope_parameters": ([1], "yarn", 3),
    "tie_word_embeddings": (1, "true"),
    "hidden_act": ("gelu", 3),
}


@pytest.mark.parametrize("key", sorted(WRONG))
def test_wrong_values_are_refused_by_key_and_value(key: str, tmp_path: Path) -> None:
    for value in WRONG[key]:
        text = {**CONFIGS["qwen3"], key: value}
        folder = write_head(tmp_path, {"model_type": "qwen3_5_mtp", "text_config": text}, tensors())
        refusal(DrafterMismatch, folder, f"{key} in config.json is {value!r}, and must be")
    refusal(
        DrafterMismatch, write_head(tmp_path, {**SIDECAR, "text_config": [1]}, tensors()), "text_config", "[1]"
    )


def test_a_rotation_as_transformers_5_writes_it(tmp_path: Path) -> None:
    """mlx-lm's classes of some families read rope_theta and rope_scaling only."""
    for family in ("qwen3", "mimo"):
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
        without = {key: value for key, value in CONFIGS[family].items() if key != "rope_theta"}
        found = []
        for number, rope in enumerate(
            (
                {"rope_theta": 777.0, "rope_scaling": yarn},
                {"rope_parameters": {"rope_theta": 777.0, **yarn}},
                {"rope_theta": 10000.0},
            )
        ):
            config = {"model_type": f"{family}_mtp", "text_config": {**without, **rope}}
            head = {n: v for n, v in head_tensors(family).items()}
            place = write_head(tmp_path / f"{family}{number}", config, named(head, family))
            found.append(np.array(load_mtp(place, tiny_target(family), "head").forward.attention.rope.frequencies))
        np.testing.assert_array_equal(found[0], found[1])
        assert not np.array_equal(found[0], found[2])


def named(head: Tensors, family: str) -> Tensors:
    return renamed(head, MIMO, "model.mtp_layers.0.") if family == "mimo" else head


def test_keys_of_published_configurations_are_known(tmp_path: Path) -> None:
    """Those of mlx-community's heads; a key that nobody knows is named, of a whole model's config it is not."""
    published = dict(
        CONFIGS["qwen3"], attn_output_gate=True, attention_dropout=0.0, hidden_act="silu", use_cache=True
    )
    published |= dict(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, dtype="bfloat16")
    published |= dict(full_attention_interval=4, layer_types=["full_attention"] * 4, mamba_ssm_dtype="float32")
    config = {"model_type": "qwen3_5_mtp", "block_size": 3, "text_config": published, "quantization": {"bits": 4}}
    load_mtp(write_head(tmp_path / "a", config, tensors()), target(), "the head")
    config["text_config"] = {**published, "sinks": 4}
    with pytest.warns(ModelWarning, match="the head: sinks in config.json is not known"):
        load_mtp(write_head(tmp_path / "b", config, tensors()), target(), "the head")
    whole = {**published, "model_type": "qwen3", "sinks": 4}
    load_mtp(write_head(tmp_path / "c", whole, renamed(tensors(), {}, "mtp.")), target(), "the head")


@pytest.mark.parametrize("prefix", ["", "mtp."])
def test_weights_in_fp8_with_scales_for_blocks(prefix: str, tmp_path: Path) -> None:
    """As Qwen publishes them: what is drafted is what the decoded weights draft."""
    plain, packed = dict(tensors()), dict(tensors())
    for name in ("fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight"):
        blocks = [-(-size // 128) for size in tensors()[name].shape]
        scales = mx.full(blocks, 0.5)
        packed |= {name: mx.to_fp8(tensors()[name] * 2), f"{name}_scale_inv": scales}
        plain[name] = mx.from_fp8(packed[name], dtype=mx.bfloat16) * 0.5
    found, expected = (
        candidates(load_mtp(write_head(tmp_path / place, SIDECAR, renamed(head, {}, prefix)), target(), "head"))
        for place, head in (("packed", packed), ("plain", plain))
    )
    assert found == expected
    del packed["fc.weight_scale_inv"]
    refusal(DrafterMismatch, write_head(tmp_path / "bare", SIDECAR, packed), "fc.weight is of type uint8")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"


@pytest.mark.parametrize(
    "contents, words", [(POINTER, ("Git LFS pointer", "git lfs pull")), (b"", ("empty",)), (b"\0" * 9, ("again",))]
)
def test_a_heads_file_that_is_not_there_yet(contents: bytes, words: tuple[str, ...], tmp_path: Path) -> None:
    trunk = {"model.norm.weight": mx.ones(64), "model.layers.0.mlp.down_proj.weight": mx.ones((64, 96))}
    write_head(tmp_path, CONFIGS["qwen3"], trunk)
    (tmp_path / "mtp.safetensors").write_bytes(contents)
    refusal(DrafterMismatch, tmp_path, "mtp.safetensors", *words)
    (tmp_path / "mtp.safetensors").rename(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SIDECAR))
    refusal(DrafterMismatch, tmp_path, "model.safetensors", *words)


def test_a_head_that_the_index_leaves_out(tmp_path: Path, expected: Any) -> None:
    trunk = {"model.norm.weight": mx.ones(64), "model.embed_tokens.weight": mx.ones((96, 64))}
    write_head(tmp_path, CONFIGS["qwen3"], trunk | renamed(tensors(), {}, "mtp."))
    index = {"weight_map": dict.fromkeys(trunk, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert candidates(load_mtp(tmp_path, target(), "model")) == expected


@pytest.mark.parametrize("dtype", [mx.int64, mx.int32, mx.float32, mx.float16, mx.bfloat16])
def test_draft_tokens_that_a_conversion_cast(dtype: mx.Dtype) -> None:
    large = SimpleNamespace(vocab_size=8192)
    assert own_draft_ids(mx.array([200, 3, 7]).astype(dtype), large, "the head") == [200, 3, 7]
    high = mx.array([4097, 3]).astype(dtype)
    if dtype in (mx.float16, mx.bfloat16):
        with pytest.raises(DrafterMismatch, match="d2t is of type .*float16, which rounds"):
            own_draft_ids(high, large, "the head")
    else:
        assert own_draft_ids(high, large, "the head") == [4097, 3]


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_shard(part: float, tmp_path: Path) -> None:
    path = write_shards(tmp_path) / "model-00003-of-3.safetensors"
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    refusal(DrafterMismatch, tmp_path, path.name, "download it again")


def test_a_missing_shard(tmp_path: Path) -> None:
    (write_shards(tmp_path) / "model-00002-of-3.safetensors").unlink()
    refusal(DrafterMismatch, tmp_path, "model-00002-of-3.safetensors")


@pytest.mark.parametrize("contents", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_broken_index(contents: str, tmp_path: Path) -> None:
    (write_shards(tmp_path) / "model.safetensors.index.json").write_text(contents)
    refusal(DrafterMismatch, tmp_path, "model.safetensors.index.json")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: {n: v for n, v in t.items() if n != "fc.weight"}, ("missing fc.weight",)),
        (lambda t: t | {"layers.0.self_attn.sinks": mx.ones(4)}, ("unused layers.0.self_attn.sinks",)),
        (lambda t: t | {"fc.weight": t["fc.weight"][:, :64]}, ("fc.weight is [64, 64], not [64, 128]",)),
        (lambda t: t | {"fc.weight": t["fc.weight"] * mx.inf}, ("NaN or infinity in fc.weight",)),
        (lambda t: t | {"d2t": mx.array([3, 96, 4])}, ("draft token 1 to 96", "has 96")),
        (lambda t: t | {"d2t": mx.array([3, -1])}, ("draft token 1 to -1",)),
        (lambda t: t | {"d2t": mx.array([3, 9, 4, 9, 3])}, ("d2t names 3, 9 more than once", "all different")),
        (lambda t: t | {"d2t": mx.zeros((0,), dtype=mx.int32)}, ("d2t names no token",)),
        (
            lambda t: t | {"d2t": mx.array([3, 4]), "lm_head.weight": mx.ones((3, 64))},
            ("scores 3 tokens", "d2t names 2"),
        ),
        (lambda t: t | {"lm_head.weight": mx.ones((3, 64))}, ("scores 3 tokens", "the target has 96")),
    ],
)
def test_tensors_that_do_not_fit(
    change: Callable[[Tensors], Tensors], words: tuple[str, ...], tmp_path: Path
) -> None:
    refusal(DrafterMismatch, write_head(tmp_path, SIDECAR, change(tensors())), *words)


@pytest.mark.parametrize("family", list(OTHER_HEADS))
def test_heads_that_work_in_another_way_are_refused_by_name(family: str, tmp_path: Path) -> None:
    folder = write_head(tmp_path, {**CONFIGS["qwen3"], "model_type": family}, tensors())
    refusal(UnsupportedModel, folder, OTHER_HEADS[family])


@pytest.mark.parametrize("family", sorted(SPECS.keys() - {"mimo", "qwen3_5", "qwen3_5_moe", "qwen3_next"}))
def test_heads_whose_targets_do_not_run_are_refused_by_name(family: str, tmp_path: Path) -> None:
    folder = write_head(tmp_path, {**CONFIGS["qwen3"], "model_type": family}, tensors())
    refusal(UnsupportedModel, folder, family)
