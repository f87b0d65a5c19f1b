"""A picture of a probe: acceptance and ranks by draft position."""

from pathlib import Path

from mlx_spec.diagnose.probe import Probe
from mlx_spec.diagnose.verdict import Verdict
from mlx_spec.errors import RequestError


def check_plots() -> None:
    """Raise RequestError where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RequestError("--plot needs matplotlib: pip install 'mlx-spec[plots]'.") from None


def save_plot(probe: Probe, verdict: Verdict, title: str, path: Path) -> None:
    """Write a PNG. Raises RequestError where nothing was measured or matplotlib is missing."""
    check_plots()
    if not probe.positions:
        raise RequestError("There is nothing to plot: no position was measured.")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    at = range(1, len(probe.positions) + 1)
    for kind, hits in probe.of_kinds().items():
        left.plot(at, hits.accepted.mean(axis=0), alpha=0.5, label=kind)
    left.plot(at, [each.accepted for each in probe.positions], "k-o", label="all")
    left.plot(at, [each.conditional for each in probe.positions], "k--", label="all, conditional")
    left.set(xlabel="draft", ylabel="accepted", ylim=(0, 1))
    left.legend(fontsize="small")
    for label, shares in (
        ("right token first", [each.in_first for each in probe.positions]),
        ("among the first 16", [each.in_16 for each in probe.positions]),
        ("among the candidates", [each.candidates for each in probe.positions]),
    ):
        right.plot(at, shares, "-o", label=label)
    right.set(xlabel="draft", ylabel="share of positions", ylim=(0, 1), title="rank of the right token")
    right.legend(fontsize="small")
    figure.suptitle(f"{title}: {verdict.status}{', ' + verdict.cause if verdict.cause else ''}", fontsize="medium")
    figure.savefig(path, format="png", dpi=110)
