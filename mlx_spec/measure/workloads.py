"""What drafting brings by kind of work: plain decoding, copies, a drafter, and both, in turns."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tqdm import tqdm

from mlx_spec.engine import Engine, Request, Statistics
from mlx_spec.engine.statistics import SourceCounts, added
from mlx_spec.measure.teacher_forced import TeacherForced

PLAIN, BOTH = "plain", "both"


@dataclass(frozen=True)
class Task:
    """A prompt of a kind of work.

    prompt: token ids.
    reply: token ids that the target is made to say, an end token last; None for its own greedy reply.
    """

    kind: str
    prompt: Sequence[int]
    reply: Sequence[int] | None = None


@dataclass
class Sums:
    """Sums over all replies of a kind in one way of decoding."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    drafted_by: dict[str, SourceCounts] = field(default_factory=dict)

    def add(self, statistics: Statistics) -> None:
        """Add a reply."""
        self.tokens += statistics.tokens
        self.rounds += statistics.rounds
        self.seconds += statistics.seconds
        self.drafted_by = added([self.drafted_by, statistics.drafted_by])

    def as_dict(self, plain: "Sums") -> dict[str, Any]:
        """Return figures as JSON values; the ratio is to plain decoding of the same prompts."""
        rate = self.tokens / self.seconds
        return {
            "tokens": self.tokens,
            "tokens_a_round": round(self.tokens / self.rounds, 3),
            "tokens_per_second": round(rate, 2),
            "ratio": round(rate * plain.seconds / plain.tokens, 3),
            "drafted_by": {name: asdict(counts) for name, counts in self.drafted_by.items()},
        }


def engines_of(engine: Engine) -> dict[str, tuple[Engine, int | None]]:
    """Return the ways to decode, with the number of drafts that each asks for.

    engine: with copies, and with a drafter or without. The others share its target, and the costs.
    """
    ways: dict[str, tuple[Engine, int | None]] = {PLAIN: (engine, 0)}
    target, drafter, lookup = engine.target, engine.drafter, engine.lookup
    costs, kernels = engine.costs, engine.kernels
    if lookup is not None:
        ways[lookup.name] = (Engine(target, None, costs, lookup=lookup, kernels=kernels), None)
    if drafter is not None:
        ways[drafter.name] = (Engine(target, drafter, costs, kernels=kernels), None)
    if lookup is not None and drafter is not None:
        ways[BOTH] = (engine, None)
    return ways


def time_workloads(
    engine: Engine, tasks: Sequence[Task], turns: int, max_tokens: int, end_tokens: frozenset[int], progress: bool
) -> tuple[dict[str, dict[str, dict[str, Any]]], int]:
    """Decode every task in every way, ``turns`` times in turns, after a run of each that compiles.

    Returns figures by kind and way, and how many replies were not those of plain decoding.
    """
    ways, different = engines_of(engine), 0
    sums: dict[str, dict[str, Sums]] = defaultdict(lambda: {way: Sums() for way in ways})
    for way, num_draft_tokens in ways.values():
        reply_to(way, tasks[0], num_draft_tokens, max_tokens, end_tokens)
    for index, task in enumerate(tqdm(list(tasks) * turns, "tasks", leave=False, disable=not progress)):
        texts = {}
        # Another way comes first each time, so that none always follows the same one.
        for name in [*ways][index % len(ways) :] + [*ways][: index % len(ways)]:
            way, num_draft_tokens = ways[name]
            texts[name], statistics = reply_to(way, task, num_draft_tokens, max_tokens, end_tokens)
            sums[task.kind][name].add(statistics)
        different += sum(text != texts[PLAIN] for text in texts.values())
    figures = {
        kind: {name: each.as_dict(by_way[PLAIN]) for name, each in by_way.items()} for kind, by_way in sums.items()
    }
    return figures, different


def reply_to(
    engine: Engine, task: Task, num_draft_tokens: int | None, max_tokens: int, end_tokens: frozenset[int]
) -> tuple[list[int], Statistics]:
    """Decode one task, and return the reply and what was counted."""
    generation = engine.start(Request(task.prompt, max_tokens, num_draft_tokens, eos_token_ids=end_tokens))
    try:
        if task.reply is not None:
            generation.rule = TeacherForced([*task.prompt, *task.reply])
        while generation.finish_reason is None:
            engine.step(generation).checked()
        return generation.tokens[len(task.prompt) :], generation.statistics
    finally:
        engine.close(generation)
