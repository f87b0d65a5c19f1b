"""The ways in which an EAGLE head may be wired other than its configuration states."""

from dataclasses import replace

import mlx.core as mx

from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.draft_head import DraftHead
from mlx_spec.drafters.eagle.head import EagleForward
from mlx_spec.drafters.wiring import Wiring, Wirings

# What a chain goes on with shows in its second draft only.
STEPS = 2


def other_wirings(drafter: ChainDrafter, target_layers: int) -> Wirings:
    """Return a head's wiring, and every one that differs from it in one point.

    target_layers: of the target.
    """
    forward, layer_ids, head = drafter.forward, drafter.target_layer_ids, drafter.head
    assert isinstance(forward, EagleForward)
    others = {
        **{name: Wiring(forward, ids, head) for name, ids in other_states(layer_ids, target_layers).items()},
        **{name: Wiring(other, layer_ids, head) for name, other in other_forwards(forward).items()},
        **{name: Wiring(forward, layer_ids, other) for name, other in other_heads(forward, head).items()},
    }
    return Wirings(Wiring(forward, layer_ids, head), others, drafter.embed, STEPS)


def other_states(layer_ids: tuple[int, ...], target_layers: int) -> dict[str, tuple[int, ...]]:
    """Return hidden states that may be meant instead: those one layer lower and higher, where there are any."""
    if layer_ids == (target_layers,):
        return {"the hidden state before the final norm": (target_layers - 1,)}
    moved = {
        "hidden states one layer lower": tuple(layer - 1 for layer in layer_ids),
        "hidden states one layer higher": tuple(layer + 1 for layer in layer_ids),
    }
    return {name: ids for name, ids in moved.items() if min(ids) >= 0 and max(ids) < target_layers}


def other_forwards(forward: EagleForward) -> dict[str, EagleForward]:
    """Return the head with its norms elsewhere."""
    spec, others = forward.spec, dict[str, EagleForward]()
    if spec.fused:
        residual = not spec.norm_before_residual
        other = replace(spec, norm_before_residual=residual)
        others[f"norm_before_residual {str(residual).lower()}"] = replace(forward, spec=other)
    if forward.norm is not None:
        side = "before" if spec.norm_output else "after"
        other = replace(spec, norm_output=not spec.norm_output)
        others[f"chains that go on with its output {side} the norm"] = replace(forward, spec=other)
    return others


def other_heads(forward: EagleForward, head: DraftHead) -> dict[str, DraftHead]:
    """Return the output head with what the checkpoint holds as offsets read as the tokens themselves."""
    if not forward.spec.fused or head.ids is None:
        return {}
    return {"d2t read as ids of the target": replace(head, ids=head.ids - mx.arange(head.size))}
