"""From a drafter's name to a drafter that is bound to its target."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_spec.checkpoints.config import read_config
from mlx_spec.checkpoints.hub import DEMO, DRAFTER_FILES, expanded, fetch, is_repo, resolve, with_weights
from mlx_spec.checkpoints.tensors import INDEX, read_index
from mlx_spec.demo import DRAFTERS
from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.dflash2.kind import KIND as DFLASH2
from mlx_spec.drafters.eagle.kind import KIND as EAGLE
from mlx_spec.drafters.kind import DrafterOptions, DrafterSource, Kind
from mlx_spec.drafters.mtp.kind import KIND as MTP
from mlx_spec.drafters.mtp.load import no_head
from mlx_spec.errors import DrafterMismatch
from mlx_spec.loading.weights import on_cpu
from mlx_spec.target import Target
from mlx_spec.target.families import num_layers_of

# Asked in this order which of them a checkpoint is.
KINDS: tuple[Kind, ...] = (MTP, EAGLE, DFLASH2)
AUTO = "auto"


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter that is bound to its target, what it is, and whether it is one of the demo's."""

    drafter: Drafter
    kind: Kind
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
        layers = num_layers_of(model_source.config)
        return next(
            (kind.name for kind in KINDS if kind.lies_in_model and kind.matches(model_source, layers)), None
        )
    named = kind_named(drafter)
    if named is not None and not named.lies_in_model and model != DEMO and not Path(named.name).is_dir():
        raise DrafterMismatch(
            f"{model} comes with no {named.title}: give --drafter the folder or repo of one that was trained for "
            f"it, or train one with tools.{named.trainer}."
        )
    return drafter


def kind_named(name: str | None) -> Kind | None:
    """Return the kind that goes by a name, if any does."""
    return next((kind for kind in KINDS if kind.name == name), None)


def load_drafter(
    name: str, target: Target, model_source: DrafterSource, options: DrafterOptions, progress: bool = False
) -> LoadedDrafter:
    """Load a drafter for a target.

    name: a folder, a file, a repo, or a kind's name for the one that comes with the model.
    model_source: the target's own checkpoint.
    Raises DrafterMismatch, DownloadError, or RequestError for an option that the drafter does not have.
    """
    named = kind_named(name)
    shipped = DRAFTERS.get(name) if model_source.name == DEMO else None
    if shipped is not None:
        place = shipped
    elif named is not None and named.lies_in_model:
        place = model_source.place
    else:
        named, place = None, resolve_drafter(name, progress)
    source = source_of(place, target.name if place == model_source.place else name, model_source.config)
    kind = named or next(kind for kind in KINDS if kind.matches(source, target.num_layers))
    return LoadedDrafter(kind.load(source, target, options), kind, shipped is not None)


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
    if is_model and not any(kind.claims(config) for kind in KINDS):
        raise DrafterMismatch(no_head(name))
    return resolve(name, progress, DRAFTER_FILES)
