"""The most important panels of a run as one PNG, from its metrics.jsonl: `qerl plot RUN`."""

from __future__ import annotations

import math
from itertools import zip_longest
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from qerl.report.panels import PALETTE, PANELS, Panel, expand, running_mean
from qerl.report.runs import Run, read_runs

COLORS = [light for light, _ in PALETTE]
INK, SOFT, LINE = "#1c2430", "#5c6776", "#dde2e8"  # the page's, on light


def plot_run(output_dir: Path) -> Path:
    """Write <output_dir>/plot.png; returns its path. ValueError when the folder holds no metrics."""
    (run,) = read_runs([output_dir])
    pictured = [panel for panel in PANELS if panel.picture]
    panels = [panel for panel in pictured if expand(panel.curves, run.metrics)] or pictured
    columns = 3
    rows = math.ceil(len(panels) / columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(13, 3.1 * rows), squeeze=False)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    for axis, panel in zip_longest(axes.flat, panels):
        if panel is None:
            axis.remove()
        else:
            _draw(axis, panel, run)
    path = output_dir / "plot.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _draw(axis: Axes, panel: Panel, run: Run) -> None:
    curves = expand(panel.curves, run.metrics)
    for curve, color in zip(curves, COLORS, strict=False):
        steps, values = run.series(curve.metric, panel.scale)
        heights = [math.nan if value is None else value for value in values]
        means = running_mean(values) if panel.smooth and not curve.points else None
        if means:
            axis.plot(steps, heights, color=color, linewidth=0.8, alpha=0.45)
            heights = [math.nan if mean is None else mean for mean in means]
        style = "o-" if curve.points or len(steps) < 3 else ":" if curve.dashed else "-"
        axis.plot(steps, heights, style, color=color, label=curve.label, linewidth=2, markersize=5)
        if curve.low in run.metrics and curve.high in run.metrics:
            ends = [run.series(end, panel.scale)[1] for end in (curve.low, curve.high)]
            low, high = ([math.nan if value is None else value for value in end] for end in ends)
            axis.vlines(steps, low, high, color=color, linewidth=1.2)
    dress(axis, panel.title, panel.unit)
    axis.set_xlim(-0.02 * max(run.step, 1), 1.02 * max(run.step, 1))
    axis.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    if panel.percent:
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.set_ylim(bottom=0)
    positive = [value for curve in curves for value in run.values(curve.metric) if value > 0]
    if panel.logarithmic and positive:
        scale_by_span(axis, max(positive) / min(positive))
    if not curves:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color=SOFT, fontsize=9)
    if len(curves) > 1:
        axis.legend(fontsize=9, frameon=False, labelcolor=SOFT)


def scale_by_span(axis: Axes, span: float) -> None:
    """A logarithmic axis from a decade on; within one, its labels would be too few or run into each other."""
    if span < 10:
        axis.yaxis.set_major_formatter("{x:.3g}")
        return
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if span < 1000 else (1,)))
    axis.yaxis.set_major_formatter("{x:.0e}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def dress(axis: Axes, title: str, unit: str) -> None:
    """Title, unit, grid and ticks of a panel, in the page's style."""
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    if unit:
        axis.set_ylabel(unit, fontsize=9, color=SOFT)
    axis.grid(which="both", color=LINE, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(which="both", labelsize=9, labelcolor=SOFT, length=0)
    axis.spines[:].set_visible(False)
