"""The ways in which an MTP head may be wired other than its spec states."""

from dataclasses import replace

from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.mtp.head import MTPForward
from mlx_spec.drafters.wiring import Wiring, Wirings
from mlx_spec.target.layers import Norm


def other_wirings(drafter: ChainDrafter, target_layers: int) -> Wirings:
    """Return a head's wiring, and every one that differs from it in one point.

    target_layers: of the target.
    """
    forward, layer_ids, head = drafter.forward, drafter.target_layer_ids, drafter.head
    assert isinstance(forward, MTPForward)
    spec = forward.spec
    swapped = replace(forward, spec=replace(spec, hidden_first=not spec.hidden_first))
    stage, other = ("before", target_layers - 1) if spec.reads_normed else ("after", target_layers)
    others = {
        f"the hidden state {stage} the final norm": Wiring(forward, (other,), head),
        "embedding and hidden state swapped": Wiring(swapped, layer_ids, head),
        "its norm weights one larger": Wiring(shifted(forward, 1.0), layer_ids, head),
        "its norm weights one smaller": Wiring(shifted(forward, -1.0), layer_ids, head),
    }
    return Wirings(Wiring(forward, layer_ids, head), others, drafter.embed, steps=1)


def shifted(forward: MTPForward, by: float) -> MTPForward:
    """Return a head whose norm weights are all larger by ``by``."""

    def other(norm: Norm) -> Norm:
        return Norm(norm.weight + by, norm.eps)

    qk_norm = forward.attention.qk_norm and (forward.attention.qk_norm[0] + by, forward.attention.qk_norm[1] + by)
    return replace(
        forward,
        norm_embedding=other(forward.norm_embedding),
        norm_hidden=other(forward.norm_hidden),
        input_norm=other(forward.input_norm),
        post_norm=other(forward.post_norm),
        norm=other(forward.norm),
        attention=replace(forward.attention, qk_norm=qk_norm),
    )
