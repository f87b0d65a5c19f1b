"""The ways in which an MTP head may be wired other than its contract says."""

from collections.abc import Sequence
from dataclasses import replace

from mlx_spec.drafters.chain import ChainDrafter
from mlx_spec.drafters.mtp.head import MTPRows
from mlx_spec.diagnose.wiring import Measured, Wiring, measure_wirings, read_text
from mlx_spec.target import Target
from mlx_spec.target.layers import Norm


def measure(target: Target, drafter: ChainDrafter, tokens: Sequence[int]) -> Measured:
    """Measure a head as its contract wires it and in every way that differs from that in one point."""
    ids, taps, expected = read_text(target, tokens, (target.num_layers - 1, target.num_layers))
    rows, head = drafter.rows, drafter.head
    assert isinstance(rows, MTPRows)
    contract = rows.contract
    swapped = replace(rows, contract=replace(contract, hidden_first=not contract.hidden_first))
    tap, other = (taps[1], taps[0]) if contract.reads_normed else (taps[0], taps[1])
    stage = "before" if contract.reads_normed else "behind"
    ways = {
        f"the hidden state {stage} the final norm": Wiring(rows, other, head),
        "embedding and hidden state swapped": Wiring(swapped, tap, head),
        "its norm weights one larger": Wiring(shifted(rows, 1.0), tap, head),
        "its norm weights one smaller": Wiring(shifted(rows, -1.0), tap, head),
    }
    return measure_wirings(drafter, Wiring(rows, tap, head), ways, ids, expected, steps=1)


def shifted(rows: MTPRows, by: float) -> MTPRows:
    """Return a head whose norm weights are all larger by ``by``."""

    def other(norm: Norm) -> Norm:
        return Norm(norm.weight + by, norm.eps)

    qk_norm = rows.attention.qk_norm and (rows.attention.qk_norm[0] + by, rows.attention.qk_norm[1] + by)
    return replace(
        rows,
        norm_embedding=other(rows.norm_embedding),
        norm_hidden=other(rows.norm_hidden),
        input_norm=other(rows.input_norm),
        post_norm=other(rows.post_norm),
        norm=other(rows.norm),
        attention=replace(rows.attention, qk_norm=qk_norm),
    )
