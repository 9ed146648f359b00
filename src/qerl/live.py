"""The live panel of a run on a terminal, drawn with rich.

    step bar with elapsed and estimated time
    phase bar: rollout 96/128
    four blocks of figures, side by side where the terminal is wide: learning, completions, policy, speed
    one completion of the newest step with its prompt and reward
    the last warning

Text of a model or a data set is data: it is never read as markup, and what could steer a terminal (escape sequences,
direction overrides) is replaced. Colours are the terminal's own sixteen, so that light and dark themes both stay
readable. There is no thread: the panel is drawn when it is told something, at most REFRESHES_PER_SECOND times.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

REFRESHES_PER_SECOND = 8
BARS = "▁▂▃▄▅▆▇█"
WARNING_STYLE = "bold red"


class Figure(NamedTuple):
    """One row of a block."""

    label: str
    metrics: tuple[str, ...]
    """Names in metrics.jsonl; a row without any of them is left out, and so is a lacking one of several."""
    form: str
    """Format of each value."""
    curve: bool = False
    """Whether its course is drawn behind the value."""


BLOCKS: tuple[tuple[str, tuple[Figure, ...]], ...] = (
    (
        "learning",
        (
            Figure("reward", ("reward",), "{:.3f}", curve=True),
            Figure("accuracy", ("accuracy",), "{:.1%}", curve=True),
            Figure("held out", ("eval/accuracy",), "{:.1%}"),
            Figure("  greedy", ("eval/accuracy_greedy",), "{:.1%}"),
        ),
    ),
    (
        "completions",
        (
            Figure("same reward", ("frac_reward_zero_std",), "{:.0%} of groups"),
            Figure("cut off", ("completions/clipped_ratio",), "{:.1%}"),
            Figure("length", ("completions/mean_length",), "{:.0f} tokens", curve=True),
            Figure("no grade", ("ungraded",), "{:.0f}"),
        ),
    ),
    (
        "policy",
        (
            Figure("entropy", ("entropy",), "{:.3f}", curve=True),
            Figure("mismatch KL", ("mismatch_kl",), "{:.1e}", curve=True),
            Figure("noise sigma", ("noise/sigma",), "{:.1e}", curve=True),
            Figure("ratio clipped", ("clip_ratio/region_mean",), "{:.2%}"),
        ),
    ),
    (
        "speed",
        (
            Figure("sampling", ("tokens_per_second",), "{:,.0f} tok/s", curve=True),
            Figure("step", ("time/step",), "{:.1f} s"),
            Figure("learning rate", ("learning_rate",), "{:.1e}"),
            Figure("memory", ("memory/reserved", "memory/rss"), "{:.2f} GB"),
        ),
    ),
)


class LiveView:
    """A `display.View` for a terminal; `title` names the run."""

    def __init__(self, num_steps: int, title: str, stream: TextIO) -> None:
        self.console = Console(file=stream, highlight=False)
        self.num_steps = num_steps
        self.title = title
        self.started = time.monotonic()
        self.drawn = 0.0
        self.left: float | None = None
        self.now: tuple[str, int, int] | None = None
        self.metrics: dict[str, Any] = {"step": 0}
        self.evaluations: list[dict[str, Any]] = []
        """Metrics of the first and of the newest step with an evaluation."""
        self.course: dict[str, list[float]] = {}
        self.shown: dict[str, Any] | None = None
        self.warnings: list[str] = []
        # last: it asks for the panel at once
        self.live = Live(console=self.console, auto_refresh=False, get_renderable=self._panel, vertical_overflow="crop")

    def open(self) -> None:
        """Put the panel up."""
        self.started = time.monotonic()
        self.live.start(refresh=True)

    def close(self) -> None:
        """Draw the panel for the last time, and leave it on the screen."""
        self.now = None
        self.live.stop()

    def phase(self, name: str, done: int, total: int, left: float | None) -> None:
        """Move the phase's bar, unless it was moved a moment ago; another phase is shown at once, as it may last."""
        is_new = self.now is None or self.now[0] != name
        self.now, self.left = (name, done, total), left
        if is_new or time.monotonic() - self.drawn > 1 / REFRESHES_PER_SECOND:
            self._draw()

    def step(self, metrics: dict[str, Any], left: float | None) -> None:
        """Show a step's figures."""
        self.metrics, self.left, self.now = metrics, left, None
        for name, value in metrics.items():
            if value is not None and value == value:
                self.course[name] = [*self.course.get(name, [])[-99:], value]
        if "eval/accuracy" in metrics:
            self.evaluations = [*self.evaluations[:1], metrics]
        self._draw()

    def completion(self, record: dict[str, Any]) -> None:
        """Show this completion from the next drawing on."""
        self.shown = record

    def message(self, text: str) -> None:
        """Print a line above the panel."""
        self.console.print(Text(printable(text)))

    def warning(self, text: str) -> None:
        """Print it above the panel, and keep its first line inside."""
        self.warnings.append(printable(text).split("\n")[0])
        self.console.print(Text(printable(text), style=WARNING_STYLE))

    def _draw(self) -> None:
        self.drawn = time.monotonic()
        self.live.refresh()

    # ------------------------------------------------------------------ the panel, top to bottom

    def _panel(self) -> Panel:
        width = self.console.width - 4  # border and padding
        head: list[RenderableType] = [self._bars(), Text(), self._figures(width)]
        foot: list[RenderableType] = []
        if self.warnings:
            count = f" (the last of {len(self.warnings)})" if len(self.warnings) > 1 else ""
            foot = [Text(f"! {self.warnings[-1]}{count}", style=WARNING_STYLE, no_wrap=True, overflow="ellipsis")]
        if self.shown is not None:
            used = sum(len(self.console.render_lines(part, self.console.options.update(width=width))) for part in head)
            foot = [*self._reading(width, self.console.height - used - len(foot) - 3), *foot]
        title = Text(f"qerl · {printable(self.title)}" if self.title else "qerl", style="bold")
        return Panel(Group(*head, *foot), title=title, title_align="left", border_style="dim", padding=(0, 1))

    def _bars(self) -> Table:
        step = self.metrics["step"]
        times = [f"{clock(time.monotonic() - self.started)} gone"]
        if step < self.num_steps:
            times.append(f"{clock(self.left)} left" if self.left is not None else "left: not known yet")
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(no_wrap=True, min_width=22)
        table.add_column(ratio=1)
        table.add_column(no_wrap=True, justify="right", min_width=22)
        table.add_row(
            Text(f"step {step}/{self.num_steps}", style="bold"), _bar(step, self.num_steps), Text(" · ".join(times))
        )
        if self.now is None:
            table.add_row(Text("done" if step == self.num_steps else "", style="dim"), "", "")
        else:
            name, done, total = self.now
            table.add_row(Text(name, style="dim"), _bar(done, total), Text(f"{done}/{total}", style="dim"))
        return table

    def _figures(self, width: int) -> Table:
        columns = 4 if width >= 136 else 2 if width >= 64 else 1
        cell = width // columns - 3
        grid = Table.grid(padding=(0, 3, 0, 0))
        for _ in range(columns):
            grid.add_column(width=cell)
        blocks = [self._block(title, figures, cell) for title, figures in BLOCKS]
        for start in range(0, len(blocks), columns):
            grid.add_row(*blocks[start : start + columns])
        return grid

    def _block(self, title: str, figures: Sequence[Figure], width: int) -> Table:
        table = Table.grid(padding=(0, 1))
        table.add_column(width=13, style="dim", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_row(Text(title, style="bold not dim"), "")
        for figure in figures:
            value, curve = self._value(figure), Text()
            if figure.curve:
                room = width - 13 - 1 - len(value) - 2
                curve = Text("  " + sparkline(self.course.get(figure.metrics[0], []), min(room, 20)), style="cyan")
            table.add_row(figure.label, Text(value or "-") + curve)
        if self.console.height >= 30:  # room for an empty line between the blocks
            table.add_row("", "")
        return table

    def _value(self, figure: Figure) -> str:
        name = next((name for name in figure.metrics if self.metrics.get(name) is not None), figure.metrics[0])
        if name.startswith("eval/"):
            return self._evaluation(name, figure.form)
        value = self.metrics.get(name)
        if value is None or value != value:
            return ""
        return figure.form.format(value / 1e9 if name.startswith("memory/") else value)

    def _evaluation(self, name: str, form: str) -> str:
        """Where it started from, the newest evaluation, and @ its step."""
        values = [(row["step"], row[name]) for row in self.evaluations if row.get(name) is not None]
        if not values:
            return ""
        shown = " → ".join(form.format(value) for _, value in values)
        return f"{shown} @ {values[-1][0]}"

    def _reading(self, width: int, height: int) -> list[RenderableType]:
        """The completion to read, in at most `height` lines: all of a short one, head and end of a long one."""
        record = self.shown
        if record is None or height < 4:
            return []
        reward = "none" if record["reward"] is None else f"{record['reward']:.2f}"
        parts = ", ".join(f"{name} {'none' if v is None else f'{v:g}'}" for name, v in record["rewards"].items())
        heading = f"completion, step {record['step']} · reward {reward} ({parts}) · {record['tokens']} tokens"
        prompt = self._lines(record["prompt"], width, min(3, height // 4))
        text = self._lines(record["completion"] or "(empty)", width, min(12, height - 1 - len(prompt)))
        if record["finish_reason"] == "length":
            heading += ", cut off"
        return [
            Rule(Text(printable(heading)), align="left", style="dim"),
            *(Text.assemble(line, style="dim") for line in prompt),
            *text,
        ]

    def _lines(self, text: str, width: int, height: int) -> list[Text]:
        """The text wrapped to `width`; where it is too long for `height`, an ellipsis stands for its middle."""
        room = height * width  # no more than this can be shown of either end, so no more is wrapped
        if len(text) > 4 * room:
            text = f"{text[:room]}\n[…]\n{text[-room:]}"
        lines = list(Text(printable(text)).wrap(self.console, width))
        lines = [line for i, line in enumerate(lines) if line.plain.strip() or (i and lines[i - 1].plain.strip())]
        if len(lines) <= height:
            return lines
        tail = (height - 1) // 2
        return [*lines[: height - 1 - tail], Text("[…]", style="dim"), *lines[len(lines) - tail :]]


def sparkline(values: Sequence[float], width: int) -> str:
    """A line of block characters, at most `width` of them: the last values, or means of them where there are more."""
    if len(values) < 2 or width < 2:
        return ""
    count = min(len(values), width)
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(BARS[min(int((value - low) / span * len(BARS)), len(BARS) - 1)] for value in means)


def printable(text: str) -> str:
    """The text with nothing in it that could steer a terminal; line breaks stay, tabs become spaces."""
    return "".join(c if c.isprintable() or c == "\n" else " " if c.isspace() else "\ufffd" for c in text.expandtabs(4))


def _bar(done: int, total: int) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=done, style="dim", complete_style="green", finished_style="green")


def clock(seconds: float) -> str:
    """`1:30`, or `2:05:09` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
