"""The contracts that an EAGLE head may mean other than its configuration states."""

from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.chain_variants import attention_shifted, head_change, shared_variants, with_ids
from mlx_spec.drafters.eagle.head import EagleForward
from mlx_spec.drafters.variants import Variant, halves_swapped, shifted, with_inputs
from mlx_spec.target import Target
from mlx_spec.target.layers import Norm

IDS = "eagle_aux_hidden_state_layer_ids"


def variants(drafter: ChainDrafter, target: Target) -> list[Variant]:
    """Return every contract that differs from a head's own in one point."""
    forward = drafter.forward
    assert isinstance(forward, EagleForward)
    own = [
        *other_states(drafter.target_layer_ids, target.num_layers),
        *other_norms(forward),
        *other_orders(forward),
        *other_vocabulary(drafter),
    ]
    return own + shared_variants(drafter, target, with_norms_shifted)


def other_states(layer_ids: tuple[int, ...], target_layers: int) -> list[Variant]:
    """Return hidden states that may be meant instead: one layer lower and higher, or in the other order."""
    found = []
    if layer_ids == (target_layers,):
        name, fix = "the hidden state before the final norm", "the last layer's output in place of the normed one"
        found.append(Variant(name, "hidden states", fix, partial(moved, by=-1), at_load=True))
    else:
        for by, side in ((-1, "lower"), (1, "higher")):
            if min(layer_ids) + by >= 0 and max(layer_ids) + by < target_layers:
                fix = f"config.json: every id of {IDS} {abs(by)} {side}"
                name = f"hidden states one layer {side}"
                found.append(Variant(name, "hidden states", fix, partial(moved, by=by), at_load=True))
    if len(layer_ids) > 1:
        fix = f"config.json: {IDS} in the order in which fc takes them, last first"
        found.append(Variant("hidden states in the other order", "order of states", fix, turned))
    return found


def moved(drafter: ChainDrafter, by: int) -> ChainDrafter:
    """Return a drafter that reads other layers."""
    return drafter.changed(target_layer_ids=tuple(layer + by for layer in drafter.target_layer_ids))


def turned(drafter: ChainDrafter) -> ChainDrafter:
    """Return a drafter that reads its hidden states in the other order."""
    return drafter.changed(target_layer_ids=drafter.target_layer_ids[::-1])


def other_norms(forward: EagleForward) -> list[Variant]:
    """Return the head with its norms elsewhere."""
    spec, found = forward.spec, []
    if spec.fused:
        residual = not spec.norm_before_residual
        value = str(residual).lower()
        change = head_change(lambda f: replace(f, spec=replace(f.spec, norm_before_residual=residual)))
        name, fix = f"norm_before_residual {value}", f'config.json: "norm_before_residual": {value}'
        found.append(Variant(name, "residual", fix, change, at_load=True))
        exchanged = head_change(lambda f: replace(f, embedding_norm=f.hidden_norm, hidden_norm=f.embedding_norm))
        fix = "exchange layers.0.input_layernorm.weight and layers.0.hidden_norm.weight"
        found.append(Variant("norms of embedding and hidden state exchanged", "input norms", fix, exchanged))
    if forward.norm is not None:
        side, value = ("before", "false") if spec.norm_output else ("after", "true")
        change = head_change(lambda f: replace(f, spec=replace(f.spec, norm_output=not f.spec.norm_output)))
        name = f"chains that go on with its output {side} the norm"
        found.append(Variant(name, "feedback", f'config.json: "norm_output": {value}', change, at_load=True))
    return found


def other_orders(forward: EagleForward) -> list[Variant]:
    """Return the head with embedding and hidden state in the other order."""
    change = head_change(order_swapped)
    fix = f"exchange the halves of the inputs of {'q_proj, k_proj and v_proj' if forward.spec.fused else 'fc'}"
    return [Variant("embedding and hidden state swapped", "order", fix, change)]


def order_swapped(forward: EagleForward) -> EagleForward:
    """Return a head whose first projections take embedding and hidden state in the other order."""
    order = halves_swapped(2 * forward.width)
    if forward.spec.fused:
        qkv = tuple(with_inputs(linear, order) for linear in forward.attention.qkv)
        return replace(forward, attention=replace(forward.attention, qkv=qkv))
    assert forward.fc is not None
    return replace(forward, fc=with_inputs(forward.fc, order))


def other_vocabulary(drafter: ChainDrafter) -> list[Variant]:
    """Return the head with what the checkpoint holds as offsets read as the tokens themselves."""
    forward, head = drafter.forward, drafter.head
    assert isinstance(forward, EagleForward)
    if not forward.spec.fused or head.ids is None:
        return []
    ids, fix = head.ids - mx.arange(head.size), "d2t holds ids: take 0, 1, 2, ... from them"
    change = partial(with_ids, ids=ids)
    return [Variant("d2t read as ids of the target", "vocabulary", fix, change, at_load=True)]


def with_norms_shifted(forward: EagleForward, by: float) -> EagleForward:
    """Return a head whose norm weights are all larger by ``by``."""

    def other(norm: Norm | None) -> Norm | None:
        return None if norm is None else shifted(norm, by)

    return replace(
        forward,
        all_norm=other(forward.all_norm),
        each_norm=tuple(shifted(norm, by) for norm in forward.each_norm),
        embedding_norm=other(forward.embedding_norm),
        hidden_norm=other(forward.hidden_norm),
        post_norm=shifted(forward.post_norm, by),
        norm=other(forward.norm),
        attention=attention_shifted(forward.attention, by),
    )
