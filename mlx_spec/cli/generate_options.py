"""From the flags of generate and chat to what ``load`` and ``stream_generate`` take."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from mlx_spec.cli.generate_flags import draft_tokens, grammar, logit_bias, text_of
from mlx_spec.decoding.sampling import Sampling
from mlx_spec.drafters.kind import DrafterOptions
from mlx_spec.engine import Request
from mlx_spec.errors import RequestError
from mlx_spec.generate.options import make_sampling, require_text


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of stream_generate that the command line sets. Raises RequestError."""
    names = ("max_tokens", "prefill_step_size", "temp", "top_p", "min_p", "min_tokens_to_keep", "top_k")
    more = ("xtc_probability", "xtc_threshold", "seed", "accept")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    options = {name: getattr(args, name) for name in (*names, *more, *penalties)}
    options["stop"] = [unescaped(text) for text in args.stop]
    options["num_draft_tokens"] = draft_tokens(args.num_draft_tokens)
    options["max_draft_tokens"] = args.max_draft_tokens
    if args.logit_bias is not None:
        options["logit_bias"] = logit_bias(args.logit_bias)
    options["grammar"] = grammar(args)
    # Checked here, before a model is loaded.
    make_sampling({name: options[name] for name in options.keys() & Sampling.__dataclass_fields__.keys()})
    limits = ("max_tokens", "prefill_step_size", "num_draft_tokens", "max_draft_tokens")
    Request([0], **{name: options[name] for name in limits}).check_limits()
    return options


def without_effect(args: argparse.Namespace, defaults: argparse.Namespace) -> list[str]:
    """Return a sentence for each group of flags that change nothing, because another flag makes them so."""
    given = [name for name, default in vars(defaults).items() if getattr(args, name) != default]

    def told(names: Sequence[str], reason: str) -> list[str]:
        flags = [f"--{name.replace('_', '-')}" for name in names if name in given]
        return [f"{' and '.join(flags)}: no effect, {reason}."] if flags else []

    sampling = (
        "top_p",
        "min_p",
        "min_tokens_to_keep",
        "top_k",
        "xtc_probability",
        "xtc_threshold",
        "seed",
        "accept",
    )
    drafting = ("draft_vocab", "draft_bits", "accept")
    found = told(sampling, "--temp 0 takes the most likely token") if args.temp == 0 else []
    if args.temp and not args.min_p:
        found += told(["min_tokens_to_keep"], "it is a bound of --min-p")
    if args.temp and not args.xtc_probability:
        found += told(["xtc_threshold"], "it needs --xtc-probability")
    if draft_tokens(args.num_draft_tokens) == 0:
        wanted = ("lookup_text",) if args.drafter == "none" else ("drafter", "lookup_text")
        found += told(
            (*wanted, *(drafting if args.temp else drafting[:2])), "--num-draft-tokens 0 decodes plainly"
        )
    return found


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``load``, but for the model. Raises RequestError for what no model could take."""
    DrafterOptions(draft_bits=args.draft_bits)
    for name in ("max_kv_size", "draft_vocab"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise RequestError(f"--{name.replace('_', '-')} must be at least 1, not {value}.")
    is_plain = draft_tokens(args.num_draft_tokens) == 0
    return {
        "drafter": None if is_plain or args.drafter == "none" else args.drafter,
        "lookup_texts": [] if is_plain else [text_of("--lookup-text", name) for name in args.lookup_text],
        "draft_vocab": None if is_plain else args.draft_vocab,
        "draft_bits": None if is_plain else args.draft_bits,
        "exact": args.exact == "on",
        "max_cached_tokens": args.max_kv_size,
        "adapter_path": args.adapter_path,
        "trust_remote_code": args.trust_remote_code,
        "progress": sys.stderr.isatty(),
    }


def end_tokens(tokenizer: Any, args: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    """Let further tokens end an answer, and return the options that follow from its ends. Raises RequestError."""
    for token in args.extra_eos_token:
        add_eos_token(tokenizer, token)
    if not args.xtc_probability:
        return {}
    special = {*tokenizer.encode("\n"), *tokenizer.eos_token_ids}
    return {"xtc_special_tokens": tuple(sorted(token for token in special if token < vocab_size))}


def add_eos_token(tokenizer: Any, token: str) -> None:
    """Let a token, given by text or id, end the answer. Raises RequestError."""
    # Asked here, because a tokenizer with an unknown-token takes every text for that one.
    known = int(token) < len(tokenizer) if token.isdecimal() else token in tokenizer.get_vocab()
    if not known:
        raise RequestError(f"--extra-eos-token {token!r} is no token of this model.")
    tokenizer.add_eos_token(token)


def read_template_config(args: argparse.Namespace) -> dict[str, Any]:
    """Read --chat-template-config. Raises RequestError."""
    try:
        config = json.loads(args.chat_template_config or "{}")
        assert isinstance(config, dict)
    except (ValueError, AssertionError):
        raise RequestError(
            f"--chat-template-config takes a JSON object, not {args.chat_template_config!r}."
        ) from None
    return config


def require_utf8(args: argparse.Namespace) -> None:
    """Raise RequestError for a text that is not UTF-8; the names of folders may be anything."""
    for name, value in vars(args).items():
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and name not in (
                "model",
                "drafter",
                "lookup_text",
                "adapter_path",
                "grammar",
            ):
                require_text(f"--{name.replace('_', '-')}", text)


def unescaped(text: str) -> str:
    r"""Return a text with its ``\n`` and ``\t`` as newlines and tabs, as mlx_lm does."""
    return text.replace("\\n", "\n").replace("\\t", "\t")
