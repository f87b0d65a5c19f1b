"""Reading prompts: in chunks, and from where an earlier generation's can be continued.

Chunks end at absolute multiples of the step, because on a GPU the chunk decides the last bits of its rows, and a
reply's keys come from other kernels than a prompt's. So a prompt that goes on from an earlier one reuses whole
chunks of that prompt and nothing after them, and has the bits of one that is read from its start.
"""

import time
from collections.abc import Sequence
from itertools import takewhile

from mlx_spec.engine.drafter_states import DrafterStates
from mlx_spec.engine.generation import Generation
from mlx_spec.engine.request import Request
from mlx_spec.errors import PositionError
from mlx_spec.target import CachedSequence, Target

# Marks of one prompt. Each holds a state of every recurrent layer: 75 MB in all in Qwen3-Next.
MAX_MARKS = 4


def next_chunk(generation: Generation) -> int:
    """Return how many tokens the next chunk of a prompt has; all but the prompt's last token are read."""
    start, step = generation.sequence.length, generation.request.prefill_step_size
    return min((start // step + 1) * step, generation.anchor_position) - start


def read_chunk(target: Target, states: DrafterStates, generation: Generation) -> None:
    """Read the next chunk of a prompt. What is raised leaves the generation as it was.

    What is cached at the last boundary is kept, for a prompt that goes on from this one.
    Raises ContextFull where the pool has too few free pages.
    """
    started, request, start = time.perf_counter(), generation.request, generation.sequence.length
    chunk = request.prompt[start : start + next_chunk(generation)]
    before = paused(states, generation)
    try:
        target.prefill(
            generation.sequence,
            chunk,
            states.target_layer_ids([generation]),
            request.prefill_step_size,
            on_rows=lambda rows, tokens: states.extend([(generation, rows, tokens)]),
        )
    except BaseException:
        generation.sequence.free()
        generation.sequence = before.sequence
        states.move(before, generation)
        raise
    if generation.is_read and generation.sequence.length % request.prefill_step_size == 0:
        discard(states, before)
        before = paused(states, generation)
    if generation.is_read:
        generation.boundary = before
    else:
        mark(generation, before.sequence)
        discard(states, before)
    generation.statistics.prompt_seconds += time.perf_counter() - started
    show_progress(generation)


def mark(generation: Generation, sequence: CachedSequence) -> None:
    """Keep a state of recurrent layers at a chunk boundary, and of all such a few that lie evenly."""
    if sequence.recurrent is None or sequence.length in (kept.length for kept in generation.marks):
        return
    marks = generation.marks
    marks.append(sequence.fork())
    if len(marks) > MAX_MARKS:
        ends = [0, *(kept.length for kept in marks)]
        # The last one stays: the next boundary is measured from there.
        gaps = [after - before for before, after in zip(ends, ends[2:], strict=False)]
        marks.pop(gaps.index(min(gaps))).free()


def show_progress(generation: Generation) -> None:
    """Say how much of a prompt is read. Its last token, the first anchor, counts when all others are."""
    request = generation.request
    request.on_progress(generation.sequence.length, len(request.prompt))
    if generation.is_read:
        request.on_progress(len(request.prompt), len(request.prompt))


def paused(states: DrafterStates, generation: Generation) -> Generation:
    """Return what there is of a generation, as one that stopped here; both share what is cached."""
    copy = Generation(
        generation.request,
        generation.sequence.fork(),
        generation.rule,
        generation.policy,
        generation.tokens[: generation.sequence.length],
    )
    states.fork(generation, copy)
    return copy


def discard(states: DrafterStates, copy: Generation) -> None:
    """Give back what ``paused`` took."""
    copy.sequence.free()
    states.forget(copy)


def take_over(states: DrafterStates, generation: Generation, earlier: Generation, everything: bool) -> None:
    """Let a new generation share what it can of an earlier one, and count it.

    everything: all that is cached of the same tokens, replies too; otherwise whole chunks of the earlier prompt.
    """
    source, sequence = shared_part(generation.request, earlier, everything)
    if sequence is not None:
        generation.sequence = sequence
        generation.marks = [kept.fork() for kept in earlier.marks if kept.length < sequence.length]
        states.continue_from(source, generation)
    generation.statistics.cached_tokens = generation.sequence.length


def shared_part(
    request: Request, earlier: Generation, everything: bool
) -> tuple[Generation, CachedSequence | None]:
    """Return the sequence that a new request can begin with, and the part of an earlier generation that has it.

    None for a model with recurrent layers that kept no state in the part that both have in common. The drafter
    goes back in what it remembers of the earlier generation, where it can.
    """
    same = common_length(request.prompt[:-1], earlier.tokens[: earlier.sequence.length])
    step = request.prefill_step_size
    if not everything:
        is_same_step = step == earlier.request.prefill_step_size
        same = min(same, len(earlier.request.prompt) - 1) // step * step if is_same_step else 0
    for source in (earlier, earlier.boundary):
        if source is not None and (sequence := sequence_at(source, min(same, source.sequence.length))):
            return source, sequence
    for kept in reversed(earlier.marks):
        if kept.length <= same:
            return earlier, kept.fork()
    return earlier, None


def trim(states: DrafterStates, generation: Generation) -> None:
    """Keep of an ended generation the whole chunks of its prompt alone."""
    if generation.boundary is not None:
        discard(states, generation)
        generation.sequence, generation.boundary.sequence = generation.boundary.sequence, generation.sequence
        states.move(generation.boundary, generation)
        generation.boundary = None


def sequence_at(source: Generation, position: int) -> CachedSequence | None:
    """Return a sequence that shares the first positions of another; None where recurrent layers cannot go back."""
    sequence = source.sequence.fork()
    try:
        sequence.rewind(position)
    except PositionError:
        sequence.free()
        return None
    return sequence


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two lists have in common at their start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
