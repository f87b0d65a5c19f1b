"""The ways in which an EAGLE head may be wired other than its configuration says, or is taken to say."""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.draft_head import DraftHead
from mlx_spec.drafters.eagle.head import EagleRows
from mlx_spec.diagnose.wiring import Measured, Wiring, measure_wirings, read_text
from mlx_spec.target import Target

# What a chain goes on with only shows in its second draft.
STEPS = 2


def measure(target: Target, drafter: ChainDrafter, tokens: Sequence[int]) -> Measured:
    """Measure a head as its contract wires it and in every way that differs from that in one point."""
    rows, head = drafter.rows, drafter.head
    assert isinstance(rows, EagleRows)
    states = other_states(drafter.taps, target.num_layers)
    needed = sorted({tap for taps in (drafter.taps, *states.values()) for tap in taps})
    ids, read, expected = read_text(target, tokens, needed)
    features = dict(zip(needed, read, strict=True))

    def tapped(taps: Sequence[int]) -> mx.array:
        return mx.concatenate([features[tap] for tap in taps], axis=-1)

    seen = tapped(drafter.taps)
    ways = {
        **{name: Wiring(rows, tapped(taps), head) for name, taps in states.items()},
        **{name: Wiring(other, seen, head) for name, other in other_rows(rows).items()},
        **{name: Wiring(rows, seen, other) for name, other in other_heads(rows, head).items()},
    }
    return measure_wirings(drafter, Wiring(rows, seen, head), ways, ids, expected, STEPS)


def other_states(taps: tuple[int, ...], target_layers: int) -> dict[str, tuple[int, ...]]:
    """Return hidden states that may be meant instead: those one layer lower and higher, where there are any."""
    if taps == (target_layers,):
        return {"the hidden state before the final norm": (target_layers - 1,)}
    moved = {
        "hidden states one layer lower": tuple(tap - 1 for tap in taps),
        "hidden states one layer higher": tuple(tap + 1 for tap in taps),
    }
    return {name: each for name, each in moved.items() if min(each) >= 0 and max(each) < target_layers}


def other_rows(rows: EagleRows) -> dict[str, EagleRows]:
    """Return the head with its norms elsewhere."""
    contract, ways = rows.contract, dict[str, EagleRows]()
    if contract.fused:
        residual = not contract.norm_before_residual
        other = replace(contract, norm_before_residual=residual)
        ways[f"norm_before_residual {str(residual).lower()}"] = replace(rows, contract=other)
    if rows.norm is not None:
        side = "before" if contract.norm_output else "behind"
        other = replace(contract, norm_output=not contract.norm_output)
        ways[f"chains that go on with its output {side} the norm"] = replace(rows, contract=other)
    return ways


def other_heads(rows: EagleRows, head: DraftHead) -> dict[str, DraftHead]:
    """Return the output head with what the checkpoint holds as offsets read as the tokens themselves."""
    if not rows.contract.fused or head.ids is None:
        return {}
    return {"d2t read as ids of the target": replace(head, ids=head.ids - mx.arange(head.size))}
