"""A recorded run is written, read again, and recomputed: the first round that differs is found."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from test_stages import loaded

from mlx_spec.decoding.sampling import Sampling
from mlx_spec.diagnose.record import RecordedRun, Recorder, read_run, write_run
from mlx_spec.diagnose.replay import BadRound, first_bad_round
from mlx_spec.engine import Engine, Request
from mlx_spec.errors import RequestError

PROMPT = [5, 9, 2, 40, 11, 7]


@pytest.fixture(params=["DFlash 2, window", "MTP", "EAGLE 3"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    target, drafter, _ = loaded(request.param, tmp_path / "drafter", mx.float32)
    return Engine(target, drafter)


def recorded(engine: Engine, sampling: Sampling) -> RecordedRun:
    recorder = Recorder(PROMPT, sampling)
    request = Request(PROMPT, 24, 3, sampling, on_verified=recorder.verified)
    generation = engine.start(request)
    while generation.finish_reason is None:
        recorder.tokens.extend(engine.step(generation).tokens)
    engine.close(generation)
    return recorder.run()


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temp=0.8, seed=3, logit_bias={4: -2.0})], ids=["greedy", "drawn"]
)
def test_a_run_is_what_recomputation_gives(engine: Engine, sampling: Sampling, tmp_path: Path) -> None:
    run = recorded(engine, sampling)
    assert len(run.tokens) == 24 and sum(1 + each.accepted for each in run.rounds) >= 24
    write_run(run, tmp_path / "run.jsonl")
    assert read_run(tmp_path / "run.jsonl") == run
    assert first_bad_round(engine, run) is None


def test_other_drafts_are_the_drafters_state(engine: Engine) -> None:
    run = recorded(engine, Sampling())
    rounds = list(run.rounds)
    drafts = rounds[3].drafts
    rounds[3] = replace(rounds[3], drafts=(drafts[0] + 1, *drafts[1:]))
    found = first_bad_round(engine, replace(run, rounds=tuple(rounds)))
    assert found is not None
    assert (found.round, found.part, found.expected) == (3, "drafter", drafts)
    assert "round 3" in str(found)


def test_another_token_is_the_targets_state(engine: Engine) -> None:
    run = recorded(engine, Sampling())
    tokens = list(run.tokens)
    tokens[10] = (tokens[10] + 1) % 90
    found = first_bad_round(engine, replace(run, tokens=tuple(tokens)))
    assert isinstance(found, BadRound)
    assert (found.part, found.recorded, found.expected) == ("target", (tokens[10],), (run.tokens[10],))
    at = run.rounds[found.round]
    assert at.position < len(PROMPT) + 10 <= at.position + at.accepted + 1


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    for text in ("", "[]", '{"mlx_spec_record": 99}', '{"mlx_spec_record": 1}', "no json"):
        (tmp_path / "x").write_text(text)
        with pytest.raises(RequestError, match="record"):
            read_run(tmp_path / "x")


def test_rejection_sampling_cannot_be_replayed(engine: Engine) -> None:
    run = RecordedRun(tuple(PROMPT), (1,), Sampling(temp=1.0, accept="rejection"), 512, ())
    with pytest.raises(RequestError, match="rejection"):
        first_bad_round(engine, run)
