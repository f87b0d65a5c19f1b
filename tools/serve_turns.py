"""A conversation of several turns with mlx_spec.serve and with mlx_lm.server, turn by turn.

    python -m tools.serve_turns [--model MODEL] [--turns 5] [--tokens 8192] [--json]

An agent's conversation: a long system message, then turns that each add the output of a tool. Both servers get the
same messages in turns, in one run. Of each turn: tokens of the prompt, how many of them were read again, and the
seconds from the request to the first token of the stream. Needs no GPU, but on a CPU patience.
"""

import argparse
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlx_spec.checkpoints.hub import resolve

WAIT = 600.0
# Text as of a tool's output: about one token in four characters.
LINE = "{number:5d}  def read_chunk(target, states, generation): return target.prefill(generation.sequence)\n"


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.serve_turns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo", help="demo, a folder, or a Hugging Face repo (default: demo)")
    parser.add_argument("--turns", type=int, default=5, help="turns of the conversation (default: 5)")
    parser.add_argument(
        "--tokens", type=int, default=8192, help="tokens of the last prompt, about (default: 8192)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0."""
    args = setup_arg_parser().parse_args(argv)
    folder = str(resolve(args.model, True))
    commands = {
        "mlx_spec.serve": ["-m", "mlx_spec.serve", "--model", args.model],
        "mlx_lm.server": ["-m", "mlx_lm", "server", "--model", folder],
    }
    with served(commands["mlx_spec.serve"], 18080) as ours, served(commands["mlx_lm.server"], 18081) as theirs:
        urls = dict(zip(commands, (ours, theirs), strict=True))
        found = {name: list[dict[str, Any]]() for name in urls}
        messages = conversation(args.turns, args.tokens)
        for turn in range(args.turns):
            for name, url in urls.items():
                found[name].append(ask(url, messages[: 2 + 2 * turn]))
    if args.json:
        print(json.dumps({"model": args.model, "turns": found}))
    else:
        show(found)
    return 0


def conversation(turns: int, tokens: int) -> list[dict[str, str]]:
    """Return the messages: a system message of half of all tokens, then turns of equal length."""
    lines = tokens // 26

    def text(first: int, count: int) -> str:
        return "".join(LINE.format(number=number) for number in range(first, first + count))

    messages = [{"role": "system", "content": "You are an agent.\n" + text(0, lines // 2)}]
    each = (lines - lines // 2) // turns
    for turn in range(turns):
        content = f"Output of command {turn}:\n" + text(lines + turn * each, each)
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": "I see. Go on."}]
    return messages


def ask(url: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Return how a turn went: its prompt's tokens, those that were cached, and the time to the first token."""
    body = {"messages": messages, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started, first, usage = time.perf_counter(), 0.0, dict[str, Any]()
    with urllib.request.urlopen(request, timeout=WAIT) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            if not first and any(choice["delta"].get("content") for choice in chunk["choices"]):
                first = time.perf_counter() - started
            usage = chunk.get("usage") or usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {"prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached, "first_token_s": round(first, 3)}


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    """Print a table."""
    for name, turns in found.items():
        print(name)
        print(f"  {'turn':>4} {'prompt':>7} {'read again':>11} {'first token':>12}")
        for number, turn in enumerate(turns, 1):
            again = turn["prompt_tokens"] - turn["cached_tokens"]
            print(f"  {number:4d} {turn['prompt_tokens']:7d} {again:11d} {turn['first_token_s']:10.2f} s")
        prompts = sum(turn["prompt_tokens"] for turn in turns)
        again = prompts - sum(turn["cached_tokens"] for turn in turns)
        print(f"  of {prompts} prompt tokens, {again} were read: {again / prompts:.0%}")


@contextmanager
def served(words: Sequence[str], port: int) -> Iterator[str]:
    """Run a server, and give its address when it answers."""
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([sys.executable, *words, "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + WAIT
        while not answers(url):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{re.sub('^-m ', '', ' '.join(words))} does not answer at port {port}.")
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    """Whether a server is there and ready."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(main())
