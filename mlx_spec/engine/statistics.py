"""What a generation did: counts, acceptance per position, and where the time went."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Exactness:
    """Whether a row of a verify pass has the bits of the same row computed alone.

    reason: how that is known, or what differs, in words.
    """

    holds: bool
    reason: str


NOT_CHECKED = Exactness(False, "not checked")
NOT_YET = Exactness(False, "not checked yet: that comes after the first text")


@dataclass(frozen=True)
class SourceCounts:
    """What a source of drafts did: rounds it drafted in, tokens of chains that it drafted, those accepted."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: "SourceCounts") -> "SourceCounts":
        return SourceCounts(
            self.rounds + other.rounds, self.drafted + other.drafted, self.accepted + other.accepted
        )


def added(every: Iterable[Mapping[str, SourceCounts]]) -> dict[str, SourceCounts]:
    """Return the sums of counts by source."""
    sums: dict[str, SourceCounts] = {}
    for each in every:
        for name, counts in each.items():
            sums[name] = sums.get(name, SourceCounts()) + counts
    return sums


def in_words(drafted_by: Mapping[str, SourceCounts]) -> str:
    """Return what each source drafted, and how much of it was accepted."""
    return ", ".join(f"{name} {counts.accepted} of {counts.drafted}" for name, counts in drafted_by.items())


@dataclass
class Statistics:
    """Counters of one generation. Times are seconds.

    prompt_tokens, prompt_seconds: of the prompt, and of reading it.
    cached_tokens: of the prompt, that an earlier generation had read.
    tokens, seconds: generated, and the time of all rounds.
    rounds: of draft and verify.
    undrafted_rounds: those of them in which nothing was drafted.
    drafted[i], accepted[i]: rounds that drafted a token i + 1 positions after the anchor, and those in which it
        was accepted.
    drafted_by: by the name of a source of drafts: the drafter's, "lookup" or "grammar".
    sibling_drafts, accepted_sibling_drafts: runners-up that were verified beside these, and those accepted.
    timed_rounds: rounds that were measured with a stop between drafting and verifying, which others do not have.
    draft_seconds, verify_seconds, host_seconds: of these rounds.
    depth_reason: why the depth is what it is, in words.
    drafter_failure: why drafting ended, if it did.
    exactness: of the engine.
    kernels: what ran its operations, in words.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    undrafted_rounds: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted_by: dict[str, SourceCounts] = field(default_factory=dict)
    sibling_drafts: int = 0
    accepted_sibling_drafts: int = 0
    timed_rounds: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    host_seconds: float = 0.0
    depth_reason: str = ""
    drafter_failure: str = ""
    exactness: Exactness = NOT_CHECKED
    kernels: str = ""

    def copy(self) -> "Statistics":
        """Return an independent copy."""
        return replace(
            self, drafted=list(self.drafted), accepted=list(self.accepted), drafted_by=dict(self.drafted_by)
        )

    def count_round(
        self,
        drafted: int,
        accepted: int,
        emitted: int,
        sources: Sequence[tuple[str, int]] = (),
        siblings: int = 0,
        accepted_siblings: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Count a round: tokens that were drafted, accepted and emitted, and siblings beside the drafted ones.

        sources: who drafted how many of them, in order.
        """
        self.seconds += seconds
        self.sibling_drafts += siblings
        self.accepted_sibling_drafts += accepted_siblings
        self.rounds += 1
        self.undrafted_rounds += drafted == 0
        self.tokens += emitted
        while len(self.drafted) < drafted:
            self.drafted.append(0)
            self.accepted.append(0)
        for i in range(drafted):
            self.drafted[i] += 1
            self.accepted[i] += i < accepted
        for name, count in sources:
            own = min(count, accepted)
            accepted -= own
            self.drafted_by = added([self.drafted_by, {name: SourceCounts(1, count, own)}])

    def count_timed(self, draft_seconds: float, verify_seconds: float, host_seconds: float) -> None:
        """Count a round whose draft and verify passes were awaited one after the other."""
        self.timed_rounds += 1
        self.draft_seconds += draft_seconds
        self.verify_seconds += verify_seconds
        self.host_seconds += host_seconds

    @property
    def exact(self) -> bool:
        """Whether the rows of this generation are those of plain decoding, bit for bit."""
        return self.exactness.holds

    @property
    def accepted_length(self) -> float:
        """Tokens a round, the bonus token included."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> list[float]:
        """Share of the rounds drafting that far in which the token at each position was accepted."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens a second."""
        read = self.prompt_tokens - self.cached_tokens
        return read / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generation_tps(self) -> float:
        """Generated tokens a second, from the end of the prompt on."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Shares of a round in drafting, in verifying and on the host, by the timed rounds."""
        parts = {"draft": self.draft_seconds, "verify": self.verify_seconds, "host": self.host_seconds}
        total = sum(parts.values())
        return {name: seconds / total if total else 0.0 for name, seconds in parts.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "prompt_tps": round(self.prompt_tps, 3),
            "generation_tokens": self.tokens,
            "generation_tps": round(self.generation_tps, 3),
            "seconds": round(self.seconds, 4),
            "rounds": self.rounds,
            "undrafted_rounds": self.undrafted_rounds,
            "accepted_length": round(self.accepted_length, 4),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance": [round(a, 4) for a in self.acceptance],
            "drafted_by": {name: asdict(counts) for name, counts in self.drafted_by.items()},
            "sibling_drafts": self.sibling_drafts,
            "accepted_sibling_drafts": self.accepted_sibling_drafts,
            "time_shares": {name: round(share, 4) for name, share in self.shares.items()},
            "timed_rounds": self.timed_rounds,
            "draft_seconds": round(self.draft_seconds, 4),
            "verify_seconds": round(self.verify_seconds, 4),
            "depth_reason": self.depth_reason,
            "drafter_failure": self.drafter_failure,
            "kernels": self.kernels,
            "exact": self.exactness.holds,
            "exact_reason": self.exactness.reason,
        }

    def __str__(self) -> str:
        cached = f", {self.cached_tokens} of them cached" if self.cached_tokens else ""
        lines = [
            f"Prompt: {self.prompt_tokens} tokens{cached}, {self.prompt_tps:.1f} tokens/s",
            f"Generation: {self.tokens} tokens, {self.generation_tps:.1f} tokens/s",
            f"Rounds: {self.rounds}, {self.accepted_length:.2f} tokens a round",
        ]
        if self.drafted:
            shares = " ".join(f"{a:.2f}" for a in self.acceptance)
            lines.append(f"Acceptance by position: {shares}")
        if self.drafted_by:
            lines.append(f"Drafts accepted: {in_words(self.drafted_by)}")
        if self.sibling_drafts:
            lines.append(f"Sibling drafts accepted: {self.accepted_sibling_drafts} of {self.sibling_drafts}")
        if self.timed_rounds:
            parts = ", ".join(f"{name} {share:.0%}" for name, share in self.shares.items())
            lines.append(f"Time: {parts}")
        if self.undrafted_rounds:
            lines.append(f"Without drafting: {self.undrafted_rounds} of {self.rounds} rounds")
        if self.depth_reason:
            lines.append(f"Draft depth: {self.depth_reason}")
        if self.drafter_failure:
            lines.append(f"Drafting stopped: {self.drafter_failure}")
        if self.kernels:
            lines.append(f"Kernels: {self.kernels}")
        lines.append(f"Exact: {'yes' if self.exactness.holds else 'no'}, {self.exactness.reason}")
        return "\n".join(lines)
