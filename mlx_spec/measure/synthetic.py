"""Rounds of published shapes with random weights and a drafter of chosen acceptance: what a machine would do."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_spec.engine import Engine, Request
from mlx_spec.measure.random_models import random_drafter, random_model
from mlx_spec.measure.scripted import ScriptedAcceptance
from mlx_spec.measure.turns import Timed, engine_arm, first_difference, in_turns, margin, mlx_lm_arm, summary
from mlx_spec.target import Target


@dataclass(frozen=True)
class Synthetic:
    """What to time.

    shape: a key of CONFIGS.
    kinds: of drafters: dflash2, eagle, mtp.
    bits: of the weights; None for bfloat16.
    acceptance: the chance of each draft after accepted ones.
    context: tokens of the prompt.
    streams: texts that are decoded together.
    tokens: of each text.
    depths: drafts a round, each an arm.
    layers: fewer than the shape has, for a quick try.
    """

    shape: str
    kinds: tuple[str, ...] = ("dflash2",)
    bits: int | None = 4
    acceptance: float = 0.8
    context: int = 1024
    streams: int = 1
    tokens: int = 200
    depths: tuple[int, ...] = (7,)
    layers: int | None = None


def time_synthetic(wanted: Synthetic, turns: int = 3, progress: bool = False) -> dict[str, Any]:
    """Time mlx-lm (of one stream), plain decoding, and each kind of drafter at each depth, in turns.

    Returns the ``summary`` of each arm by its name; see ``compared`` for its texts.
    """
    model, config = random_model(wanted.shape, wanted.bits, layers=wanted.layers)
    vocabulary = min(config["vocab_size"], 40000)
    prompts = [
        [(7919 * i + 13 * stream + 13) % vocabulary for i in range(wanted.context)]
        for stream in range(wanted.streams)
    ]
    arms = {}
    if wanted.streams == 1:
        arms["mlx-lm"] = partial(mlx_lm_arm, model, prompts[0], wanted.tokens)
    target = Target(model, config, wanted.shape, (wanted.streams + 2) * (wanted.context + wanted.tokens + 1024))

    def requests(depth: int) -> list[Request]:
        return [Request(prompt, wanted.tokens, depth) for prompt in prompts]

    plain = Engine(target)
    texts = engine_arm(plain, requests(0)).texts
    arms["plain"] = partial(engine_arm, plain, requests(0))
    for kind in wanted.kinds:
        drafter = random_drafter(kind, target, config, wanted.bits)
        scripted = ScriptedAcceptance(
            drafter, [prompt + text for prompt, text in zip(prompts, texts, strict=True)], wanted.acceptance
        )
        engine = Engine(target, scripted)
        for depth in sorted({min(depth, drafter.max_draft) for depth in wanted.depths}):
            arms[f"{kind} {depth}"] = partial(engine_arm, engine, requests(depth))
    runs: dict[str, list[Timed]] = in_turns(arms, turns, progress)
    return {name: summary(each) | compared(target, prompts, texts, each) for name, each in runs.items()}


def compared(
    target: Target, prompts: Sequence[list[int]], plain: Sequence[list[int]], runs: Sequence[Timed]
) -> dict[str, Any]:
    """Return whether an arm's texts are the plain ones, and of the first that is not, where and how narrowly.

    That is the number of the first other token, and by how much the target preferred its own token to the second.
    """
    for run in runs:
        for prompt, text, other in zip(prompts, plain, run.texts, strict=True):
            if (place := first_difference(text, other)) is not None:
                near = round(margin(target, [*prompt, *text[:place]]), 4)
                return {"equal": False, "first_difference": place, "margin": near}
    return {"equal": True}
