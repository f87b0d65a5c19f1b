"""A recorded run: the request as token ids, and the drafts and accepted counts of every round, without texts."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.decoding.sampling import Sampling
from mlx_spec.errors import RequestError
from mlx_spec.target import CachedSequence

FORMAT = 1


@dataclass(frozen=True)
class RecordedRound:
    """A round.

    position: of the anchor.
    anchor: the token that the drafts follow.
    drafts: of the path that was verified.
    accepted: how many of them were.
    """

    position: int
    anchor: int
    drafts: tuple[int, ...]
    accepted: int


@dataclass(frozen=True)
class RecordedRun:
    """A run.

    prompt: token ids.
    tokens: that were generated.
    prefill_step_size: prompt tokens of a pass.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    sampling: Sampling
    prefill_step_size: int
    rounds: tuple[RecordedRound, ...]


@dataclass
class Recorder:
    """Records a run; pass ``verified`` to a request as ``on_verified``, and each token to ``tokens``."""

    prompt: Sequence[int]
    sampling: Sampling
    prefill_step_size: int = 512
    tokens: list[int] = field(default_factory=list)
    passes: list[tuple[int, list[int]]] = field(default_factory=list)

    def verified(self, sequence: CachedSequence, tokens: mx.array, logits: mx.array) -> None:
        """Take the rows of a verify pass: the anchor, then drafts."""
        self.passes.append((sequence.length, [int(token) for token in np.array(tokens)]))

    def run(self) -> RecordedRun:
        """Return what was recorded so far."""
        text = [*self.prompt, *self.tokens]
        rounds = []
        for position, (anchor, *drafts) in self.passes:
            following = text[position + 1 : position + 1 + len(drafts)]
            accepted = next(
                (i for i, pair in enumerate(zip(drafts, following, strict=False)) if pair[0] != pair[1]),
                min(len(drafts), len(following)),
            )
            rounds.append(RecordedRound(position, anchor, tuple(drafts), accepted))
        return RecordedRun(
            tuple(self.prompt), tuple(self.tokens), self.sampling, self.prefill_step_size, tuple(rounds)
        )


def write_run(run: RecordedRun, path: Path) -> None:
    """Write a run as JSON lines: the request, then a line for each round. Raises OSError."""
    sampling = {name: value for name, value in asdict(run.sampling).items() if name != "logits_processors"}
    head = {
        "mlx_spec_record": FORMAT,
        "prompt": run.prompt,
        "tokens": run.tokens,
        "sampling": sampling,
        "prefill_step_size": run.prefill_step_size,
    }
    lines = [head, *(asdict(each) for each in run.rounds)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read_run(path: Path) -> RecordedRun:
    """Read what ``write_run`` wrote. Raises RequestError for anything else, OSError."""
    try:
        head, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if head["mlx_spec_record"] != FORMAT:
            raise RequestError(
                f"{path} is a record of format {head['mlx_spec_record']}; this version reads {FORMAT}."
            )
        rounds = [RecordedRound(**{**line, "drafts": tuple(line["drafts"])}) for line in lines]
        sampling = Sampling(**read_sampling(head["sampling"]))
        return RecordedRun(
            tuple(head["prompt"]), tuple(head["tokens"]), sampling, int(head["prefill_step_size"]), tuple(rounds)
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{path} is no record that mlx_spec.generate --record wrote ({error!r}).") from None


def read_sampling(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings of Sampling as JSON keeps them, in their own types."""
    bias = values.get("logit_bias")
    whole = {int(token): value for token, value in bias.items()} if bias else None
    return {**values, "logit_bias": whole, "xtc_special_tokens": tuple(values.get("xtc_special_tokens", ()))}
