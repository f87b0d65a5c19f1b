"""The command ``python -m mlx_spec.generate``."""

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

from tqdm import tqdm

from mlx_spec.decoding.sampling import Sampling
from mlx_spec.diagnose.rows import RowCheck
from mlx_spec.errors import MlxSpecError, RequestError
from mlx_spec.generate.stream import GenerationResponse, make_sampling, stream_generate
from mlx_spec.loading.load import load

# A prompt that prefills in fewer chunks than this needs no progress bar.
BAR_FROM_CHUNKS = 2
# Flags of mlx_lm.generate that do not exist here, and why.
REFUSED = {
    "--draft-model": "a small language model is not a drafter here: use --drafter with a DFlash, MTP or EAGLE "
    "checkpoint",
    "--kv-bits": "the cache keeps the model's precision",
    "--kv-group-size": "the cache keeps the model's precision",
    "--quantized-kv-start": "the cache keeps the model's precision",
    "--prompt-cache-file": "a cache belongs to a running engine: fork a generation in Python instead",
    "--quantize-activations": "the kernels take activations that are not quantised",
    "--image": "prompts are text only",
}
DESCRIPTION = """Generate text with speculative decoding: a drafter proposes tokens, the model verifies them in one
pass, and the text is the one that plain decoding gives. Flags are those of mlx_lm.generate, and more."""
EXAMPLES = """examples:
  python -m mlx_spec.generate --prompt "Write a Python function that reverses a string."
  python -m mlx_spec.generate --model mlx-community/Qwen3-8B-4bit \\
      --drafter RedHatAI/Qwen3-8B-speculator.dflash2 --prompt "Write a haiku." --temp 0.7 --top-p 0.9
  cat question.txt | python -m mlx_spec.generate --prompt - --stats json
  python -m mlx_spec.generate --prompt "Why is the sky blue?" --num-draft-tokens 0     plain decoding

The answer goes to standard output, the summary to standard error. The exit status is 0, 1 after an error, 2 for
wrong usage, 130 after Ctrl-C."""


class Refused(argparse.Action):
    """A flag of mlx_lm.generate that is refused with its reason."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """End with status 2."""
        flag = self.option_strings[0]
        parser.error(f"{flag} does not exist here: {REFUSED[flag]}.")


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line; flags that mlx_lm.generate has are named and behave as there."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_spec.generate",
        usage="%(prog)s [--model MODEL] [--prompt PROMPT] [more flags]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    models = parser.add_argument_group("model and drafter")
    add = models.add_argument
    add("--model", default="demo", help="demo, a local folder, or a Hugging Face repo (default: demo)")
    add(
        "--drafter",
        default="auto",
        help="folder or repo of a DFlash or DFlash 2 drafter, an EAGLE head or an MTP head; mtp: the head that "
        "comes with the model; dflash2, eagle: the demo's; auto: what comes with the model, if anything; "
        "none: plain decoding (default: auto)",
    )
    add("--adapter-path", help="folder of adapters that mlx_lm.lora trained for the model")
    add(
        "--trust-remote-code",
        action="store_true",
        help="let a tokenizer run Python code that comes with the model",
    )
    add("--max-kv-size", type=int, help="token positions to cache at most (default: the model's context)")
    prompt = parser.add_argument_group("prompt")
    add = prompt.add_argument
    add("--prompt", "-p", default="hello", help="the message; - reads it from standard input (default: hello)")
    add("--system-prompt", help="system message of the chat template")
    add("--prefill-response", help="beginning of the answer, to be continued")
    add("--ignore-chat-template", action="store_true", help="use the prompt as it is")
    add(
        "--use-default-chat-template",
        action="store_true",
        help="use the default chat template of a tokenizer without its own; refused if there is none",
    )
    add("--chat-template-config", help='further arguments of the chat template, as {"enable_thinking": false}')
    add("--prefill-step-size", type=int, default=512, help="prompt tokens read in one pass (default: 512)")
    end = parser.add_argument_group("end of the answer")
    add = end.add_argument
    add("--max-tokens", "-m", type=int, default=256, help="longest answer, -1 for no limit (default: 256)")
    add("--stop", nargs="+", default=(), help="strings that end the answer and are not printed")
    add("--extra-eos-token", nargs="+", default=(), help="further tokens that end the answer")
    sampling = parser.add_argument_group(
        "sampling", "Biases and penalties come first, then top-p, min-p, XTC, top-k, and then the temperature."
    )
    add = sampling.add_argument
    add("--temp", type=float, default=0.0, help="temperature; 0 takes the most likely token (default)")
    add(
        "--top-p",
        type=float,
        default=0.0,
        help="nucleus sampling: smallest set of tokens with this total probability (default: all tokens)",
    )
    add("--min-p", type=float, default=0.0, help="drop tokens less likely than this times the most likely one")
    add(
        "--min-tokens-to-keep",
        type=int,
        default=1,
        help="most likely tokens that --min-p never drops (default: 1)",
    )
    add("--top-k", type=int, default=0, help="number of most likely tokens to keep (default: all)")
    add(
        "--xtc-probability",
        type=float,
        default=0.0,
        help="probability, at each token, of XTC: of the tokens above --xtc-threshold only the least likely "
        "one is kept; newline and end tokens are never dropped (default: 0)",
    )
    add("--xtc-threshold", type=float, default=0.1, help="see --xtc-probability, up to 0.5 (default: 0.1)")
    add("--seed", type=int, default=0, help="same seed, same text, with and without a drafter (default: 0)")
    add("--repetition-penalty", type=float, help="divide the logits of the last 20 tokens by this")
    add("--presence-penalty", type=float, help="subtract this from the logits of the last 20 tokens")
    add("--frequency-penalty", type=float, help="subtract this for each use of a token in the last 20")
    add("--logit-bias", help='additions to the logits of token ids, as {"198": -5}')
    drafting = parser.add_argument_group("drafting")
    add = drafting.add_argument
    add(
        "--num-draft-tokens",
        default="auto",
        help="tokens to draft a round: auto chooses by costs measured on this machine (default), adaptive goes up "
        "and down with acceptance, a number is kept, 0 is plain decoding",
    )
    add("--draft-vocab", type=int, metavar="N", help="draft from the N most frequent tokens only (MTP, EAGLE)")
    add(
        "--draft-bits",
        type=int,
        metavar="N",
        help="bits per weight of an MTP or EAGLE head, 16: not quantised (default: EAGLE 4, MTP as its model)",
    )
    add(
        "--accept",
        choices=("coupled", "rejection"),
        default="coupled",
        help="with --temp: coupled gives plain decoding's text for the seed (default); "
        "rejection accepts more and gives other draws from the same distribution",
    )
    add(
        "--exact",
        choices=("on", "off"),
        default="on",
        help="off takes MLX's own operations where these are faster: "
        "the answer may then differ from plain decoding's at near ties (default: on)",
    )
    add("--check-rows", action="store_true", help="compute every verified row again alone, and report differences")
    output = parser.add_argument_group("output")
    add = output.add_argument
    add("--verbose", type=str_to_bool, default=True, help="F prints the answer only (default: T)")
    add(
        "--stats",
        choices=("text", "json"),
        default="text",
        help="json prints one JSON object on standard output, the answer in its text (default: text)",
    )
    for flag in REFUSED:
        flags = [flag, "-qa"] if flag == "--quantize-activations" else [flag]
        parser.add_argument(*flags, action=Refused, nargs="*", help=argparse.SUPPRESS)
    return parser


def str_to_bool(text: str) -> bool:
    """Read T or F, as mlx_lm does."""
    return text.lower() not in ("false", "f")


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


def draft_tokens(text: str) -> int | Literal["adaptive"] | None:
    """Read --num-draft-tokens. Raises RequestError."""
    if text == "auto":
        return None
    if text == "adaptive":
        return "adaptive"
    if not text.isdecimal():
        raise RequestError(f"--num-draft-tokens takes auto, adaptive or a number from 0 on, not {text!r}.")
    return int(text)


def logit_bias(text: str) -> dict[int, float]:
    """Read --logit-bias. Raises RequestError."""
    try:
        return {int(token): float(bias) for token, bias in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        raise RequestError(f"--logit-bias takes a JSON object of token ids to numbers, not {text!r}.") from None


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
