"""From a drafter's name to a drafter that is bound to its target."""

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

from mlx_spec.checkpoints.config import read_config
from mlx_spec.checkpoints.hub import DEMO, DRAFTER_FILES, expanded, fetch, is_repo, resolve, with_weights
from mlx_spec.checkpoints.tensors import INDEX, read_index, tensor_names
from mlx_spec.demo import DRAFTERS
from mlx_spec.drafters.base import ObservedDrafter
from mlx_spec.drafters.dflash2.kind import KIND as DFLASH2
from mlx_spec.drafters.eagle.kind import KIND as EAGLE
from mlx_spec.drafters.kind import DrafterOptions, DrafterSource, Kind
from mlx_spec.drafters.mtp.kind import KIND as MTP
from mlx_spec.drafters.mtp.load import no_head
from mlx_spec.errors import DrafterMismatch, MlxSpecError, ModelError, ModelWarning
from mlx_spec.loading.weights import on_cpu
from mlx_spec.target import Target
from mlx_spec.target.families import num_layers_of

# Asked in this order which of them a checkpoint is.
KINDS: tuple[Kind, ...] = (MTP, EAGLE, DFLASH2)
AUTO = "auto"
T = TypeVar("T")


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter that is bound to its target, what it is, where it is from, and whether it is one of the demo's."""

    drafter: ObservedDrafter
    kind: Kind
    source: DrafterSource
    is_shipped: bool


def drafter_name(model: str, drafter: str | None, model_source: DrafterSource) -> str | None:
    """Return the folder or repo of the drafter to use with a model, or None.

    Of one that comes with the model it is the name of its kind. The demo's own is the one that is fastest: on a
    CPU the EAGLE head, of which one token costs least.
    Raises DrafterMismatch for a drafter of the demo's with another model.
    """
    if drafter == AUTO and model == DEMO:
        return (EAGLE if on_cpu() else DFLASH2).name
    if drafter == AUTO:
        return optionally(lambda: kind_in_model(model_source))
    named = kind_named(drafter)
    if named is not None and not named.lies_in_model and model != DEMO and not Path(named.name).is_dir():
        raise DrafterMismatch(
            f"{model} comes with no {named.title}: give --drafter the folder or repo of one that was trained for "
            f"it, or train one with tools.{named.trainer}."
        )
    return drafter


def kind_in_model(source: DrafterSource) -> str | None:
    """Return the kind of the drafter that lies in a model's own checkpoint, if there is one."""
    layers = num_layers_of(source.config)
    return next((kind.name for kind in KINDS if kind.lies_in_model and kind.matches(source, layers)), None)


def kind_named(name: str | None) -> Kind | None:
    """Return the kind that goes by a name, if any does."""
    return next((kind for kind in KINDS if kind.name == name), None)


def optionally(find: Callable[[], T]) -> T | None:
    """Return what is found, or give a ModelWarning and return None where it cannot be used.

    Nobody asked for a drafter that merely lies in a model's folder: with a broken one the model runs without.
    """
    try:
        return find()
    except ModelError as error:
        warnings.warn(f"No drafter is used, because {error}", ModelWarning, stacklevel=3)
        return None


def load_drafter(
    name: str,
    target: Target,
    model_source: DrafterSource,
    options: DrafterOptions,
    progress: bool = False,
    optional: bool = False,
) -> LoadedDrafter | None:
    """Load a drafter for a target.

    name: a folder, a file, a repo, or a kind's name for the one that comes with the model.
    model_source: the target's own checkpoint.
    optional: nobody asked for it: where it cannot be used, a ModelWarning says why, and None is returned.
    Raises DrafterMismatch, DownloadError, or RequestError for an option that the drafter does not have.
    """

    def load() -> LoadedDrafter:
        return load_asked(name, target, model_source, options, progress)

    return optionally(load) if optional else load()


def load_asked(
    name: str, target: Target, model_source: DrafterSource, options: DrafterOptions, progress: bool
) -> LoadedDrafter:
    """Load a drafter that was asked for, see ``load_drafter``."""
    named = kind_named(name)
    shipped = DRAFTERS.get(name) if model_source.name == DEMO else None
    if shipped is not None:
        place = shipped
    elif named is not None and named.lies_in_model:
        place = model_source.place
    else:
        named, place = None, resolve_drafter(name, progress)
    source = source_of(place, target.name if place == model_source.place else name, model_source.config)
    kind = named or kind_of(source, target.num_layers)
    try:
        return LoadedDrafter(kind.load(source, target, options), kind, source, shipped is not None)
    except MlxSpecError:
        raise
    except Exception as error:
        raise DrafterMismatch(
            f"{source.name} cannot be loaded as {kind.title}: {shorten(str(error) or repr(error), 300)}"
        ) from error


def kind_of(source: DrafterSource, target_layers: int) -> Kind:
    """Return the kind of a checkpoint: the last one where nothing shows it, to be refused with the reason.

    Raises DrafterMismatch for a whole model without a head.
    """
    kind = next(kind for kind in KINDS if kind.matches(source, target_layers))
    if kind is KINDS[-1] and not is_claimed(source.config, source.tensors) and is_whole_model(source.tensors):
        raise DrafterMismatch(
            f"{source.name} is a whole model without a drafter's head, and mlx_spec does not draft with whole "
            "models; give --drafter a head, or a DFlash drafter, that was trained for the target."
        )
    return kind


def is_claimed(config: Mapping[str, Any], tensors: Collection[str]) -> bool:
    """Whether a ``config.json`` and names of tensors show that a checkpoint is a drafter."""
    return any(kind.claims(config, tensors) for kind in KINDS)


def is_drafter(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder holds a drafter and not a whole model, which may have a head of its own."""
    tensors = tensor_names(sorted(folder.glob("*.safetensors")), folder.name)
    return is_claimed(config, tensors) and not is_whole_model(tensors)


def is_whole_model(tensors: Collection[str]) -> bool:
    """Whether these are the names of a whole model's tensors: embeddings, and a layer with a norm at its start."""
    return any("embed_tokens." in name for name in tensors) and any(
        name.endswith("layers.0.input_layernorm.weight") for name in tensors
    )


def source_of(place: Path, name: str, model_config: Mapping[str, Any]) -> DrafterSource:
    """Read what a checkpoint says of itself. Raises DrafterMismatch for a broken ``config.json``."""
    has_config = (place / "config.json").is_file()
    config = read_config(place, name, "drafter", DrafterMismatch) if has_config else model_config
    return DrafterSource(place, name, config, model_config)


def resolve_drafter(name: str, progress: bool = False) -> Path:
    """Return the file or folder of a drafter, fetched when needed.

    Of a repo that holds a whole model only the files with its head are fetched. Raises DownloadError, or
    DrafterMismatch for a model without a head.
    """
    if expanded(name).is_file():
        return expanded(name)
    if expanded(name).is_dir() or not is_repo(name):
        return resolve(name, progress, DRAFTER_FILES)
    folder = fetch(name, ["config.json", INDEX])
    shards = read_index(folder / INDEX, name)
    if not shards:
        return with_weights(resolve(name, progress, DRAFTER_FILES), name)
    config = read_config(folder, name, "drafter", DrafterMismatch)
    for kind in KINDS:
        files = [] if kind.indexed_files is None else kind.indexed_files(config, shards, name)
        if files:
            return fetch(name, ["config.json", INDEX, *files])
    is_model = any("model.embed_tokens." in tensor for tensor in shards)
    if is_model and not is_claimed(config, shards.keys()):
        raise DrafterMismatch(no_head(name))
    return resolve(name, progress, DRAFTER_FILES)
