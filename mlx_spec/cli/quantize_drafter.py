"""Quantise a DFlash drafter's checkpoint, or turn a quantised one back into plain tensors.

    python -m mlx_spec.quantize_drafter Qwen3-8B-dflash Qwen3-8B-dflash-4bit
    python -m mlx_spec.generate --model mlx-community/Qwen3-8B-4bit --drafter Qwen3-8B-dflash-4bit

The quantised file keeps the published names, with .weight, .scales and .biases where a tensor is quantised.
Programs that read only plain tensors take what --dequantize writes.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from mlx_spec.checkpoints.config import read_config as read_config_file
from mlx_spec.checkpoints.tensors import load_tensors, read_tensors
from mlx_spec.cli.command import run_command
from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.dflash2.config import read_config
from mlx_spec.drafters.dflash2.tensors import native_names
from mlx_spec.errors import DrafterMismatch


def setup_arg_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_spec.quantize_drafter",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="folder of the checkpoint")
    parser.add_argument("out", type=Path, help="folder to write")
    add_quantization_arguments(parser)
    parser.add_argument("--dequantize", action="store_true", help="write plain bfloat16 tensors instead")
    return parser


def add_quantization_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings of quantisation, also to programs that train for it."""
    bits = (2, 3, 4, 5, 6, 8)
    parser.add_argument("--bits", type=int, default=4, choices=bits, help="bits a weight (default 4)")
    parser.add_argument(
        "--codebook-bits", type=int, default=3, choices=bits, help="bits a weight of the selector's codebooks (3)"
    )
    parser.add_argument("--group-size", type=int, default=64, choices=(32, 64, 128), help="weights a scale (64)")


def quantization(model: nn.Module, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the group size and the bits of every module to quantise, by its path."""
    return {
        path: {
            "group_size": args.group_size,
            "bits": args.codebook_bits if path.endswith("codebook") else args.bits,
        }
        for path, module in model.named_modules()
        if hasattr(module, "to_quantized") and module.weight.shape[-1] % args.group_size == 0
    }


def plain_tensors(model: nn.Module) -> dict[str, mx.array]:
    """Return a module's tensors with every quantised weight dequantised to bfloat16."""
    tensors = {}
    for path, module in model.named_modules():
        for name, value in leaf_parameters(module).items():
            if name == "weight" and "scales" in module:
                value = mx.dequantize(
                    value, module.scales, module.get("biases"), module.group_size, module.bits, module.mode
                )
            if name not in ("scales", "biases"):
                tensors[f"{path}.{name}"] = value.astype(mx.bfloat16)
    return tensors


def leaf_parameters(module: nn.Module) -> dict[str, mx.array]:
    """Return the parameters that a module holds itself, not those of the modules in it."""
    return {name: value for name, value in module.parameters().items() if isinstance(value, mx.array)}


def published_names(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Drop ``.weight`` from codebooks that are not quantised, as published checkpoints do."""
    return {
        name.removesuffix(".weight")
        if name.endswith("codebook.weight") and name.replace(".weight", ".scales") not in tensors
        else name: value
        for name, value in tensors.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, or 1 after an error."""
    args = setup_arg_parser().parse_args(argv)
    return run_command(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Write the folder and print what was written. Raises ModelError, OSError."""
    print(json.dumps(write(args)))
    return 0


def write(args: argparse.Namespace) -> dict[str, Any]:
    """Write the folder and return what was written. Raises ModelError."""
    config = read_config_file(args.source, str(args.source), "drafter", DrafterMismatch)
    model = DraftModel(read_config(config, str(args.source)))
    load_tensors(model, native_names(read_tensors(args.source, str(args.source))), str(args.source))
    args.out.mkdir(parents=True, exist_ok=True)
    if args.dequantize:
        tensors = plain_tensors(model)
        config.pop("quantization", None)
    else:
        settings = quantization(model, args)
        nn.quantize(model, class_predicate=lambda path, _: settings.get(path, False))
        tensors = dict(tree_flatten(model.parameters()))
        codebooks = {path: own for path, own in settings.items() if path.endswith("codebook")}
        config["quantization"] = {"group_size": args.group_size, "bits": args.bits, **codebooks}
    out = args.out / "model.safetensors"
    mx.save_safetensors(str(out), published_names(tensors), metadata={"format": "mlx"})
    (args.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for extra in ("README.md", "training.json"):
        if (args.source / extra).exists() and args.out != args.source:
            shutil.copy(args.source / extra, args.out / extra)
    return {"out": str(args.out), "tensors": len(tensors), "bytes": out.stat().st_size}


if __name__ == "__main__":
    raise SystemExit(main())
