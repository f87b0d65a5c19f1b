"""From names to loaded models: the target, its tokenizer and its drafter, in an engine."""

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metal_kernels import MAX_VERIFY_ROWS
from metal_kernels.launching.implementations import Implementation, implementation, using
from mlx_spec.checkpoints.config import read_config
from mlx_spec.checkpoints.hub import resolve
from mlx_spec.drafters.kind import DrafterOptions, DrafterSource
from mlx_spec.drafters.lookup.lookup import Lookup
from mlx_spec.engine import Engine
from mlx_spec.engine.statistics import NOT_YET
from mlx_spec.errors import ModelError, ModelWarning, RequestError, UnsupportedModel
from mlx_spec.loading.adapters import merge_adapters
from mlx_spec.loading.draft_vocabulary import frequent_tokens
from mlx_spec.loading.drafter import AUTO, LoadedDrafter, drafter_name, is_drafter, load_drafter
from mlx_spec.loading.model import read_model, read_tokenizer
from mlx_spec.loading.published_drafters import drafter_hint
from mlx_spec.loading.weights import fit_to_machine, quantized_is_slow
from mlx_spec.measure.after_text import AfterText
from mlx_spec.measure.exactness import OFF, checked_exactness, stored_exactness
from mlx_spec.measure.kept_costs import kept_costs
from mlx_spec.measure.wiring import check_wiring
from mlx_spec.target import Target
from mlx_spec.target.families import family_of

# Rows of the largest pass that exactness is checked with where there is no drafter.
DEFAULT_ROWS = 8

logger = logging.getLogger(__name__)


def load(
    model: str,
    drafter: str | None = AUTO,
    *,
    lookup_texts: Sequence[str] = (),
    draft_vocab: int | Sequence[int] | None = None,
    draft_bits: int | None = None,
    exact: bool = True,
    max_cached_tokens: int | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    adapter_path: str | Path | None = None,
    trust_remote_code: bool = False,
    progress: bool = False,
) -> tuple[Engine, Any]:
    """Load a target with its drafter, and return the engine and the tokenizer.

    model: "demo", a folder, or a Hugging Face repo, in any layout that mlx-lm loads.
    drafter: a folder or repo of a DFlash or DFlash 2 checkpoint, an EAGLE head or an MTP head, or a file that
        holds an MTP head; "mtp" for the head that comes with the model, "dflash2" and "eagle" for the demo's;
        "auto" for the one that comes with it, if any. Beside each of them, and alone where there is none, text is
        copied that stood before; "lookup" for copies alone, None for plain decoding.
    lookup_texts: texts that are copied from too, besides prompt and reply, by all generations.
    draft_vocab: draft with an MTP or EAGLE head from so many of the most frequent tokens, or from these token ids,
        unless it has a vocabulary of its own.
    draft_bits: bits a weight, 2, 3, 4, 5, 6 or 8, to quantise such a head with, 16 for none; by default EAGLE
        heads have 4 and MTP heads those of their model. Heads that are quantised already stay as they are.
    exact: after the first text of a model on a machine, a few rows are computed together and one at a time, and
        statistics say whether they were equal. False takes MLX's own operations for all work, where these are
        faster: then a row's rounding may depend on the rows beside it, and near ties may be decided otherwise
        than in plain decoding. The next turn of a chat then shares all that is cached, replies too.
    max_cached_tokens: token positions that all sequences together may cache (default: the model's context).
    tokenizer_config: further arguments of the tokenizer.
    adapter_path: folder with adapters that ``mlx_lm.lora`` trained for the model. They are merged into its
        weights; the layers that they change are held in 16 bits.
    trust_remote_code: let a tokenizer run Python code that comes with the model. Otherwise no such code runs.
    progress: show what is fetched and checked, on standard error.

    Nothing is measured here. What rounds cost is learned from rounds and kept for the next process; rows, and the
    wiring of a head, are checked once a first text has ended, or by ``engine.settle()``.
    Where MLX's own operations run on a CPU, quantised weights are dequantised to bfloat16, unless that would take
    more than half of the memory: MLX's quantised CPU product costs as much per row as the first row. Heads are not
    quantised there unless ``draft_bits`` says so.
    Raises ModelError (DownloadError, UnsupportedModel, DrafterMismatch) before anything is generated, RequestError
    for a setting without a meaning.
    """
    kernels = chosen_kernels(exact)
    # Without a word on it, transformers asks on standard input.
    settings = {"trust_remote_code": trust_remote_code, **(tokenizer_config or {})}
    with using(kernels):
        target, tokenizer, source = load_target(model, settings, adapter_path, max_cached_tokens, progress)
        found, label = find_drafter(drafter, target, tokenizer, source, draft_vocab, draft_bits, progress)
        bound = None if found is None else found.drafter
        lookup = find_lookup(drafter, tokenizer, lookup_texts)
        kept = None if lookup is None else kept_costs(target, bound, label or Lookup.name)
        most_rows = DEFAULT_ROWS if lookup is None else MAX_VERIFY_ROWS
        exactness = stored_exactness(target, most_rows) if exact else OFF
    logger.info(
        "Loaded %s (%s, %d layers, %d positions) with %s.",
        model,
        target.dtype,
        target.num_layers,
        target.context,
        f"the drafter {label}, up to {bound.max_draft} tokens" if bound is not None else "no drafter",
    )
    engine = Engine(
        target,
        bound,
        None if kept is None else kept.costs,
        lookup=lookup,
        exactness=exactness or NOT_YET,
        kernels=kernels,
        reuse_replies=not exact,
        at_end=(after := AfterText()),
    )
    if exactness is None:
        after.once.append(lambda: check_rows(engine, most_rows, progress))
    if found is not None and not found.is_shipped:
        variants = found.kind.variants(found.drafter, target)
        after.once.append(lambda: check_wiring(target, found.drafter, variants, tokenizer, label, progress))
    if kept is not None:
        after.always.append(kept.keep)
    return engine, tokenizer


def check_rows(engine: Engine, most_rows: int, progress: bool) -> None:
    """Find out whether the rows of an engine's passes are exact."""
    engine.exactness = checked_exactness(engine.target, most_rows, progress)


def load_target(
    model: str,
    tokenizer_settings: dict[str, Any],
    adapter_path: str | Path | None = None,
    max_cached_tokens: int | None = None,
    progress: bool = False,
) -> tuple[Target, Any, DrafterSource]:
    """Load a target and its tokenizer, and return them and the target's checkpoint; arguments as of ``load``."""
    folder = resolve(model, progress)
    config = read_config(folder, model, "model", ModelError)
    refuse_other_content(folder, config, model)
    loaded = read_model(folder, config, model)
    tokenizer = read_tokenizer(folder, config, model, tokenizer_settings)
    if adapter_path is not None:
        merge_adapters(loaded, adapter_path)
    target = Target(fit_to_machine(loaded), config, model, max_cached_tokens)
    return target, tokenizer, DrafterSource(folder, model, config, config)


def find_drafter(
    drafter: str | None,
    target: Target,
    tokenizer: Any,
    source: DrafterSource,
    draft_vocab: int | Sequence[int] | None,
    draft_bits: int | None,
    progress: bool,
) -> tuple[LoadedDrafter | None, str]:
    """Return the drafter that is asked for or comes with the model, if any, and what to call it.

    source: the target's own checkpoint.
    The other arguments are those of ``load``; it raises what ``load`` does.
    """
    name = None if drafter == Lookup.name else drafter_name(source.name, drafter, source)
    has_settings = draft_vocab is not None or draft_bits is not None
    if name is None:
        if has_settings:
            raise RequestError(
                f"draft_vocab and draft_bits are settings of a drafter, and {source.name} has none here."
            )
        if drafter == AUTO and (hint := drafter_hint(source.config, source.name)):
            warnings.warn(hint, ModelWarning, stacklevel=3)
        return None, ""
    ids = frequent_tokens(tokenizer, draft_vocab, target.vocab_size)
    options = DrafterOptions(ids, draft_bits, quantized_is_slow())
    label = name if ids is None else f"{name}, {len(ids)} draft tokens"
    label = label if draft_bits is None else f"{label}, {draft_bits} bits"
    is_optional = drafter == AUTO and not has_settings
    return load_drafter(name, target, source, options, progress, is_optional), label


def find_lookup(drafter: str | None, tokenizer: Any, texts: Sequence[str]) -> Lookup | None:
    """Return what copies, see ``load``; None for plain decoding. Raises RequestError for texts without it."""
    if drafter is not None:
        return Lookup([tokenizer.encode(text, add_special_tokens=False) for text in texts])
    if texts:
        raise RequestError("lookup_texts are texts to copy from, and with drafter=None nothing is copied.")
    return None


def refuse_other_content(folder: Path, config: Mapping[str, Any], name: str) -> None:
    """Raise UnsupportedModel for a checkpoint that is a drafter, or whose architecture is Python code."""
    if is_drafter(folder, config):
        raise UnsupportedModel(f"{name} holds a drafter: give it as --drafter, and its target as --model.")
    family_of(config, name)
    if "model_file" in config:
        raise UnsupportedModel(f"{name} brings its architecture as Python code, which mlx_spec does not run.")


def chosen_kernels(exact: bool) -> Implementation:
    """Return the implementation of the operations. Raises ModelError for an unknown one in the environment."""
    try:
        return implementation() if exact else "stock"
    except ValueError as error:
        raise ModelError(str(error)) from error
