"""How rows are shared out: by chance, within every limit, as far as it pays."""

from itertools import product
from math import exp
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_spec.engine.costs import Costs, Setting, Shape
from mlx_spec.engine.draft_policy import PROBE_ROUNDS, CostAware, DepthOffer, FixedDepth
from mlx_spec.engine.learned_costs import LearnedCosts
from mlx_spec.engine.scheduler import share_rows

COSTS = Costs({1: 10.0, 16: 25.0}, {1: 0.5, 7: 2.0})


def falling(chances: list[float]) -> tuple[float, ...]:
    return tuple(sorted(chances, reverse=True))


chances = st.lists(st.floats(0.01, 1.0), max_size=7).map(falling)
offers = st.lists(st.builds(DepthOffer, chances, st.booleans(), st.booleans()), min_size=1, max_size=16)


@given(offers=offers, data=st.data(), costs=st.sampled_from([None, COSTS]))
def test_every_limit_is_kept(offers: list[DepthOffer], data: st.DataObject, costs: Costs | None) -> None:
    most = [data.draw(st.integers(0, 7)) for _ in offers]
    depths = share_rows(offers, most, 16, costs)
    assert len(depths) == len(offers)
    assert sum(depths) + len(offers) <= 16
    for depth, offer, limit in zip(depths, offers, most, strict=True):
        assert 0 <= depth <= min(limit, len(offer.chances))


def test_drafts_that_are_asked_for_get_rows_while_there_are_any() -> None:
    assert share_rows([DepthOffer((0.9,) * 7)] * 2, [7, 7], 16, COSTS) == [7, 7]
    assert share_rows([DepthOffer((0.9,) * 7)] * 4, [7] * 4, 16, None) == [3, 3, 3, 3]
    assert share_rows([DepthOffer((0.9,) * 7)] * 16, [7] * 16, 16, COSTS) == [0] * 16


def test_rows_go_where_survival_is_highest() -> None:
    likely, unlikely = DepthOffer((0.9, 0.8, 0.7, 0.6, 0.5), True), DepthOffer((0.4, 0.1, 0.05), True)
    assert share_rows([unlikely, likely], [7, 7], 7, None) == [0, 5]
    assert share_rows([unlikely, likely], [7, 7], 8, None) == [1, 5]
    assert share_rows([unlikely, likely], [7, 2], 8, None) == [3, 2]


def test_optional_drafts_take_the_number_that_is_cheapest_for_each_token() -> None:
    """Against every other way to share the rows out."""
    found = [DepthOffer((0.9, 0.7, 0.3), True), DepthOffer((0.5, 0.2), True), DepthOffer((0.95, 0.9, 0.85), True)]

    def ms_per_token(depths: tuple[int, ...]) -> float:
        tokens = 3 + sum(sum(offer.chances[:depth]) for offer, depth in zip(found, depths, strict=True))
        drafting = COSTS.draft_ms(max(depths))
        return (drafting + COSTS.verify_ms(3 + sum(depths))) / tokens

    best = min(product(range(4), range(3), range(4)), key=ms_per_token)
    got = tuple(share_rows(found, [7] * 3, 16, COSTS))
    assert ms_per_token(got) <= 1.02 * ms_per_token(best)
    assert 0 < sum(got) < 8


def test_where_every_row_costs_as_much_as_the_first_nothing_is_drafted() -> None:
    expensive = Costs({1: 10.0, 16: 160.0}, {1: 1.0, 7: 2.0})
    assert share_rows([DepthOffer((0.9, 0.8), True)] * 4, [7] * 4, 16, expensive) == [0] * 4


def test_copies_need_no_draft_pass() -> None:
    """A pass whose drafts would cost more than they bring takes the copies alone."""
    costs = Costs({1: 10.0, 16: 11.0}, {1: 100.0, 7: 100.0})
    likely = (0.9, 0.8)
    offers = [DepthOffer(likely, True, is_drafted) for is_drafted in (True, False, True)]
    assert share_rows(offers[1:2], [7], 16, costs) == [2]
    assert share_rows([offers[1], DepthOffer((0.1,), True)], [7] * 2, 16, costs) == [2, 0]
    assert share_rows(offers[:1], [7], 16, costs) == [0]


def test_what_further_sequences_add_to_a_draft_keeps_some_of_them_out() -> None:
    offers = [DepthOffer((0.9, 0.8), True), DepthOffer((0.5, 0.3), True), DepthOffer((0.5, 0.3), True)]
    flat = {1: 10.0, 16: 10.0}
    assert share_rows(offers, [7] * 3, 16, Costs(flat, {1: 1.0, 7: 1.0})) == [2, 2, 2]
    assert share_rows(offers, [7] * 3, 16, Costs(flat, {1: 1.0, 7: 1.0}, {1: 9.0, 7: 9.0})) == [2, 0, 0]


def test_a_policy_that_got_no_rows_for_long_asks_for_some() -> None:
    policy = CostAware(COSTS, 7)
    assert policy.offer().optional
    for _ in range(16):
        policy.update(0, 0, None)
    probe = policy.offer()
    assert not probe.optional and probe.chances
    for _ in range(PROBE_ROUNDS):
        policy.update(len(probe.chances), 0, None)
    assert policy.offer().optional
    assert FixedDepth(3).offer().chances == pytest.approx((0.75, 0.5625, 0.421875))


# 16 rows cost 2.5 times one, or hardly more where a draft is as expensive as a pass.
SHARED = {
    "a CPU": Costs({1: 20.7, 2: 20.5, 5: 27.2, 8: 30.2, 16: 51.0}, {1: 3.6, 7: 13.7, 15: 28.0}, {1: 0.6, 15: 6.0}),
    "launches": Costs({1: 5.2, 16: 5.7}, {1: 4.9, 7: 6.0, 15: 8.0}, {1: 0.5, 15: 1.5}),
}


@pytest.mark.parametrize("sequences", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("machine", SHARED)
def test_sequences_that_may_draft_lose_at_most_their_probes(machine: str, sequences: int) -> None:
    """From a guess that knows none of this, at each acceptance: 300 rounds to learn, then 700 that count."""
    true, setting = SHARED[machine], Setting("greedy", sequences, 100)
    for chance in (0.0, 0.5, 0.85):
        costs, draws = LearnedCosts(Costs({1: 1.0, 16: 1.7}, {1: 0.3, 15: 1.2}), is_guess=True), Random(1)
        policies = [CostAware(costs, 15, setting=setting) for _ in range(sequences)]
        spent, tokens = 0.0, 0
        for turn in range(1000):
            depths = [policies[0].depth()]
            if sequences > 1:
                offers = [policy.offer(sequences) for policy in policies]
                depths = share_rows(offers, [15] * sequences, 16, costs, setting)
            shape = Shape(max(depths), sequences + sum(depths), max(1, sum(depth > 0 for depth in depths)))
            ms = true.round_ms(setting, shape)
            costs.learn(setting, shape, ms * exp(draws.gauss(0, 0.05)))
            for policy, depth in zip(policies, depths, strict=True):
                accepted = next((i for i in range(depth) if draws.random() >= chance), depth)
                policy.update(depth, accepted, None)
                tokens += (1 + accepted) * (turn >= 300)
            spent += ms * (turn >= 300)
        assert tokens / spent > 0.95 * sequences / true.verify_ms(sequences)
