"""What a drafter is measured on: the target's own replies to built-in prompts, or a text of the user's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.drafters.base import Committed
from mlx_spec.errors import RequestError
from mlx_spec.target import Pass, Target

PROMPTS = {
    "prose": (
        "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
        "Describe how a small town changes between summer and winter.",
    ),
    "code": (
        "Write a Python function that merges two sorted lists, and explain how it works.",
        "Write a JavaScript class for a stack with push, pop and peek.",
    ),
    "mathematics": (
        "A train travels 180 km in 2 hours and 30 minutes. What is its average speed? Explain step by step.",
        "Solve 3x + 7 = 25 and check the solution, step by step.",
    ),
    "lists": (
        "List ten things to pack for a week of hiking, with a reason for each.",
        "Give me seven tips for learning a new language, as a numbered list.",
    ),
}
LEAST_POSITIONS = 16
# The first anchor: two rows are committed before it, so that one can be withheld.
FIRST = 2
CHUNK = 512


@dataclass(frozen=True)
class Text:
    """A text of n tokens, and what the target computes for it.

    kind: what it is, such as "code".
    tokens: [n] int32.
    start: the first position that is an anchor: the last of a prompt, or a later one.
    states: by target layer id, its output [n, H], see ``Target``.
    choices: [n] int32: the target's greedy choice after each position.
    """

    kind: str
    tokens: mx.array
    start: int
    states: Mapping[int, mx.array]
    choices: mx.array

    def committed(self, begin: int, end: int, layer_ids: Sequence[int], shift: int = 0) -> Committed:
        """Return rows as a drafter gets them.

        shift: a row gets the hidden states of the row so many positions later.
        """
        rows = mx.clip(mx.arange(begin, end) + shift, 0, self.tokens.size - 1)
        states = mx.concatenate([self.states[layer][rows] for layer in layer_ids], axis=-1)
        return Committed(begin, self.tokens[begin:end], states)

    def anchors(self, depth: int) -> range:
        """Return the positions with ``depth`` tokens after them."""
        return range(self.start, self.tokens.size - depth)


def read_text(target: Target, kind: str, tokens: Sequence[int], start: int, layer_ids: Sequence[int]) -> Text:
    """Run a text through the target, and keep the outputs of some layers.

    start: the first position that is to be an anchor.
    """
    sequence, kept, choices = target.open(), list[mx.array](), list[mx.array]()

    def keep(rows: Pass, chunk: mx.array) -> None:
        kept.append(rows.aux_hidden_states)
        choices.append(mx.argmax(target.logits(rows.hidden), axis=-1).astype(mx.int32))
        mx.eval(kept[-1], choices[-1])

    try:
        target.prefill(sequence, list(tokens), layer_ids, CHUNK, keep)
    finally:
        sequence.free()
    states = mx.split(mx.concatenate(kept), len(layer_ids), axis=-1)
    return Text(
        kind,
        mx.array(list(tokens), dtype=mx.int32),
        max(start, FIRST),
        dict(zip(layer_ids, states, strict=True)),
        mx.concatenate(choices),
    )


def own_replies(
    target: Target, tokenizer: Any, count: int, on_token: Callable[[], None] = lambda: None
) -> list[tuple[str, list[int], int]]:
    """Let the target answer the built-in prompts, all at once and greedily, with up to ``count`` tokens each.

    on_token: called after each of the ``count`` steps.
    Returns kinds, tokens of prompts and replies, and the position of the last token of each prompt.
    """
    prompts = [(kind, as_chat(tokenizer, prompt)) for kind, prompts in PROMPTS.items() for prompt in prompts]
    prompts = [(kind, ids) for kind, ids in prompts if len(ids) + count <= target.context]
    ends, sequences = set(getattr(tokenizer, "eos_token_ids", ())), [target.open() for _ in prompts]
    texts, running = [list(ids) for _, ids in prompts], list(range(len(prompts)))
    try:
        for sequence, (_, ids) in zip(sequences, prompts, strict=True):
            target.prefill(sequence, ids[:-1])
        for _ in range(count):
            batch = [(sequences[i], mx.array(texts[i][-1:], dtype=mx.int32)) for i in running]
            rows = target.forward(batch)
            following = mx.argmax(target.logits(rows.hidden), axis=-1)
            mx.eval(following, *rows.arrays)
            chosen = [int(token) for token in np.array(following)]
            target.commit_all([(sequence, rows.prefix(n, 1)) for n, (sequence, _) in enumerate(batch)])
            for i, token in zip(running, chosen, strict=True):
                texts[i].append(token)
            running = [i for i in running if texts[i][-1] not in ends]
            on_token()
            if not running:
                break
    finally:
        for sequence in sequences:
            sequence.free()
    return [(kind, text, len(ids) - 1) for (kind, ids), text in zip(prompts, texts, strict=True)]


def as_chat(tokenizer: Any, prompt: str) -> list[int]:
    """Return the tokens of a prompt: in the chat template, where the tokenizer has one."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    return list(tokenizer.encode(prompt)) or [0]


def parts_of(tokens: Sequence[int], size: int) -> Iterator[list[int]]:
    """Cut a user's text into parts of up to ``size`` tokens. Raises RequestError where it is too short."""
    if len(tokens) < LEAST_POSITIONS:
        raise RequestError(
            f"The text has {len(tokens)} tokens; at least {LEAST_POSITIONS} are needed, a few hundred are better."
        )
    for begin in range(0, len(tokens), size):
        part = list(tokens[begin : begin + size])
        if len(part) >= LEAST_POSITIONS:
            yield part
