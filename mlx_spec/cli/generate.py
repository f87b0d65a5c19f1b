"""The command ``python -m mlx_spec.generate``."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from tqdm import tqdm

from mlx_spec.decoding.sampling import Sampling
from mlx_spec.diagnose.rows import RowCheck
from mlx_spec.errors import MlxSpecError, RequestError
from mlx_spec.generate.stream import GenerationResponse, make_sampling, stream_generate
from mlx_spec.loading.load import load

# A prompt that prefills in fewer chunks than this needs no progress bar.
BAR_FROM_CHUNKS = 2


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line; flags that mlx_lm.generate has are named and behave as there."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_spec.generate",
        description="Generate text with speculative decoding. The text is the one that plain decoding gives.",
        epilog='Example: python -m mlx_spec.generate --model demo --prompt "Why is the sky blue?"',
    )
    add = parser.add_argument
    add("--model", default="demo", help="demo, a local folder, or a Hugging Face repo (default: demo)")
    add(
        "--drafter",
        default="auto",
        help="folder or repo of a DFlash or DFlash 2 drafter, an EAGLE head or an MTP head; mtp: the head that "
        "comes with the model; dflash2, eagle: the demo's; auto: what comes with it, if anything (default); none",
    )
    add("--prompt", "-p", default="hello", help="the message; - reads it from standard input")
    add("--system-prompt", help="system message of the chat template")
    add("--prefill-response", help="beginning of the answer, to be continued")
    add("--ignore-chat-template", action="store_true", help="use the prompt as it is")
    add("--chat-template-config", help="JSON object of further arguments of the chat template")
    add("--max-tokens", "-m", type=int, default=256, help="longest answer; -1 for no limit (default: 256)")
    add("--stop", nargs="+", default=(), help="strings that end the answer")
    add("--extra-eos-token", nargs="+", default=(), help="further tokens that end the answer")
    add("--max-kv-size", type=int, help="token positions to cache at most (default: the model's context)")
    add("--prefill-step-size", type=int, default=512, help="prompt tokens per prefill pass (default: 512)")
    sampling = parser.add_argument_group("sampling")
    add = sampling.add_argument
    add("--temp", type=float, default=0.0, help="temperature; 0 takes the most likely token (default)")
    add("--top-p", type=float, default=0.0, help="keep the most likely tokens that hold this probability")
    add("--min-p", type=float, default=0.0, help="drop tokens less likely than this times the most likely")
    add("--top-k", type=int, default=0, help="keep this many most likely tokens")
    add("--seed", type=int, default=0, help="same seed, same text, with and without a drafter (default: 0)")
    add("--repetition-penalty", type=float, help="divide logits of recent tokens by this")
    add("--presence-penalty", type=float, help="subtract this from logits of recent tokens")
    add("--frequency-penalty", type=float, help="subtract this for each recent use of a token")
    add("--logit-bias", help='JSON object of token ids to additions to their logits, as {"198": -5}')
    drafting = parser.add_argument_group("drafting")
    add = drafting.add_argument
    add(
        "--draft-tokens",
        default="auto",
        help="tokens to draft a round; auto chooses by measured costs (default), adaptive goes up and down with "
        "acceptance, 0 is plain decoding",
    )
    add("--draft-vocab", type=int, metavar="N", help="draft with a head from the N most frequent tokens only")
    add(
        "--draft-bits",
        type=int,
        metavar="N",
        help="bits a weight to quantise an MTP or EAGLE head with; 16: none (default: EAGLE 4, MTP as its model)",
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
        help="off takes MLX's own operations, where these are faster: "
        "the answer may then differ from plain decoding's at near ties (default: on)",
    )
    add("--check-rows", action="store_true", help="recompute every verify row alone and report differences")
    output = parser.add_argument_group("output")
    add = output.add_argument
    add("--verbose", type=str_to_bool, default=True, help="F prints the answer only (default: T)")
    add("--stats", choices=("text", "json"), default="text", help="form of the summary (default: text)")
    return parser


def str_to_bool(text: str) -> bool:
    """Read T or F, as mlx_lm does."""
    return text.lower() not in ("false", "f")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, 1 after an error, 130 after Ctrl-C."""
    args = setup_arg_parser().parse_args(argv)
    try:
        return run(args)
    except MlxSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def run(args: argparse.Namespace) -> int:
    """Load, generate, and print the summary. Raises MlxSpecError."""
    options = generation_options(args)
    text = sys.stdin.read() if args.prompt == "-" else args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    if not text.strip():
        raise RequestError("The prompt is empty: give --prompt TEXT, or --prompt - and text on standard input.")
    drafter = None if args.drafter == "none" or options["num_draft_tokens"] == 0 else args.drafter
    engine, tokenizer = load(
        args.model,
        drafter,
        draft_vocab=args.draft_vocab if drafter else None,
        draft_bits=args.draft_bits if drafter else None,
        exact=args.exact == "on",
        max_cached_tokens=args.max_kv_size,
        progress=sys.stderr.isatty(),
    )
    for token in args.extra_eos_token:
        add_eos_token(tokenizer, token)
    check = RowCheck(engine.target) if args.check_rows else None
    with PrefillBar(args.prefill_step_size) as bar:
        responses = stream_generate(
            engine,
            tokenizer,
            chat_prompt(tokenizer, text, args),
            prompt_progress_callback=bar.update,
            on_verified=check.check if check else None,
            **options,
        )
        last, stopped = print_responses(responses)
    if last is not None and (args.verbose or args.stats == "json"):
        print_summary(last, args.stats)
    elif args.exact == "on" and not engine.exactness.holds:
        print(f"not exact: {engine.exactness.reason}", file=sys.stderr)
    if check is not None:
        print(check, file=sys.stderr)
    return 130 if stopped else 0


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of stream_generate that the command line sets. Raises RequestError."""
    names = ("max_tokens", "stop", "prefill_step_size", "temp", "top_p", "min_p", "top_k", "seed", "accept")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    options = {name: getattr(args, name) for name in (*names, *penalties)}
    options["num_draft_tokens"] = draft_tokens(args.draft_tokens)
    if args.logit_bias is not None:
        options["logit_bias"] = logit_bias(args.logit_bias)
    # Checked here, before a model is loaded.
    make_sampling({name: options[name] for name in options.keys() & Sampling.__dataclass_fields__.keys()})
    return options


def draft_tokens(text: str) -> int | Literal["adaptive"] | None:
    """Read --draft-tokens. Raises RequestError."""
    if text == "auto":
        return None
    if text == "adaptive":
        return "adaptive"
    if not text.isdecimal():
        raise RequestError(f"--draft-tokens takes auto, adaptive or a number from 0 on, not {text!r}.")
    return int(text)


def logit_bias(text: str) -> dict[int, float]:
    """Read --logit-bias. Raises RequestError."""
    try:
        return {int(token): float(bias) for token, bias in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        raise RequestError(f"--logit-bias takes a JSON object of token ids to numbers, not {text!r}.") from None


def add_eos_token(tokenizer: Any, token: str) -> None:
    """Let a token, given by text or id, end the answer. Raises RequestError."""
    # Asked here, because a tokenizer with an unknown-token takes every text for that one.
    known = int(token) < len(tokenizer) if token.isdecimal() else token in tokenizer.get_vocab()
    if not known:
        raise RequestError(f"--extra-eos-token {token!r} is no token of this model.")
    tokenizer.add_eos_token(token)


def chat_prompt(tokenizer: Any, text: str, args: argparse.Namespace) -> str | list[int]:
    """Put the message into the model's chat template, where it has one. Raises RequestError."""
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return text
    messages = [{"role": "user", "content": text}]
    if args.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    continued = args.prefill_response is not None
    if continued:
        messages.append({"role": "assistant", "content": args.prefill_response})
    try:
        config = json.loads(args.chat_template_config or "{}")
        assert isinstance(config, dict)
    except (ValueError, AssertionError):
        raise RequestError(
            f"--chat-template-config takes a JSON object, not {args.chat_template_config!r}."
        ) from None
    ending = {"continue_final_message": continued, "add_generation_prompt": not continued}
    try:
        rendered = tokenizer.apply_chat_template(messages, **{**config, **ending, "tokenize": False})
    except Exception as error:  # templates raise what they like
        raise RequestError(f"The model's chat template refuses the messages: {error}") from error
    return list(tokenizer.encode(rendered, add_special_tokens=False))


class PrefillBar:
    """A progress bar on standard error while a long prompt is read; it siblings nothing behind."""

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
            self._bar = tqdm(total=total, desc="reading the prompt", unit="token", leave=False)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            if done == total:
                self.close()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def print_responses(responses: Any) -> tuple[GenerationResponse | None, bool]:
    """Print text as it comes; returns the last response, and whether Ctrl-C stopped it."""
    last = None
    try:
        for last in responses:
            print(last.text, end="", flush=True)
    except KeyboardInterrupt:
        print("\nstopped", end="", file=sys.stderr)
        return last, True
    finally:
        responses.close()
        if last is not None:
            print(flush=True)
    return last, False


def print_summary(last: GenerationResponse, form: str) -> None:
    """Print what the generation did: for people on standard error, or as one JSON line on standard output."""
    if form == "json":
        summary = {**last.statistics.as_dict(), "finish_reason": last.finish_reason}
        print(json.dumps({**summary, "peak_memory": round(last.peak_memory, 3)}))
        return
    print(f"{'=' * 10}\n{last.statistics}\nPeak memory: {last.peak_memory:.3f} GB", file=sys.stderr)


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
