"""Problems that are in memory already: rows of a Python program, read as those of `task.name = "data"` are.

    train_dataset, eval_dataset (a datasets.Dataset, or a list of dicts) -> RowsTask

Beside `DataTask`, on which it is built: nothing is held out unless held-out rows are given, no system message is added
unless `task.system_prompt` asks for one, and answers are graded only if `task.grader` is set. Where prompts are plain
text, reward functions are given text too, as in TRL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qerl.config import TaskConfig
from qerl.tasks.data import DataTask, Prompt, without_held_out
from qerl.tasks.table import Row


class RowsTask(DataTask):
    """The task over rows in memory, see `qerl.tasks.Task`. ValueError names the data set and the row."""

    def __init__(self, config: TaskConfig, train: Sequence[Row], held_out: Sequence[Row] = ()) -> None:
        self._given = {"train_dataset": list(train), "eval_dataset": list(held_out)}
        super().__init__(config)
        self.plain_text = isinstance(self._train[0][0], str)
        """Whether prompts are text, and not chat messages."""

    def _read(self, config: TaskConfig) -> tuple[list[tuple[Prompt, Row]], list[tuple[Prompt, Row]]]:
        splits = {name: rows.copy for name, rows in self._given.items()}
        held_out = self._rows("Trainer", splits, "eval_dataset", config) if self._given["eval_dataset"] else []
        train = self._rows("Trainer", splits, "train_dataset", config)
        kept = without_held_out(train, held_out, "train_dataset")
        if not kept:
            raise ValueError("every prompt of train_dataset is in eval_dataset too: nothing is left to train on")
        return kept, held_out


def read_rows(dataset: Any, name: str) -> list[Row]:
    """The rows of a datasets.Dataset, or a list of dicts as it is. ValueError for anything else, and for no rows."""
    rows = dataset.to_list() if hasattr(dataset, "to_list") else dataset
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{name} is a {type(dataset).__name__}: a datasets.Dataset or a list of dicts is expected")
    if not rows:
        raise ValueError(f"{name} has no rows")
    return rows
