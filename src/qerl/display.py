"""What a person sees while a run goes: a live panel on a terminal, plain lines elsewhere, or nothing but the end.

    Display -> one view:  LiveView (live.py)    a terminal
                          _PlainView            a file or a pipe: a line a step
                          _QuietView            --quiet: warnings, and the line of the last step

The display only prints. Every number it shows is in metrics.jsonl as well, every completion in completions.jsonl.
It never breaks a run: what a view raises is reported once and the next simpler one takes over, from the panel to plain
lines to silence (a pipe whose reader has gone). No thread: a view draws when it is called, which is as often as a
completion ends. While the panel is up, warnings of this package's loggers go to it instead of through it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TextIO

from qerl.live import LiveView, clock


class Column(NamedTuple):
    """How one metric is shown."""

    metric: str
    """Name in metrics.jsonl."""
    label: str
    form: str
    """Format of the value."""
    meaning: str = ""
    """What the label stands for, where it does not say it itself."""

    def text(self, metrics: dict[str, Any]) -> str | None:
        """The value as shown; None for a metric that the step does not have."""
        value = metrics.get(self.metric)
        return None if value is None or value != value else self.form.format(value)


COLUMNS = (
    Column("reward", "reward", "{:.3f}"),
    Column("accuracy", "acc", "{:.0%}", "completions graded right"),
    Column("entropy", "entropy", "{:.2g}", "of the policy, nats a token"),
    Column("noise/sigma", "sigma", "{:.2g}", "of the noise in sampling"),
    Column("mismatch_kl", "mismatch", "{:.1e}", "KL of the policy that samples against the one that is trained"),
    Column("frac_reward_zero_std", "same", "{:.0%}", "groups whose rewards are all equal, which teach nothing"),
    Column("completions/clipped_ratio", "cut", "{:.0%}", "completions cut off at the length limit"),
    Column("eval/accuracy", "eval", "{:.1%}", "accuracy on held-out problems, sampled"),
    Column("eval/accuracy_greedy", "greedy", "{:.1%}", "the same, greedy"),
    Column("time/step", "", "{:.1f} s"),
)


class View(Protocol):
    """One way of showing a run; `left` is an estimate in seconds, None before there is one."""

    def open(self) -> None:
        """The loop begins."""
        ...

    def close(self) -> None:
        """The loop has ended, whatever ended it."""
        ...

    def phase(self, name: str, done: int, total: int, left: float | None) -> None:
        """What is under way."""
        ...

    def step(self, metrics: dict[str, Any], left: float | None) -> None:
        """A step is done."""
        ...

    def completion(self, record: dict[str, Any]) -> None:
        """One completion to read."""
        ...

    def message(self, text: str) -> None:
        """A line that stays."""
        ...

    def warning(self, text: str) -> None:
        """A line that stays and matters."""
        ...


class Display:
    """What the trainer tells about its run; a context manager around the loop. No method raises.

    `title` names the run. `stream` is where to print (default: the standard output).
    """

    def __init__(self, num_steps: int, *, title: str = "", quiet: bool = False, stream: TextIO | None = None) -> None:
        self.num_steps, self.quiet = num_steps, quiet
        self.stream = stream or sys.stdout
        self._view: View | None
        self._handler = _Handler(self)
        # The first and the last finished step of this process, and when. The first one itself is never in the pace: it
        # compiles kernels and captures graphs.
        self._ended: list[tuple[int, float]] = []
        if quiet:
            self._view = _QuietView(num_steps, self.stream)
        elif self.stream.isatty() and os.environ.get("TERM") != "dumb":
            self._view = LiveView(num_steps, title, self.stream)
        else:
            self._view = _PlainView(num_steps, self.stream)

    def __enter__(self) -> Display:
        if not isinstance(self._view, _PlainView):
            self._handler.attach()
        self._show("open")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show("close")
        self._handler.detach()

    def phase(self, name: str, done: int, total: int) -> None:
        """What is under way inside a step, and how far it is."""
        self._show("phase", name, done, total, self._left())

    def step(self, metrics: dict[str, Any]) -> None:
        """A finished step (0: the evaluation before training) with all its metrics."""
        if metrics["step"] > 0:
            self._ended = [*self._ended[:1], (metrics["step"], time.monotonic())]
        self._show("step", metrics, self._left())

    def completion(self, record: dict[str, Any]) -> None:
        """One completion of the step to read: a record of completions.jsonl."""
        self._show("completion", record)

    def message(self, text: str) -> None:
        """A line that stays."""
        self._show("message", text)

    def warning(self, text: str) -> None:
        """A line that stays, and that --quiet shows too."""
        self._show("warning", text)

    def _left(self) -> float | None:
        """Seconds to the last step at the pace so far, evaluations included."""
        if len(self._ended) < 2:
            return None
        (first_step, first), (step, last) = self._ended
        pace = (last - first) / (step - first_step)
        return max(0.0, pace * (self.num_steps - step) - (time.monotonic() - last))

    def _show(self, method: str, *arguments: Any) -> None:
        while self._view is not None:
            try:
                getattr(self._view, method)(*arguments)
                return
            except Exception as error:  # whatever it is, the run is worth more than its picture
                self._step_down(error)

    def _step_down(self, error: Exception) -> None:
        failed, self._view = self._view, None
        self._handler.detach()
        if failed is not None and not isinstance(failed, _PlainView):
            with suppress(Exception):
                failed.close()
            self._view = _PlainView(self.num_steps, self.stream)
        then = "plain lines from here on" if self._view else "no more output from here on"
        with suppress(Exception):
            print(f"the display failed ({type(error).__name__}: {error}); {then}", file=sys.stderr, flush=True)


class _PlainView:
    """A line a step, and before each label's first use what it stands for."""

    def __init__(self, num_steps: int, stream: TextIO) -> None:
        self.num_steps = num_steps
        self.stream = stream
        self.explained: set[str] = set()

    def open(self) -> None: ...
    def close(self) -> None: ...
    def phase(self, name: str, done: int, total: int, left: float | None) -> None: ...
    def completion(self, record: dict[str, Any]) -> None: ...

    def step(self, metrics: dict[str, Any], left: float | None) -> None:
        for column in COLUMNS:
            if column.meaning and column.label not in self.explained and column.text(metrics) is not None:
                self.explained.add(column.label)
                print(f"{column.label:>10}: {column.meaning}", file=self.stream)
        print(step_line(metrics, self.num_steps, left), file=self.stream, flush=True)

    def message(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    warning = message


class _QuietView(_PlainView):
    """Warnings, and the line of the last step at the end."""

    last_line = ""

    def step(self, metrics: dict[str, Any], left: float | None) -> None:
        self.last_line = step_line(metrics, self.num_steps, left=None)

    def message(self, text: str) -> None: ...

    def close(self) -> None:
        if self.last_line:
            print(self.last_line, file=self.stream, flush=True)


def step_line(metrics: dict[str, Any], num_steps: int, left: float | None) -> str:
    """The plain line of a step: `step 3/40  reward 0.359  acc 10.2%  ...  left 1:30`."""
    parts = [f"step {metrics['step']:>{len(str(num_steps))}}/{num_steps}"]
    parts += [f"{column.label} {text}".lstrip() for column in COLUMNS if (text := column.text(metrics)) is not None]
    if left is not None and left >= 1:
        parts.append(f"left {clock(left)}")
    return "  ".join(parts)


class _Handler(logging.Handler):
    """Brings warnings of this package to the display, where a line on stderr would run through the panel."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self.display = display
        self.logger = logging.getLogger("qerl")

    def emit(self, record: logging.LogRecord) -> None:
        self.display.warning(self.format(record))

    def attach(self) -> None:
        self.logger.addHandler(self)
        self.logger.propagate = False

    def detach(self) -> None:
        if self in self.logger.handlers:
            self.logger.removeHandler(self)
            self.logger.propagate = True


class ByteProgress:
    """Progress of what goes through a folder's bytes: amount, rate, time left. Called with (bytes done, bytes in all).

    On a terminal one line that is written over; elsewhere a line every ten seconds, and the last.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # Time and bytes of the first call: a resumed run begins in the middle.
        self._begun: tuple[float, int] | None = None
        self._shown = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Show it, now and then."""
        now, terminal = time.monotonic(), self._stream.isatty()
        self._begun = self._begun or (now, done)
        if done < total and now - self._shown < (0.2 if terminal else 10):
            return
        self._shown = now
        rate = (done - self._begun[1]) / max(now - self._begun[0], 1e-9)
        size, unit = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
        text = f"{done / size:.2f} of {total / size:.2f} {unit}"
        if rate:
            text += f", {rate / size:.2f} {unit}/s, {clock((total - done) / rate)} left"
        print(f"\r{text}\033[K" if terminal else text, end="" if terminal and done < total else "\n", file=self._stream)
        self._stream.flush()
