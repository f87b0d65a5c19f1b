"""What a loader may take wrongly drafts worse, and load() reports it: on a target and heads that were trained."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny_eagles import Tensors, write_eagle
from trained_texts import TEXTS

from mlx_spec import load, stream_generate
from mlx_spec.diagnose.acceptance import Alignment, Hits, is_better, measure
from mlx_spec.diagnose.text import read_text
from mlx_spec.diagnose.variants import Found, better_at_load, measure_at_load
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.eagle.load import load_eagle
from mlx_spec.drafters.eagle.spec import LAYER_IDS
from mlx_spec.drafters.eagle.variants import variants
from mlx_spec.engine import Engine

TRIO = Path(__file__).parent.parent / "tiny_eagles"
PROMPTS = (
    "The drafter reads",
    "    def forward(self",
    "Raises RequestError for",
    "Return the number of",
)

OPTIONS: dict[str, Any] = {"max_tokens": 32, "num_draft_tokens": 3, "temp": 0.8}

Change = Callable[[dict[str, Any], Tensors], tuple[dict[str, Any], Tensors]]


def configured(**changes: Any) -> Change:
    """State something else in the config."""
    return lambda config, tensors: ({**config, **changes}, tensors)


def as_speculators(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """State that what is fed back is normed, which only that layout can state."""
    layer = {key: value for key, value in config.items() if key not in ("architectures", "eagle_config")}
    ids = [i + 1 for i in config["eagle_config"][LAYER_IDS]]
    return {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "norm_before_residual": False,
        "norm_output": True,
        LAYER_IDS: ids,
    }, tensors


# A wrong reading of the third head, and, seen from there, what the right one is called, where it is looked for.
WRONG: dict[str, tuple[Change, str | None]] = {
    "layer ids counted by what layers read": (
        configured(**{LAYER_IDS: [1, 2, 3], "eagle_config": {}}),
        "hidden states one layer higher",
    ),
    "layer ids one too high": (
        configured(eagle_config={LAYER_IDS: [2, 3, 4]}),
        "hidden states one layer lower",
    ),
    "default layer ids": (configured(eagle_config={}), None),
    "norm_before_residual": (configured(norm_before_residual=True), "norm_before_residual false"),
    "norm_output": (as_speculators, "chains that go on with its output before the norm"),
    "no norm before the output head": (configured(norm_output=False), None),
    "the target's rotation": (configured(rope_theta=500000.0), None),
    "d2t read as ids": (configured(), None),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path_factory.mktemp("cache")))


@cache
def trio(kind: str) -> tuple[Engine, Any]:
    """The trained target with one of its heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_spec.loading.load.kept_costs", lambda *_: None)
        patch.setattr("mlx_spec.loading.load.check_wiring", lambda *_: None)
        return load(str(TRIO / "target"), str(TRIO / kind))


def drafter_of(kind: str) -> ChainDrafter:
    drafter = trio(kind)[0].drafter
    assert isinstance(drafter, ChainDrafter)
    return drafter


def stored(kind: str) -> tuple[dict[str, Any], Tensors]:
    """The config and the tensors of a head."""
    folder = TRIO / kind
    return json.loads((folder / "config.json").read_text()), mx.load(str(folder / "model.safetensors"))


def changed(kind: str, change: Change, folder: Path) -> ChainDrafter:
    """A head as a loader takes it that goes wrong in one point."""
    config, tensors = change(*stored(kind))
    if not config.get("norm_output", True):
        tensors = {name: value for name, value in tensors.items() if name != "norm.weight"}
    return load_eagle(write_eagle(folder, config, tensors), trio(kind)[0].target, "wrong")


def tokens(text: str) -> list[int]:
    return list(trio("eagle3")[1].encode(text))


@cache
def repeating() -> list[list[int]]:
    """Tokens that come again after nine, as the target and the heads know them: here positions matter."""
    ids, rng = np.array(drafter_of("eagle3").head.ids), np.random.default_rng(5)
    return [np.tile(rng.choice(ids, 9), 14).tolist() for _ in range(2)]


def prompts() -> list[str | list[int]]:
    """What decoding begins with."""
    return [*PROMPTS, *(sequence[:40] for sequence in repeating())]


def measured(kind: str, drafter: ChainDrafter) -> list[tuple[Hits, list[Found]]]:
    """How the head does on all texts, wired as it is and otherwise."""
    sequences = [*map(tokens, TEXTS), *repeating()]
    target = trio(kind)[0].target
    return [measure_at_load(target, drafter, variants(drafter, target), sequence) for sequence in sequences]


def hits(kind: str, drafter: ChainDrafter) -> np.ndarray:
    """Whether first and second drafts are right."""
    return np.concatenate([declared.right.ravel() for declared, _ in measured(kind, drafter)])


def decoded(kind: str, drafter: ChainDrafter) -> tuple[float, list[str]]:
    """Return the accepted length of real decoding, and the texts."""
    # Sampled, because greedy texts of so small a model soon repeat themselves.
    engine, tokenizer = Engine(trio(kind)[0].target, drafter), trio(kind)[1]
    done = [list(stream_generate(engine, tokenizer, p, seed=i, **OPTIONS)) for i, p in enumerate(prompts())]
    length = np.mean([d[-1].statistics.accepted_length for d in done])
    return float(length), ["".join(r.text for r in d) for d in done]


@cache
def right(kind: str) -> tuple[np.ndarray, float, list[str]]:
    """What the head as it was trained reaches."""
    drafter = drafter_of(kind)
    return hits(kind, drafter), *decoded(kind, drafter)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_the_heads_draft_right_about_half_of_the_time(kind: str) -> None:
    share, length, texts = right(kind)
    assert 0.35 < share.mean() < 0.8
    assert length > 1.5
    engine, tokenizer = trio(kind)
    for i, (prompt, text) in enumerate(zip(prompts(), texts, strict=True)):
        plain = stream_generate(engine, tokenizer, prompt, seed=i, **{**OPTIONS, "num_draft_tokens": 0})
        assert "".join(response.text for response in plain) == text


@pytest.mark.parametrize("wrong", list(WRONG))
def test_every_wrong_reading_lowers_acceptance(wrong: str, tmp_path: Path) -> None:
    """In decoding, whose text stays what it is, and on texts, where the right reading is named."""
    change, name = WRONG[wrong]
    drafter = changed("eagle3", change, tmp_path)
    if wrong == "d2t read as ids":
        assert drafter.head.ids is not None
        drafter.head = replace(drafter.head, ids=drafter.head.ids - mx.arange(drafter.head.size))
    share, length, texts = right("eagle3")
    found, (shorter, same) = measured("eagle3", drafter), decoded("eagle3", drafter)
    assert same == texts
    assert shorter < length
    assert share.mean() - np.concatenate([declared.right.ravel() for declared, _ in found]).mean() > 0.03
    if name is not None:
        gain = 0
        for declared, others in found:
            other = next(each.hits for each in others if each.contract.name == name)
            gain += int(other.right.sum()) - int(declared.right.sum())
        assert gain > 0.03 * len(share)
        named = [better_at_load(*each, "the head") or "" for each in found]
        assert any(sentence.startswith("the head: ") and name in sentence for sentence in named)


def test_the_hidden_state_before_the_final_norm_is_worse_for_eagle_1() -> None:
    engine, drafter = trio("eagle1")[0], drafter_of("eagle1")
    wrong = ChainDrafter("eagle", drafter.forward, (4,), engine.target, drafter.head)
    share, length, texts = right("eagle1")
    shorter, same = decoded("eagle1", wrong)
    assert same == texts and shorter < length
    assert share.mean() - hits("eagle1", wrong).mean() > 0.1


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_an_embedding_of_another_token_is_worse(kind: str) -> None:
    """Pairs of a hidden state and the token at its own position, not the one after it."""
    target, drafter = trio(kind)[0].target, drafter_of(kind)
    read = [read_text(target, "text", tokens(text)[:256], 1, drafter.target_layer_ids) for text in TEXTS]
    late = measure(drafter, read, 2, alignment=Alignment(shift=1))
    assert is_better(measure(drafter, read, 2), late)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_the_right_reading_is_left_alone(kind: str) -> None:
    assert [better_at_load(*each, "head") for each in measured(kind, drafter_of(kind))] == [None] * 5


def test_load_warns_of_a_wrong_reading_and_is_silent_about_the_right_one(tmp_path: Path) -> None:
    config, tensors = stored("eagle3")
    folder = write_eagle(tmp_path, {**config, LAYER_IDS: [1, 2, 3]}, tensors)
    with pytest.warns(UserWarning, match="hidden states one layer higher"):
        load(str(TRIO / "target"), str(folder))[0].settle()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("eagle1", "eagle3"):
            engine, _ = load(str(TRIO / "target"), str(TRIO / kind))
            engine.settle()
            assert engine.drafter is not None


def test_the_trio_is_small() -> None:
    assert sum(path.stat().st_size for path in TRIO.rglob("*") if path.is_file()) < 1 << 20
