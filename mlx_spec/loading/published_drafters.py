"""Published drafters by the shape of their target, as data: which of them fit a model that comes without one.

A shape does not tell a model from its relatives and fine-tunes; a drafter of one may still fit the other, with
fewer drafts accepted. None of these was run here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_spec.target.families import text_config


@dataclass(frozen=True)
class PublishedDrafter:
    """A drafter in a Hugging Face repo.

    repo: its name.
    kind: for people.
    target: the model that it was trained for.
    model_type, hidden_size, num_hidden_layers, vocab_size: of that model.
    """

    repo: str
    kind: str
    target: str
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int


# Targets: name, model_type, hidden_size, num_hidden_layers, vocab_size; then (repo, kind) of each drafter, the one
# to try first at the head.
TARGETS: tuple[tuple[tuple[str, str, int, int, int], tuple[tuple[str, str], ...]], ...] = (
    (
        ("Qwen/Qwen3-1.7B", "qwen3", 2048, 28, 151936),
        (("AngelSlim/Qwen3-1.7B_eagle3", "EAGLE-3"),),
    ),
    (
        ("Qwen/Qwen3-4B", "qwen3", 2560, 36, 151936),
        (
            ("RedHatAI/Qwen3-4B-speculator.dflash2", "DFlash 2"),
            ("z-lab/Qwen3-4B-DFlash-b16", "DFlash"),
            ("AngelSlim/Qwen3-4B_eagle3", "EAGLE-3"),
        ),
    ),
    (
        ("Qwen/Qwen3-8B", "qwen3", 4096, 36, 151936),
        (
            ("RedHatAI/Qwen3-8B-speculator.dflash2", "DFlash 2"),
            ("z-lab/Qwen3-8B-DFlash-b16", "DFlash"),
            ("RedHatAI/Qwen3-8B-speculator.eagle3", "EAGLE-3"),
            ("AngelSlim/Qwen3-8B_eagle3", "EAGLE-3"),
        ),
    ),
    (
        ("Qwen/Qwen3-14B", "qwen3", 5120, 40, 151936),
        (("AngelSlim/Qwen3-14B_eagle3", "EAGLE-3"),),
    ),
    (
        ("Qwen/Qwen3-32B", "qwen3", 5120, 64, 151936),
        (
            ("RedHatAI/Qwen3-32B-speculator.eagle3", "EAGLE-3"),
            ("AngelSlim/Qwen3-32B_eagle3", "EAGLE-3"),
        ),
    ),
    (
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3_moe", 2048, 48, 151936),
        (("RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3", "EAGLE-3"),),
    ),
    (
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_moe", 2048, 48, 151936),
        (("z-lab/Qwen3-Coder-30B-A3B-DFlash", "DFlash"),),
    ),
    (
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next", 2048, 48, 151936),
        (("Qwen/Qwen3-Next-80B-A3B-Instruct", "MTP head"),),
    ),
    (
        ("Qwen/Qwen3.5-4B", "qwen3_5", 2560, 32, 248320),
        (
            ("mlx-community/Qwen3.5-4B-MTP-4bit", "MTP head"),
            ("Qwen/Qwen3.5-4B", "MTP head"),
            ("z-lab/Qwen3.5-4B-DFlash", "DFlash"),
        ),
    ),
    (
        ("Qwen/Qwen3.5-27B", "qwen3_5", 5120, 64, 248320),
        (("z-lab/Qwen3.5-27B-DFlash", "DFlash"),),
    ),
    (
        ("Qwen/Qwen3.6-27B", "qwen3_5", 5120, 64, 248320),
        (
            ("mlx-community/Qwen3.6-27B-MTP-4bit", "MTP head"),
            ("z-lab/Qwen3.6-27B-DFlash", "DFlash"),
        ),
    ),
    (
        ("Qwen/Qwen3.8-27B", "qwen3_5", 5120, 64, 248320),
        (
            ("z-lab/Qwen3.8-27B-DFlash2", "DFlash 2"),
            ("mlx-community/Qwen3.8-27B-MTP-8bit", "MTP head"),
        ),
    ),
    (
        ("Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe", 2048, 40, 248320),
        (("z-lab/Qwen3.5-35B-A3B-DFlash", "DFlash"),),
    ),
    (
        ("Qwen/Qwen3.6-35B-A3B", "qwen3_5_moe", 2048, 40, 248320),
        (
            ("mlx-community/Qwen3.6-35B-A3B-MTP-4bit", "MTP head"),
            ("z-lab/Qwen3.6-35B-A3B-DFlash", "DFlash"),
        ),
    ),
    (
        ("Qwen/Qwen3.5-122B-A10B", "qwen3_5_moe", 3072, 48, 248320),
        (("z-lab/Qwen3.5-122B-A10B-DFlash", "DFlash"),),
    ),
    (
        ("meta-llama/Llama-3.1-8B-Instruct", "llama", 4096, 32, 128256),
        (
            ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "EAGLE-3"),
            ("z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", "DFlash"),
        ),
    ),
    (
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama", 4096, 32, 128256),
        (("yuhuili/EAGLE-LLaMA3-Instruct-8B", "EAGLE"),),
    ),
    (
        ("meta-llama/Llama-3.3-70B-Instruct", "llama", 8192, 80, 128256),
        (("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", "EAGLE-3"),),
    ),
)
PUBLISHED = tuple(PublishedDrafter(repo, kind, *target) for target, drafters in TARGETS for repo, kind in drafters)


def fitting_drafters(config: Mapping[str, Any]) -> list[PublishedDrafter]:
    """Return the published drafters whose target has the shape of a model, by its ``config.json``."""
    text = text_config(config)
    keys = ("hidden_size", "num_hidden_layers", "vocab_size")
    types = {str(part.get("model_type")).removesuffix("_text") for part in (config, text)}
    return [
        drafter
        for drafter in PUBLISHED
        if drafter.model_type in types and all(getattr(drafter, key) == text.get(key) for key in keys)
    ]


def drafter_hint(config: Mapping[str, Any], name: str = "") -> str | None:
    """Return one line that names a published drafter for a model that comes without one, or None.

    name: of the model; of several targets of one shape, one that it names is taken.
    """
    fitting = fitting_drafters(config)
    if not fitting:
        return None
    named = [drafter for drafter in fitting if drafter.target.split("/")[1].lower() in name.lower()]
    first = (named or fitting)[0]
    others = len({drafter.target for drafter in fitting}) - 1
    more = "" if named or not others else f", one of {others + 1} models of this shape"
    return (
        f"No drafter comes with this model; published for {first.target}{more}: "
        f"--drafter {first.repo} ({first.kind}); python -m mlx_spec.drafters lists all."
    )
