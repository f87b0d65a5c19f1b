"""The command ``python -m mlx_spec.generate``."""

import argparse
import io
import json
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

from tqdm import tqdm

from mlx_spec.cli.command import note, run_command, status_of
from mlx_spec.cli.generate_flags import setup_arg_parser, shielded
from mlx_spec.cli.generate_options import (
    end_tokens,
    generation_options,
    load_options,
    read_template_config,
    require_utf8,
    unescaped,
    without_effect,
)
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.diagnose.record import Recorder, write_run
from mlx_spec.diagnose.rows import RowCheck
from mlx_spec.errors import RequestError
from mlx_spec.generate.options import chat_prompt, encode, make_sampling
from mlx_spec.generate.stream import GenerationResponse, stream_generate
from mlx_spec.loading.load import load

# A prompt that prefills in fewer chunks than this needs no progress bar.
BAR_FROM_CHUNKS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, 1 after an error, 130 after Ctrl-C, 143 after SIGTERM."""
    args = setup_arg_parser().parse_args(shielded(sys.argv[1:] if argv is None else argv))
    return run_command(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Load, generate, and print the summary. Raises MlxSpecError."""
    require_utf8(args)
    options = generation_options(args)
    loading = load_options(args)
    check_template_flags(args)
    template_config = read_template_config(args)
    for sentence in without_effect(args, setup_arg_parser().parse_args([])):
        note(sentence)
    text = standard_input() if args.prompt == "-" else unescaped(args.prompt)
    if not text.strip():
        raise RequestError("The prompt is empty: give --prompt TEXT, or --prompt - and text on standard input.")
    engine, tokenizer = load(args.model, **loading)
    if args.record:
        # A replay compares all drafts with the drafter's own.
        engine.lookup = None
    options |= end_tokens(tokenizer, args, engine.target.vocab_size)
    check = RowCheck(engine.target) if args.check_rows else None
    prompt = encode(tokenizer, message_prompt(tokenizer, text, args, template_config))
    recorder = recorder_of(prompt, options) if args.record else None
    with PrefillBar(args.prefill_step_size) as bar:
        responses = stream_generate(
            engine,
            tokenizer,
            prompt,
            prompt_progress_callback=bar.update,
            on_verified=watching(check, recorder),
            **options,
        )
        if recorder is not None:
            responses = recorded(responses, recorder)
        # As in mlx_lm, an answer does not begin with the space that parts it from the template; one that matches
        # a grammar is not changed.
        is_answer = is_templated(tokenizer, args) and options["grammar"] is None
        answer, last, stopped = read_responses(responses, is_answer, is_printed=args.stats == "text")
    if recorder is not None:
        write_run(recorder.run(), args.record)
    if stopped:
        print("stopped", file=sys.stderr)
    if last is not None:
        if args.stats == "json":
            print_json(answer, last)
        elif args.verbose:
            print(f"\n{'=' * 10}\n{last.statistics}\nPeak memory: {last.peak_memory:.3f} GB", file=sys.stderr)
        elif args.exact == "on" and not engine.exactness.holds:
            print(f"not exact: {engine.exactness.reason}", file=sys.stderr)
    if check is not None:
        print(check, file=sys.stderr)
    return stopped


def recorder_of(prompt: Sequence[int], options: dict[str, Any]) -> Recorder:
    """Return what records a run with these options of stream_generate."""
    names = options.keys() & Sampling.__dataclass_fields__.keys()
    return Recorder(prompt, make_sampling({name: options[name] for name in names}), options["prefill_step_size"])


def watching(check: RowCheck | None, recorder: Recorder | None) -> Callable[..., None] | None:
    """Return what gets the verified rows, None where nobody needs them."""
    watchers = ([check.check] if check else []) + ([recorder.verified] if recorder else [])

    def show(*rows: Any) -> None:
        for watch in watchers:
            watch(*rows)

    return show if watchers else None


def recorded(responses: Any, recorder: Recorder) -> Generator[GenerationResponse, None, None]:
    """Yield responses, and record their tokens."""
    try:
        for response in responses:
            recorder.tokens.append(response.token)
            yield response
    finally:
        responses.close()


def check_template_flags(args: argparse.Namespace) -> None:
    """Raise RequestError for flags that only a chat template would take, where none is used."""
    names = ("system_prompt", "prefill_response", "chat_template_config", "use_default_chat_template")
    used = [name for name in names if getattr(args, name)]
    if used and args.ignore_chat_template:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in used)
        raise RequestError(f"{flags} would have no effect with --ignore-chat-template.")


def is_templated(tokenizer: Any, args: argparse.Namespace) -> bool:
    """Whether the text is an answer of its own: not a raw continuation, nor of an answer that was begun."""
    has_template = tokenizer.has_chat_template or args.use_default_chat_template
    return has_template and not args.ignore_chat_template and args.prefill_response is None


def standard_input() -> str:
    """Read the prompt, in UTF-8 whatever the terminal's encoding is. Raises RequestError for what is no text."""
    if not isinstance(sys.stdin, io.TextIOWrapper):
        return sys.stdin.read()
    try:
        return sys.stdin.buffer.read().decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"Standard input must be UTF-8 text; byte {error.start} of it is not.") from None


def message_prompt(
    tokenizer: Any, text: str, args: argparse.Namespace, template_config: dict[str, Any]
) -> str | list[int]:
    """Put the message into the model's chat template, where it has one. Raises RequestError."""
    if args.ignore_chat_template:
        return text
    if not tokenizer.has_chat_template:
        default = default_template(tokenizer, args)
        if default is None:
            return text
        template_config = {**template_config, "chat_template": default}
    messages = [{"role": "user", "content": text}]
    if args.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    continued = args.prefill_response is not None
    if continued:
        messages.append({"role": "assistant", "content": args.prefill_response})
    ending = {"continue_final_message": continued, "add_generation_prompt": not continued}
    return chat_prompt(tokenizer, messages, **{**template_config, **ending})


def default_template(tokenizer: Any, args: argparse.Namespace) -> str | None:
    """Return the default chat template for a tokenizer without its own, where that is asked for.

    Raises RequestError for flags that need a template where there is none.
    """
    default = getattr(tokenizer, "default_chat_template", None)
    if args.use_default_chat_template and default is not None:
        return str(default)
    flags = ("use_default_chat_template", "system_prompt", "prefill_response", "chat_template_config")
    if wanted := [name for name in flags if getattr(args, name)]:
        flag = f"--{wanted[0].replace('_', '-')}"
        raise RequestError(f"{flag} needs a chat template: this model has none, and its tokenizer no default one.")
    return None


class PrefillBar:
    """A progress bar on a terminal's standard error while a long prompt is read; it goes away afterwards."""

    def __init__(self, step_size: int) -> None:
        self._step_size = step_size
        self._bar: Any = None

    def __enter__(self) -> "PrefillBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` prompt tokens are read."""
        if self._bar is None and done == 0 and total > BAR_FROM_CHUNKS * self._step_size:
            self._bar = tqdm(total=total, desc="reading the prompt", unit="token", leave=False, disable=None)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            if done == total:
                self.close()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def read_responses(
    responses: Any, is_answer: bool, is_printed: bool
) -> tuple[str, GenerationResponse | None, int]:
    """Read the responses to their end, and print their text as it comes or not.

    is_answer: a space at the very beginning is left out.
    Returns the text, the last response, and the exit status where Ctrl-C or SIGTERM stopped it, else 0. The
    generation is closed then, so that its statistics are complete.
    """
    texts, last, status = list[str](), None, 0
    try:
        for last in responses:
            texts.append(last.text.removeprefix(" ") if is_answer and not any(texts) else last.text)
            if is_printed:
                print(texts[-1], end="", flush=True)
    except KeyboardInterrupt as stopped:
        status = status_of(stopped)
    finally:
        responses.close()
        if is_printed and last is not None:
            print(flush=True)
    return "".join(texts), last, status


def print_json(answer: str, last: GenerationResponse) -> None:
    """Print what the generation did as one JSON object on standard output."""
    summary = {"text": answer, **last.statistics.as_dict(), "finish_reason": last.finish_reason}
    print(json.dumps({**summary, "peak_memory": round(last.peak_memory, 3)}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
