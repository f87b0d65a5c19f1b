"""A head wired wrongly drafts worse, and load() reports it: on tiny targets and heads that were trained."""

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
from tiny_heads import MIMO, NEXTN, Tensors, renamed, write_head, zero_centred
from trained_texts import TEXTS

from mlx_spec import load, stream_generate
from mlx_spec.cache_folder import cache_folder
from mlx_spec.diagnose.acceptance import Hits, is_gain
from mlx_spec.diagnose.variants import Found, better_at_load, measure_at_load
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.mtp.head import MTPForward
from mlx_spec.drafters.mtp.tensors import shift_norms
from mlx_spec.drafters.mtp.variants import variants, with_norms_shifted
from mlx_spec.engine import Engine
from mlx_spec.target import Target

TESTS = Path(__file__).parent.parent
# Target and head; the hybrid, whose layers are recurrent in turn, holds its head.
KINDS = {
    "pair": (TESTS / "tiny_pair" / "target", TESTS / "tiny_pair" / "head"),
    "hybrid": (TESTS / "tiny_hybrid", TESTS / "tiny_hybrid"),
}
PROMPTS = (
    "The drafter reads",
    "    def forward(self",
    "Raises RequestError for",
    "Return the number of",
    "from mlx_spec",
)

Wiring = Callable[[MTPForward], MTPForward]
WRONG: dict[str, Wiring] = {
    "the hidden state after the final norm": lambda r: replace(r, spec=replace(r.spec, reads_normed=False)),
    "embedding and hidden state swapped": lambda r: replace(r, spec=replace(r.spec, hidden_first=True)),
    "its norm weights one smaller": lambda r: with_norms_shifted(r, 1.0),
    "its norm weights one larger": lambda r: with_norms_shifted(r, -1.0),
}

kinds = pytest.mark.parametrize("kind", list(KINDS))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path_factory.mktemp("cache")))


@cache
def loaded(kind: str) -> tuple[Engine, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_spec.loading.load.kept_costs", lambda *_: None)
        patch.setattr("mlx_spec.loading.load.check_wiring", lambda *_: None)
        return load(*map(str, KINDS[kind]))


def rewired(kind: str, wiring: Wiring) -> ChainDrafter:
    """The drafter, wired in another way."""
    engine = loaded(kind)[0]
    assert isinstance(engine.drafter, ChainDrafter)
    rows = wiring(engine.drafter.forward)
    target_layer_ids = (engine.target.num_layers - (not rows.spec.reads_normed),)
    return ChainDrafter("mtp", rows, target_layer_ids, engine.target, engine.drafter.head)


def measure(target: Target, drafter: ChainDrafter, tokens: list[int]) -> tuple[Hits, list[Found]]:
    return measure_at_load(target, drafter, variants(drafter, target), tokens)


def tokens(text: str) -> list[int]:
    return list(loaded("pair")[1].encode(text))


@kinds
def test_drafts_are_right_about_half_of_the_time(kind: str) -> None:
    target, drafter = loaded(kind)[0].target, rewired(kind, lambda r: r)
    hits = np.concatenate([measure(target, drafter, tokens(text))[0].right for text in TEXTS])
    assert 0.4 < hits.mean() < 0.8
    assert hits.size > 500


@cache
def decoded(kind: str, wiring: str) -> tuple[float, list[str]]:
    """The mean accepted length of a wiring, and the texts that came."""
    drafter = rewired(kind, WRONG.get(wiring, lambda rows: rows))
    engine, tokenizer = Engine(loaded(kind)[0].target, drafter), loaded(kind)[1]
    # Sampled, because greedy texts of so small a model soon repeat themselves.
    options = {"max_tokens": 60, "num_draft_tokens": 2, "temp": 0.8}
    done = [list(stream_generate(engine, tokenizer, p, seed=i, **options)) for i, p in enumerate(PROMPTS)]
    lengths = [responses[-1].statistics.accepted_length for responses in done]
    return float(np.mean(lengths)), ["".join(r.text for r in responses) for responses in done]


@kinds
@pytest.mark.parametrize("wrong", list(WRONG))
def test_every_wrong_wiring_lowers_acceptance(wrong: str, kind: str) -> None:
    """In decoding, which stays what it is, and position by position on texts."""
    engine, drafter = loaded(kind)[0], rewired(kind, WRONG[wrong])
    length, texts = decoded(kind, "right")
    assert decoded(kind, wrong)[1] == texts
    assert decoded(kind, wrong)[0] < length
    measured = [measure(engine.target, drafter, tokens(text)) for text in TEXTS]
    # Seen from the wrong wiring, the right one is the one that differs by ``wrong``.
    found = [next(each.hits for each in others if each.contract.name == wrong) for _, others in measured]
    gain = [
        int(hits.right.sum()) - int(declared.right.sum())
        for hits, (declared, _) in zip(found, measured, strict=True)
    ]
    assert sum(gain) > 0.05 * sum(declared.right.size for declared, _ in measured)


@kinds
def test_the_right_wiring_is_left_alone(kind: str) -> None:
    for text in TEXTS:
        found = measure(loaded(kind)[0].target, rewired(kind, lambda r: r), tokens(text))
        assert better_at_load(*found, "head") is None


@kinds
@pytest.mark.parametrize("wrong", list(WRONG))
def test_a_wrong_wiring_is_named(wrong: str, kind: str) -> None:
    target, drafter = loaded(kind)[0].target, rewired(kind, WRONG[wrong])
    found = [better_at_load(*measure(target, drafter, tokens(text)), "the head") for text in TEXTS]
    named = [sentence for sentence in found if sentence is not None]
    assert named and all(sentence.startswith("the head: ") and wrong in sentence for sentence in named)


def test_only_a_clear_gain_counts() -> None:
    few, many, lost = np.zeros(200), np.zeros(200), np.ones(200)
    few[:4], many[:30] = 1.0, 1.0
    lost[::2] = -1.0
    assert [is_gain(gains) for gains in (few, many, lost, -many, many[:1])] == [False, True, False, False, False]


def stored(kind: str) -> Tensors:
    """The head's tensors, norm weights whole, without prefix."""
    tensors = mx.load(str(KINDS[kind][1] / "model.safetensors"))
    head = {name.removeprefix("mtp."): value for name, value in tensors.items() if name.startswith("mtp.")}
    return shift_norms(head, 1.0)


def layer_of(kind: str) -> dict[str, Any]:
    """The configuration of the head's layer."""
    config = json.loads((KINDS[kind][1] / "config.json").read_text())
    return config["text_config"]


def wirings() -> list[dict[str, str | None]]:
    """What was measured of wirings so far."""
    known = json.loads((cache_folder() / "machine.json").read_text())
    return [entry for entry in known.values() if "better" in entry]


def after_target(kind: str, tensors: Tensors) -> Tensors:
    """Number a head's layer after the target's."""
    return renamed(tensors, NEXTN, f"model.layers.{layer_of(kind)['num_hidden_layers']}.")


# Heads under the names of families that are wired otherwise, though they were trained as Qwen's: a model type, and
# the stored tensors by those of the head.
SIDECARS: dict[str, tuple[str, Callable[[str, Tensors], Tensors]]] = {
    "the hidden state after the final norm": ("step3p5_mtp", lambda k, t: after_target(k, zero_centred(t))),
    "embedding and hidden state swapped": ("mimo_mtp", lambda k, t: renamed(t, MIMO, "model.mtp_layers.0.")),
    "its norm weights one smaller": ("qwen3_5_mtp", lambda k, t: shift_norms(t, 1.0)),
    "its norm weights one larger": ("deepseek_v3_mtp", lambda k, t: after_target(k, zero_centred(t))),
}


@kinds
@pytest.mark.parametrize("wrong", list(SIDECARS))
def test_load_warns_of_a_wrong_wiring_every_time(wrong: str, kind: str, tmp_path: Path) -> None:
    model_type, names = SIDECARS[wrong]
    config = {"model_type": model_type, "text_config": layer_of(kind)}
    folder = write_head(tmp_path, config, names(kind, stored(kind)))
    for _ in range(2):
        with pytest.warns(UserWarning, match=wrong):
            load(str(KINDS[kind][0]), str(folder))[0].settle()
    assert len(wirings()) == 1


def test_load_measures_again_when_the_head_was_replaced(tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v3_mtp", "text_config": layer_of("pair")}
    for by, warns in ((-1.0, True), (0.0, False)):
        write_head(tmp_path, config, shift_norms(stored("pair"), by))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load(str(KINDS["pair"][0]), str(tmp_path))[0].settle()
        assert ["norm weights one larger" in str(w.message) for w in caught] == ([True] if warns else [])


@kinds
def test_load_is_silent_about_the_right_wiring(kind: str) -> None:
    engine, _ = load(*map(str, KINDS[kind]))
    assert isinstance(engine.drafter, ChainDrafter)
    engine.settle()
    assert wirings() == [{"better": None}]


def test_a_model_as_published_brings_its_head(tmp_path: Path) -> None:
    """Its norm weights are stored less one, those of the target and those of the head."""
    folder = KINDS["hybrid"][0]
    engine, _ = load(str(folder))
    assert isinstance(engine.drafter, ChainDrafter)
    assert mx.array_equal(engine.drafter.forward.norm.weight, stored("hybrid")["norm.weight"])
    low = mx.load(str(folder / "model.safetensors"))["model.language_model.norm.weight"]
    assert mx.array_equal(engine.target.norm.weight, low + 1)
