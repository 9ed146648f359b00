"""What a run writes while it goes: metrics.jsonl (one line a step) and completions.jsonl (some completions to read).

    <output_dir>/metrics.jsonl      {"step": 12, "reward": 1.31, ...}; step 0 is the evaluation before training
    <output_dir>/completions.jsonl  {"step": 12, "prompt": ..., "completion": ..., "reward": ..., "rewards": {...}}

Names are held against `metrics.py`. After a kill the files may be ahead of the newest checkpoint: `rewind` cuts them
back to it, so that the resumed run's files equal those of an unbroken one.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from qerl.metrics import check_names
from qerl.types import RolloutGroup


class RunLog:
    """Appends to the run's files; every line is on disk before `write` returns."""

    def __init__(self, output_dir: Path, *, completions_per_step: int) -> None:
        self.metrics_path = output_dir / "metrics.jsonl"
        self.completions_path = output_dir / "completions.jsonl"
        self.completions_per_step = completions_per_step

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        """One line; a NaN or infinite value is written as null, since JSON has neither."""
        check_names(metrics)
        _append(self.metrics_path, [{k: v if math.isfinite(v) else None for k, v in metrics.items()}])

    def write_completions(self, step: int, groups: list[RolloutGroup]) -> None:
        """The first completions of the step's first groups, one a group, then the second ones."""
        pairs = [(group, i) for i in range(len(groups[0].completions)) for group in groups] if groups else []
        _append(
            self.completions_path,
            [
                {
                    "step": step,
                    "prompt": group.example.prompt[-1]["content"],
                    "completion": group.texts[i],
                    "reward": _number(group.rewards[i]),
                    "rewards": {name: _number(values[i]) for name, values in group.reward_parts.items()},
                    "tokens": len(group.completions[i].token_ids),
                    "finish_reason": group.completions[i].finish_reason,
                }
                for group, i in pairs[: self.completions_per_step]
            ],
        )

    def rewind(self, *, metrics_step: int, completions_step: int) -> None:
        """Drop the lines of steps after these; -1 drops all."""
        for path, last_step in ((self.metrics_path, metrics_step), (self.completions_path, completions_step)):
            if path.exists():
                lines = [line for line in path.read_text().splitlines(keepends=True) if _step_of(line) <= last_step]
                staging = path.with_suffix(".tmp")
                staging.write_text("".join(lines))
                staging.replace(path)


def read_metrics(output_dir: Path) -> list[dict[str, Any]]:
    """All lines of a run's metrics.jsonl; ValueError when there is none."""
    path = output_dir / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{output_dir} holds no metrics.jsonl: is it the output_dir of a run?")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _append(path: Path, records: list[dict[str, Any]]) -> None:
    if records:
        with path.open("a") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):
        return math.inf  # a line that a kill cut short
