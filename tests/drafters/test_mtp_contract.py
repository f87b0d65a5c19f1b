"""A head that is wired wrongly drafts worse, and load() says so: on a tiny target and a head that were trained."""

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
from tiny_heads import MIMO, Tensors, renamed, write_head

from mlx_spec import load, stream_generate
from mlx_spec.cache_folder import cache_folder
from mlx_spec.drafters.mtp.check import Measured, better_wiring, measure, shifted
from mlx_spec.drafters.mtp.drafter import MTPDrafter
from mlx_spec.drafters.mtp.head import HeadRows
from mlx_spec.drafters.mtp.tensors import shift_norms
from mlx_spec.engine import Engine

PAIR = Path(__file__).parent.parent / "tiny_pair"
# Of the kind that the pair was trained on.
TEXTS = (
    "The target itself writes the replies, half of them greedily, half sampled: a drafter must predict what this "
    "target\nsays, not what is right. Every position of a reply can start a block. It sees the committed "
    "positions before\nits anchor and must say the next seven tokens at once. The loss compares each.",
    "    def depth(self) -> int:\n"
    '        """Return the fixed depth."""\n'
    "        return self.count\n\n"
    "    def update(self, drafted: int, accepted: int) -> None:\n"
    '        """Learn nothing."""\n\n'
    "    @property\n"
    "    def reason(self) -> str:\n",
    "A drafter is made for one target. mlx_spec compares hidden size, vocabulary and every tensor's name and\n"
    "shape at load, and names what does not fit. Memory is taken as it is used, in pages of 32 positions.",
)
PROMPTS = (
    "The drafter reads",
    "    def forward(self",
    "Raises RequestError for",
    "Return the number of",
    "from mlx_spec",
)

Wiring = Callable[[HeadRows], HeadRows]
WRONG: dict[str, Wiring] = {
    "the hidden state behind the final norm": lambda r: replace(
        r, contract=replace(r.contract, reads_normed=False)
    ),
    "embedding and hidden state swapped": lambda r: replace(r, contract=replace(r.contract, hidden_first=True)),
    "its norm weights one smaller": lambda r: shifted(r, 1.0),
    "its norm weights one larger": lambda r: shifted(r, -1.0),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path_factory.mktemp("cache")))


@cache
def pair() -> tuple[Engine, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_spec.models.measured_costs", lambda *_: None)
        patch.setattr("mlx_spec.models.check_wiring", lambda *_: None)
        return load(str(PAIR / "target"), str(PAIR / "head"))


def rewired(wiring: Wiring) -> MTPDrafter:
    """The pair's drafter, wired in another way."""
    engine = pair()[0]
    assert isinstance(engine.drafter, MTPDrafter)
    return MTPDrafter(wiring(engine.drafter.rows), engine.target, engine.drafter.head)


def tokens(text: str) -> list[int]:
    return list(pair()[1].encode(text))


def test_the_pair_drafts_right_about_half_of_the_time() -> None:
    engine = pair()[0]
    hits = np.concatenate([measure(engine.target, rewired(lambda r: r), tokens(text)).declared for text in TEXTS])
    assert 0.4 < hits.mean() < 0.8
    assert len(hits) > 500


@pytest.mark.parametrize("wrong", list(WRONG))
def test_every_wrong_wiring_lowers_acceptance(wrong: str) -> None:
    """In decoding, which stays what it is, and position by position on texts."""
    engine, tokenizer = pair()
    drafter = rewired(WRONG[wrong])
    lengths, texts = [], []
    for each in (engine, Engine(engine.target, drafter)):
        # Sampled, because greedy texts of so small a model soon repeat themselves.
        options = {"max_tokens": 80, "num_draft_tokens": 2, "temp": 0.8}
        done = [list(stream_generate(each, tokenizer, p, seed=i, **options)) for i, p in enumerate(PROMPTS)]
        lengths.append(np.mean([d[-1].statistics.accepted_length for d in done]))
        texts.append(["".join(r.text for r in d) for d in done])
    assert texts[0] == texts[1]
    assert lengths[1] < lengths[0]
    measured = [measure(engine.target, drafter, tokens(text)) for text in TEXTS]
    # Seen from the wrong wiring, the right one is the one that differs by ``wrong``.
    gain = [int(m.others[wrong].sum()) - int(m.declared.sum()) for m in measured]
    assert sum(gain) > 0.05 * sum(len(m.declared) for m in measured)


def test_the_right_wiring_is_left_alone() -> None:
    engine = pair()[0]
    for text in TEXTS:
        assert better_wiring(engine.target, rewired(lambda r: r), tokens(text), "head") is None


@pytest.mark.parametrize("wrong", list(WRONG))
def test_a_wrong_wiring_is_named(wrong: str) -> None:
    engine = pair()[0]
    found = [better_wiring(engine.target, rewired(WRONG[wrong]), tokens(text), "the head") for text in TEXTS]
    named = [sentence for sentence in found if sentence is not None]
    assert named and all(sentence.startswith("the head: ") and wrong in sentence for sentence in named)


def test_only_a_clear_gain_counts() -> None:
    base = np.arange(200) % 2 == 0
    few, many = base.copy(), base.copy()
    few[1:8:2] = True
    many[1:60:2] = True
    assert Measured(base, {"few": few}).better() is None
    assert Measured(base, {"few": few, "many": many}).better() == "many"
    # As many lost as won: nothing is better.
    assert Measured(base, {"other": ~base}).better() is None


def stored() -> Tensors:
    """The head's tensors, norm weights whole, without prefix."""
    tensors = mx.load(str(PAIR / "head" / "model.safetensors"))
    return shift_norms({name.removeprefix("mtp."): value for name, value in tensors.items()}, 1.0)


def wirings() -> list[dict[str, str | None]]:
    """What was measured of wirings so far."""
    known = json.loads((cache_folder() / "costs.json").read_text())
    return [entry for entry in known.values() if "better" in entry]


def test_load_warns_of_a_wrong_wiring_every_time(tmp_path: Path) -> None:
    """A head under the names of a family that puts the hidden state first, though it was trained otherwise."""
    config = json.loads((PAIR / "head" / "config.json").read_text())
    folder = write_head(
        tmp_path, {**config, "model_type": "mimo_mtp"}, renamed(stored(), MIMO, "model.mtp_layers.0.")
    )
    for _ in range(2):
        with pytest.warns(UserWarning, match="embedding and hidden state swapped"):
            load(str(PAIR / "target"), str(folder))
    assert len(wirings()) == 1


def test_load_measures_again_when_the_head_was_replaced(tmp_path: Path) -> None:
    config = {**json.loads((PAIR / "head" / "config.json").read_text()), "model_type": "deepseek_v3_mtp"}
    for by, warns in ((-1.0, True), (0.0, False)):
        write_head(tmp_path, config, shift_norms(stored(), by))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load(str(PAIR / "target"), str(tmp_path))
        assert ["norm weights one larger" in str(w.message) for w in caught] == ([True] if warns else [])


def test_load_is_silent_about_the_right_wiring() -> None:
    engine, _ = load(str(PAIR / "target"), str(PAIR / "head"))
    assert isinstance(engine.drafter, MTPDrafter)
    assert wirings() == [{"better": None}]
