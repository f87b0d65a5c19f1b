"""Lossless trees: whatever is verified beside a chain, every token and every number is that of plain decoding.

bfloat16 targets, see test_lossless. Families with recurrent layers take no trees.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from ranked_drafter import RankedDrafter, Ranks
from scripted_drafters import Finished, ScriptedState, plain, run
from started import started
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_eagles import eagle_config, eagle_tensors, write_eagle
from tiny_heads import head_tensors, write_layout
from tiny_models import CONFIGS, HYBRIDS, tiny_target

from mlx_spec import load
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.diagnose.rows import RowCheck
from mlx_spec.drafters.base import Draft, Drafter, DraftRule
from mlx_spec.drafters.dflash2.load import load_dflash2
from mlx_spec.drafters.eagle.load import load_eagle
from mlx_spec.drafters.mtp.load import load_mtp
from mlx_spec.drafters.tree import tree_of
from mlx_spec.engine import Engine, Request
from mlx_spec.errors import RequestError
from mlx_spec.target import Target

FAMILIES = [family for family in CONFIGS if family not in HYBRIDS]
TOKENS = [int(t) for t in np.random.default_rng(1).integers(0, 90, 110)]
# The text crosses a page of 32 and goes beyond the windows of 24 and 40.
PROMPT, NEW_TOKENS = TOKENS[:27], 20


def even_tokens_cost_more(tokens: mx.array, logits: mx.array) -> mx.array:
    """A logits processor that depends on the whole history: its sum and its length."""
    shift = (mx.sum(tokens) + tokens.size) % 2
    return logits - 3 * ((mx.arange(logits.shape[-1]) + shift) % 2 == 0)


SAMPLERS = {
    "greedy": Sampling(),
    "greedy, penalties": Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    "coupled": Sampling(temp=0.8, seed=5),
    "coupled, penalties": Sampling(temp=0.8, seed=7, top_k=24, repetition_penalty=1.3, logit_bias={3: 4.0}),
    "coupled, processor": Sampling(temp=0.7, seed=8, logits_processors=(even_tokens_cost_more,)),
    # top_k 1 leaves one token to draw, so even rejection must give the plain text.
    "rejection, one token left": Sampling(temp=0.8, seed=9, top_k=1, accept="rejection"),
}
# Drafts and siblings.
SHAPES = [(3, 3), (1, 14), (7, 8), (2, 5), (5, 1), (7, 7), (1, 1)]


def lots(seed: int) -> Ranks:
    """The right token is drafted in half of the cases, and is another candidate, or none, in the others."""
    ranks = [0, 0, 0, 0, 1, 1, 2, None]
    return lambda proposal, index, position: ranks[np.random.default_rng([seed, proposal, index]).integers(8)]


SCRIPTS: dict[str, Ranks] = {
    "always right": lambda proposal, index, position: 0,
    "always wrong": lambda proposal, index, position: None,
    "always a sibling": lambda proposal, index, position: 1,
    **{
        f"a sibling at depth {depth}": lambda proposal, index, position, depth=depth: int(index == depth)
        for depth in range(7)
    },
    "lots 1": lots(1),
    "lots 2": lots(2),
}


@cache
def target_of(family: str) -> Target:
    return tiny_target(family, mx.bfloat16)


@cache
def plain_text(family: str, sampler: str) -> Finished:
    return plain(target_of(family), Request(PROMPT, NEW_TOKENS, sampling=SAMPLERS[sampler]))


def request_of(sampler: str, shape: tuple[int, int]) -> Request:
    return Request(PROMPT, NEW_TOKENS, shape[0], SAMPLERS[sampler], num_sibling_drafts=shape[1])


def check_counters(done: Finished) -> None:
    """Every round emits one token of the target's own, and those accepted."""
    statistics = done.statistics
    assert statistics.tokens == sum(map(len, done.rounds)) == NEW_TOKENS
    assert statistics.tokens == statistics.rounds + sum(statistics.accepted) + statistics.accepted_sibling_drafts
    assert 0 <= statistics.accepted_sibling_drafts <= statistics.sibling_drafts


# Every second pair, so that each family meets half of the samplers and each sampler half of the families.
SCRIPTED = [
    (family, sampler, shape, script)
    for (family, sampler), shape, script in zip(
        [pair for i, pair in enumerate(product(FAMILIES, SAMPLERS)) if (i + i // len(SAMPLERS)) % 2 == 0],
        cycle(SHAPES),
        cycle(SCRIPTS),
        strict=False,
    )
]


@pytest.mark.parametrize(("family", "sampler", "shape", "script"), SCRIPTED)
def test_a_scripted_tree_changes_no_token(family: str, sampler: str, shape: tuple[int, int], script: str) -> None:
    target, expected = target_of(family), plain_text(family, sampler)
    drafter = RankedDrafter(target, expected.text, SCRIPTS[script], target_layer_ids=(1, 4))
    done = run(Engine(target, drafter), request_of(sampler, shape))
    assert (done.text, done.finish_reason) == (expected.text, "length")
    check_counters(done)
    assert done.statistics.sibling_drafts > 0
    if script == "always wrong":
        assert done.statistics.accepted_sibling_drafts == 0


def test_the_cases_cover_what_they_should() -> None:
    assert {case[1] for case in SCRIPTED} == set(SAMPLERS)
    assert {case[2] for case in SCRIPTED} == set(SHAPES)
    assert {case[3] for case in SCRIPTED} == set(SCRIPTS)
    assert {case[0] for case in SCRIPTED} == set(FAMILIES)


@pytest.mark.parametrize(
    ("depth", "sampler"),
    [*((depth, "greedy") for depth in range(7)), *product((0, 6), ("coupled", "rejection, one token left"))],
)
def test_a_token_that_is_only_a_sibling_ends_its_path(depth: int, sampler: str) -> None:
    """Right in the chain up to a depth, there in the sibling alone: the round takes both and one token more."""
    target, expected = target_of("llama"), plain_text("llama", sampler)
    drafter = RankedDrafter(target, expected.text, SCRIPTS[f"a sibling at depth {depth}"])
    done = run(Engine(target, drafter), request_of(sampler, (7, 8)))
    assert done.text == expected.text
    assert [len(tokens) for tokens in done.rounds[:-1]] == [depth + 2] * (len(done.rounds) - 1)
    assert done.statistics.accepted_sibling_drafts >= len(done.rounds) - 2


@pytest.mark.parametrize("place", range(3, 8))
def test_a_text_ends_inside_a_path_and_at_its_sibling_where_plain_decoding_ends(place: int) -> None:
    target, whole = target_of("llama"), plain_text("llama", "coupled").text[len(PROMPT) :]
    request = replace(request_of("coupled", (3, 4)), eos_token_ids=frozenset({whole[place]}))
    expected = plain(target, request)
    drafter = RankedDrafter(target, plain_text("llama", "coupled").text, SCRIPTS["a sibling at depth 2"])
    done = run(Engine(target, drafter), request)
    assert (done.text, done.finish_reason) == (expected.text, expected.finish_reason)
    assert done.finish_reason == "stop"


def dflash2(folder: Path, target: Target) -> Drafter:
    config = dflash2_config()
    written = write_drafter(folder, config, random_tensors(config, dtype=mx.bfloat16))
    return load_dflash2(written, target, "tiny drafter")


def mtp(folder: Path, target: Target) -> Drafter:
    write_layout(folder, "sidecar", "llama", head_tensors("llama", dtype=mx.bfloat16))
    return load_mtp(folder, target, "tiny head")


def eagle(folder: Path, target: Target) -> Drafter:
    config = eagle_config("llama", layer_types=["sliding_attention"], sliding_window=24)
    return load_eagle(write_eagle(folder, config, eagle_tensors(config, dtype=mx.bfloat16)), target, "tiny head")


@pytest.mark.parametrize("sampler", ["greedy", "coupled", "rejection, one token left"])
@pytest.mark.parametrize("make", [dflash2, mtp, eagle])
def test_siblings_of_every_drafter_change_no_token(
    make: Callable[[Path, Target], Drafter], sampler: str, tmp_path: Path
) -> None:
    target, expected = target_of("llama"), plain_text("llama", sampler)
    done = run(Engine(target, make(tmp_path, target)), request_of(sampler, (3, 12)))
    assert done.text == expected.text
    check_counters(done)
    # Four siblings beside each draft: the rounds at the end have fewer drafts.
    assert done.statistics.sibling_drafts >= 10 * done.statistics.rounds


@cache
def trained() -> tuple[Engine, Callable[[str], list[int]]]:
    """A target and a trained head, of whose drafts and siblings some are accepted, and how it reads a text."""
    folder = Path(__file__).parent / "tiny_pair"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_spec.loading.load.kept_costs", lambda *_: None)
        patch.setattr("mlx_spec.loading.load.check_wiring", lambda *_: None)
        engine, tokenizer = load(str(folder / "target"), drafter=str(folder / "head"))
    return engine, tokenizer.encode


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.parametrize(("sampler", "text"), [("greedy", "from mlx_spec"), ("coupled", "Return the number of")])
def test_a_trained_head_gains_by_siblings_and_gives_the_numbers_of_plain_decoding(sampler: str, text: str) -> None:
    engine, encode = trained()
    prompt = encode(text)
    rows, logprobs = RowCheck(engine.target), []
    request = Request(
        prompt,
        40,
        3,
        SAMPLERS[sampler],
        logprobs=True,
        top_logprobs=3,
        num_sibling_drafts=6,
        on_verified=rows.check,
    )
    for each in (request, replace(request, num_draft_tokens=0, on_verified=None)):
        generation, found = started(engine, each), list[Any]()
        while generation.finish_reason is None:
            found += engine.step(generation).checked().logprobs
        logprobs.append([(token.logprob, token.top) for token in found])
        engine.close(generation)
        if each is request:
            tree = generation
    assert tree.tokens == generation.tokens
    assert logprobs[0] == logprobs[1] and len(logprobs[0]) == 40
    assert tree.statistics.accepted_sibling_drafts > 0
    assert "tree with 6 siblings" in tree.statistics.depth_reason
    assert rows.rows >= 40 and not rows.differences
    chain = run(engine, replace(request, num_sibling_drafts=0, on_verified=None))
    assert chain.text == generation.tokens
    assert chain.statistics.rounds > tree.statistics.rounds


def test_a_short_exact_answer_may_come_from_a_tree() -> None:
    engine, encode = trained()
    prompt = encode("A round that an exception breaks off")
    request = Request(prompt, 20, 3, num_sibling_drafts=9, top_logprobs=2)
    expected = plain(engine.target, request)
    generation, found = started(engine, request), list[Any]()
    while generation.finish_reason is None:
        found += engine.answer_step(generation).logprobs
    engine.close(generation)
    assert generation.tokens == expected.text and len(found) == 20
    assert all(token.top[0][1] == token.logprob for token in found)
    assert generation.statistics.accepted_sibling_drafts > 0


def test_a_sequence_in_company_drafts_chains() -> None:
    engine, encode = trained()
    prompt = encode("A round that an exception breaks off")
    request = Request(prompt, 16, 3, num_sibling_drafts=9)
    pair = [started(engine, replace(request, prompt=prompt[: len(prompt) - cut])) for cut in (0, 1)]
    engine.step(pair)
    assert [generation.statistics.sibling_drafts for generation in pair] == [0, 0]
    engine.step(pair[0])
    assert pair[0].statistics.sibling_drafts == 9
    while any(generation.finish_reason is None for generation in pair):
        engine.step(pair)
    for generation in pair:
        assert generation.tokens == plain(engine.target, generation.request).text
        engine.close(generation)


class Thicket(RankedDrafter):
    """Brings a tree of its own, that branches at every depth; in half of the places its token is right."""

    parents = (0, 1, 2, 0, 4, 5, 1, 7, 4, 9, 0)

    def draft(self, state: ScriptedState, anchor: int, count: int, rule: DraftRule) -> Draft:
        chain, tree = super().draft(state, anchor, count, rule), tree_of(self.parents)
        if count < max(tree.depths):
            return chain
        lots, first = np.random.default_rng([state.proposals, 5]).random(tree.num_rows) < 0.5, len(state.tokens)
        rights = [*self.text[first : first + 4], 0, 0, 0][:4]
        tokens = [
            (rights[depth] + (0 if lots[row] else row)) % self.vocab_size for row, depth in enumerate(tree.depths)
        ]
        return Draft(mx.array(tokens[1:], dtype=mx.int32), mx.zeros((tree.num_rows - 1, 0)), parents=self.parents)


@pytest.mark.parametrize("sampler", ["greedy", "greedy, penalties", "coupled", "coupled, processor"])
def test_a_drafters_own_tree_changes_no_token(sampler: str) -> None:
    target, expected = target_of("llama_sliding"), plain_text("llama_sliding", sampler)
    drafter = Thicket(target, expected.text, SCRIPTS["always right"], target_layer_ids=(2,))
    done = run(Engine(target, drafter), replace(request_of(sampler, (3, 0)), num_sibling_drafts=None))
    assert done.text == expected.text
    check_counters(done)
    assert done.statistics.sibling_drafts >= 8 and done.statistics.accepted_sibling_drafts > 0


def test_a_tree_of_more_rows_than_a_pass_has_is_refused_and_nothing_is_lost() -> None:
    target, expected = target_of("llama_sliding"), plain_text("llama_sliding", "greedy")
    drafter = Thicket(target, expected.text, SCRIPTS["always right"], target_layer_ids=(2,))
    engine = Engine(target, drafter)
    generation = started(engine, replace(request_of("greedy", (3, 0)), num_sibling_drafts=None))
    drafter.parents = (0, 1, 2, *(0,) * 13)
    with pytest.raises(RequestError, match="proposed 16 tokens, but beside the anchor this pass has 15 rows"):
        engine.step(generation).checked()
    assert generation.tokens == list(generation.request.prompt)
    del drafter.parents
    while generation.finish_reason is None:
        engine.step(generation).checked()
    assert generation.tokens == expected.text
    engine.close(generation)
