"""Variants that all heads that draft in a chain have, whatever their kind."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from itertools import combinations
from typing import Any

import mlx.core as mx

from metal_kernels import Linear
from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.draft_head import DraftHead
from mlx_spec.drafters.variants import Variant, other_ropes, plain, with_rope
from mlx_spec.target import Target
from mlx_spec.target.families import Dense
from mlx_spec.target.layers import Attention, Norm

NORM_SHIFTS = {
    1.0: ("one larger", "add 1 to the norm weights: the checkpoint holds them less one"),
    -1.0: ("one smaller", "take 1 from the norm weights: they were made whole once too often"),
    -2.0: ("two smaller", "take 2 from the norm weights: they were made whole twice too often"),
}


def head_change(change: Callable[[Any], Any]) -> Callable[[ChainDrafter], ChainDrafter]:
    """Return the change of a drafter that changes its head's forward."""
    return lambda drafter: drafter.changed(forward=change(drafter.forward))


def shared_variants(drafter: ChainDrafter, target: Target, shift: Callable[..., Any]) -> list[Variant]:
    """Return what both MTP and EAGLE heads may mean otherwise: norm weights, positions, the feed-forward.

    shift: returns a forward whose norm weights are all larger by a number.
    """
    found = [
        Variant(f"its norm weights {words}", "norms", fix, head_change(partial(shift, by=by)), by > -2.0)
        for by, (words, fix) in NORM_SHIFTS.items()
    ]
    for (name, point, fix), module in other_ropes(drafter.forward.attention.rope, target).items():
        found.append(Variant(name, point, f"config.json: {fix}", head_change(partial(roped, module=module))))
    # A sublayer that was trained never makes drafts worse.
    fix = "compare q_proj, k_proj, v_proj and o_proj with the original: what they compute makes drafts worse"
    found.append(Variant("its attention left out", "attention", fix, head_change(without_attention)))
    if isinstance(getattr(drafter.forward, "feed_forward", None), Dense):
        fix = "compare gate_proj, up_proj and down_proj with the original: what they compute makes drafts worse"
        found.append(Variant("its feed-forward left out", "feed-forward", fix, head_change(without_feed_forward)))
        fix = "exchange mlp.gate_proj.weight and mlp.up_proj.weight"
        found.append(Variant("gate and up exchanged", "feed-forward", fix, head_change(gate_up_exchanged)))
    found += norms_exchanged(drafter.forward)
    if drafter.forward.width == target.hidden_size:
        fix = "leave lm_head.weight out: it is not the one that the head was trained with"
        change = partial(with_target_head, target=target)
        found.append(Variant("the target's output head", "output head", fix, change))
    if drafter.embed != target.embed:
        fix = "leave embed_tokens.weight out: it is not the one that the head was trained with"
        found.append(Variant("the target's embedding", "embedding", fix, lambda d: d.changed(embed=target.embed)))
    return found


def norms_exchanged(forward: Any) -> list[Variant]:
    """Return a head with any two of its norms exchanged, but those of embedding and hidden state."""
    norms = {each.name: getattr(forward, each.name) for each in fields(forward)}
    names = [name for name, norm in norms.items() if isinstance(norm, Norm)]
    found = []
    for one, other in combinations(names, 2):
        is_known = {one, other} in ({"norm_embedding", "norm_hidden"}, {"embedding_norm", "hidden_norm"})
        if is_known or norms[one].weight.shape != norms[other].weight.shape:
            continue
        change = head_change(partial(with_exchanged, one=one, other=other))
        fix = f"exchange the weights that became {one} and {other}"
        found.append(Variant(f"{one} and {other} exchanged", f"{one} and {other}", fix, change))
    return found


def with_exchanged(forward: Any, one: str, other: str) -> Any:
    """Return a head's forward with two of its parts exchanged."""
    return replace(forward, **{one: getattr(forward, other), other: getattr(forward, one)})


def with_ids(drafter: ChainDrafter, ids: mx.array) -> ChainDrafter:
    """Return a drafter whose draft tokens are others: [N] int32."""
    return drafter.changed(head=replace(drafter.head, ids=ids))


def with_target_head(drafter: ChainDrafter, target: Target) -> ChainDrafter:
    """Return a drafter that scores its draft tokens by the target's output head."""
    ids = drafter.head.ids
    scores = target.logits if ids is None else target.head_for(ids)
    return drafter.changed(head=DraftHead(scores, target.vocab_size if ids is None else ids.size, ids))


def roped(forward: Any, module: Any) -> Any:
    """Return a head's forward with another rotary encoding."""
    return replace(forward, attention=with_rope(forward.attention, module))


def gate_up_exchanged(forward: Any) -> Any:
    """Return a head's forward whose feed-forward takes gates for ups."""
    dense: Dense = forward.feed_forward
    if len(dense.gate_up) == 2:
        return replace(forward, feed_forward=Dense(dense.gate_up[::-1], dense.down))
    joined = plain(dense.gate_up[0])
    half = joined.size // 2
    parts = [
        replace(joined, weight=joined.weight[part], bias=None if joined.bias is None else joined.bias[part])
        for part in (slice(half, None), slice(half))
    ]
    return replace(forward, feed_forward=Dense(tuple(parts), dense.down))


def without_attention(forward: Any) -> Any:
    """Return a head's forward whose attention adds nothing."""
    return replace(forward, attention=replace(forward.attention, output=silent(forward.attention.output)))


def without_feed_forward(forward: Any) -> Any:
    """Return a head's forward whose feed-forward adds nothing."""
    dense: Dense = forward.feed_forward
    return replace(forward, feed_forward=Dense(dense.gate_up, silent(dense.down)))


def silent(linear: Linear) -> Linear:
    """Return a linear map whose outputs are zero."""
    own = plain(linear)
    return Linear(mx.zeros_like(own.weight))


def attention_shifted(attention: Attention, by: float) -> Attention:
    """Return an attention whose query and key norms are larger by a number."""
    norms = attention.qk_norm
    return attention if norms is None else replace(attention, qk_norm=(norms[0] + by, norms[1] + by))
