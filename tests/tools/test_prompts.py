"""The prompt collection: filters, forms and, above all, that nothing held out is trained on."""

import ast
import json
import random
from itertools import chain

import pytest

from tools import prompts as tool
from tools.more_topics import MORE
from tools.prompt_forms import MAX_CHARS, TOPICS, Prompt, coding_prompts, passage_prompts, topic_prompts


def sample(*messages, ideal="A"):
    return {"input": [{"role": role, "content": text} for role, text in messages], "ideal": ideal}


def own_prompts(seed=0):
    rng = random.Random(seed)
    texts = [f"Passage number {n} speaks of a river, a town and a bridge. It is short." for n in range(200)]
    return [*topic_prompts(rng), *coding_prompts(rng), *passage_prompts(texts, rng)]


def test_forms_are_filled_and_deterministic():
    found = own_prompts()
    assert found == own_prompts()
    assert found != own_prompts(seed=1)
    assert not [p for p in found if "{" in p.prompt or "}" in p.prompt]
    assert len(tool.without_repeats(found)) > 10_000


def test_split_shares_neither_text_nor_group():
    candidates = tool.without_repeats(own_prompts())
    split = tool.split_prompts(candidates, seed=0)
    tool.check_disjoint(split, [])
    train_texts = {tool.normalise(p.prompt) for p in split.train}
    train_groups = {g for p in split.train for g in p.groups}
    held_out = split.test + split.pool
    assert len(split.test) == tool.HELDOUT_TEST
    assert len(split.pool) == tool.HELDOUT_POOL
    assert len({tool.normalise(p.prompt) for p in held_out}) == len(held_out)
    assert not train_texts & {tool.normalise(p.prompt) for p in held_out}
    assert not train_groups & {g for p in held_out for g in p.groups}


def test_a_prompt_with_only_one_held_out_topic_is_dropped():
    groups = [f"topic {n}" for n in range(1000)]
    out = next(g for g in groups if tool.is_held_out(g, 0))
    kept = next(g for g in groups if not tool.is_held_out(g, 0))
    split = tool.split_prompts([Prompt("Compare them.", "compare", (out, kept))], seed=0)
    assert not split.train and not split.test and not split.pool


def test_check_disjoint_names_the_leak():
    leak = Prompt("What is  RAIN?", "explain", ("topic rain",))
    split = tool.Split([leak], [], [])
    with pytest.raises(ValueError, match="1 are, first: 'what is rain'"):
        tool.check_disjoint(split, [Prompt("what is rain", "writing", ("mtbench 1",))])


def test_prompts_that_contain_a_benchmark_are_left_out():
    benchmark = Prompt(" ".join(f"word{n}" for n in range(20)), "writing", ("mtbench 1",))
    inside = Prompt("Please answer: " + " ".join(f"Word{n}" for n in range(3, 17)), "evals", ("a",))
    short = Prompt("What is rain?", "explain", ("b",))
    assert tool.without_benchmarks([inside, short], [benchmark]) == [short]
    assert tool.without_benchmarks([short], [Prompt("what is rain", "writing", ("c",))]) == []


def test_evals_filters():
    rng = random.Random(0)
    long = "Describe the water cycle in a few plain sentences."
    good = tool.evals_prompt(sample(("system", "Be kind."), ("user", long), ideal="A long answer " * 5), rng)
    assert good is not None and good.prompt.endswith(long)
    short = tool.evals_prompt(sample(("user", long)), rng)
    assert short is not None and short.prompt.partition("\n")[2] in tool.ASK_FOR_REASONS
    assert tool.evals_prompt(sample(("user", "too short")), rng) is None
    assert tool.evals_prompt(sample(("user", "é" * 60)), rng) is None
    assert tool.evals_prompt(sample(("user", "x" * (MAX_CHARS + 1))), rng) is None
    assert tool.evals_prompt(sample(("user", long), ("assistant", "Yes."), ("user", long)), rng) is None
    assert tool.evals_prompt({"question": "no chat"}, rng) is None


def test_evals_leaves_out_folders_and_bounds_each_file(tmp_path):
    for folder in ("theory_of_mind/tomi", "steganography", "task"):
        (tmp_path / folder).mkdir(parents=True)
        lines = [
            json.dumps(sample(("user", f"{folder}, question number {n} of quite a long list"))) for n in range(150)
        ]
        (tmp_path / folder / "samples.jsonl").write_text("\n".join([*lines, "not json"]))
    found = list(tool.evals_prompts(tmp_path, random.Random(0)))
    assert len(found) == tool.EVALS_PER_FILE
    assert all(p.prompt.startswith("task, question") for p in found)


def test_function_stub_is_signature_and_docstring():
    source = 'def add(a, b):\n    """Return the sum."""\n    return a + b\n'
    assert tool.function_stub(source, ast.parse(source).body[0]) == source.partition("    return")[0]
    bare = "def add(a, b):\n    return a + b\n"
    assert tool.function_stub(bare, ast.parse(bare).body[0]) is None


def test_written_lines(tmp_path):
    one = Prompt("Hello?", "letter", ("topic x",), "Be brief.")
    two = Prompt("Bye?", "letter", ("topic y",))
    tool.write_files(tmp_path, tool.Split([one], [two], [one]), [two], [two])
    read = {p.stem: [json.loads(line) for line in p.read_text().splitlines()] for p in tmp_path.iterdir()}
    assert read["train"] == [{"prompt": "Hello?", "kind": "letter", "system": "Be brief."}]
    assert [item["split"] for item in read["heldout"]] == ["heldout40", "heldout"]
    assert read["mtbench"] == read["humaneval"] == [{"prompt": "Bye?", "kind": "letter"}]


def test_kinds_can_be_evened_out():
    prompts = [Prompt(f"{kind} {n}", kind, ()) for n in range(5) for kind in ("recipe", "story")] + [
        Prompt("How?", "advice", ())
    ]
    kept = tool.at_most_of_a_kind(prompts, 2)
    assert [p.prompt for p in kept] == ["recipe 0", "story 0", "recipe 1", "story 1", "How?"]
    assert tool.at_most_of_a_kind(prompts, None) == prompts


def test_more_topics_are_new_and_can_be_trained_on():
    assert MORE.keys() == TOPICS.keys()
    for name, topics in MORE.items():
        assert len(set(topics)) == len(topics) > len(TOPICS[name])
        assert set(topics).isdisjoint(chain(*TOPICS.values()))
    more = tool.without_repeats(tool.more_prompts(seed=0, variants=1))
    assert len(more) > 40_000 and not [p for p in more if "{" in p.prompt]
    split = tool.split_prompts(tool.without_repeats(own_prompts()), seed=0)
    tool.check_disjoint(tool.Split([*split.train, *more], split.test, split.pool), [])
