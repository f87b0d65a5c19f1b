"""The flags of ``python -m mlx_spec.generate``: mlx_lm.generate's, and more; what does not exist is refused.

``python -m mlx_spec.chat`` shares most groups.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mlx_spec.decoding.grammar import Grammar
from mlx_spec.errors import RequestError

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
wrong usage, 130 after Ctrl-C, 143 after SIGTERM."""


class Refused(argparse.Action):
    """A flag of mlx_lm that is refused with its reason."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """End with status 2."""
        parser.error(f"{self.option_strings[0]} does not exist here: {self.const}.")


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line; flags that mlx_lm.generate has are named and behave as there."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_spec.generate",
        usage="%(prog)s [--model MODEL] [--prompt PROMPT] [more flags]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.register("type", None, unshielded)
    add_model_flags(parser)
    add_prompt_flags(parser)
    add_template_flags(parser)
    add_end_flags(parser)
    add_grammar_flags(parser)
    add_sampling_flags(parser)
    add_drafting_flags(parser)
    add_output_flags(parser)
    add_refused_flags(parser, REFUSED)
    return parser


def add_refused_flags(parser: argparse.ArgumentParser, reasons: Mapping[str, str]) -> None:
    """Add flags that are refused, each with its reason."""
    for flag, reason in reasons.items():
        flags = [flag, "-qa"] if flag == "--quantize-activations" else [flag]
        parser.add_argument(*flags, action=Refused, nargs="*", const=reason, help=argparse.SUPPRESS)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of what is loaded."""
    add = parser.add_argument_group("model and drafter").add_argument
    add("--model", default="demo", help="demo, a local folder, or a Hugging Face repo (default: demo)")
    add(
        "--drafter",
        default="auto",
        help="folder or repo of a DFlash or DFlash 2 drafter, an EAGLE head or an MTP head; mtp: the head that "
        "comes with the model; dflash2, eagle: the demo's; auto: what comes with the model, if anything. Beside "
        "each of them, and alone where there is none, text is copied that stood before. lookup: copies alone; "
        "none: plain decoding (default: auto)",
    )
    add(
        "--lookup-text",
        action="append",
        default=[],
        metavar="FILE",
        help="copy from this text too, besides prompt and answer; may be given more than once",
    )
    add("--adapter-path", help="folder of adapters that mlx_lm.lora trained for the model")
    add(
        "--trust-remote-code",
        action="store_true",
        help="let a tokenizer run Python code that comes with the model",
    )
    add("--max-kv-size", type=int, help="token positions to cache at most (default: the model's context)")


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the prompt."""
    add = parser.add_argument_group("prompt").add_argument
    add("--prompt", "-p", default="hello", help="the message; - reads it from standard input (default: hello)")
    add("--prefill-response", help="beginning of the answer, to be continued")
    add("--ignore-chat-template", action="store_true", help="use the prompt as it is")
    add(
        "--use-default-chat-template",
        action="store_true",
        help="use the default chat template of a tokenizer without its own; refused if there is none",
    )


def add_template_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of how messages become a prompt, and how that is read."""
    add = parser.add_argument_group("chat template").add_argument
    add("--system-prompt", help="system message of the chat template")
    add("--chat-template-config", help='further arguments of the chat template, as {"enable_thinking": false}')
    add("--prefill-step-size", type=int, default=512, help="prompt tokens read in one pass (default: 512)")


def add_end_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of where the answer ends."""
    add = parser.add_argument_group("end of the answer").add_argument
    add("--max-tokens", "-m", type=int, default=256, help="longest answer, -1 for no limit (default: 256)")
    add("--stop", nargs="+", default=(), help="strings that end the answer and are not printed")
    add("--extra-eos-token", nargs="+", default=(), help="further tokens that end the answer")


def add_grammar_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of what the answer must match."""
    group = parser.add_argument_group(
        "grammar", 'These need the package llguidance: pip install "mlx-spec[grammar]".'
    )
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument(
        "--json-schema", metavar="FILE_OR_JSON", help="the answer is JSON that this schema describes"
    )
    kinds.add_argument("--regex", help="the whole answer matches this regular expression")
    kinds.add_argument("--grammar", metavar="FILE", help="the answer is of the language of these Lark rules")
    group.add_argument(
        "--grammar-after",
        metavar="TOKEN",
        help="the answer is free up to this token, as </think>, and must match after it",
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of how tokens are drawn."""
    add = parser.add_argument_group(
        "sampling", "Biases and penalties come first, then top-p, min-p, XTC, top-k, and then the temperature."
    ).add_argument
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


def add_drafting_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of how many tokens are drafted, and how they are judged."""
    add = parser.add_argument_group("drafting").add_argument
    add(
        "--num-draft-tokens",
        default="auto",
        help="tokens to draft a round: auto chooses by costs measured on this machine (default), adaptive goes up "
        "and down with acceptance, a number is kept, 0 is plain decoding",
    )
    add("--max-draft-tokens", type=int, metavar="N", help="the most that auto and adaptive draft a round")
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


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of what is printed."""
    add = parser.add_argument_group("output").add_argument
    add("--check-rows", action="store_true", help="compute every verified row again alone, and report differences")
    add(
        "--record",
        type=Path,
        metavar="FILE",
        help="keep token ids, drafts and accepted counts, for bisect --replay; nothing is copied then",
    )
    add("--verbose", type=str_to_bool, default=True, help="F prints the answer only (default: T)")
    add(
        "--stats",
        choices=("text", "json"),
        default="text",
        help="json prints one JSON object on standard output, the answer in its text (default: text)",
    )


def shielded(argv: Sequence[str]) -> list[str]:
    """Let values such as ``--`` and ``-->`` be given, which argparse takes for ends and names of flags.

    The shield is a character that no argument of a program can hold.
    """
    return [f"\0{word}" if word.startswith("--") and not word[2:3].isalpha() else word for word in argv]


def unshielded(word: str) -> str:
    """Return a value as it was given."""
    return word.removeprefix("\0")


def str_to_bool(text: str) -> bool:
    """Read T or F, as mlx_lm does."""
    return text.lower() not in ("false", "f")


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


def grammar(args: argparse.Namespace) -> Grammar | None:
    """Read what the answer must match, if anything. Raises RequestError."""
    if args.json_schema is not None:
        is_json = args.json_schema.lstrip().startswith("{")
        schema = args.json_schema if is_json else text_of("--json-schema", args.json_schema)
        return Grammar.json_schema(schema, args.grammar_after)
    if args.regex is not None:
        return Grammar.regex(args.regex, args.grammar_after)
    if args.grammar is not None:
        return Grammar.lark(text_of("--grammar", args.grammar), args.grammar_after)
    if args.grammar_after is not None:
        raise RequestError("--grammar-after needs a grammar too: give --json-schema, --regex or --grammar.")
    return None


def text_of(flag: str, name: str) -> str:
    """Read a file that a flag names. Raises RequestError."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RequestError(f"{flag} takes a file of UTF-8 text; {name!r} cannot be read: {error}.") from None
