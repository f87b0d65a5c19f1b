"""Costs of rounds: what they learn, what they ignore, and what a policy makes of them on simulated machines."""

import math
import random
from collections.abc import Callable, Sequence

import pytest

from mlx_spec.engine.costs import Costs, Setting, Shape, interpolate
from mlx_spec.engine.draft_policy import CostAware
from mlx_spec.engine.learned_costs import Known, LearnedCosts

TABLE = Costs({1: 10.0, 8: 12.0, 16: 18.0}, {1: 1.0, 7: 2.0, 15: 4.0})
GREEDY = Setting("greedy", 1, 100)


def taught(costs: LearnedCosts, shape: Shape, ms: float, times: int, setting: Setting = GREEDY) -> None:
    for _ in range(times):
        costs.learn(setting, shape, ms)


def test_costs_begin_with_the_table() -> None:
    costs = LearnedCosts(TABLE)
    assert costs.round_ms(GREEDY, Shape(0, 1)) == pytest.approx(10.0)
    assert costs.round_ms(GREEDY, Shape(7, 8)) == pytest.approx(14.0)
    assert costs.table(GREEDY)[7][8] == pytest.approx(14.0)
    assert costs.table(GREEDY, hopeful=True)[7][8] < 12.0


def test_a_shape_is_learned_and_those_like_it_follow_but_plain_decoding_does_not() -> None:
    costs = LearnedCosts(TABLE)
    taught(costs, Shape(0, 1), 10.0, 40)
    taught(costs, Shape(5, 6), 26.0, 40)
    assert costs.round_ms(GREEDY, Shape(5, 6)) == pytest.approx(26.0, rel=0.02)
    assert costs.round_ms(GREEDY, Shape(0, 1)) < 11.5
    before = LearnedCosts(TABLE).table(GREEDY)
    ratios = [costs.table(GREEDY)[depth][depth + 1] / before[depth][depth + 1] for depth in range(16)]
    assert ratios[4] > ratios[3] > ratios[2] and ratios[6] > ratios[8] > ratios[15]
    assert ratios[4] > 1.5


@pytest.mark.parametrize("outlier", [600_000.0, 90.0, 0.01])
def test_single_rounds_that_are_exceptions_move_nothing(outlier: float) -> None:
    """A first round that compiles, a stopped process, another program: one round in six."""
    costs, calm = LearnedCosts(TABLE), LearnedCosts(TABLE)
    for turn in range(60):
        costs.learn(GREEDY, Shape(3, 4), outlier if turn % 6 == 0 else 15.0)
        calm.learn(GREEDY, Shape(3, 4), 15.0)
    assert costs.table(GREEDY) == calm.table(GREEDY)


def test_a_machine_that_gets_slower_slows_all_shapes() -> None:
    costs = LearnedCosts(TABLE)
    taught(costs, Shape(0, 1), 10.0, 30)
    taught(costs, Shape(5, 6), 13.0, 30)
    before = costs.round_ms(GREEDY, Shape(0, 1))
    taught(costs, Shape(5, 6), 26.0, 60)
    assert costs.round_ms(GREEDY, Shape(5, 6)) == pytest.approx(26.0, rel=0.05)
    assert costs.round_ms(GREEDY, Shape(0, 1)) > 1.2 * before


def test_a_setting_begins_with_the_most_similar_one_and_learns_by_itself() -> None:
    costs = LearnedCosts(TABLE)
    taught(costs, Shape(5, 6), 26.0, 40)
    longer, sampled = GREEDY._replace(cached=20_000), GREEDY._replace(work="coupled")
    for setting in (longer, sampled):
        assert costs.table(setting) == costs.table(GREEDY)
    taught(costs, Shape(5, 6), 52.0, 40, longer)
    assert costs.round_ms(longer, Shape(5, 6)) == pytest.approx(52.0, rel=0.05)
    assert costs.round_ms(GREEDY._replace(cached=1000), Shape(5, 6)) < 35.0


def test_what_was_learned_is_taken_over() -> None:
    costs = LearnedCosts(TABLE, is_guess=True)
    taught(costs, Shape(0, 1), 40.0, 20)
    taught(costs, Shape(5, 6), 90.0, 20)
    taught(costs, Shape(5, 6), 180.0, 20, GREEDY._replace(sequences=2))
    known = costs.known()
    assert [(each.setting.sequences, each.shape) for each in known] == [
        (1, Shape(0, 1)),
        (1, Shape(5, 6)),
        (2, Shape(5, 6)),
    ]
    after = LearnedCosts(TABLE, known, is_guess=True)
    for each in known:
        assert after.round_ms(each.setting, each.shape) == pytest.approx(each.ms, rel=0.15)
    # It looks at plain decoding early: the other process may have run on a busier machine.
    taught(after, Shape(5, 6), 90.0, 6)
    assert after.wants_plain(GREEDY, 0.4)


def test_plain_decoding_is_looked_at_first_and_then_where_it_might_win() -> None:
    costs = LearnedCosts(TABLE)
    assert not costs.wants_plain(GREEDY, 0.9)
    taught(costs, Shape(3, 4), 12.0, 6)
    assert costs.wants_plain(GREEDY, 0.1)
    taught(costs, Shape(0, 1), 10.0, 12)
    assert not costs.wants_plain(GREEDY, 0.9)
    taught(costs, Shape(3, 4), 12.0, 64)
    assert costs.wants_plain(GREEDY, 0.9) and not costs.wants_plain(GREEDY, 0.3)


# Verify by rows, draft by tokens, milliseconds for each row after 1,000 cached tokens, what of a draft is seen.
MACHINES = {
    "launches alone": ({1: 5.2, 16: 5.7}, {1: 4.9, 7: 6.0, 15: 8.0}, 0.01, 0.3),
    "a CPU": ({1: 20.7, 2: 20.5, 5: 27.2, 8: 30.2, 16: 51.0}, {1: 3.6, 7: 13.7, 15: 28.0}, 0.3, 1.0),
    "a small GPU": ({1: 12.0, 4: 12.6, 8: 17.0, 16: 25.0}, {1: 1.5, 7: 5.0, 15: 10.0}, 0.05, 0.8),
}
# The chance that a draft is right.
KINDS = {"random": 0.0, "hard": 0.3, "prose": 0.6, "code": 0.8, "copy": 0.97}
GUESS = Costs({1: 1.0, 4: 1.1, 8: 1.3, 16: 1.7}, {1: 0.3, 7: 0.7, 15: 1.2})
TOKENS = 1000


class Machine:
    """A simulated clock: true costs, noise, rounds in which others ran, and a first one that compiles."""

    def __init__(self, name: str, cached: int) -> None:
        verify, draft, for_a_row, seen = MACHINES[name]
        self.ms = [
            interpolate(verify, depth + 1)
            + (seen * interpolate(draft, depth) if depth else 0.0)
            + for_a_row * cached / 1000 * (depth + 1)
            for depth in range(16)
        ]
        self.random = random.Random(name)
        self.compiled = set[int]()

    def measured(self, depth: int) -> float:
        """What the clock shows of a round."""
        luck, compiling = self.random.random(), 0.0 if depth in self.compiled else 500.0
        self.compiled.add(depth)
        busy = 8.0 if luck < 0.01 else 1.8 if luck < 0.05 else 1.0
        return self.ms[depth] * math.exp(self.random.gauss(0, 0.05)) * busy + compiling


def spent(
    right: list[bool], ms: list[float], choose: Callable[[], int], learn: Callable[[int, int], None]
) -> float:
    """Return the milliseconds of a text in which draft t is right or not."""
    position, total = 0, 0.0
    while position < len(right) - 16:
        depth = choose()
        accepted = next((i for i in range(depth) if not right[position + i]), depth)
        learn(depth, accepted)
        total += ms[depth]
        position += 1 + accepted
    return total


@pytest.mark.parametrize("cached", [100, 4_000, 16_000])
@pytest.mark.parametrize("name", MACHINES)
def test_the_policy_comes_close_to_the_best_fixed_depth_on_all_texts(name: str, cached: int) -> None:
    """From a guess that fits none of these machines: a short text of each kind, then longer ones, which count."""
    machine, costs = Machine(name, cached), LearnedCosts(GUESS, is_guess=True)

    def ratio(kind: str, tokens: int, seeds: Sequence[int]) -> float:
        """Return the time of texts over that of the best fixed depth."""
        took, fixed = 0.0, [0.0] * 16
        for seed in seeds:
            draws = random.Random(seed)
            right = [draws.random() < KINDS[kind] for _ in range(tokens + 16)]
            policy = CostAware(costs, 15, setting=GREEDY._replace(cached=cached))

            def learn(depth: int, accepted: int, policy: CostAware = policy) -> None:
                costs.learn(policy.setting, Shape(depth, depth + 1), machine.measured(depth))
                policy.update(depth, accepted, None)

            took += spent(right, machine.ms, policy.depth, learn)
            fixed = [
                sum_ + spent(right, machine.ms, lambda d=depth: d, lambda *_: None)
                for depth, sum_ in enumerate(fixed)
            ]
        return took / min(fixed)

    first = {kind: ratio(kind, TOKENS // 2, [1]) for kind in KINDS}
    then = {kind: ratio(kind, TOKENS, range(2, 8)) for kind in KINDS}
    assert max(then.values()) < 1.05
    # Nothing is accepted there, so plain decoding is the best.
    assert then["random"] < 1.03
    # And while it still learns what rounds cost.
    assert sum(first.values()) / len(first) < 1.1


def test_wrong_knowledge_is_corrected() -> None:
    """A stored figure may be wrong by any factor."""
    wrong = [Known(GREEDY, Shape(0, 1), 10.0, 25.0), Known(GREEDY, Shape(5, 6), 100.0, 25.0)]
    costs = LearnedCosts(TABLE, wrong, is_guess=True)
    for _ in range(40):
        taught(costs, Shape(5, 6), 13.0, 2)
        taught(costs, Shape(0, 1), 10.0, 1)
    assert 1.2 < costs.round_ms(GREEDY, Shape(5, 6)) / costs.round_ms(GREEDY, Shape(0, 1)) < 2.0
