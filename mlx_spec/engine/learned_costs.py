"""What rounds cost, learned from rounds: moving averages by shape that start from a table of passes.

Draft and verify passes overlap, attention grows with the cache, machines get hot and are shared: so what counts is
the time of whole rounds. A round of some shape is expected to take what the table says, times a correction of that
shape, times a level that all shapes share; a correction is shared with shapes of about the same depth and rows, as
far as little is known of them. One round moves these by a bounded step, whatever it took.
"""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from metal_kernels import MAX_VERIFY_ROWS
from mlx_spec.engine.costs import ALONE, Costs, Setting, Shape, table_of

# Rounds that a correction remembers, and how much of a step that repeats goes into the level.
MEMORY, LEVEL_RATE = 25, 0.1
# The largest step, in the logarithm, of a correction that is known well; of a new one it is larger.
LARGEST_STEP = 0.2
# How alike the corrections of two shapes are, by the difference of the logarithms to base 2 of depth and rows.
LIKENESS = 0.5
# How much less a shape may take than is expected, in the logarithm, where nothing is known of it but the table.
HOPE = 0.4
# Where drafting takes less than this share of plain decoding's time, no error in what that takes would matter.
CLOSE = 0.6
# The rounds that the table counts for; those that an earlier process' knowledge counts for, fewer than a look at
# plain decoding brings, as the machine may have been busy then; what a round leaves of the evidence on a shape.
TABLE, TAKEN_OVER, FORGET = 0.5, 2, 0.998
# Rounds until the first look at plain decoding, the evidence that it brings, and rounds until the next one: fewer
# while there is not enough evidence.
FIRST_LOOK, LOOK, NEXT_LOOK, ENOUGH = 6, 3, 64, 10
# Cached tokens up to which lengths count as one; beyond, those between two powers of two do.
SHORT = 1024
# Curves that go on beyond what was measured may reach zero.
LEAST_MS = 1e-3

SIZE = MAX_VERIFY_ROWS + 1
Group = tuple[Hashable, int, int]


@dataclass
class Corrections:
    """What is known of rounds in one setting; arrays are [17, 17], by depth and rows.

    values: logarithms of the corrections.
    evidence: how many rounds each of them rests on, the table included.
    visits: rounds of each shape that this process ran. seen: of all shapes.
    recent: the last rounds of a shape, the logarithm of what they took over what the table says.
    learned: the shapes, (depth, rows), of which rounds were learned from.
    last_plain: the number of the last plain round.
    """

    values: np.ndarray = field(default_factory=lambda: np.zeros((SIZE, SIZE)))
    evidence: np.ndarray = field(default_factory=lambda: np.full((SIZE, SIZE), TABLE))
    visits: np.ndarray = field(default_factory=lambda: np.zeros((SIZE, SIZE), dtype=np.int64))
    recent: dict[tuple[int, int], deque[float]] = field(default_factory=dict)
    learned: set[tuple[int, int]] = field(default_factory=set)
    seen: int = 0
    last_plain: int = 0

    def borrowed(self) -> "Corrections":
        """Return what another setting begins with."""
        return Corrections(self.values.copy())

    def note(self, shape: Shape, off: float, is_plain: bool) -> float | None:
        """Count a round, and return the median of the last three of its shape; None while there are too few.

        The first round of a shape may have compiled something, and one alone may be an exception.
        """
        self.seen += 1
        if is_plain:
            self.last_plain = self.seen
        cell = shape.depth, shape.rows
        self.visits[cell] += 1
        if self.visits[cell] == 1:
            return None
        recent = self.recent.setdefault(cell, deque(maxlen=3))
        recent.append(off)
        if len(recent) < 2:
            return None
        self.learned.add(cell)
        return sorted(recent)[(len(recent) - 1) // 2]

    def move(self, depth: int, rows: int, off: float) -> float:
        """Move the corrections towards a round, and return the share of its deviation that its own one took.

        off: the logarithm of what it took over what the table and the level say.
        """
        near = likeness(depth, rows)
        most = 1 / (1 - near + 1 / MEMORY)
        share = float(1 / (self.evidence[depth, rows] + 1))
        gains = np.where(self.evidence <= most, near / (self.evidence + near), 0)
        steps = np.maximum(LARGEST_STEP, 2 / (self.evidence + 1))
        self.values += gains * np.clip(off - self.values, -steps, steps)
        faded = TABLE + (self.evidence - TABLE) * FORGET
        self.evidence = np.maximum(faded, np.minimum(self.evidence + near, most))
        return share


class Known(NamedTuple):
    """What a round of some shape takes, and how many rounds that rests on."""

    setting: Setting
    shape: Shape
    ms: float
    evidence: float


class LearnedCosts:
    """The costs of whole rounds in every setting; all policies of an engine share them.

    num_learned: the rounds that were learned from.
    """

    def __init__(self, start: Costs, known: Sequence[Known] = (), is_guess: bool = False) -> None:
        """Begin with a table.

        start: of passes.
        known: what an earlier process learned.
        is_guess: the table's milliseconds mean nothing, only their ratios do.
        """
        self.start = start
        self.num_learned = 0
        self._prior = np.log(np.maximum(table_of(start), LEAST_MS))
        self._level: float | None = None if is_guess else 0.0
        self._groups: dict[Group, Corrections] = {}
        self._tables: dict[tuple[Group, bool], list[list[float]]] = {}
        self._begin_with(known)

    def __deepcopy__(self, memo: object) -> "LearnedCosts":
        """Return itself: a policy that is copied goes on learning for all."""
        return self

    def round_ms(self, setting: Setting, shape: Shape) -> float:
        """Return the expected milliseconds of a round."""
        correction = self._of(setting).values[shape.depth, shape.rows]
        return self.start.round_ms(setting, shape) * math.exp((self._level or 0.0) + correction)

    def table(self, setting: Setting, hopeful: bool = False) -> Sequence[Sequence[float]]:
        """Return the milliseconds of rounds in which one sequence drafts, by depth and rows."""
        key = group_of(setting), hopeful
        if key not in self._tables:
            known = self._of(setting)
            logs = self._prior + known.values + (self._level or 0.0)
            self._tables[key] = np.exp(logs - HOPE / (1 + known.evidence) if hopeful else logs).tolist()
        return self._tables[key]

    def wants_plain(self, setting: Setting, ratio: float) -> bool:
        """Whether too few plain rounds were seen since the first rounds, or none for long where that matters."""
        known = self._of(setting)
        evidence = float(known.evidence[0, setting.sequences])
        if evidence < LOOK:
            return known.seen >= FIRST_LOOK
        return ratio > CLOSE and known.seen - known.last_plain >= NEXT_LOOK * min(1.0, evidence / ENOUGH)

    def learn(self, setting: Setting, shape: Shape, ms: float) -> None:
        """Learn from what a round took."""
        known = self._of(setting)
        is_plain = not shape.depth and shape.rows == setting.sequences
        off = known.note(shape, self._beyond_table(shape, ms), is_plain)
        if off is None:
            return
        if self._level is None:
            self._level = off
        beyond = off - self._level - known.values[shape.depth, shape.rows]
        share = known.move(shape.depth, shape.rows, off - self._level)
        self._level += (1 - share) * LEVEL_RATE * min(max(beyond, -LARGEST_STEP), LARGEST_STEP)
        self.num_learned += 1
        self._tables.clear()

    def known(self) -> list[Known]:
        """Return what is known of all shapes that this process learned of, or began with."""
        found = []
        for (work, sequences, scale), known in self._groups.items():
            setting = Setting(work, sequences, SHORT << scale - 1 if scale else 0)
            for depth, rows in sorted(known.learned):
                shape = Shape(depth, rows)
                ms, evidence = self.round_ms(setting, shape), float(known.evidence[depth, rows])
                found.append(Known(setting, shape, round(ms, 3), round(evidence, 1)))
        return found

    def _begin_with(self, known: Sequence[Known]) -> None:
        """Take over what an earlier process learned."""
        for each in sorted(known, key=lambda each: each.evidence):
            off = self._beyond_table(each.shape, each.ms)
            self._level = off if self._level is None else self._level
            group, cell = self._of(each.setting), (each.shape.depth, each.shape.rows)
            group.learned.add(cell)
            while group.evidence[cell] < min(each.evidence, TAKEN_OVER):
                group.move(*cell, off - self._level)

    def _beyond_table(self, shape: Shape, ms: float) -> float:
        return math.log(ms / max(self.start.round_ms(ALONE, shape), LEAST_MS))

    def _of(self, setting: Setting) -> Corrections:
        """Return what is known in a setting; a new one begins with what is known of the most similar one."""
        group = group_of(setting)
        if group not in self._groups:
            similar = min(self._groups, key=lambda other: distance(group, other), default=None)
            self._groups[group] = Corrections() if similar is None else self._groups[similar].borrowed()
        return self._groups[group]


def group_of(setting: Setting) -> Group:
    """Return the work, the sequences and the scale of the length: settings whose costs are learned together."""
    return setting.work, setting.sequences, (setting.cached // SHORT).bit_length()


def distance(one: Group, other: Group) -> tuple[float, int, bool]:
    """Return how much two groups differ: by sequences most, then by length, then by work."""
    return abs(math.log2(one[1] / other[1])), abs(one[2] - other[2]), one[0] != other[0]


@cache
def likeness(depth: int, rows: int) -> np.ndarray:
    """Return how alike the corrections of a shape and of each other are, from 0 to 1: [17, 17].

    Rounds without a draft pass, which may verify copies, are like each other only.
    """
    counts = np.log2(np.arange(SIZE) + 1)
    apart = np.abs(counts - counts[depth])[:, None] + np.abs(counts - counts[rows])[None]
    is_plain = np.arange(SIZE) == 0
    return np.where(is_plain[:, None] == (depth == 0), np.exp(-LIKENESS * apart), 0)
