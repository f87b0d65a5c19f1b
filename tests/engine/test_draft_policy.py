"""The depth policy: the cheapest depth by expectation, pausing, and probing."""

import numpy as np
import pytest

from mlx_spec.engine.costs import Costs, interpolate
from mlx_spec.engine.draft_policy import (
    COPY_MARGIN,
    DECAY,
    MARGIN,
    Adaptive,
    CopiesAlone,
    CostAware,
    FixedDepth,
    policy_for,
)

CHEAP = Costs({1: 10.0, 8: 12.0}, {1: 1.0, 7: 2.0})
# A verify pass of n rows costs what n passes of one row cost: drafting can never pay.
EXPENSIVE = Costs({1: 10.0, 8: 80.0}, {1: 1.0, 7: 2.0})


@pytest.mark.parametrize(
    ("x", "expected"), [(1, 10.0), (2, 12.0), (3, 14.0), (5, 22.0), (7, 30.0), (9, 38.0), (0, 8.0)]
)
def test_interpolate_is_piecewise_linear_and_carries_on(x: int, expected: float) -> None:
    assert interpolate({7: 30.0, 1: 10.0, 3: 14.0}, x) == pytest.approx(expected)


def test_interpolate_with_a_single_point_is_constant() -> None:
    assert [interpolate({4: 3.0}, x) for x in (1, 4, 9)] == [3.0, 3.0, 3.0]


def test_drafting_nothing_is_free() -> None:
    assert CHEAP.draft_ms(0) == 0.0
    assert CHEAP.draft_ms(1) == 1.0
    assert CHEAP.verify_ms(1) == 10.0


def test_fixed_depth_never_moves() -> None:
    policy = FixedDepth(3)
    for _ in range(20):
        policy.update(3, 0, None)
    assert policy.depth() == 3
    assert policy.reason == "fixed at 3"


def test_adaptive_depth_follows_whole_rounds() -> None:
    policy, depths = Adaptive(7), []
    for accepted in ("all", "all", 3, 0, 0, 0, 0, 0, 0, *["all"] * 8, 2):
        drafted = policy.depth()
        policy.update(drafted, drafted if accepted == "all" else int(accepted), None)
        depths.append(policy.depth())
    assert depths == [4, 5, 5, 4, 3, 2, 1, 1, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7]
    assert policy.reason == "adaptive, at 7"


def test_adaptive_depth_learns_nothing_from_a_round_that_was_cut() -> None:
    policy = Adaptive(2)
    assert policy.depth() == 2
    policy.update(1, 1, None)
    policy.update(1, 0, None)
    policy.update(0, 0, None)
    assert policy.depth() == 2


def rates_of(policy: CostAware) -> list[float]:
    """The chance of each draft: its successes, and what is borrowed of the position before, over both tries."""
    rates = [policy.prior]
    for tries, successes, borrowed in policy.reach:
        rates.append((successes + borrowed * rates[-1]) / (tries + borrowed))
    return rates[1:]


def expected_cost(policy: CostAware, depth: int) -> float:
    """Milliseconds a token at a depth, from the definition: a draft counts when all up to it are accepted."""
    rates = rates_of(policy)
    tokens = 1 + sum(np.prod(rates[: k + 1]) for k in range(depth))
    draft = np.interp(depth, [1, 7], [1.0, 2.0]) if depth else 0.0
    return (draft + np.interp(depth + 1, [1, 8], [10.0, 24.0])) / tokens


def test_the_depth_is_the_cheapest_by_brute_force() -> None:
    chosen = set()
    for seed in range(12):
        random = np.random.default_rng(seed)
        policy, rate = CostAware(Costs({1: 10.0, 8: 24.0}, {1: 1.0, 7: 2.0}), 7), random.uniform(0.3, 0.99)
        for _ in range(60):
            costs = [expected_cost(policy, k) for k in range(8)]
            best = int(np.argmin(costs))
            assert policy.ms_per_token(best) == pytest.approx(costs[best])
            if costs[best] < MARGIN * costs[0]:
                assert policy.depth() == best
                chosen.add(best)
            policy.update(7, int((random.random(8) < rate).argmin()) if random.random() < 0.99 else 7, None)
    assert len(chosen) > 3


def test_evidence_fades_and_reaches_only_the_first_failure() -> None:
    policy = CostAware(CHEAP, 4, prior=0.5)
    assert policy.reach == [[0.0, 0.0, 4.0]] * 4
    policy.update(3, 1, None)
    assert policy.reach[0] == pytest.approx([1, 1, DECAY * 4])
    assert policy.reach[1] == pytest.approx([1, 0, DECAY * 4])
    assert policy.reach[2:] == [[0.0, 0.0, 4.0]] * 2
    policy.update(2, 2, None)
    assert policy.reach[1] == pytest.approx([DECAY + 1, 1, DECAY * DECAY * 4])
    assert policy.reach[2:] == [[0.0, 0.0, 4.0]] * 2
    policy.update(0, 0, None)
    assert policy.reach[3] == [0.0, 0.0, 4.0]


def test_a_position_of_which_nothing_is_known_is_taken_for_the_one_before() -> None:
    """So a text whose drafts are all accepted is drafted deeper at once, and not position by position."""
    policy = CostAware(CHEAP, 15)
    for _ in range(12):
        policy.update(2, 2, None)
    rates = rates_of(policy)
    assert policy.offer().chances == pytest.approx(np.cumprod(rates))
    assert rates[2:] == pytest.approx([rates[1]] * 13) and rates[1] > 0.9
    assert policy.depth() == 15


def test_a_cheap_drafter_is_used_from_the_first_round_at_full_depth_while_all_is_accepted() -> None:
    policy = CostAware(CHEAP, 7)
    depths = []
    for _ in range(30):
        depths.append(policy.depth())
        policy.update(depths[-1], depths[-1], None)
    assert min(depths) >= 1
    assert depths[-1] == 7
    assert policy.reason.startswith("about 7: drafting 7, a chain, is expected to cost ")


def test_an_expensive_drafter_is_paused_and_probed_after_8_16_and_so_on() -> None:
    """Up to where 4 rounds that take 2.1 times as long are 1.5 % of the time."""
    policy = CostAware(EXPENSIVE, 7)
    runs, drafting = [], None
    for _ in range(1500):
        depth = policy.depth()
        if (depth > 0) != drafting:
            drafting = depth > 0
            runs.append(0)
        runs[-1] += 1
        policy.update(depth, 0, None)
    assert runs[:-1] == [8, 4, 16, 4, 32, 4, 64, 4, 128, 4, 256, 4, *[293, 4] * 9][: len(runs) - 1]
    assert len(runs) > 13
    assert policy.reason.startswith("paused: drafting ")
    assert policy.reason.endswith("plain decoding 10.0")


def test_a_gain_below_the_margin_is_not_worth_drafting() -> None:
    """At acceptance 1, two rows at 19.8 ms save 1 %; at 19.0 ms 5 %."""
    for two_rows, depth in ((19.8, 0), (19.0, 1)):
        policy = CostAware(Costs({1: 10.0, 2: two_rows}, {1: 0.0}), 1, prior=1.0)
        assert policy.depth() == depth
        assert policy.reason.startswith("about 1" if depth else "paused")


def test_a_paused_drafter_comes_back_when_its_drafts_are_accepted_again() -> None:
    policy = CostAware(Costs({1: 10.0, 8: 40.0}, {1: 1.0, 7: 4.0}), 7)
    depths = []
    for i in range(200):
        depths.append(policy.depth())
        policy.update(depths[-1], 0 if i < 30 else depths[-1], None)
    assert depths[0] > 0
    assert 0 in depths[:30]
    returned = len(depths) - depths[::-1].index(0)
    assert returned < 100, "it stays paused although every draft is accepted"
    assert min(depths[returned:]) > 0
    # The next pause begins with a short wait again.
    later = []
    for _ in range(60):
        later.append(policy.depth())
        policy.update(later[-1], 0, None)
    first = later.index(0)
    assert later[first : first + 8] == [0] * 8
    assert later[first + 8] > 0


# Rows are nearly free, drafts are not: siblings win.
FLAT = Costs({1: 10.0, 16: 10.5}, {1: 3.0, 7: 12.0})


def sibling_gains(policy: CostAware, depth: int) -> list[float]:
    """The tokens that a sibling of each draft adds: it is accepted where the draft, of all so far, is not."""
    firsts = rates_of(policy)
    seconds = [successes / tries for tries, successes in policy.runners_up]
    return [float(np.prod(firsts[:i])) * (1 - firsts[i]) * seconds[i] for i in range(depth)]


def brute_force(policy: CostAware, costs: Costs, depth: int) -> tuple[float, int]:
    """The cheapest number of siblings at a depth, from the definition, and what a token costs with it."""
    firsts, gains = rates_of(policy), sibling_gains(policy, depth)
    found = []
    for siblings in range(min(depth, 15 - depth) + 1):
        tokens = 1 + sum(np.prod(firsts[: i + 1]) for i in range(depth)) + sum(sorted(gains)[depth - siblings :])
        found.append(((costs.draft_ms(depth) + costs.verify_ms(depth + 1 + siblings)) / tokens, siblings))
    return min(found) if min(found)[0] < MARGIN * found[0][0] else found[0]


def test_depth_and_siblings_are_the_cheapest_by_brute_force() -> None:
    chosen = set()
    for seed in range(10):
        random = np.random.default_rng(seed)
        rows = random.uniform(10.1, 30)
        costs = Costs({1: 10.0, 8: (10 + rows) / 2, 16: rows}, {1: 1.0, 7: 6.0})
        policy, rate, second = CostAware(costs, 7, may_branch=True), random.uniform(0.3, 0.95), random.random()
        for _ in range(40):
            depth = policy.depth()
            siblings = policy.siblings(depth)
            best = min(range(8), key=lambda k: brute_force(policy, costs, k)[0])
            if brute_force(policy, costs, best)[0] < MARGIN * 10.0:
                assert (depth, sum(siblings)) == (best, brute_force(policy, costs, best)[1])
                assert len(siblings) == depth and set(siblings) <= {0, 1}
                gains = sibling_gains(policy, depth)
                chosen_gains = [gain for gain, count in zip(gains, siblings, strict=True) if count]
                assert sorted(chosen_gains) == sorted(gains)[depth - len(chosen_gains) :]
            chosen.add((depth, sum(siblings)))
            accepted = min(int((random.random(8) < rate).argmin()), depth)
            policy.update(
                depth,
                accepted,
                bool(random.random() < second) if accepted < depth and siblings[accepted] else None,
            )
    assert (
        len(chosen) > 8 and any(siblings for _, siblings in chosen) and any(not siblings for _, siblings in chosen)
    )


def test_siblings_are_verified_only_where_measured_costs_make_them_win() -> None:
    """Drafts are rejected at one place after another, and the next in line is accepted there half of the time."""
    for costs, wins in ((FLAT, True), (Costs({1: 10.0, 16: 85.0}, {1: 0.5, 7: 1.0}), False)):
        policy = CostAware(costs, 7, may_branch=True)
        for turn in range(60):
            depth = policy.depth()
            siblings, accepted = policy.siblings(depth), min(turn % 4, depth)
            policy.update(depth, accepted, turn % 8 < 4 if accepted < depth and siblings[accepted] else None)
        assert policy.depth() > 0
        assert (sum(policy.siblings(policy.depth())) > 0) == wins
        assert ("a tree with" in policy.reason) == wins
        assert ("a chain" in policy.reason) != wins


def test_a_runner_up_that_is_never_accepted_is_left_out_and_probed_again() -> None:
    policy, costs = CostAware(FLAT, 1, may_branch=True), []
    for _ in range(400):
        costs.append(policy.siblings(1)[0])
        policy.update(1, 0, False if costs[-1] else None)
    assert costs[0] == 1 and policy.runners_up[0][0] < 30
    rarely = CostAware(Costs({1: 10.0, 2: 10.0, 3: 10.4}, {1: 1.0}), 1, prior=0.5, may_branch=True)
    probes = []
    for _ in range(400):
        probes.append(rarely.siblings(1)[0])
        rarely.update(1, 0, False if probes[-1] else None)
        rarely.update(1, 1, None)
    assert probes[0] == 1 and 0 < sum(probes[20:]) < 80


def test_a_tree_never_has_more_rows_than_a_pass() -> None:
    """Of a drafter of 15 tokens, however cheap rows are."""
    policy = CostAware(Costs({1: 10.0, 16: 10.01}, {1: 0.1, 15: 0.2}), 15, prior=0.9, may_branch=True)
    numbers = [sum(policy.siblings(depth)) for depth in range(1, 16)]
    assert max(numbers) > 4 and all(depth + number <= 15 for depth, number in enumerate(numbers, 1))


def test_without_leave_to_branch_everything_is_a_chain() -> None:
    policy = CostAware(FLAT, 7)
    assert policy.siblings(policy.depth()) == (0,) * policy.depth()
    assert Adaptive(7).siblings(3) == FixedDepth(3).siblings(3) == (0, 0, 0)


def test_a_fixed_number_of_siblings_is_spread_from_the_first_draft_on() -> None:
    policy = FixedDepth(3, 5)
    assert [policy.siblings(depth) for depth in range(4)] == [(), (5,), (3, 2), (2, 2, 1)]
    assert policy.reason == "fixed at 3, a tree with 5 siblings"


LIKELY = tuple(0.95**count for count in range(1, 16))


@pytest.mark.parametrize("chances", [LIKELY, LIKELY[:3], (0.5, 0.25, 0.1), (0.05,), ()])
@pytest.mark.parametrize("last_row", [10.5, 25.0, 60.0, 160.0])
def test_a_copy_is_as_long_as_is_cheapest_for_each_token(chances: tuple[float, ...], last_row: float) -> None:
    """Against every other length, plain decoding included."""
    costs = Costs({1: 10.0, 16: last_row}, {})
    policy = CopiesAlone(costs)

    def ms_per_token(count: int) -> float:
        return costs.verify_ms(count + 1) / (1 + sum(chances[:count]))

    best = min(range(len(chances) + 1), key=ms_per_token)
    assert policy.copied(chances) == (best if ms_per_token(best) < MARGIN * 10.0 else 0)
    assert policy.depth() == 0 and policy.offer().chances == () and policy.siblings(2) == (0, 0)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("chance", [0.1, 0.6, 0.99])
def test_a_copy_takes_the_round_where_it_is_cheaper_than_drafting(rate: float, chance: float) -> None:
    policy, copies = CostAware(CHEAP, 7, prior=rate), CopiesAlone(CHEAP)
    chances = tuple(chance**count for count in range(1, 16))
    alone = copies.copied(chances)
    ms = CHEAP.verify_ms(alone + 1) / (1 + sum(chances[:alone]))
    drafted = min(policy.ms_per_token(depth) for depth in range(1, 8))
    assert policy.copied(chances) == (alone if ms < min(MARGIN * 10.0, COPY_MARGIN * drafted) else 0)


def test_what_copies_without_costs_takes_what_there_is() -> None:
    for asked, expected in ((None, 15), ("adaptive", 15), (4, 4)):
        policy = policy_for(asked, None, 0, None, takes_trees=True, max_copy=15)
        assert policy.copied(LIKELY) == expected and policy.copied(LIKELY[:2]) == 2
    nothing = policy_for(None, None, 0, CHEAP, takes_trees=True)
    assert nothing.copied(LIKELY) == nothing.depth() == 0
    assert Adaptive(7).copied(LIKELY) == 0
