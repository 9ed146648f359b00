"""A run as the report sees it: its rows, what it was, its headline figures.

    read_runs([folder, ...]) -> [Run]; run.series("reward") -> steps, values; run.headline() -> [Headline]

A metric that a step lacks, or that was no number there, is a gap; a folder without run.json (older than it, or copied
by hand) has curves all the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from qerl.live import clock
from qerl.metrics import constant_since
from qerl.rl.log import read_metrics, read_run


class Headline(NamedTuple):
    """One figure to read first."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Run:
    """What one output_dir holds, completions left out."""

    name: str
    """The folder's name, with its parent's where two runs would share it."""
    folder: Path
    rows: list[dict[str, Any]]
    """metrics.jsonl, by step."""
    config: dict[str, Any]
    """Nested as in run.json; empty when unknown."""
    versions: dict[str, str]
    device: str

    @cached_property
    def metrics(self) -> set[str]:
        """Names that have a value at some step."""
        return {name for row in self.rows for name, value in row.items() if value is not None}

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def num_steps(self) -> int | None:
        """Steps that were asked for; None when unknown."""
        return self.config.get("steps")

    @property
    def finished(self) -> bool:
        """Whether it reached its last step, as far as that is known."""
        return self.num_steps is None or self.step >= self.num_steps

    def series(self, name: str, scale: float = 1.0) -> tuple[list[int], list[float | None]]:
        """Steps that have the metric, and its values times `scale`; None where it was no number."""
        rows = [row for row in self.rows if name in row]
        return [row["step"] for row in rows], [None if row[name] is None else row[name] * scale for row in rows]

    def values(self, name: str) -> list[float]:
        """The metric's values, gaps left out."""
        return [row[name] for row in self.rows if row.get(name) is not None]

    def headline(self) -> list[Headline]:
        """Evaluation before and after, reward, steps and their time, speed, memory; what the run has of it."""
        figures = [
            *self._before_after("eval/accuracy", "held out, sampled"),
            *self._before_after("eval/accuracy_greedy", "held out, greedy"),
        ]
        if rewards := self.values("reward"):
            count = max(1, len(rewards) // 10)
            first, last = fmean(rewards[:count]), fmean(rewards[-count:])
            over = f"mean of the first and the last {count} steps" if count > 1 else "first and last step"
            figures.append(Headline("reward", f"{first:.2f} → {last:.2f}", over))
        of = f" of {self.num_steps}" if self.num_steps is not None else ""
        times = self.values("time/step")
        details = [] if self.finished else ["unfinished"]
        if seconds := sum(times) + sum(self.values("time/eval")):
            details.append(f"in {clock(seconds)}")
        if times:
            details.append(f"median step {median(times):.1f} s")  # the first one compiles kernels and captures graphs
        figures.append(Headline("steps", f"{self.step}{of}", "; ".join(details)))
        if speeds := self.values("tokens_per_second"):
            tokens = sum(self.values("completions/new_tokens"))
            detail = f"median step; {tokens:,.0f} tokens sampled"
            figures.append(Headline("sampling", f"{median(speeds):,.0f} tokens/s", detail))
        for name, what in (("memory/reserved", "GPU, peak"), ("memory/rss", "process, peak")):
            if peaks := self.values(name):
                figures.append(Headline("memory", f"{max(peaks) / 1e9:.2f} GB", what))
        return figures

    def notes(self) -> list[str]:
        """What its curves hide: reward functions that are paid and have become constant."""
        last = self.rows[-1] if self.rows else {}
        names = [match[1] for name in last if (match := re.fullmatch("rewards/(.+)/std", name))]
        weights = self.config.get("rewards", {}).get("weights") or [1.0] * len(names)
        notes = []
        for name, weight in zip(names, weights, strict=False):  # both in the order of the functions
            if weight and (since := constant_since(self.rows, name)) is not None:
                notes.append(
                    f"reward {name}: since step {since} all completions of a step got the same value, "
                    f"{last[f'rewards/{name}/mean']:g} in the last one: it teaches nothing any more, since no group "
                    "differs in it"
                )
        return notes

    def _before_after(self, name: str, label: str) -> list[Headline]:
        rows = [row for row in self.rows if row.get(name) is not None]
        if not rows:
            return []
        first, last = rows[0], rows[-1]
        details = []
        if len(rows) > 1:
            details.append(f"{100 * (last[name] - first[name]):+.1f} points, steps {first['step']} to {last['step']}")
        else:
            details.append(f"step {last['step']} only")
        if last.get(f"{name}_low") is not None and last.get(f"{name}_high") is not None:
            details.append(f"95 % interval {last[f'{name}_low']:.1%} to {last[f'{name}_high']:.1%}")
        if last.get("eval/num_problems") is not None:
            details.append(f"{last['eval/num_problems']:.0f} problems")
        shown = [first, last] if len(rows) > 1 else [last]
        return [Headline(label, " → ".join(f"{row[name]:.1%}" for row in shown), "; ".join(details))]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the runs; ValueError for a folder that is none, or that is named twice."""
    resolved = [folder.resolve() for folder in folders]
    for folder in resolved:
        if resolved.count(folder) > 1:
            raise ValueError(f"{folder} is named twice: name each run once")
    names = [folder.name for folder in resolved]
    runs = []
    for folder, path in zip(folders, resolved, strict=True):
        info = read_run(folder)
        runs.append(
            Run(
                name=path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}",
                folder=folder,
                rows=read_metrics(folder),
                config=info.get("config", {}),
                versions=info.get("versions", {}),
                device=info.get("device", ""),
            )
        )
    return runs
