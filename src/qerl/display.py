"""What a person sees while a run goes: one line a step; on a terminal, a line in between that says what is under way.

The display only prints. Everything it shows is in metrics.jsonl as well.
"""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

# name in metrics.jsonl, label, format; a metric that a step does not have is left out
COLUMNS = (
    ("reward", "reward", "{:.3f}"),
    ("accuracy", "acc", "{:.1%}"),
    ("entropy", "entropy", "{:.3f}"),
    ("noise/sigma", "sigma", "{:.1e}"),
    ("mismatch_kl", "mismatch", "{:.1e}"),
    ("frac_reward_zero_std", "same", "{:.0%}"),
    ("completions/clipped_ratio", "cut", "{:.0%}"),
    ("learning_rate", "lr", "{:.1e}"),
    ("eval/accuracy", "eval", "{:.1%}"),
    ("eval/accuracy_greedy", "eval greedy", "{:.1%}"),
)


class Display:
    """Plain lines on a stream."""

    def __init__(self, num_steps: int, stream: TextIO | None = None) -> None:
        self.num_steps = num_steps
        self.stream = stream or sys.stdout
        self.live = self.stream.isatty()
        self.started = time.monotonic()
        self.first_step: int | None = None
        self.status = ""

    def step(self, metrics: dict[str, Any]) -> None:
        """The line of a finished step."""
        step = metrics["step"]
        parts = [
            f"{label} {form.format(metrics[name])}" for name, label, form in COLUMNS if metrics.get(name) is not None
        ]
        if "time/step" in metrics:
            parts.append(f"{metrics['time/step']:.1f} s")
        self.message(f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}  " + "  ".join(parts) + self._eta(step))

    def phase(self, name: str, done: int, total: int) -> None:
        """What is under way; shown on a terminal only."""
        if self.live:
            self.status = f"  {name} {done}/{total}"
            self.stream.write(f"\r\x1b[K{self.status}")
            self.stream.flush()

    def message(self, text: str) -> None:
        """A line that stays."""
        if self.status:
            self.stream.write("\r\x1b[K")
            self.status = ""
        print(text, file=self.stream, flush=True)

    def _eta(self, step: int) -> str:
        if self.first_step is None:
            self.first_step, self.started = step, time.monotonic()
            return ""
        left = (time.monotonic() - self.started) / (step - self.first_step) * (self.num_steps - step)
        return f"  left {int(left) // 60}:{int(left) % 60:02d}" if left >= 1 else ""
