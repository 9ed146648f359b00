"""What happened to weights, as tables: what `qerl export` prints."""

from __future__ import annotations

import math
import sys
from typing import TextIO

from qerl.evaluate.show import print_table
from qerl.export import Export, Rounding

LITTLE = 0.5
"""Share of the change below which an export is warned of."""

WORST = 5
"""Layers that are listed; the folder's own record has all of them."""


def print_export(export: Export, stream: TextIO | None = None) -> None:
    """What was written, and what rounding has cost, over all layers and in the worst."""
    out = stream or sys.stdout
    step = "" if export.trained.step is None else f" (checkpoint of step {export.trained.step})"
    print(f"{export.kind}: {export.folder}, from {export.trained.folder}{step} over {export.base}", file=out)
    if export.total is None:
        return
    changed = [layer for layer in export.layers if layer.change_kept is not None]
    worst = sorted(changed or export.layers, key=lambda layer: (layer.change_snr_db or 0.0, layer.sqnr_db))[:WORST]
    rows = [[r.name, decibels(r.sqnr_db), decibels(r.change_snr_db), _share(r)] for r in (export.total, *worst)]
    header = ["weight", "SQNR dB", "change / error dB", "change kept"]
    print_table(f"{len(export.layers)} weights together, and the worst of them", header, rows, out)
    if export.total.change_kept is not None and export.total.change_kept < LITTLE:
        print(
            f"Rounding took {1 - export.total.change_kept:.0%} of what was learned: most weights fell back to what "
            "they were before training. Use --merged or --adapter.",
            file=out,
        )


def decibels(value: float | None) -> str:
    """One decimal; a word where there is no error at all."""
    return "-" if value is None else "exact" if value == math.inf else f"{value:.1f}"


def _share(rounding: Rounding) -> str:
    return "-" if rounding.change_kept is None else f"{rounding.change_kept:.1%}"
