"""The contracts that a DFlash or DFlash 2 checkpoint may mean other than its configuration states."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_spec.drafters.dflash2.block import DraftModel
from mlx_spec.drafters.dflash2.config import DFlash2Config
from mlx_spec.drafters.dflash2.drafter import DFlash2Drafter
from mlx_spec.drafters.variants import Variant, other_ropes
from mlx_spec.target import Target

Module = TypeVar("Module", bound=nn.Module)
ModelChange = Callable[[DraftModel], None]
NORM_SHIFTS = {
    1.0: ("one larger", "add 1 to the norm weights: the checkpoint holds them less one"),
    -1.0: ("one smaller", "take 1 from the norm weights: they were made whole, and should not have been"),
}
# How many windows of published drafters to try where one is declared.
WINDOWS = (512, 1024, 2048, 4096)
# Token ids that published configurations name as the mask: the last of the vocabulary, and those after its end.
SPARE = 2


def variants(drafter: DFlash2Drafter, target: Target) -> list[Variant]:
    """Return every contract that differs from a drafter's own in one point."""
    config = drafter.config
    return [
        *other_layers(config, target.num_layers),
        *other_visibility(config),
        *other_inputs(config, target),
        *other_weights(drafter.model),
        *(
            Variant(name, point, f"config.json: {fix}", model_change(partial(set_rope, module=module)))
            for (name, point, fix), module in other_ropes(drafter.model.rope, target).items()
        ),
    ]


def other_layers(config: DFlash2Config, target_layers: int) -> list[Variant]:
    """Return hidden states of the target that may be meant instead."""
    ids, found = config.target_layer_ids, []
    for by, side in ((-1, "lower"), (1, "higher")):
        if min(ids) + by >= 0 and max(ids) + by < target_layers:
            fix = f"config.json: every target_layer_id one {side} (speculators counts from 1)"
            found.append(
                Variant(
                    f"hidden states one layer {side}",
                    "hidden states",
                    fix,
                    partial(moved, by=by),
                )
            )
    if len(ids) > 1:
        fix = "config.json: target_layer_ids in the order in which fc takes them, last first"
        found.append(Variant("hidden states in the other order", "order of states", fix, turned))
    return found


def moved(drafter: DFlash2Drafter, by: int) -> DFlash2Drafter:
    """Return a drafter that reads other layers."""
    ids = tuple(layer + by for layer in drafter.config.target_layer_ids)
    return drafter.changed(replace(drafter.config, target_layer_ids=ids), copied(drafter.model))


def turned(drafter: DFlash2Drafter) -> DFlash2Drafter:
    """Return a drafter that reads its hidden states in the other order."""
    config = drafter.config
    return drafter.changed(replace(config, target_layer_ids=config.target_layer_ids[::-1]), copied(drafter.model))


def other_visibility(config: DFlash2Config) -> list[Variant]:
    """Return other rules of what a block row sees."""
    causal = not config.causal[0]
    flipped = (causal,) * config.num_hidden_layers
    found = [
        Variant(
            "a causal block" if causal else "a block whose rows see each other",
            "visibility",
            f'config.json: "is_causal": {str(causal).lower()}',
            config_change(partial(replace, causal=flipped)),
        )
    ]
    if any(window is not None for window in config.windows):
        everything = (None,) * config.num_hidden_layers
        fix = "config.json: layer_types of full_attention"
        found.append(Variant("no window", "window", fix, config_change(partial(replace, windows=everything))))
        for window in WINDOWS:
            every = tuple(None if own is None else window for own in config.windows)
            if every != config.windows:
                fix = f'config.json: "sliding_window": {window}'
                change = config_change(partial(replace, windows=every))
                found.append(Variant(f"a window of {window}", "window", fix, change))
    return found


def other_inputs(config: DFlash2Config, target: Target) -> list[Variant]:
    """Return other mask tokens, and other sizes of what goes in and comes out."""
    found, own = [], config.mask_token_id
    size = target.vocab_size
    for token in sorted({0, 1, 2, 3, own - 1, own + 1, *range(size - SPARE, size)} - {own}):
        if 0 <= token < size:
            fix = f'config.json: "mask_token_id": {token}'
            change = config_change(partial(replace, mask_token_id=token))
            found.append(Variant(f"mask token {token}", "mask token", fix, change))
    scale, root = config.input_embedding_scale, float(config.hidden_size) ** 0.5
    for factor in (1.0, root, 1 / root):
        if abs(factor / scale - 1) > 0.01:
            fix = f'config.json: "input_embedding_scale": {factor:.6g}'
            change = model_change(partial(scale_embedding, by=factor / scale))
            found.append(Variant(f"embeddings scaled by {factor:.4g}", "embedding scale", fix, change))
    if config.selector_rank and config.output_multiplier != 1.0:
        change = config_change(partial(replace, output_multiplier=1.0))
        fix = 'config.json: "output_multiplier": 1.0'
        found.append(Variant("logits as they are", "output multiplier", fix, change))
    return found


def other_weights(model: DraftModel) -> list[Variant]:
    """Return weights that a conversion may have changed or mixed up."""
    found = [
        Variant(f"its norm weights {words}", "norms", fix, model_change(partial(shift_norms, by=by)))
        for by, (words, fix) in NORM_SHIFTS.items()
    ]
    fix = "exchange mlp.gate_proj.weight and mlp.up_proj.weight of all layers"
    found.append(Variant("gate and up exchanged", "feed-forward", fix, model_change(exchange_gates)))
    fix = "exchange hidden_norm.weight and norm.weight"
    found.append(Variant("its two outer norms exchanged", "outer norms", fix, model_change(exchange_outer_norms)))
    if "attention_conv" in model.layers[0]:
        for axis, words in ((0, "sides"), (1, "taps")):
            fix = f"turn the {words} of base_kernel and kernel_projection round"
            change = model_change(partial(turn_convolutions, axis=axis))
            found.append(Variant(f"{words} of the convolutions turned round", f"convolution {words}", fix, change))
    if "candidate_selector" in model:
        fix = "exchange predecessor_codebook and successor_codebook"
        found.append(Variant("codebooks exchanged", "codebooks", fix, model_change(exchange_codebooks)))
    return found


def config_change(change: Callable[[DFlash2Config], DFlash2Config]) -> Callable[[DFlash2Drafter], DFlash2Drafter]:
    """Return the change of a drafter that changes its configuration."""
    return lambda drafter: drafter.changed(change(drafter.config), copied(drafter.model))


def model_change(change: ModelChange) -> Callable[[DFlash2Drafter], DFlash2Drafter]:
    """Return the change of a drafter that changes a copy of its model."""

    def changed(drafter: DFlash2Drafter) -> DFlash2Drafter:
        model = copied(drafter.model)
        change(model)
        return drafter.changed(drafter.config, model)

    return changed


def copied(module: Module) -> Module:
    """Return a module with the same arrays, whose own modules may be changed."""
    other = copy.copy(module)
    for name, part in other.items():
        if isinstance(part, nn.Module):
            other[name] = copied(part)
        elif isinstance(part, list):
            other[name] = [copied(each) if isinstance(each, nn.Module) else each for each in part]
    return other


def set_rope(model: DraftModel, module: nn.Module) -> None:
    """Encode positions otherwise."""
    model._rope = module


def scale_embedding(model: DraftModel, by: float) -> None:
    """Scale embeddings by another factor."""
    model.embedding_scale *= by


def shift_norms(model: DraftModel, by: float) -> None:
    """Add a number to all norm weights."""
    weights = dict(tree_flatten(model.parameters()))
    norms = [(name, w + by) for name, w in weights.items() if name.endswith("norm.weight")]
    model.update(tree_unflatten(norms))


def exchange_gates(model: DraftModel) -> None:
    """Take gates for ups."""
    for layer in model.layers:
        layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


def exchange_outer_norms(model: DraftModel) -> None:
    """Norm features as the output, and the other way round."""
    model.hidden_norm, model.norm = model.norm, model.hidden_norm


def turn_convolutions(model: DraftModel, axis: int) -> None:
    """Turn an axis of [side, tap, group] round in all convolution kernels."""
    for layer in model.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            conv.base_kernel = turned_round(conv.base_kernel, axis)
            projection = conv.kernel_projection
            for name in projection.parameters():
                value = projection[name].reshape(*conv._shape, *projection[name].shape[1:])
                projection[name] = turned_round(value, axis).reshape(projection[name].shape)


def turned_round(x: mx.array, axis: int) -> mx.array:
    """Return an array with an axis in the other order."""
    return mx.take(x, mx.arange(x.shape[axis] - 1, -1, -1), axis=axis)


def exchange_codebooks(model: DraftModel) -> None:
    """Take predecessors for successors."""
    selector = model.candidate_selector
    books = selector.successor_codebook, selector.predecessor_codebook
    selector.predecessor_codebook, selector.successor_codebook = books
