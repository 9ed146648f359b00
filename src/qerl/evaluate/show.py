"""What a person sees of an evaluation: progress with the time left, then tables; plain text without a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

import rich.progress
from rich.console import Console
from rich.table import Table

from qerl.engine import Progress
from qerl.evaluate.sampling import GRADINGS, Evaluation, Grading
from qerl.evaluate.statistics import Difference

SECONDS_BETWEEN_LINES = 20  # of progress, without a terminal
LEGEND = (
    "% [95 % interval] over problems: Wilson's where every problem scores 0 or 1,\n"
    "else 1.96 standard errors of the problems' scores"
)


def print_evaluations(
    title: str, evaluations: Mapping[str, Evaluation], grading: Grading, stream: TextIO | None = None
) -> None:
    """One policy's numbers, by mode: a row a measure, a column a grading (`grading` first), and what was counted."""
    gradings = sorted(GRADINGS, key=lambda g: g != grading)
    rows = []
    for mode, evaluation in evaluations.items():
        estimates = [evaluation.estimates(g) for g in gradings]
        for measure in estimates[0]:
            cells = [
                f"{100 * e[measure].value:.1f} [{100 * e[measure].low:.1f}, {100 * e[measure].high:.1f}]"
                for e in estimates
            ]
            rows.append([_name(mode, measure), *cells])
    out: TextIO = stream or sys.stdout
    print_table(title, ["", *(g.replace("_", "-") for g in gradings)], rows, out)
    for mode, evaluation in evaluations.items():
        ungraded = " / ".join(str(evaluation.num_ungraded(g)) for g in gradings)
        print(
            f"{mode}: {len(evaluation.attempts)} completions, {evaluation.num_truncated} truncated, "
            f"{ungraded} ungraded, {evaluation.mean_length_tokens:.1f} tokens on average",
            file=out,
        )


def print_differences(
    title: str, differences: Mapping[str, Mapping[str, Difference]], stream: TextIO | None = None
) -> None:
    """How one policy differs from another, by mode and measure."""
    rows = [
        [
            _name(mode, measure),
            f"{100 * d.value:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]",
            f"{d.num_better} / {d.num_worse} / {d.num_equal}",
            f"{d.p_value:.2g}",
        ]
        for mode, measures in differences.items()
        for measure, d in measures.items()
    ]
    print_table(title, ["", "change", "better / worse / equal", "sign test p"], rows, stream or sys.stdout)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    """A rich table on a terminal, else columns padded with spaces."""
    if stream.isatty():
        table = Table(title=title, title_justify="left")
        for i, name in enumerate(header):
            table.add_column(name, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row)
        Console(file=stream).print(table)
        return
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    print(f"\n{title}", file=stream)
    for row in (header, *rows):
        cells = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip(), file=stream)


def _name(mode: str, measure: str) -> str:
    return mode if mode == "greedy" else measure


@contextmanager
def show_progress(what: str, stream: TextIO | None = None) -> Generator[Progress]:
    """A function to call with (done, total): on a terminal a bar with the time left, elsewhere a line now and then."""
    out: TextIO = stream or sys.stderr
    if not out.isatty():
        yield _Lines(what, out)
        return
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("left"),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=Console(file=out), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """Progress as plain lines."""

    def __init__(self, what: str, stream: TextIO) -> None:
        self.what, self.stream = what, stream
        self.started = self.shown = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == 0 or now - self.shown < SECONDS_BETWEEN_LINES:
            return
        self.shown = now
        left = int((now - self.started) / done * (total - done))
        print(f"{self.what}: {done}/{total}, {left // 60}:{left % 60:02d} left", file=self.stream, flush=True)
