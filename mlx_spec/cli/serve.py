"""The command ``python -m mlx_spec.serve``: a server with OpenAI's and Anthropic's interfaces and a chat page."""

import argparse
import errno
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mlx_spec.cli.command import note, run_command, status_of
from mlx_spec.cli.generate_flags import REFUSED, add_model_flags, add_refused_flags, draft_tokens
from mlx_spec.cli.generate_options import load_options, read_template_config
from mlx_spec.engine import Engine
from mlx_spec.errors import MlxSpecError, ModelError, RequestError
from mlx_spec.generate.options import make_sampling
from mlx_spec.loading.load import load

DESCRIPTION = """Serve a model to apps, agents and a browser, with speculative decoding: replies are the ones that
plain decoding gives. OpenAI's /v1/chat/completions, /v1/completions and /v1/responses, Anthropic's
/v1/messages, and a chat page at /. Flags are those of mlx_lm.server, and more."""
EXAMPLES = """examples:
  python -m mlx_spec.serve
  python -m mlx_spec.serve --model mlx-community/Qwen3-8B-4bit \\
      --drafter RedHatAI/Qwen3-8B-speculator.dflash2 --idle-unload 600
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "Hello"}]}'

The exit status is 1 after an error, 2 for wrong usage, 130 after Ctrl-C, 143 after SIGTERM."""
# How long the rest of a round may take after replies have had a second to end.
SECONDS_TO_STOP = 0.5
NEEDED = 'The server needs packages that are not installed: pip install "mlx-spec[server]".'


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line; flags that mlx_lm.server has are named and behave as there."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_spec.serve",
        usage="%(prog)s [--model MODEL] [--drafter DRAFTER] [more flags]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_flags(parser)
    add_server_flags(parser)
    add_request_flags(parser)
    add_drafting_flags(parser)
    reasons = {
        "--draft-model": REFUSED["--draft-model"],
        "--pipeline": "a model runs on one machine",
        "--decode-concurrency": "up to 16 texts always decode together",
        "--prompt-concurrency": "prompts are read a chunk a round, short ones first",
        "--prompt-cache-size": "the cache of prompts is bounded by --prompt-cache-bytes",
        "--chat-template": "the model's own template is used",
        "--use-default-chat-template": "the model's own template is used",
    }
    add_refused_flags(parser, reasons)
    return parser


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of who may use the server, and of what it holds in memory."""
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, this machine only)")
    add("--port", type=int, default=8080, help="port to listen at, 0 for any (default: 8080)")
    add("--model-id", metavar="NAME", help="what clients call the model (default: the last part of --model)")
    add("--api-key", help="key that requests must carry (default: $MLX_SPEC_API_KEY, or none)")
    add("--allowed-hosts", nargs="+", default=(), help="names to be reached by, besides localhost and addresses")
    add("--allowed-origins", nargs="+", default=(), help="origins of web pages that may use it, * for all")
    add("--max-body-bytes", type=int, default=32 * 2**20, help="largest request (default: 32 MiB)")
    add("--max-waiting", type=int, default=64, help="requests that may wait; more get status 429 (default: 64)")
    add(
        "--prompt-cache-bytes", type=size, metavar="SIZE", help="kept of earlier prompts, as 2G (default: as fits)"
    )
    add("--idle-unload", type=float, metavar="SECONDS", help="give the model's memory back after so long unused")
    add("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"), help="(default: INFO)")


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of what holds for requests that do not say otherwise."""
    add = parser.add_argument_group("requests that do not say otherwise").add_argument
    add("--temp", type=float, default=0.0, help="temperature (default: 0, the most likely token)")
    add("--top-p", type=float, default=1.0, help="nucleus sampling (default: 1, all tokens)")
    add("--top-k", type=int, default=0, help="number of most likely tokens to keep (default: all)")
    add("--min-p", type=float, default=0.0, help="drop tokens less likely than this times the most likely one")
    add("--max-tokens", "-m", type=int, help="longest reply (default: what is left of the context)")
    add(
        "--chat-template-config",
        "--chat-template-args",
        help='arguments of the chat template, as {"enable_thinking": false}',
    )
    add("--prefill-step-size", type=int, default=512, help="prompt tokens read in one pass (default: 512)")
    add(
        "--num-draft-tokens",
        default="auto",
        help="auto, or 0 to load no drafter and decode plainly (default: auto)",
    )


def add_drafting_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the drafter."""
    add = parser.add_argument_group("drafting").add_argument
    add("--draft-vocab", type=int, metavar="N", help="draft from the N most frequent tokens only (MTP, EAGLE)")
    add("--draft-bits", type=int, metavar="N", help="bits per weight of an MTP or EAGLE head, 16: not quantised")
    add(
        "--exact",
        choices=("on", "off"),
        default="on",
        help="off takes MLX's own operations where these are faster, and reuses replies too (default: on)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, 1 after an error, 130 after Ctrl-C, 143 after SIGTERM."""
    args = setup_arg_parser().parse_args(argv)
    return run_command(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Load and serve until Ctrl-C. Raises MlxSpecError."""
    try:
        import uvicorn

        from mlx_spec.server.app import make_app
        from mlx_spec.server.memory import fit_cache
        from mlx_spec.server.metrics import Metrics
        from mlx_spec.server.worker import Worker
    except ImportError as error:
        raise RequestError(f"{NEEDED} ({error})") from error
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("mlx_spec").setLevel(args.log_level)
    settings, loading = server_settings(args), load_options(args)
    listening = listen(args.host, args.port)
    url = f"http://{args.host}:{listening.getsockname()[1]}"

    def load_model() -> tuple[Engine, Any]:
        engine, tokenizer = load(args.model, **loading)
        memory = fit_cache(engine, args.max_kv_size)
        drafting = f"drafting by {' and '.join(engine.sources)}" if engine.sources else "without drafting"
        print(
            f"Serving {settings.model_id}, {drafting}, at {url}: {memory}.",
            file=sys.stderr,
            flush=True,
        )
        return engine, tokenizer

    metrics = Metrics(settings.model_id)
    worker = Worker(
        load_model,
        max_waiting=args.max_waiting,
        max_kept_bytes=args.prompt_cache_bytes,
        idle_seconds=args.idle_unload,
        on_end=metrics.observe,
    )
    app = make_app(worker, settings, metrics)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, server_header=False)
    server = uvicorn.Server(config)
    stop_server = server.handle_exit

    def stop(number: int, frame: FrameType | None) -> None:
        worker.begin_stop()  # replies end, so that their connections do
        stop_server(number, frame)

    server.handle_exit = stop  # type: ignore[assignment, method-assign]
    threading.Thread(target=lambda: stop_where_failed(worker, server), daemon=True).start()
    interrupt: KeyboardInterrupt | None = None
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt as error:
        interrupt = error
    listening.close()
    if not worker.stop(SECONDS_TO_STOP):
        # A pass that still runs cannot be interrupted, and Python must not end below it.
        note("stopped in the middle of a pass")
        sys.stderr.flush()
        os._exit(1 if interrupt is None else status_of(interrupt))
    if interrupt is not None:
        raise interrupt
    if isinstance(worker.error, MlxSpecError):
        raise worker.error
    if worker.error is not None:
        raise ModelError(f"The model cannot be served: {worker.error}") from worker.error
    return 0


def stop_where_failed(worker: Any, server: Any) -> None:
    """Let the server end where the model cannot be loaded."""
    worker.wait()
    server.should_exit = True


def server_settings(args: argparse.Namespace) -> Any:
    """Return the settings of a server. Raises RequestError."""
    from mlx_spec.server.settings import Settings

    draft_tokens(args.num_draft_tokens)
    sampling = {"temp": args.temp, "top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p}
    make_sampling(sampling)
    for name in ("max_tokens", "prefill_step_size", "max_waiting", "max_body_bytes"):
        if (value := getattr(args, name)) is not None and value < (name != "max_waiting"):
            raise RequestError(f"--{name.replace('_', '-')} must be positive, not {value}.")
    if args.idle_unload is not None and not args.idle_unload > 0:
        raise RequestError(f"--idle-unload must be positive, not {args.idle_unload}.")
    if not 0 <= args.port < 65536:
        raise RequestError(f"--port must lie between 0 and 65535, not {args.port}.")
    model_id = args.model_id or Path(args.model).name or "model"
    return Settings(
        model_id=model_id,
        loaded_from=args.model,
        aliases=(args.model, "default_model", "default"),
        sampling=sampling,
        max_tokens=args.max_tokens,
        template=read_template_config(args),
        prefill_step_size=args.prefill_step_size,
        api_key=args.api_key or os.environ.get("MLX_SPEC_API_KEY") or None,
        hosts=(*(host.lower() for host in args.allowed_hosts), args.host.lower()),
        origins=tuple(args.allowed_origins),
        max_body_bytes=args.max_body_bytes,
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket at an address. Raises RequestError where it cannot be had."""
    listening: socket.socket | None = None
    try:
        listening = socket.socket(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0])
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
        return listening
    except OSError as error:
        if listening is not None:
            listening.close()
        if error.errno == errno.EADDRINUSE:
            raise RequestError(
                f"Port {port} of {host} is taken, perhaps by another server: stop that, or give another --port."
            ) from None
        raise RequestError(
            f"The server cannot listen at {host}, port {port}: {error.strerror or error}."
        ) from None


def size(text: str) -> int:
    """Read a number of bytes, such as 512M or 2G."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give one as 512M or 2G")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


if __name__ == "__main__":
    sys.exit(main())
