"""From names to loaded models: the target, its tokenizer and its drafter."""

import os
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

from metal_kernels.implementations import Implementation, implementation, using
from mlx_spec.checkpoints.config import read_config
from mlx_spec.measure.costs import measured_costs
from mlx_spec.demo import DRAFTERS
from mlx_spec.demo.model import demo_model_folder
from mlx_spec.loading.draft_vocabulary import frequent_tokens
from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.dflash2.drafter import load_dflash2
from mlx_spec.drafters.eagle.spec import is_eagle
from mlx_spec.drafters.eagle.load import load_eagle
from mlx_spec.drafters.eagle.source import TORCH_FILES
from mlx_spec.drafters.mtp.spec import contract_of
from mlx_spec.drafters.mtp.load import load_mtp, no_head, packing_of
from mlx_spec.drafters.mtp.source import INDEX, head_files, indexed_files, is_mtp, read_index
from mlx_spec.engine.engine import Engine
from mlx_spec.errors import DownloadError, DrafterMismatch, ModelError, RequestError
from mlx_spec.measure.exactness import OFF, checked_exactness
from mlx_spec.measure.wiring import check_wiring
from mlx_spec.target import Target
from mlx_spec.target.families import family_of
from mlx_spec.target.target import text_config

DEMO, DFLASH2, MTP, EAGLE = "demo", "dflash2", "mtp", "eagle"
# Rows of the largest pass that exactness is checked with where there is no drafter.
DEFAULT_ROWS = 8
# Bits a weight of an EAGLE head, and the choices; 16 leaves a head as it is.
EAGLE_BITS, BITS, GROUP_SIZE = 4, (2, 3, 4, 5, 6, 8, 16), 64
FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]


def load(
    model: str,
    drafter: str | None = "auto",
    *,
    draft_vocab: int | Sequence[int] | None = None,
    draft_bits: int | None = None,
    exact: bool = True,
    max_kv_size: int | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    progress: bool = False,
) -> tuple[Engine, Any]:
    """Load a target with its drafter, and return the engine and the tokenizer.

    model: "demo", a folder, or a Hugging Face repo, in any layout that mlx-lm loads. drafter: a folder or repo of
    a DFlash or DFlash 2 checkpoint, an EAGLE head or an MTP head, or a file that holds an MTP head; "mtp" for the
    head that comes with the model, "dflash2" and "eagle" for the demo's; "auto" for the one that comes with it, if
    any; None for none.
    draft_vocab: draft with an MTP or EAGLE head from so many of the most frequent tokens, or from these token ids,
    unless it has a vocabulary of its own. draft_bits: bits a weight, 2, 3, 4, 5, 6 or 8, to quantise such a head
    with, 16 for none; by default EAGLE heads have 4 and MTP heads those of their model. Quantised ones stay as
    they are.
    exact: when a model is first loaded on a machine, a few rows are computed together and one at a time, and
    statistics say whether they were equal. False takes MLX's own operations for all work, where these are faster:
    then a row's rounding may depend on the rows beside it, and texts part from plain decoding at near ties.
    max_kv_size: token positions that all sequences together may cache (default: the model's context).
    Where MLX runs on the CPU, quantised weights are unpacked to bfloat16, unless that would take more than half of
    the memory: MLX's quantised CPU product costs as much per row as the first row. Heads are not quantised there
    unless ``draft_bits`` says so.
    Raises ModelError (DownloadError, UnsupportedModel, DrafterMismatch) before anything is generated.
    """
    kernels = chosen_kernels(exact)
    folder = resolve(model, progress)
    config = read_config(folder, model, "model", ModelError)
    family_of(config, model)
    try:
        loaded, _ = load_model(folder, lazy=True)
        tokenizer = load_tokenizer(folder, tokenizer_config or {})
    except Exception as error:
        raise ModelError(f"{model} cannot be loaded: {shorten(str(error) or repr(error), 400)}") from error
    loaded = fit_to_machine(loaded)
    target = Target(loaded, config, model, max_kv_size)
    name = drafter_name(model, drafter)
    if drafter == "auto" and name is None and ships_head(folder, config, model):
        name = MTP
    bound, label, shipped = None, "", None
    if name is not None:
        shipped = DRAFTERS.get(name) if model == DEMO else None
        place = shipped or (folder if name == MTP else None)
        ids = frequent_tokens(tokenizer, draft_vocab, target.vocab_size)
        options: dict[str, Any] = {"draft_ids": ids, "draft_bits": draft_bits}
        bound = load_drafter(name, target, progress, place=place, model_config=config, **options)
        label = name if ids is None else f"{name}, {len(ids)} draft tokens"
        label = label if draft_bits is None else f"{label}, {draft_bits} bits"
    with using(kernels):
        costs = None if bound is None else measured_costs(target, bound, label, progress)
        most_rows = DEFAULT_ROWS if bound is None else bound.max_draft + 1
        exactness = checked_exactness(target, most_rows) if exact else OFF
        if isinstance(bound, ChainDrafter) and not shipped:
            check_wiring(target, bound, tokenizer, label)
    return Engine(target, bound, costs, exactness=exactness, kernels=kernels), tokenizer


def chosen_kernels(exact: bool) -> Implementation:
    """Return the implementation of the operations. Raises ModelError for an unknown one in the environment."""
    try:
        return implementation() if exact else "stock"
    except ValueError as error:
        raise ModelError(str(error)) from error


def drafter_name(model: str, drafter: str | None) -> str | None:
    """Return the folder or repo of the drafter to use with a model, or None.

    The demo's own is the one that is fastest: on a CPU the EAGLE head, of which one token costs least.
    Raises DrafterMismatch for a drafter of the demo's with another model.
    """
    if drafter == "auto":
        return (EAGLE if on_cpu() else DFLASH2) if model == DEMO else None
    if drafter in (EAGLE, DFLASH2) and model != DEMO and not Path(drafter).is_dir():
        kind, tool = ("EAGLE head", "eagle") if drafter == EAGLE else ("DFlash 2 drafter", "drafter")
        raise DrafterMismatch(
            f"{model} comes with no {kind}: give --drafter the folder or repo of one that was trained for it, "
            f"or train one with tools.train_{tool}."
        )
    return drafter


def ships_head(folder: Path, config: dict[str, Any], name: str) -> bool:
    """Whether an MTP head lies in a model's folder."""
    return bool(head_files(folder, contract_of(config, name), layers_of(config), name))


def layers_of(config: dict[str, Any]) -> int:
    """Return the number of decoder layers that a ``config.json`` states, 0 where it states none."""
    return int(text_config(config).get("num_hidden_layers") or 0)


def load_drafter(
    name: str,
    target: Target,
    progress: bool = False,
    *,
    place: Path | None = None,
    model_config: dict[str, Any] | None = None,
    draft_ids: Sequence[int] | None = None,
    draft_bits: int | None = None,
) -> Drafter:
    """Load a drafter for a target.

    place: where it is known to lie; else ``name`` says it. model_config: the target's ``config.json``, for an MTP
    head without one. draft_ids: ascending token ids to draft from. draft_bits: see ``load``.
    Raises DrafterMismatch, DownloadError, or RequestError for an option that the drafter does not have.
    """
    if draft_bits is not None and draft_bits not in BITS:
        raise RequestError(f"draft_bits takes {', '.join(map(str, BITS))}, not {draft_bits}.")
    place = place or resolve_drafter(name, progress)
    config = read_config(place, name, "drafter", DrafterMismatch) if has_config(place) else model_config or {}
    if name == MTP or is_mtp(place, config, target.num_layers, name):
        what, packing = target.name if name == MTP else name, packing_of(model_config or {})
        options: dict[str, Any] = {
            "unpack": on_cpu(),
            "packing": head_packing(draft_bits, packing),
            "draft_ids": draft_ids,
        }
        return load_mtp(place, target, what, model_config=model_config, **options)
    if is_eagle(config):
        packing = head_packing(draft_bits, {"group_size": GROUP_SIZE, "bits": EAGLE_BITS})
        return load_eagle(place, target, name, unpack=on_cpu(), packing=packing, draft_ids=draft_ids)
    for option, value in (("draft_vocab", draft_ids), ("draft_bits", draft_bits)):
        if value is not None:
            raise RequestError(f"{option} is for MTP and EAGLE heads; {name} is used as it is.")
    return load_dflash2(place, target, name, unpack=on_cpu())


def head_packing(draft_bits: int | None, default: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return how a head is to be quantised that is not: as asked for, else by ``default``, on a CPU not at all."""
    if draft_bits is None:
        return None if on_cpu() else default
    return None if draft_bits == max(BITS) else {"group_size": GROUP_SIZE, "bits": draft_bits}


def has_config(place: Path) -> bool:
    """Whether a drafter comes with a ``config.json`` of its own."""
    return (place / "config.json").is_file()


def resolve_drafter(name: str, progress: bool = False) -> Path:
    """Return the file or folder of a drafter, fetched when needed.

    Of a repo that holds a whole model only the files with its MTP head are fetched. Raises DownloadError, or
    DrafterMismatch for a model without a head.
    """
    if Path(name).expanduser().is_file():
        return Path(name).expanduser()
    if Path(name).expanduser().is_dir() or not is_repo(name):
        return resolve(name, progress)
    folder = fetch(name, ["config.json", INDEX])
    shards = read_index(folder / INDEX, name)
    if not shards:
        return with_weights(resolve(name, progress), name)
    config = read_config(folder, name, "drafter", DrafterMismatch)
    files = indexed_files(shards, contract_of(config, name), layers_of(config))
    if files:
        return fetch(name, ["config.json", INDEX, *files])
    is_model = any("model.embed_tokens." in tensor for tensor in shards)
    if is_model and not is_eagle(config) and not config.keys() & {"dflash_config", "speculators_model_type"}:
        raise DrafterMismatch(no_head(name))
    return resolve(name, progress)


def with_weights(folder: Path, name: str) -> Path:
    """Return the folder of a repo, with the files that torch wrote where there are no others."""
    return folder if any(folder.glob("*.safetensors")) else fetch(name, [*FILES, TORCH_FILES])


def resolve(name: str, progress: bool = False) -> Path:
    """Return the folder of a model: "demo", a folder, or a Hugging Face repo, which is fetched when needed.

    Raises DownloadError, in one sentence, when there is no such model or it cannot be fetched.
    """
    if name == DEMO:
        return demo_model_folder(progress)
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if not is_repo(name):
        raise DownloadError(f"{name!r} is neither a folder nor a Hugging Face repo (owner/name).")
    return fetch(name, FILES)


def is_repo(name: str) -> bool:
    """Whether a name has the form of a Hugging Face repo."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")


def fetch(name: str, patterns: list[str]) -> Path:
    """Return the folder of a repo, with the files that match. Raises DownloadError."""
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DownloadError(
            f"{name} is no folder here and could not be fetched from Hugging Face{offline}: {reason}"
        ) from error


def fit_to_machine(model: nn.Module) -> nn.Module:
    """Unpack quantised weights where that is faster, settle on one floating type, and evaluate the weights."""
    packed = any(name.endswith(".scales") for name in dict(tree_flatten(model.parameters())))
    unpack = packed and on_cpu() and unpacked_bytes(model) < memory_bytes() // 2
    kinds = len({weight.dtype for weight in castable(model).values()})
    if unpack:
        model = dequantize_model(model)
    if unpack or kinds > 1:
        model.update(tree_unflatten([(name, w.astype(mx.bfloat16)) for name, w in castable(model).items()]))
    mx.eval(model.parameters())
    return model


def castable(model: nn.Module) -> dict[str, mx.array]:
    """Return the floating weights of a model by name, without those whose precision mlx-lm keeps (A_log, say)."""
    may_cast = getattr(model, "cast_predicate", lambda name: True)
    weights = dict(tree_flatten(model.parameters()))
    return {name: w for name, w in weights.items() if mx.issubdtype(w.dtype, mx.floating) and may_cast(name)}


def unpacked_bytes(model: nn.Module) -> int:
    """Return the bytes that the quantised weights of a model take in bfloat16."""
    modules = [module for _, module in model.named_modules() if "scales" in module]
    return sum(2 * module.scales.size * module.group_size for module in modules)


def memory_bytes() -> int:
    """Return the physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return mx.default_device().type == mx.DeviceType.cpu
