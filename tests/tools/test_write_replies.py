"""Writing replies in batches: greedy ids equal mlx-lm's, and an early end saves complete replies."""

import json
import signal
import sys
import time

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma3_text, llama
from mlx_lm.sample_utils import apply_top_p
from mlx_lm.utils import load, quantize_model, save_config, save_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_spec.errors import UnsupportedModel
from tools import write_replies as tool

WORDS = ["<pad>", "<eos>", "<unk>", "user", "system", "assistant", ":"] + [f"w{n}" for n in range(57)]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)
CONFIG = dict(
    model_type="llama",
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    vocab_size=len(WORDS),
    tie_word_embeddings=False,
)
MAX_TOKENS = 40
# One more than the tokenizer's, so that this random model ends some replies early.
EOS_IDS = frozenset({1, 31})


def save_tokenizer(folder):
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random llama, with weights large enough that its greedy replies vary and some end."""
    folder = tmp_path_factory.mktemp("tiny_llama")
    mx.random.seed(3)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    embed, head = mx.random.normal((2, len(WORDS), 32))
    model.update({"model": {"embed_tokens": {"weight": embed}}, "lm_head": {"weight": head}})
    save_model(folder, model, donate_model=False)
    save_config(dict(CONFIG), folder / "config.json")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def target(folder):
    return load(str(folder))[:2]


@pytest.fixture(scope="module")
def items():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 12, 30)
    texts = [" ".join(f"w{n}" for n in rng.integers(0, 57, length)) for length in lengths]
    items = [{"prompt": text, "kind": "even" if n % 2 == 0 else "odd"} for n, text in enumerate(texts)]
    items[0]["system"] = "w1 w2"
    return items


def greedy_alone(model, prompt, eos_ids=EOS_IDS):
    reply = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=MAX_TOKENS):
        reply.append(int(token))
        if reply[-1] in eos_ids:
            break
    return reply


def write(target, items, share, batch_size=8, **changes):
    model, tokenizer = target
    prompts = tool.encode(tokenizer, items)
    greedy = tool.choose_greedy(len(items), share, seed=0)
    batches = tool.make_batches(prompts, greedy, batch_size, seed=0)
    settings = tool.Settings(**{"max_tokens": MAX_TOKENS, "eos_ids": EOS_IDS, **changes})
    mx.random.seed(0)
    return prompts, greedy, tool.write_replies(model, prompts, greedy, batches, settings)


@pytest.mark.parametrize("row_multiple", [1, 64])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_greedy_replies_equal_mlx_lm(target, items, share, row_multiple, monkeypatch):
    monkeypatch.setattr(tool, "ROW_MULTIPLE", row_multiple)
    prompts, greedy, replies = write(target, items, share)
    assert len(replies.by_prompt) == len(items)
    assert greedy.sum() == share * len(items)
    alone = {n: greedy_alone(target[0], prompts[n]) for n in np.flatnonzero(greedy).tolist()}
    assert {n: replies.by_prompt[n] for n in alone} == alone
    ended = [reply[-1] in EOS_IDS for reply in alone.values()]
    assert any(ended) and not all(ended), "the tiny model must show both ends of a reply"


def test_sampled_replies_depend_on_the_seed_only(target, items):
    first, second = (write(target, items, 0.0)[2].by_prompt for _ in range(2))
    assert first == second
    assert first != write(target, items, 1.0)[2].by_prompt
    assert all(len(reply) <= MAX_TOKENS and not EOS_IDS & set(reply[:-1]) for reply in first.values())


def test_top_p_keeps_what_mlx_lm_keeps():
    logits = mx.random.normal((16, 200), key=mx.random.key(0)) * 3
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for top_p in (0.3, 0.8, 0.95):
        ours, theirs = tool.keep_top_p(logprobs, top_p), apply_top_p(logprobs, top_p)
        assert mx.array_equal(ours > -mx.inf, theirs > -mx.inf)


def test_batches_hold_each_prompt_once_with_greedy_rows_first():
    prompts = [[0] * n for n in (5, 1, 9, 2, 7, 3, 8)]
    greedy = np.array([True, False, True, False, False, True, True])
    batches = tool.make_batches(prompts, greedy, size=3, seed=0)
    assert sorted(n for batch in batches for n in batch) == list(range(7))
    assert sorted(len(batch) for batch in batches) == [1, 3, 3]
    assert all(greedy[batch].tolist() == sorted(greedy[batch], reverse=True) for batch in batches)


def test_deadline_keeps_complete_replies(target, items, monkeypatch):
    """With a clock that advances by one at each call: a few chunks, then the deadline."""
    ticks = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    prompts, _, replies = write(target, items, 1.0, deadline=6)
    assert 0 < len(replies.by_prompt) < len(items)
    for number, reply in replies.by_prompt.items():
        assert reply == greedy_alone(target[0], prompts[number])


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_keep_complete_replies(target, items, sent, monkeypatch):
    advance, calls, before = tool.Batch.advance, iter(range(1000)), signal.getsignal(signal.SIGTERM)

    def interrupted(batch, settings):
        if next(calls) == 2:
            signal.raise_signal(sent)
        advance(batch, settings)

    monkeypatch.setattr(tool.Batch, "advance", interrupted)
    # A shell lets what runs in its background ignore SIGINT.
    of_shell = signal.signal(signal.SIGINT, signal.default_int_handler)
    replies = write(target, items, 1.0)[2]
    signal.signal(signal.SIGINT, of_shell)
    assert 0 < len(replies.by_prompt) < len(items)
    assert signal.getsignal(signal.SIGTERM) == before


def test_other_caches_are_refused():
    args = dict(model_type="gemma3_text", hidden_size=32, num_hidden_layers=6, intermediate_size=64)
    args |= dict(num_attention_heads=4, num_key_value_heads=1, head_dim=8, vocab_size=64, sliding_window=8)
    model = gemma3_text.Model(gemma3_text.ModelArgs.from_dict(args))
    with pytest.raises(UnsupportedModel, match="this model has RotatingKVCache"):
        tool.plain_caches(model)


def run_main(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["write_replies", *map(str, arguments)])
    assert tool.main() == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_command_line_writes_flat_arrays(folder, target, items, tmp_path, monkeypatch, capsys):
    source, out = tmp_path / "prompts.jsonl", tmp_path / "replies.npz"
    source.write_text("".join(json.dumps(item) + "\n" for item in items))
    options = ["--max-tokens", MAX_TOKENS, "--batch-size", 8, "--limit", 20]
    result = run_main(monkeypatch, capsys, "--model", folder, "--prompts", source, "--out", out, *options)
    assert result["replies"] == result["prompts"] == 20
    with np.load(out) as data:
        arrays = dict(data)
    assert arrays["tokens"].dtype == np.uint32 and arrays["offsets"].dtype == np.int64
    assert (
        arrays["offsets"][-1] == len(arrays["tokens"]) == result["reply_tokens"] + arrays["prompt_lengths"].sum()
    )
    assert arrays["greedy"].sum() == 10
    assert [arrays["kinds"][k] for k in arrays["kind"]] == [item["kind"] for item in items[:20]]
    for row, prompt in enumerate(tool.encode(target[1], items[:20])):
        begin, end = arrays["offsets"][row : row + 2]
        assert arrays["tokens"][begin : begin + len(prompt)].tolist() == prompt
        if arrays["greedy"][row]:
            expected = greedy_alone(target[0], prompt, {1})
            assert arrays["tokens"][begin + len(prompt) : end].tolist() == expected


def test_dtype_dequantises(folder, tmp_path):
    model, _ = load(str(folder))
    model, config = quantize_model(model, dict(CONFIG), group_size=32, bits=4)
    save_model(tmp_path, model, donate_model=False)
    save_config(config, tmp_path / "config.json")
    save_tokenizer(tmp_path)
    loaded, _ = tool.load_target(str(tmp_path), "bfloat16")
    layer = loaded.model.layers[0].self_attn.q_proj
    assert layer.weight.dtype == mx.bfloat16 and layer.weight.shape == (32, 32)
