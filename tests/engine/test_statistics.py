"""Counters of a generation, and how they are printed."""

import json

import pytest

from mlx_spec.engine.statistics import Exactness, SourceCounts, Statistics


def example() -> Statistics:
    statistics = Statistics(prompt_tokens=10, prompt_seconds=0.5, seconds=1.0)
    statistics.count_round(drafted=3, accepted=2, emitted=3)
    statistics.count_timed(0.1, 0.2, 0.1)
    statistics.count_round(drafted=2, accepted=2, emitted=3)
    statistics.count_timed(0.0, 0.4, 0.0)
    statistics.count_round(drafted=0, accepted=0, emitted=1)
    statistics.depth_reason = "fixed at 3"
    statistics.exactness = Exactness(True, "rows were compared")
    statistics.kernels = "cpu (C for AVX2, 2 threads)"
    return statistics


def test_counts_and_rates() -> None:
    statistics = example()
    assert (statistics.rounds, statistics.undrafted_rounds, statistics.tokens) == (3, 1, 7)
    assert statistics.drafted == [2, 2, 1]
    assert statistics.accepted == [2, 2, 0]
    assert statistics.acceptance == [1.0, 1.0, 0.0]
    assert statistics.accepted_length == pytest.approx(7 / 3)
    assert statistics.prompt_tps == pytest.approx(20)
    assert statistics.generation_tps == pytest.approx(7)
    assert statistics.timed_rounds == 2


def test_a_deeper_round_lengthens_the_lists_and_a_shallower_one_does_not() -> None:
    statistics = Statistics()
    for drafted, accepted in ((1, 0), (4, 1), (2, 2)):
        statistics.count_round(drafted, accepted, accepted + 1)
    assert statistics.drafted == [3, 2, 1, 1]
    assert statistics.accepted == [2, 1, 0, 0]


def test_siblings_are_counted_beside_the_drafts_and_printed_where_there_were_some() -> None:
    statistics = example()
    statistics.count_round(drafted=2, accepted=1, emitted=3, siblings=2, accepted_siblings=1)
    statistics.count_round(drafted=2, accepted=0, emitted=1, siblings=3)
    assert (statistics.sibling_drafts, statistics.accepted_sibling_drafts) == (5, 1)
    assert statistics.accepted == [3, 2, 0]
    assert (statistics.as_dict()["sibling_drafts"], statistics.as_dict()["accepted_sibling_drafts"]) == (5, 1)
    assert "Sibling drafts accepted: 1 of 5" in str(statistics).splitlines()


def test_each_source_is_counted_with_what_it_drafted_in_the_order_of_the_chain() -> None:
    statistics = Statistics()
    statistics.count_round(5, 3, 4, [("grammar", 2), ("lookup", 3)])
    statistics.count_round(4, 4, 5, [("eagle", 4)])
    statistics.count_round(2, 0, 1, [("lookup", 2)])
    copy = statistics.copy()
    copy.count_round(1, 1, 2, [("lookup", 1)])
    assert statistics.drafted_by == {
        "grammar": SourceCounts(1, 2, 2),
        "lookup": SourceCounts(2, 5, 1),
        "eagle": SourceCounts(1, 4, 4),
    }
    assert copy.drafted_by["lookup"] == SourceCounts(3, 6, 2)
    assert "Drafts accepted: grammar 2 of 2, lookup 1 of 5, eagle 4 of 4" in str(statistics).splitlines()
    assert statistics.as_dict()["drafted_by"]["lookup"] == {"rounds": 2, "drafted": 5, "accepted": 1}


def test_shares_of_time_sum_to_one() -> None:
    shares = example().shares
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares == pytest.approx({"draft": 0.125, "verify": 0.75, "host": 0.125})


def test_a_new_statistics_divides_by_nothing() -> None:
    statistics = Statistics()
    assert statistics.accepted_length == statistics.prompt_tps == statistics.generation_tps == 0.0
    assert statistics.acceptance == []
    assert statistics.shares == {"draft": 0.0, "verify": 0.0, "host": 0.0}
    assert json.loads(json.dumps(statistics.as_dict()))["rounds"] == 0


def test_as_dict_survives_json() -> None:
    found = example().as_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["generation_tokens"] == 7
    assert found["accepted_length"] == 2.3333
    assert found["acceptance"] == [1.0, 1.0, 0.0]
    assert found["time_shares"] == {"draft": 0.125, "verify": 0.75, "host": 0.125}
    assert (found["timed_rounds"], found["draft_seconds"], found["verify_seconds"]) == (2, 0.1, 0.6)
    assert found["depth_reason"] == "fixed at 3"
    assert (found["exact"], found["exact_reason"]) == (True, "rows were compared")
    assert found["kernels"] == "cpu (C for AVX2, 2 threads)"


def test_the_summary_for_people() -> None:
    assert str(example()).splitlines() == [
        "Prompt: 10 tokens, 20.0 tokens/s",
        "Generation: 7 tokens, 7.0 tokens/s",
        "Rounds: 3, 2.33 tokens a round",
        "Acceptance by position: 1.00 1.00 0.00",
        "Time: draft 12%, verify 75%, host 12%",
        "Without drafting: 1 of 3 rounds",
        "Draft depth: fixed at 3",
        "Kernels: cpu (C for AVX2, 2 threads)",
        "Exact: yes, rows were compared",
    ]


def test_nothing_is_exact_until_it_is_checked() -> None:
    statistics = Statistics()
    assert not statistics.exact
    assert str(statistics).splitlines()[-1] == "Exact: no, not checked"
    statistics.exactness = Exactness(True, "")
    assert statistics.exact


def test_the_summary_of_plain_decoding_says_nothing_of_drafts() -> None:
    statistics = Statistics(prompt_tokens=2, prompt_seconds=1.0, seconds=0.5)
    statistics.count_round(0, 0, 1)
    lines = str(statistics).splitlines()
    assert lines[0] == "Prompt: 2 tokens, 2.0 tokens/s"
    assert not any(line.startswith(("Acceptance", "Draft depth", "Time")) for line in lines)
