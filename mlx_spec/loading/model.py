"""Reads a model's folder: its modules with their weights, and its tokenizer."""

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import mlx.core as mx
import transformers
from mlx import nn
from mlx_lm.utils import load_model, load_tokenizer

from mlx_spec.checkpoints.config import read_json
from mlx_spec.checkpoints.tensors import INDEX, read_files, read_index
from mlx_spec.errors import DrafterMismatch, ModelError, ModelWarning, UnsupportedModel
from mlx_spec.target.families import family_of
from mlx_spec.target.model_config import ModelConfig, class_of

# mlx-lm reads these files, and their metadata, from a folder.
WEIGHTS = "model*.safetensors"
MODES = {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}
METHODS = ("awq", "bitnet", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4", "mxfp8")


def read_model(folder: Path, config: Mapping[str, Any], name: str) -> nn.Module:
    """Build a model of mlx-lm with its weights, lazily.

    folder: of the checkpoint.
    config: its ``config.json``.
    name: of the model, for messages.
    Raises ModelError, in a sentence that names the file or the key, for what cannot be read or run.
    """
    check_quantization(config, name)
    tensors = read_weights(folder, name)
    head = next((value for tensor, value in tensors.items() if tensor.endswith("lm_head.weight")), None)
    settings = ModelConfig.read(config, name, head is not None)
    settings.warn(name)
    if head is not None and settings.is_tied:
        warn_of_other_head(head, tensors, name)
    try:
        with plain_name(folder) as place:
            model, _ = load_model(place, lazy=True, model_config=settings.arguments)
    except Exception as error:
        if missing := missing_files(folder, name):
            reason = f"{INDEX} names {', '.join(missing)}, which is not there; download it again"
        else:
            reason = f"its tensors do not fit its config.json ({shorten(str(error) or repr(error), 400)})"
        raise ModelError(f"{name}: {reason}.") from error
    check_weights(model, name)
    return model


def warn_of_other_head(head: mx.array, tensors: Mapping[str, mx.array], name: str) -> None:
    """Give a ModelWarning where an output head is left out, as ``config.json`` says, that is not the embedding."""
    embedding = next((value for tensor, value in tensors.items() if tensor.endswith("embed_tokens.weight")), head)
    if head.shape != embedding.shape or not mx.array_equal(head, embedding):
        warnings.warn(
            f"{name}: config.json sets tie_word_embeddings, so lm_head.weight is left out, although it differs "
            "from the embedding.",
            ModelWarning,
            stacklevel=3,
        )


def read_weights(folder: Path, name: str) -> dict[str, mx.array]:
    """Return the tensors of a model, lazily. Raises ModelError where there are none, or a file is broken."""
    files = sorted(folder.glob(WEIGHTS))
    if not files:
        found = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_file())[:12]) or "nothing"
        raise ModelError(
            f"{name} holds no {WEIGHTS} file, only {found}: convert other formats with mlx_lm.convert."
        )
    try:
        return read_files(files, name)
    except DrafterMismatch as error:  # as it is when a drafter's files are read
        raise ModelError(str(error)) from None


def missing_files(folder: Path, name: str) -> list[str]:
    """Return the files that a model's index names and that are not there. A broken index names none."""
    try:
        return sorted(
            file for file in {*read_index(folder / INDEX, name).values()} if not (folder / file).exists()
        )
    except DrafterMismatch:
        return []


@contextmanager
def plain_name(folder: Path) -> Iterator[Path]:
    """Give a path of a folder that ``glob`` takes as it is written: mlx-lm would read "[4bit]" as a pattern."""
    if not {*"*?["} & {*str(folder)}:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="mlx_spec.") as temporary:
        link = Path(temporary) / "model"
        link.symlink_to(folder.absolute(), target_is_directory=True)
        yield link


def check_quantization(config: Mapping[str, Any], name: str) -> None:
    """Raise UnsupportedModel for quantization settings that mlx-lm would not understand."""
    given, key = config.get("quantization"), "quantization"
    if given is not None:
        bits = given.get("bits") if isinstance(given, Mapping) else None
        group, mode = (given.get("group_size"), given.get("mode", "affine")) if bits else (None, None)
        if isinstance(mode, str) and bits in MODES.get(mode, ()) and isinstance(group, int) and group > 0:
            return
        needed = "group_size, bits and, if it is not affine, mode"
    else:
        given, key = config.get("quantization_config"), "quantization_config"
        if not given or (isinstance(given, Mapping) and given.get("quant_method") in METHODS):
            return
        if isinstance(given, Mapping) and {"bits", "group_size"} <= given.keys():
            needed = "quant_method, or to be named quantization"
        else:
            needed = f"quant_method, one of {', '.join(METHODS)}"
    raise UnsupportedModel(f"{name}: config.json gives {key} {given!r}; it needs {needed}.")


def check_weights(model: nn.Module, name: str) -> None:
    """Raise UnsupportedModel for weights that hold bytes or whole numbers where there are no scales."""
    raw = {
        f"{path}.weight": module.weight.dtype
        for path, module in model.named_modules()
        if "weight" in module and "scales" not in module and not mx.issubdtype(module.weight.dtype, mx.floating)
    }
    if raw:
        first = next(iter(raw))
        raise UnsupportedModel(
            f"{name} holds {len(raw)} tensors such as {first} as {raw[first]} without scales, perhaps FP8 bytes; "
            "mlx_spec reads floating types and the quantised weights of mlx_lm.convert."
        )


def read_tokenizer(folder: Path, config: Mapping[str, Any], name: str, settings: dict[str, Any]) -> Any:
    """Load the tokenizer of a model, with the end tokens that its files name.

    settings: further arguments of the tokenizer, ``trust_remote_code`` among them.
    Raises ModelError.
    """
    for file in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / file).exists():
            read_json(folder / file, name, ModelError)
    hints = {"config": tokenizer_hints(folder, config, name)}
    settings = {**hints, **chat_template(folder, name), **settings}
    try:
        return load_tokenizer(folder, settings, eos_token_ids=end_tokens(folder, config, name))
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{name} comes with a tokenizer that is Python code. If you trust it, load it with "
                "trust_remote_code=True (--trust-remote-code)."
            ) from error
        raise ModelError(
            f"{name}: its tokenizer cannot be loaded ({shorten(str(error) or repr(error), 400)})."
        ) from error


def chat_template(folder: Path, name: str) -> dict[str, str]:
    """Return the template of a folder that has it in ``chat_template.json`` alone, as a setting of the tokenizer.

    transformers looks for none there. A file without a template is left out, with a warning.
    """
    file, config = folder / "chat_template.json", folder / "tokenizer_config.json"
    known = read_json(config, name, ModelError) if config.exists() else {}
    if not file.exists() or (folder / "chat_template.jinja").exists() or known.get("chat_template"):
        return {}
    try:
        template = read_json(file, name, ModelError).get("chat_template")
    except ModelError as error:
        warnings.warn(f"{error} It is left out.", ModelWarning, stacklevel=4)
        return {}
    if not isinstance(template, str):
        warnings.warn(
            f"{name}: chat_template.json holds no text under chat_template; it is left out.",
            ModelWarning,
            stacklevel=4,
        )
        return {}
    return {"chat_template": template}


def tokenizer_hints(folder: Path, config: Mapping[str, Any], name: str) -> Any:
    """Return what transformers takes from ``config.json`` to choose a tokenizer's class, and nothing else of it.

    Read whole, a value that no tokenizer needs could refuse the load, and a model type of mlx-lm's alone is warned
    of.
    """
    family = family_of(config, name)
    known = family.model_type in transformers.CONFIG_MAPPING
    hints = transformers.CONFIG_MAPPING[family.model_type]() if known else class_of(family)()
    hints.tokenizer_class, hints.name_or_path = config.get("tokenizer_class"), str(folder)
    return hints


def end_tokens(folder: Path, config: Mapping[str, Any], name: str) -> list[int]:
    """Return the tokens that end a text by ``generation_config.json``, or else by ``config.json``, as mlx-lm does.

    Those of the tokenizer are not among them. A file or value that cannot be read is left out, with a warning.
    """
    generation: Mapping[str, Any] = {}
    if (folder / "generation_config.json").exists():
        try:
            generation = read_json(folder / "generation_config.json", name, ModelError)
        except ModelError as error:
            warnings.warn(f"{error} It is left out.", ModelWarning, stacklevel=3)
    given = generation.get("eos_token_id") or config.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    good = [token for token in ids if isinstance(token, int) and not isinstance(token, bool) and token >= 0]
    if len(good) < len(ids):
        warnings.warn(
            f"{name}: eos_token_id is {given!r}; what is no token id in it is left out.",
            ModelWarning,
            stacklevel=3,
        )
    return good
