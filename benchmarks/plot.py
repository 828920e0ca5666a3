"""One log-log picture a sweep."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness import Curve


def draw(curve: Curve, header: str, path: Path) -> None:
    """Draw the curve to ``path``: an SVG whose bytes depend on the figures alone."""
    import matplotlib

    matplotlib.rcParams.update({"svg.hashsalt": "rope-ops", "svg.fonttype": "none"})
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, points in curve.series.items():
        ours = name.startswith("rope_ops")
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=2.2 if ours else 1.2, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel=curve.x, ylabel="us", title=curve.title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    figure.text(0.995, 0.002, header, ha="right", fontsize=4, alpha=0.7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
