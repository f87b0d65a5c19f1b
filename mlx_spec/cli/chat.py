"""The command ``python -m mlx_spec.chat``: a conversation at the terminal, or with a program through pipes."""

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from mlx_spec.cli.command import TERMINATED, note, run_command
from mlx_spec.cli.generate import PrefillBar, print_json, read_responses
from mlx_spec.cli.generate_flags import (
    REFUSED,
    add_drafting_flags,
    add_end_flags,
    add_grammar_flags,
    add_model_flags,
    add_refused_flags,
    add_sampling_flags,
    add_template_flags,
    shielded,
    unshielded,
)
from mlx_spec.cli.generate_options import (
    end_tokens,
    generation_options,
    load_options,
    read_template_config,
    require_utf8,
    without_effect,
)
from mlx_spec.engine import Statistics
from mlx_spec.errors import RequestError
from mlx_spec.generate.conversation import Conversation
from mlx_spec.generate.options import require_text
from mlx_spec.loading.load import load

DESCRIPTION = """Chat with a model, with speculative decoding: the replies are the ones that plain decoding gives.
Flags are those of mlx_lm.chat, and more."""
COMMANDS = "q: end   r: begin a new conversation   h: these commands   Ctrl-C: stop a reply"
EXAMPLES = f"""examples:
  python -m mlx_spec.chat
  python -m mlx_spec.chat --model mlx-community/Qwen3-8B-4bit \\
      --drafter RedHatAI/Qwen3-8B-speculator.dflash2 --temp 0.7 --top-p 0.9 --stats
  cat questions.txt | python -m mlx_spec.chat --stats json     one message a line

At the prompt:  {COMMANDS}

Replies go to standard output, everything else to standard error. The exit status is 0 at the end of the messages,
1 after an error, 2 for wrong usage, 130 after Ctrl-C at the prompt or twice, 143 after SIGTERM."""
PROMPT = "> "


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line; flags that mlx_lm.chat has are named and behave as there."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_spec.chat",
        usage="%(prog)s [--model MODEL] [more flags]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.register("type", None, unshielded)
    add_model_flags(parser)
    add_template_flags(parser)
    add_end_flags(parser)
    add_grammar_flags(parser)
    add_sampling_flags(parser)
    add_drafting_flags(parser)
    parser.add_argument_group("output").add_argument(
        "--stats",
        nargs="?",
        choices=("text", "json"),
        const="text",
        help="a line on standard error after each reply; json prints each reply as one JSON object a line instead",
    )
    reasons = {"--pipeline": "a model runs on one machine", "--draft-model": REFUSED["--draft-model"]}
    add_refused_flags(parser, reasons)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, 1 after an error, 130 after Ctrl-C, 143 after SIGTERM."""
    args = setup_arg_parser().parse_args(shielded(sys.argv[1:] if argv is None else argv))
    return run_command(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Load, and reply to messages until there are no more. Raises MlxSpecError."""
    require_utf8(args)
    options, loading, template = generation_options(args), load_options(args), read_template_config(args)
    for sentence in without_effect(args, setup_arg_parser().parse_args([])):
        note(sentence)
    engine, tokenizer = load(args.model, **loading)
    options |= end_tokens(tokenizer, args, engine.target.vocab_size)
    is_typed = sys.stdin.isatty()
    with Conversation(engine, tokenizer, **template) as conversation:
        chat = Chat(conversation, options, args.system_prompt, args.stats)
        return reply_to_all(chat, typed_messages() if is_typed else piped_messages(), is_typed)


class Chat:
    """A conversation with its messages, whose replies are printed."""

    def __init__(
        self, conversation: Conversation, options: dict[str, Any], system: str | None, stats: str | None
    ) -> None:
        """Begin with nothing but the system message.

        options: of every reply, see stream_generate.
        stats: what is printed of each, "text", "json" or None.
        """
        self._conversation = conversation
        self._options = options
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._stats = stats
        self.messages = list(self._system)

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self._conversation.close()
        self.messages = list(self._system)

    def reply(self, message: str) -> int:
        """Reply to a message, and return the exit status of what stopped the reply, or 0.

        A message without any reply, because it was stopped or cannot be served, leaves no trace.
        Raises MlxSpecError.
        """
        asked = [*self.messages, {"role": "user", "content": message}]
        with PrefillBar(self._options["prefill_step_size"]) as bar:
            responses = self._conversation.stream(asked, prompt_progress_callback=bar.update, **self._options)
            # A reply that matches a grammar is not changed.
            is_answer = self._options["grammar"] is None
            text, last, stopped = read_responses(responses, is_answer, is_printed=self._stats != "json")
        if last is None:
            return stopped
        self.messages = [*asked, {"role": "assistant", "content": text}]
        if self._stats == "json":
            print_json(text, last)
        elif self._stats == "text":
            print(summary(last.statistics), file=sys.stderr)
        return stopped


def reply_to_all(chat: Chat, messages: Iterator[str], is_typed: bool) -> int:
    """Reply to each message or do what it commands, and return the exit status.

    is_typed: someone sees what goes wrong and types on; otherwise an error or a second Ctrl-C ends the command.
    Raises MlxSpecError.
    """
    was_stopped = False
    for message in messages:
        if message == "q":
            break
        if message == "r":
            chat.reset()
            print("a new conversation", file=sys.stderr)
        elif message == "h":
            print(COMMANDS, file=sys.stderr)
        elif message:
            status = replied(chat, message, is_typed)
            if status == TERMINATED or (status and was_stopped and not is_typed):
                return status
            was_stopped = was_stopped or status != 0
    return 0


def replied(chat: Chat, message: str, is_typed: bool) -> int:
    """Reply to a message, and say what goes wrong where it was typed. Raises MlxSpecError where it was not."""
    try:
        status = chat.reply(message)
    except RequestError as error:
        if not is_typed:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 0
    if status:
        print("stopped", file=sys.stderr)
    return status


def typed_messages() -> Iterator[str]:
    """Ask for messages on the terminal, with the line editing and the history of readline where that is there."""
    with suppress(ImportError):
        import readline  # noqa: F401
    print(COMMANDS, file=sys.stderr)
    is_seen = sys.stdout.isatty()
    while True:
        if not is_seen:
            print(PROMPT, end="", file=sys.stderr, flush=True)
        try:
            message = input(PROMPT if is_seen else "").strip()
            require_text("A message", message)
        except EOFError:
            print(file=sys.stderr)
            return
        except RequestError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        yield message


def piped_messages() -> Iterator[str]:
    """Read messages from standard input, one a line, in UTF-8 whatever the terminal's encoding is.

    Raises RequestError for a line that is no text.
    """
    if not isinstance(sys.stdin, io.TextIOWrapper):
        yield from (line.strip() for line in sys.stdin)
        return
    for number, line in enumerate(iter(sys.stdin.buffer.readline, b""), 1):
        try:
            message = line.decode().strip()
        except UnicodeDecodeError:
            raise RequestError(f"Standard input must be UTF-8 text; line {number} of it is not.") from None
        yield message


def summary(statistics: Statistics) -> str:
    """Return what a reply took, in one line."""
    parts = [f"{statistics.tokens} tokens", f"{statistics.generation_tps:.1f} tokens/s"]
    parts.append(f"{statistics.accepted_length:.2f} tokens a round")
    if statistics.drafted:
        parts.append("acceptance " + " ".join(f"{share:.2f}" for share in statistics.acceptance))
    parts.append(f"prompt {statistics.prompt_tokens} tokens, {statistics.cached_tokens} of them cached")
    return f"[{', '.join(parts)}]"


if __name__ == "__main__":
    sys.exit(main())
