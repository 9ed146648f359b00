"""What `qerl inspect` found, as tables, JSON and a plot."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from qerl.evaluate.show import print_table
from qerl.inspection.text import MEASURES, TextComparison
from qerl.inspection.weights import WeightComparison, sum_distortions
from qerl.report.panels import running_mean
from qerl.report.plot import COLORS, SOFT, dress
from qerl.report.weights import decibels

LABELS = {
    "kl": "KL nats",
    "agreement": "top-1 agreement",
    "entropy": "entropy",
    "reference_entropy": "bf16 entropy",
    "nll": "nll",
    "reference_nll": "bf16 nll",
}


def print_inspection(
    weights: WeightComparison, text: TextComparison | None, *, worst: int, stream: TextIO | None = None
) -> None:
    """SQNR by kind of layer and of the worst layers; measures on the text by position."""
    out = stream or sys.stdout
    print(f"{weights.model} ({weights.format}, {weights.bits:.2f} bits a weight) against {weights.reference}", file=out)
    rows = []
    for kind, layers in {"all": weights.layers, **weights.by_kind}.items():
        each = [layer.distortion.sqnr_db for layer in layers]
        pooled = sum_distortions(layers).sqnr_db
        rows.append([kind, str(len(layers)), decibels(pooled), decibels(min(each)), decibels(max(each))])
    print_table("SQNR in dB, by kind of layer", ["", "layers", "together", "lowest", "highest"], rows, out)
    if weights.worst:
        found = weights.worst[:worst]
        rows = [[layer.name, f"{layer.rows} x {layer.columns}", decibels(layer.distortion.sqnr_db)] for layer in found]
        print_table("the worst layers", ["", "size", "SQNR dB"], rows, out)
    if weights.others:
        few = ", ".join(weights.others[:3]) + (", ..." if len(weights.others) > 3 else "")
        print(f"\n{len(weights.others)} other tensors differ too ({few}): was one made of the other?", file=out)
    if text is not None:
        rows = [["all", *(_number(text.mean[m], m) for m in MEASURES)]]
        for first, last in _ranges(len(text.by_position["kl"])):
            values = [text.by_position[m][first : last + 1] for m in MEASURES]
            cells = [_number(fmean(v), m) if v else "-" for v, m in zip(values, MEASURES, strict=True)]
            rows.append([f"{first}-{last}" if last > first else str(first), *cells])
        title = f"{text.file}: {text.num_tokens} tokens in {text.num_windows} windows, by position"
        print_table(title, ["position", *LABELS.values()], rows, out)


def as_json(weights: WeightComparison, text: TextComparison | None) -> dict[str, Any]:
    """All of it as plain values; null where nothing is lost (an SQNR without end)."""
    found: dict[str, Any] = {
        "model": str(weights.model),
        "against": str(weights.reference),
        "format": weights.format,
        "bits": weights.bits,
        "sqnr_db": _finite(weights.total.sqnr_db),
        "layers": [
            {
                "name": layer.name,
                "rows": layer.rows,
                "columns": layer.columns,
                "bits": layer.bits,
                "sqnr_db": _finite(layer.distortion.sqnr_db),
            }
            for layer in weights.layers
        ],
        "other_tensors_that_differ": weights.others,
    }
    if text is not None:
        found["text"] = {
            "file": str(text.file),
            "windows": text.num_windows,
            "tokens": text.num_tokens,
            "mean": text.mean,
            "by_position": text.by_position,
        }
    return found


def write_json(path: Path, weights: WeightComparison, text: TextComparison | None) -> None:
    """Write `as_json`."""
    path.write_text(json.dumps(as_json(weights, text), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def plot_inspection(path: Path, weights: WeightComparison, text: TextComparison | None) -> None:
    """SQNR of every layer by depth; with text, KL, entropies and agreement by position."""
    count = 1 if text is None else 4
    rows, columns = math.ceil(count / 2), min(count, 2)
    figure, axes = pyplot.subplots(rows, columns, figsize=(6.5 * columns, 3.4 * rows), squeeze=False)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    sqnr, *others = axes.flat
    for i, (kind, layers) in enumerate(weights.by_kind.items()):
        points = [(_depth(layer.name), layer.distortion.sqnr_db) for layer in layers]
        finite = [(depth, value) for depth, value in points if math.isfinite(value)]
        if finite:
            style = "o-" if i < len(COLORS) else "s--"
            color = COLORS[i % len(COLORS)]
            sqnr.plot(*zip(*finite, strict=True), style, color=color, label=kind, markersize=3, linewidth=1)
    _finish(sqnr, f"SQNR of the weights, {weights.format}", "dB", "layer")
    if text is not None:
        panels = (
            ("KL(bf16 || model)", "nats a token", ("kl",)),
            ("entropy", "nats a token", ("entropy", "reference_entropy")),
            ("top-1 agreement", "", ("agreement",)),
        )
        for axis, (title, unit, measures) in zip(others, panels, strict=True):
            for color, measure in zip(COLORS, measures, strict=False):
                _draw_positions(axis, text.by_position[measure], color, LABELS[measure])
            _finish(axis, title, unit, "position")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _finish(axis: Axes, title: str, unit: str, along: str) -> None:
    dress(axis, title, unit)
    axis.set_xlabel(along, fontsize=9, color=SOFT)
    axis.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    if len(axis.get_legend_handles_labels()[1]) > 1:
        axis.legend(fontsize=8, frameon=False, labelcolor=SOFT, ncols=2)


def _draw_positions(axis: Axes, values: list[float], color: str, label: str) -> None:
    means = [value for value in running_mean(list(values)) or [] if value is not None]
    if means:
        axis.plot(values, color=color, linewidth=0.6, alpha=0.35)
    axis.plot(means or values, color=color, linewidth=2, label=label)


def _ranges(length: int) -> list[tuple[int, int]]:
    """0, 1, 2-3, 4-7, ... up to the last position."""
    starts = [0, *(1 << i for i in range(length.bit_length()) if 1 << i < length)]
    return [(first, min(last, length) - 1) for first, last in zip(starts, [*starts[1:], length], strict=True)]


def _depth(name: str) -> int:
    return int(re.findall(r"\.(\d+)\.", name)[0])


def _number(value: float, measure: str) -> str:
    return f"{value:.1%}" if measure == "agreement" else f"{value:.4f}" if measure == "kl" else f"{value:.3f}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
