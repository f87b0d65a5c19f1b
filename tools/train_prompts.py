"""Let a target write prompts itself, like those that it was tuned on.

A chat model that is given the beginning of a user's turn continues with a prompt like those of its tuning data
(Magpie, arXiv:2406.08464). Prompts that share twelve successive words with a prompt that is measured on are left
out. Needs a GPU, of Apple or NVIDIA: a CPU is enough for tiny models only.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.cli.bench import read_prompts
from tools.prompt_forms import Prompt
from tools.prompts import as_line, without_benchmarks, without_repeats
from tools.write_replies import Settings, load_target, write_replies

KIND = "own"
MARK = "PROMPT"
MIN_CHARS = 12


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_prompts", description=__doc__)
    parser.add_argument("--model", required=True, help="demo, a folder or a Hugging Face repo")
    parser.add_argument("--out", type=Path, required=True, help="JSON-lines file to write")
    parser.add_argument("--count", type=int, default=10000, help="prompts to sample (default 10000)")
    parser.add_argument(
        "--measured", type=Path, nargs="*", default=[], help="files of prompts that are measured on"
    )
    parser.add_argument("--batch-size", type=int, default=512, help="prompts written together (default 512)")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest prompt; longer ones are dropped (96)")
    parser.add_argument("--temp", type=float, default=0.9, help="temperature (default 0.9)")
    parser.add_argument("--top-p", type=float, default=0.95, help="nucleus sampling (default 0.95)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling (default 0)")
    return parser


def opening(tokenizer: Any) -> list[int]:
    """Return the ids of the chat template up to where the user's text begins."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    return tokenizer.encode(text.partition(MARK)[0], add_special_tokens=False)


def own_prompts(tokenizer: Any, replies: Sequence[list[int]]) -> list[Prompt]:
    """Return the user turns that ended before the limit, as prompts."""
    ended = [reply[:-1] for reply in replies if reply[-1] in tokenizer.eos_token_ids]
    texts = [tokenizer.decode(reply).strip() for reply in ended]
    return [Prompt(text, KIND, (text,)) for text in texts if len(text) >= MIN_CHARS]


def main() -> None:
    """Sample prompts, filter them and write them; print one JSON line."""
    args = setup_arg_parser().parse_args()
    model, tokenizer = load_target(args.model, "bfloat16")
    mx.random.seed(args.seed)
    settings = Settings(args.max_tokens, frozenset(tokenizer.eos_token_ids), args.temp, args.top_p)
    numbers = range(args.count)
    batches = [numbers[i : i + args.batch_size] for i in range(0, args.count, args.batch_size)]
    start = [opening(tokenizer)] * args.count
    replies = write_replies(model, start, np.zeros(args.count, bool), batches, settings)
    written = own_prompts(tokenizer, list(replies.by_prompt.values()))
    different = without_repeats(written)
    measured = [Prompt(i["prompt"], i["kind"], ()) for path in args.measured for i in read_prompts(path, None)]
    kept = without_benchmarks(different, measured)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(map(as_line, kept)), encoding="utf-8")
    counts = {"ended": len(written), "different": len(different), "kept": len(kept)}
    print(json.dumps({"sampled": args.count, **counts}))


if __name__ == "__main__":
    main()
