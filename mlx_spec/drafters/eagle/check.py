"""The ways in which an EAGLE head may be wired other than its configuration says, or is taken to say."""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.eagle.head import EagleRows
from mlx_spec.drafters.wiring import Measured, Wiring, measure_wirings, read_text
from mlx_spec.target import Target

# Where a chain goes on with another hidden state, only its second draft shows it.
STEPS = 2


def measure(target: Target, drafter: ChainDrafter, tokens: Sequence[int]) -> Measured:
    """Measure a head as its contract wires it and in every way that differs from that in one point."""
    rows, head, declared = drafter.rows, drafter.head, drafter.taps
    assert isinstance(rows, EagleRows)
    last, contract = target.num_layers, rows.contract
    sets = {f"hidden states one layer {where}": moved for where, moved in neighbours(declared, last).items()}
    needed = sorted({tap for taps in (declared, *sets.values()) for tap in taps})
    ids, read, expected = read_text(target, tokens, needed)
    features = dict(zip(needed, read, strict=True))

    def tapped(taps: Sequence[int]) -> mx.array:
        return mx.concatenate([features[tap] for tap in taps], axis=-1)

    seen = tapped(declared)
    ways = {name: Wiring(rows, tapped(taps), head) for name, taps in sets.items()}
    if contract.fused:
        residual, output = not contract.norm_before_residual, not contract.norm_output
        others = {
            f"norm_before_residual {str(residual).lower()}": replace(contract, norm_before_residual=residual)
        }
        if rows.norm is not None:
            others[f"norm_output {str(output).lower()}"] = replace(contract, norm_output=output)
        ways |= {name: Wiring(replace(rows, contract=other), seen, head) for name, other in others.items()}
    if head.ids is not None and (offsets := head.ids - mx.arange(head.size)).min() >= 0:
        ways["d2t as ids of the target"] = Wiring(rows, seen, replace(head, ids=offsets))
    return measure_wirings(drafter, Wiring(rows, seen, head), ways, ids, expected, STEPS)


def neighbours(taps: tuple[int, ...], target_layers: int) -> dict[str, tuple[int, ...]]:
    """Return the same hidden states counted one layer lower and higher, where the target has these.

    A head that reads the last one alone has one neighbour, the last before the final norm.
    """
    if taps == (target_layers,):
        return {"lower": (target_layers - 1,)}
    moved = {"lower": tuple(tap - 1 for tap in taps), "higher": tuple(tap + 1 for tap in taps)}
    return {where: each for where, each in moved.items() if min(each) >= 0 and max(each) < target_layers}
