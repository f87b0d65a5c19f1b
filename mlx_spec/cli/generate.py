"""The command ``python -m mlx_spec.generate``."""

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from mlx_spec.cli.generate_flags import draft_tokens, logit_bias, setup_arg_parser
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.diagnose.rows import RowCheck
from mlx_spec.errors import MlxSpecError, RequestError
from mlx_spec.generate.stream import GenerationResponse, make_sampling, stream_generate
from mlx_spec.loading.load import load

# A prompt that prefills in fewer chunks than this needs no progress bar.
BAR_FROM_CHUNKS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, 1 after an error, 130 after Ctrl-C."""
    args = setup_arg_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not have every character of an answer
    try:
        return run(args)
    except MlxSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except OSError as error:
        # What is still buffered goes nowhere, without another complaint at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0
        print(f"error: The answer cannot be written: {error}", file=sys.stderr)
        return 1


def run(args: argparse.Namespace) -> int:
    """Load, generate, and print the summary. Raises MlxSpecError."""
    options = generation_options(args)
    template_config = read_template_config(args)
    text = standard_input() if args.prompt == "-" else unescaped(args.prompt)
    if not text.strip():
        raise RequestError("The prompt is empty: give --prompt TEXT, or --prompt - and text on standard input.")
    is_plain = options["num_draft_tokens"] == 0
    engine, tokenizer = load(
        args.model,
        None if is_plain or args.drafter == "none" else args.drafter,
        draft_vocab=None if is_plain else args.draft_vocab,
        draft_bits=None if is_plain else args.draft_bits,
        exact=args.exact == "on",
        max_cached_tokens=args.max_kv_size,
        adapter_path=args.adapter_path,
        trust_remote_code=args.trust_remote_code,
        progress=sys.stderr.isatty(),
    )
    for token in args.extra_eos_token:
        add_eos_token(tokenizer, token)
    if args.xtc_probability:
        special = {*tokenizer.encode("\n"), *tokenizer.eos_token_ids}
        options["xtc_special_tokens"] = tuple(sorted(t for t in special if t < engine.target.vocab_size))
    check = RowCheck(engine.target) if args.check_rows else None
    with PrefillBar(args.prefill_step_size) as bar:
        responses = stream_generate(
            engine,
            tokenizer,
            chat_prompt(tokenizer, text, args, template_config),
            prompt_progress_callback=bar.update,
            on_verified=check.check if check else None,
            **options,
        )
        answer, last, is_stopped = read_responses(responses, is_printed=args.stats == "text")
    if is_stopped:
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
    return 130 if is_stopped else 0


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of stream_generate that the command line sets. Raises RequestError."""
    names = ("max_tokens", "prefill_step_size", "temp", "top_p", "min_p", "min_tokens_to_keep", "top_k")
    more = ("xtc_probability", "xtc_threshold", "seed", "accept")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    options = {name: getattr(args, name) for name in (*names, *more, *penalties)}
    options["stop"] = [unescaped(text) for text in args.stop]
    options["num_draft_tokens"] = draft_tokens(args.num_draft_tokens)
    if args.logit_bias is not None:
        options["logit_bias"] = logit_bias(args.logit_bias)
    # Checked here, before a model is loaded.
    make_sampling({name: options[name] for name in options.keys() & Sampling.__dataclass_fields__.keys()})
    return options


def standard_input() -> str:
    """Read the prompt. Raises RequestError for bytes that are no text."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"Standard input is no text in {sys.stdin.encoding}: {error}") from error


def unescaped(text: str) -> str:
    r"""Return a text with its ``\n`` and ``\t`` as newlines and tabs, as mlx_lm does."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def read_template_config(args: argparse.Namespace) -> dict[str, Any]:
    """Read --chat-template-config. Raises RequestError, and for flags that only a chat template would take."""
    used = [name for name in ("system_prompt", "prefill_response", "chat_template_config") if getattr(args, name)]
    if used and args.ignore_chat_template:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in used)
        raise RequestError(f"{flags} would have no effect with --ignore-chat-template.")
    try:
        config = json.loads(args.chat_template_config or "{}")
        assert isinstance(config, dict)
    except (ValueError, AssertionError):
        raise RequestError(
            f"--chat-template-config takes a JSON object, not {args.chat_template_config!r}."
        ) from None
    return config


def add_eos_token(tokenizer: Any, token: str) -> None:
    """Let a token, given by text or id, end the answer. Raises RequestError."""
    # Asked here, because a tokenizer with an unknown-token takes every text for that one.
    known = int(token) < len(tokenizer) if token.isdecimal() else token in tokenizer.get_vocab()
    if not known:
        raise RequestError(f"--extra-eos-token {token!r} is no token of this model.")
    tokenizer.add_eos_token(token)


def chat_prompt(
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
    try:
        rendered = tokenizer.apply_chat_template(messages, **{**template_config, **ending, "tokenize": False})
    except Exception as error:  # templates raise what they like
        raise RequestError(f"The model's chat template refuses the messages: {error}") from error
    return list(tokenizer.encode(rendered, add_special_tokens=False))


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


def read_responses(responses: Any, is_printed: bool) -> tuple[str, GenerationResponse | None, bool]:
    """Read the responses to their end, and print their text as it comes or not.

    Returns the text, the last response, and whether Ctrl-C stopped it. The generation is closed then, so that its
    statistics are complete.
    """
    texts, last, is_stopped = list[str](), None, False
    try:
        for last in responses:
            texts.append(last.text)
            if is_printed:
                print(last.text, end="", flush=True)
    except KeyboardInterrupt:
        is_stopped = True
    finally:
        responses.close()
        if is_printed and last is not None:
            print(flush=True)
    return "".join(texts), last, is_stopped


def print_json(answer: str, last: GenerationResponse) -> None:
    """Print what the generation did as one JSON object on standard output."""
    summary = {"text": answer, **last.statistics.as_dict(), "finish_reason": last.finish_reason}
    print(json.dumps({**summary, "peak_memory": round(last.peak_memory, 3)}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
