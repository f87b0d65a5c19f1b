"""Edits tiny checkpoints at random and loads them: each runs right or is refused in one sentence.

    PYTHONPATH=.:tests python tests/fuzz_folders.py --edits 2000

Models are judged by transformers where torch is installed: what loads there without a missing tensor has the
same logits here, unless a warning said that a setting is not known. With an edited drafter, the text stays that of
plain decoding. Anything but an MlxSpecError, and an edit that takes longer than a minute, is a fault.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tiny_drafters import dflash2_config, random_tensors, write_drafter
from tiny_eagles import eagle_config, eagle_tensors, midlayer, write_eagle
from tiny_folders import TOKENS, folder_config, write_model, write_tokenizer
from tiny_heads import head_tensors, write_head

from mlx_spec import load, stream_generate
from mlx_spec.checkpoints.config import read_config
from mlx_spec.errors import MlxSpecError, ModelError
from mlx_spec.loading.model import read_model
from mlx_spec.target import Target

SECONDS = 60
TRANSFORMERS = Path(__file__).parent / "oracles" / "transformers"
PROMPT = [5, 14, 37, 12, 30, 33, 11, 28, 10, 17, 3, 25]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 7, -1, 16, 1000, 0.5, 1.5, 1e-30, 1e30, -0.0),
    *("", "x", "16", "1e-6", "silu", "yarn", [], [1], ["x"], [None], {}, {"a": 1}, [[1]]),
]
NAMES = [
    "._model.safetensors",
    "model copy.safetensors",
    "consolidated.safetensors",
    "adapters.safetensors",
    "x.bin",
]
SMALL_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mimo": "Qwen2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


@dataclass(frozen=True)
class Case:
    """A checkpoint to edit: a model, or the drafter of one."""

    name: str
    folder: Path
    target: Path | None = None


def cases(place: Path) -> list[Case]:
    """Write a checkpoint of every family and of every kind of drafter."""
    found = []
    for source in sorted(TRANSFORMERS.iterdir()):
        folder = place / source.name
        shutil.copytree(source, folder)
        write_tokenizer(folder)
        found.append(Case(source.name, folder))
    llama, qwen3 = write_model(place / "llama"), write_model(place / "qwen3", "qwen3")
    mimo = write_model(place / "mimo", "mimo")
    size, layer = len(TOKENS), folder_config("qwen3")
    dflash, eagle3 = dflash2_config(vocab_size=size, mask_token_id=2), eagle_config(vocab_size=size)
    eagle1 = eagle_config(version=1, vocab_size=size)
    folders = {
        "dflash2": (write_drafter(place / "dflash2", dflash, random_tensors(dflash)), llama),
        "eagle3": (write_eagle(place / "eagle3", eagle3, midlayer(eagle_tensors(eagle3))), llama),
        "eagle1": (write_eagle(place / "eagle1", eagle1, eagle_tensors(eagle1)), llama),
        "mtp": (
            write_head(place / "mtp", {"model_type": "qwen3_5_mtp", "text_config": layer}, head_tensors("qwen3")),
            qwen3,
        ),
    }
    found.append(Case("mimo", mimo))
    return found + [Case(name, folder, target) for name, (folder, target) in folders.items()]


def paths_of(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all keys of an object, nested ones too."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield (*path, key)
            yield from paths_of(value, (*path, key))


def edit_json(draw: random.Random, folder: Path, others: list[Path]) -> str:
    """Remove, change, move or add a key of a JSON file."""
    files = [folder / name for name in SMALL_FILES[: draw.choice((1, 1, 1, 3))] if (folder / name).is_file()]
    file = draw.choice(files)
    content = json.loads(file.read_text())
    path = draw.choice(list(paths_of(content)) or [("x",)])
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    what = draw.choice(("remove", "change", "other", "swap", "scale", "scale"))
    if what == "remove":
        inner.pop(path[-1], None)
    elif what == "change":
        inner[path[-1]] = draw.choice(VALUES)
    elif what == "scale":
        inner[path[-1]] = scaled(inner.get(path[-1]), draw.choice((0.5, 2, 10)))
    elif what == "other":
        other = json.loads((draw.choice(others) / "config.json").read_text())
        key = draw.choice(list(other))
        inner[key] = other[key]
        path = (*path[:-1], key)
    else:
        key = draw.choice(list(inner))
        inner[path[-1]], inner[key] = inner.get(key), inner.get(path[-1])
    file.write_text(json.dumps(content))
    return f"{what} {'.'.join(map(str, path))} of {file.name}: {json.dumps(inner.get(path[-1]))[:60]}"


def scaled(value: Any, factor: float) -> Any:
    """Return another value of the same kind, which a checkpoint could have."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return int(value * factor)
    if isinstance(value, float):
        return value * factor
    if isinstance(value, list):
        return value[::-1]
    return value


def edit_file(draw: random.Random, folder: Path, others: list[Path]) -> str:
    """Truncate, empty, overwrite, remove, rename or double a file."""
    file = draw.choice(sorted(path for path in folder.iterdir() if path.is_file() and path.suffix != ".npz"))
    what = draw.choice(
        ("truncate", "empty", "lfs", "noise", "remove", "rename", "double", "folder", "loop", "flip")
    )
    content = file.read_bytes()
    name = draw.choice(NAMES)
    if what == "truncate":
        file.write_bytes(content[: draw.randrange(len(content) + 1)])
    elif what == "flip":
        at = draw.randrange(max(1, min(len(content), 2000)))
        file.write_bytes(content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :])
    elif what in ("empty", "lfs", "noise"):
        file.write_bytes({"empty": b"", "lfs": LFS, "noise": draw.randbytes(200)}[what])
    elif what == "rename":
        file.rename(folder / name)
    elif what == "double":
        (folder / name).write_bytes(draw.choice((content, LFS, b"", draw.randbytes(64))))
    else:
        file.unlink()
        if what == "folder":
            file.mkdir()
        elif what == "loop":
            file.symlink_to(file.name)
    return f"{what} {file.name} {name if what in ('rename', 'double') else ''}"


def edit_tensor(draw: random.Random, folder: Path, others: list[Path]) -> str:
    """Drop, rename, cast, cut, transpose or spoil a tensor."""
    file = folder / "model.safetensors"
    if not file.is_file():
        return edit_json(draw, folder, others)
    tensors: Any = dict(mx.load(str(file)))
    mx.eval(tensors)
    name = draw.choice(sorted(tensors))
    what = draw.choice(("drop", "rename", "uint8", "int32", "float16", "float32", "cut", "turn", "nan", "double"))
    value = tensors[name]
    if what in ("drop", "rename"):
        del tensors[name]
    changed: dict[str, Callable[[], mx.array]] = {
        "cut": lambda: value[: value.shape[0] // 2],
        "turn": lambda: value.T,
        "nan": lambda: value * float("nan"),
        "double": lambda: mx.concatenate([value, value]),
    }
    if what == "rename":
        tensors[name.replace("layers.0", "layers.9") if "layers.0" in name else f"x.{name}"] = value
    elif what in changed:
        tensors[name] = mx.contiguous(changed[what]())
    elif what != "drop":
        tensors[name] = value.astype(getattr(mx, what))
    mx.save_safetensors(str(file), tensors, {"format": "mlx" if draw.random() < 0.5 else "pt"})
    return f"{what} {name}"


@contextmanager
def seconds(most: int) -> Iterator[None]:
    """Raise TimeoutError after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {most} seconds")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(most)
    try:
        yield
    finally:
        signal.alarm(0)


def texts(model: Path, drafter: str | None) -> None:
    """Load, and generate plainly and with drafts; both texts are the same."""
    engine, tokenizer = load(str(model), drafter)
    ids = [min(token, engine.target.vocab_size - 1) for token in PROMPT]
    counts = [0] if engine.drafter is None else [0, min(3, engine.drafter.max_draft)]
    found = [
        [r.token for r in stream_generate(engine, tokenizer, ids, max_tokens=8, num_draft_tokens=count)]
        for count in counts
    ]
    if found[0] != found[-1]:
        raise AssertionError(f"drafted {found[-1]}, plain {found[0]}")


def judge(folder: Path, architecture: str, judged: Counter[str]) -> None:
    """Compare logits in float32 with those of transformers, where that loads the folder whole."""
    expected = transformers_logits(folder, architecture)
    if expected is None:
        judged["not judged"] += 1
        return
    config = read_config(folder, "judged", "model", ModelError)
    model = read_model(folder, config, "judged")
    model.set_dtype(mx.float32)
    target, sequence, got = Target(model, config, "judged"), None, []
    sequence = target.open()
    target.prefill(sequence, PROMPT, on_rows=lambda rows, _: got.append(target.logits(rows.hidden)))
    if not np.allclose(np.array(mx.concatenate(got)), expected, rtol=1e-3, atol=1e-3):
        raise AssertionError(f"logits differ by {np.abs(np.array(mx.concatenate(got)) - expected).max()}")
    judged["same logits as transformers"] += 1


def transformers_logits(folder: Path, architecture: str) -> Any:
    """Return the logits [R, V] that a class of transformers computes for the prompt; None where it cannot."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        model, found = getattr(transformers, architecture).from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        if any(found[key] for key in ("missing_keys", "mismatched_keys", "error_msgs") if key in found):
            return None
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([PROMPT])).logits[0].numpy()
        return logits if np.isfinite(logits).all() else None
    except Exception:
        return None


def run(case: Case, edited: Path, judged: Counter[str]) -> str:
    """Load an edited checkpoint and use it; return what came of it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if case.target is None:
                texts(edited, "auto")
            else:
                texts(case.target, str(edited))
        except MlxSpecError as error:
            if "\n" in str(error) or not str(error).endswith((".", ")")):
                raise AssertionError(f"no sentence: {error}") from error
            return "refused"
        if case.target is None and not said and find_spec("torch"):
            judge(edited, ARCHITECTURES[case.name.removesuffix("_settings")], judged)
    return "warned" if said else "ran"


def fuzz(edits: int, seed: int, place: Path, report: Callable[[str], None]) -> Counter[str]:
    """Edit and run; returns how many were refused, ran, ran with a warning, or were at fault.

    edits: how many.
    seed: of the edits.
    place: an empty folder to write in.
    report: gets a text for each fault.
    """
    draw, found, judged = random.Random(seed), Counter[str](), Counter[str]()
    every = cases(place / "cases")
    models = [case.folder for case in every]
    os.environ["MLX_SPEC_CACHE"] = str(place / "cache")
    for number in range(edits):
        case, edited = draw.choice(every), place / "edited"
        shutil.rmtree(edited, ignore_errors=True)
        shutil.copytree(case.folder, edited)
        edits_now = [edit_json] * (draw.random() < 0.2) + [
            draw.choice((edit_json, edit_json, edit_file, edit_tensor))
        ]
        notes = [edit(draw, edited, models) for edit in edits_now]
        try:
            with seconds(SECONDS):
                found[run(case, edited, judged)] += 1
        except Exception as error:
            found["faults"] += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__} {str(error)[:200]} ({Path(last.filename).name}:{last.lineno})"
            report(f"{number} {case.name}: {'; '.join(notes)}\n    {what}")
    return found + judged


def main() -> int:
    """Run the fuzzer and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=200, help="how many edits (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the edits (default: 0)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz.") as place:
        found = fuzz(args.edits, args.seed, Path(place), lambda text: print(text, flush=True))
    print(dict(found), f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
