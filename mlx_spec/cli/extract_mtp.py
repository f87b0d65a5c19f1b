"""Write the MTP head of a model into a folder of its own, for conversions of the model that leave it out.

    python -m mlx_spec.extract_mtp --model Qwen/Qwen3.5-4B --out Qwen3.5-4B-mtp --bits 4
    python -m mlx_spec.generate --model mlx-community/Qwen3.5-4B-4bit --drafter Qwen3.5-4B-mtp

Of a repo only the files that hold the head are fetched. What is written has the layout of mlx-community's heads:
tensor names without prefix, norm weights whole.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from mlx_spec.checkpoints.config import read_config
from mlx_spec.checkpoints.settings import Settings
from mlx_spec.checkpoints.tensors import load_tensors, quantize_head, read_files
from mlx_spec.cli.command import run_command
from mlx_spec.drafters.mtp.load import build_head, no_head
from mlx_spec.drafters.mtp.source import head_files
from mlx_spec.drafters.mtp.spec import layer_config, plain_type, spec_of
from mlx_spec.drafters.mtp.tensors import head_tensors
from mlx_spec.errors import DrafterMismatch
from mlx_spec.loading.drafter import resolve_drafter
from mlx_spec.target.families import num_layers_of


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_spec.extract_mtp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder or Hugging Face repo of the original model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--bits", type=int, choices=(2, 3, 4, 5, 6, 8), help="quantise to so many bits a weight")
    parser.add_argument("--group-size", type=int, default=64, choices=(32, 64, 128), help="weights a scale (64)")
    return parser


def extract(model: str, out: Path, bits: int | None, group_size: int) -> dict[str, Any]:
    """Write the head and return what was written. Raises ModelError."""
    place = resolve_drafter(model, progress=sys.stderr.isatty())
    config = read_config(place, model, "model", DrafterMismatch)
    layer = layer_config(Settings(config, model, DrafterMismatch))
    spec, layers = spec_of(config, model), num_layers_of(config)
    tensors = head_tensors(read_files(head_files(place, spec, layers, model), model), spec, layers, model)
    if not tensors:
        raise DrafterMismatch(no_head(model))
    d2t, head = tensors.pop("d2t", None), build_head(layer, tensors)
    load_tensors(head, tensors, model)
    written: dict[str, Any] = {
        "model_type": f"{plain_type(config.get('model_type'))}_mtp",
        "text_config": layer.values,
    }
    if bits is not None:
        quantize_head(head, group_size, bits)
        written["quantization"] = {"group_size": group_size, "bits": bits}
    save_head(out, written, head, d2t)
    return {"out": str(out), "family": spec.family, "bytes": (out / "model.safetensors").stat().st_size}


def save_head(folder: Path, config: dict[str, Any], head: nn.Module, d2t: mx.array | None) -> None:
    """Write a head's tensors, in bfloat16 where they are not quantised, and its ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    head.set_dtype(mx.bfloat16)
    tensors = dict(tree_flatten(head.parameters())) | ({} if d2t is None else {"d2t": d2t})
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 0, or 1 after an error."""
    args = setup_arg_parser().parse_args(argv)
    return run_command(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Write the head and print what was written. Raises ModelError, OSError."""
    print(json.dumps(extract(args.model, args.out, args.bits, args.group_size)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
